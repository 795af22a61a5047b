"""What an optimizer knows is saved by name, and follows when weights are rewritten."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dyrep
from dyrep.errors import OptimizerError
from dyrep.surgery.optimizer_state import load_state_by_name_, state_by_name
from dyrep.surgery.undo import Snapshot
from surgery_helpers import (
    OPTIMIZERS,
    assert_same_picture,
    conv_bn_net,
    decay_groups,
    images,
    names_in,
    picture,
    relative_change,
    train_step,
    trained,
)
from training import eval_output


def evolved(make, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    """A model trained through an expansion and a cut, its optimizer, and the plain model it came from."""
    model = conv_bn_net(dtype)
    plain = copy.deepcopy(model)
    optimizer = make(decay_groups(model))
    batches = images(5, dtype=dtype)
    train_step(model, optimizer, batches[0])
    dyrep.expand_(model, ["0", "3"], calibration=batches, optimizer=optimizer, origin_norm="calibrated")
    train_step(model, optimizer, batches[1])
    dyrep.cut_(model, "3", ["1x1", "1x1-KxK"], optimizer=optimizer)
    train_step(model, optimizer, batches[2])
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] * 0.5
    return model, optimizer, plain


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_saved_by_name_is_restored_exactly_into_an_optimizer_of_another_order(kind, tmp_path):
    model, optimizer, plain = evolved(OPTIMIZERS[kind])
    torch.save(state_by_name(optimizer, model), tmp_path / "optimizer.pt")
    twin = dyrep.restructure_(plain, dyrep.structure(model))
    twin.load_state_dict(model.state_dict(), strict=True)
    everything = list(twin.parameters())[::-1]
    other = OPTIMIZERS[kind]([{"params": everything[::2]}, {"params": everything[1::2]}])
    load_state_by_name_(other, twin, torch.load(tmp_path / "optimizer.pt", weights_only=True))

    assert len(other.param_groups) == 2
    for ours, theirs in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert names_in(twin, ours) == names_in(model, theirs)
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    theirs = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        state, expected = other.state[parameter], optimizer.state[theirs[name]]
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            if torch.is_tensor(value):
                assert state[key] is not value
                assert state[key].dtype == value.dtype
                assert torch.equal(state[key], value), f"{name} {key}"
            else:
                assert state[key] == value

    for batch in images(3):
        assert train_step(twin, other, batch) == train_step(model, optimizer, batch)
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize("kind", ["NAdam", "ASGD", "Adam"])
def test_scalar_state_of_a_double_precision_model_keeps_its_dtype_and_trajectory(kind):
    model, optimizer, plain = evolved(OPTIMIZERS[kind], torch.float64)
    twin = dyrep.restructure_(plain, dyrep.structure(model))
    twin.load_state_dict(model.state_dict(), strict=True)
    other = OPTIMIZERS[kind](decay_groups(twin))
    load_state_by_name_(other, twin, state_by_name(optimizer, model))
    theirs = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        expected = optimizer.state[theirs[name]]
        for key, value in other.state[parameter].items():
            assert value.dtype == expected[key].dtype, f"{name} {key}"
    for batch in images(2, dtype=torch.float64):
        assert train_step(twin, other, batch) == train_step(model, optimizer, batch)


def test_lbfgs_state_saved_by_name_continues_the_same_trajectory(tmp_path):
    model = conv_bn_net(torch.float64).eval()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x = images(1, dtype=torch.float64)[0]
    dyrep.expand_(model, "3", calibration=[x], optimizer=optimizer)
    train_step(model, optimizer, x)
    torch.save(state_by_name(optimizer, model), tmp_path / "optimizer.pt")
    twin = dyrep.restructure_(plain, dyrep.structure(model))
    twin.load_state_dict(model.state_dict(), strict=True)
    other = torch.optim.LBFGS(list(twin.parameters())[::-1], lr=0.1, max_iter=3)
    load_state_by_name_(other, twin, torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for _ in range(2):
        assert train_step(twin, other, x) == train_step(model, optimizer, x)


def test_param_names_of_the_target_follow_the_saved_order():
    model = conv_bn_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([(f"net/{n}", p) for n, p in reversed(list(model.named_parameters()))], lr=0.2)
    load_state_by_name_(other, model, state_by_name(optimizer, model))
    assert other.param_groups[0]["param_names"] == [f"net/{name}" for name, _ in model.named_parameters()]
    assert other.param_groups[0]["lr"] == 0.1


def test_state_that_does_not_fit_is_refused_by_name_and_changes_nothing():
    model, optimizer, plain = evolved(OPTIMIZERS["SGD"])
    saved = state_by_name(optimizer, model)
    target = OPTIMIZERS["SGD"](decay_groups(plain))
    train_step(plain, target, images(1)[0])
    before = picture(plain, target)
    with pytest.raises(
        OptimizerError, match=r"2 groups saved, 2 here; not in this optimizer: \['0\.branches\.1x1\.conv"
    ) as e:
        load_state_by_name_(target, plain, saved)
    assert "not in the file" not in str(e.value)
    with pytest.raises(OptimizerError, match=r"2 groups saved, 2 here; not in the file: \['0\.branches"):
        load_state_by_name_(optimizer, model, state_by_name(target, plain))
    one = OPTIMIZERS["SGD"](plain.parameters())
    with pytest.raises(OptimizerError, match="1 group saved, 2 here"):
        load_state_by_name_(target, plain, state_by_name(one, plain))
    with pytest.raises(OptimizerError, match="optimizer state of format 99; this version reads 1"):
        load_state_by_name_(target, plain, {**state_by_name(target, plain), "format": 99})
    assert_same_picture(picture(plain, target), before)


@pytest.mark.parametrize("scheduled", ["saved", "present"])
def test_options_that_schedulers_add_do_not_make_another_kind_of_optimizer(scheduled):
    """Nor do options that an older version of it did not have yet."""
    model = conv_bn_net()
    optimizers = {name: torch.optim.Adam(model.parameters()) for name in ("saved", "present")}
    torch.optim.lr_scheduler.OneCycleLR(optimizers[scheduled], 0.1, total_steps=10)
    saved = state_by_name(optimizers["saved"], model)
    del saved["groups"][0]["options"]["amsgrad"]
    load_state_by_name_(optimizers["present"], model, saved)
    assert optimizers["present"].param_groups[0]["amsgrad"] is False
    with pytest.raises(OptimizerError, match=r"another kind .*: Adam has amsgrad, .*, and SGD here has damp"):
        load_state_by_name_(
            torch.optim.SGD(model.parameters(), lr=0.1), model, state_by_name(optimizers["present"], model)
        )


def test_state_of_an_optimizer_with_the_same_options_and_more_is_refused_by_its_name():
    """Adam has all options of Adamax, whose steps would fail on Adam's state."""
    model = conv_bn_net()
    adam, adamax = torch.optim.Adam(model.parameters()), torch.optim.Adamax(model.parameters())
    train_step(model, adam, images(1)[0])
    saved = state_by_name(adam, model)
    with pytest.raises(OptimizerError, match=r"another kind .*: Adam has amsgrad, .*fused among its options"):
        load_state_by_name_(adamax, model, saved)
    with pytest.raises(OptimizerError, match=r"another kind .*: Adam here has amsgrad, .*fused among its options"):
        load_state_by_name_(adam, model, state_by_name(adamax, model))
    newer = {**saved["groups"][0], "options": {**saved["groups"][0]["options"], "of_a_later_version": True}}
    renamed = {**newer, "options": {key: value for key, value in newer["options"].items() if key != "betas"}}
    with pytest.raises(OptimizerError, match=r"Adam has of_a_later_version, and Adam here has betas among its options"):
        load_state_by_name_(adam, model, {**saved, "groups": [renamed]})
    load_state_by_name_(adam, model, {**saved, "groups": [newer]})


def test_parameters_outside_the_model_survive_edits_and_the_round_trip():
    model, margin, x = conv_bn_net(), nn.Parameter(torch.tensor([2.0])), images(1)[0]
    optimizer = torch.optim.SGD([*model.parameters(), margin], lr=0.1, momentum=0.9)

    def step(model, optimizer, margin):
        optimizer.zero_grad()
        (margin * model(x).square().mean()).sum().backward()
        optimizer.step()

    step(model, optimizer, margin)
    dyrep.expand_(model, "3", ["1x1"], optimizer=optimizer)
    step(model, optimizer, margin)
    saved = state_by_name(optimizer, model)
    assert saved["groups"][0]["params"][-1] == "(outside the model) 0"
    twin, twin_margin = copy.deepcopy(model), nn.Parameter(margin.detach().clone())
    other = torch.optim.SGD([twin_margin, *twin.parameters()], lr=0.3, momentum=0.9)
    load_state_by_name_(other, twin, saved)
    buffer = optimizer.state[margin]["momentum_buffer"]
    assert torch.equal(other.state[twin_margin]["momentum_buffer"], buffer)
    step(model, optimizer, margin)
    step(twin, other, twin_margin)
    assert torch.equal(margin, twin_margin)
    for parameter, expected in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_lookahead_of_timm_keeps_its_state_through_edits_and_by_name():
    from timm.optim import create_optimizer_v2

    def make(parameters):
        return create_optimizer_v2(list(parameters), "lookahead_adamw", lr=1e-2)

    model, optimizer = trained(make)
    dyrep.expand_(model, "3", ["1x1", "1xK"], optimizer=optimizer)
    for batch in images(2):
        train_step(model, optimizer, batch)
    dyrep.cut_(model, "3", ["1xK"], optimizer=optimizer)
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    saved = copy.deepcopy(state_by_name(optimizer, model))
    assert len(saved["state"]) == len(list(model.parameters()))
    twin = copy.deepcopy(model)
    other = make(twin.parameters())
    load_state_by_name_(other, twin, saved)
    for batch in images(7):  # slow weights are taken over in every sixth step
        train_step(model, optimizer, batch)
        train_step(twin, other, batch)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def with_copies(kind):
    """An optimizer that keeps copies of the weights, which later steps fall back on."""
    from timm.optim import create_optimizer_v2

    if kind == "ASGD":
        return lambda parameters: torch.optim.ASGD(parameters, lr=0.05, t0=0, lambd=0)
    return lambda parameters: create_optimizer_v2(list(parameters), kind, lr=0.01, weight_decay=0)


def rest_(model, optimizer, steps=200):
    """Steps that move nothing by themselves: without a learning rate, and without a gradient."""
    for _ in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("kind", ["lookahead_sgd", "lookahead_adamw", "madgrad", "ASGD"])
def test_copies_of_weights_that_an_optimizer_keeps_follow_edits_and_are_put_back_with_them(kind):
    model, optimizer = trained(with_copies(kind), steps=6)
    x = images(1)[0]
    dyrep.expand_(model, ["0", "3"], gamma=0.3, calibration=[x], optimizer=optimizer)
    for batch in images(12):
        train_step(model, optimizer, batch)
    rest_(model, optimizer)
    before, kept = eval_output(model, x), copy.deepcopy(state_by_name(optimizer, model)["state"])
    snapshot, weight = Snapshot([model[0], model[3]], optimizer), model[3].weight.detach().clone()
    dyrep.cut_(model, ["0", "3"], optimizer=optimizer)
    if kind == "ASGD":
        lag = kept["3.weight"]["ax"] - weight
        assert torch.allclose(optimizer.state[model[3].weight]["ax"] - model[3].weight, lag, atol=1e-6)
    rest_(model, optimizer)
    assert relative_change(eval_output(model, x), before) <= 1e-5
    snapshot.restore_()
    for name in ("0.weight", "3.weight"):
        (key,) = {"lookahead_slow_buff", "x0", "ax"} & kept[name].keys()
        assert torch.equal(state_by_name(optimizer, model)["state"][name][key], kept[name][key])


class SharpnessAware(torch.optim.Optimizer):
    """As SAM is usually written: it shares its groups with the optimizer that it wraps, and both keep state."""

    def __init__(self, parameters, base, name, **options):
        super().__init__(parameters, options)
        self._name = name
        setattr(self, name, base(self.param_groups, **options))
        self.param_groups = self.base.param_groups

    @property
    def base(self):
        return getattr(self, self._name)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old_p"] = parameter.detach().clone()
        return self.base.step(closure)


@pytest.mark.parametrize("name", ["base_optimizer", "optimizer"])
def test_an_optimizer_that_wraps_another_keeps_both_states(name):
    def make(parameters):
        return SharpnessAware(parameters, torch.optim.SGD, name, lr=0.05, momentum=0.9)

    model, optimizer = trained(make)
    dyrep.expand_(model, "3", ["1x1", "1xK"], optimizer=optimizer)
    train_step(model, optimizer, images(1)[0])
    dyrep.cut_(model, "3", ["1xK"], optimizer=optimizer)
    held = {id(p) for p in model.parameters()}
    for state in (optimizer.state, optimizer.base.state):
        assert {id(p) for p in state} == held
    twin = copy.deepcopy(model)
    other = make(twin.parameters())
    load_state_by_name_(other, twin, copy.deepcopy(state_by_name(optimizer, model)))
    weight = twin[3].weight
    assert torch.equal(other.state[weight]["old_p"], optimizer.state[model[3].weight]["old_p"])
    momentum = optimizer.base.state[model[3].weight]["momentum_buffer"]
    assert torch.equal(other.base.state[weight]["momentum_buffer"], momentum)
    other.base.state_dict()


def test_state_in_a_precision_of_its_own_keeps_it():
    model = nn.Conv2d(2, 2, 1)
    model.temperature = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"] = optimizer.state[model.weight]["exp_avg"].bfloat16()
    saved = copy.deepcopy(state_by_name(optimizer, model))
    load_state_by_name_(optimizer, model, saved)
    assert optimizer.state[model.temperature]["step"].dtype == torch.float32
    assert optimizer.state[model.temperature]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.bfloat16  # smaller than its parameter
    model.bfloat16()
    load_state_by_name_(optimizer, model, saved)
    assert optimizer.state[model.weight]["exp_avg_sq"].dtype == torch.bfloat16  # as its parameter was and is


def test_a_wrapper_around_the_optimizer_that_trains_is_refused_with_the_remedy():
    class Prepared(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    model = conv_bn_net()
    wrapper = Prepared(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match=r"Prepared wraps the optimizer that trains: pass its \.optimizer instead"):
        dyrep.DyRep(model, wrapper)


class InFullPrecision(torch.optim.Optimizer):
    """Keeps weights in float32 under a name of its own, and rounds them to those of the model."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                full = state.setdefault("precise", parameter.detach().float().clone())
                state.setdefault("moved", torch.zeros_like(full)).add_(parameter.grad)
                parameter.copy_(full.sub_(parameter.grad.float(), alpha=group["lr"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_in_full_precision_follow_whatever_they_are_called(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)).to(dtype)
    optimizer = InFullPrecision(model.parameters(), lr=0.01)
    (model(torch.randn(8, 4, 8, 8).to(dtype)) - 1).square().mean().backward()
    optimizer.step()
    dyrep.expand_(model, "0", gamma=0.5, optimizer=optimizer)
    moved = optimizer.state[model[0].weight]["moved"].clone()
    dyrep.cut_(model, "0", ["1x1"], optimizer=optimizer)
    rest_(model, optimizer, steps=1)
    dyrep.cut_(model, "0", optimizer=optimizer)
    before = model[0].weight.detach().clone()
    rest_(model, optimizer, steps=1)
    rounding = 2 * torch.finfo(dtype).eps * float(before.abs().max())  # what copies have beyond the weights goes along
    torch.testing.assert_close(model[0].weight.detach(), before, rtol=0, atol=rounding)
    assert torch.equal(optimizer.state[model[0].weight]["moved"], moved)
