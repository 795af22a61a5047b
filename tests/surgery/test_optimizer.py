"""The optimizer follows every edit: survivors keep their state, newcomers get one, and it is saved by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dyrep
from dyrep.errors import OptimizerError
from dyrep.surgery.optimizer_state import load_state_by_name_, state_by_name
from surgery_helpers import (
    OPTIMIZERS,
    assert_same_picture,
    conv_bn_net,
    decay_groups,
    held_parameters,
    images,
    picture,
    train_step,
    trained,
)


def state_objects(optimizer: torch.optim.Optimizer) -> dict:
    return {p: (id(state), {k: id(v) for k, v in state.items()}) for p, state in optimizer.state.items()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_survivors_keep_their_state_and_steps_work_after_expansion_and_cut(kind):
    model, optimizer = trained(OPTIMIZERS[kind])
    old, before, x = set(model.parameters()), state_objects(optimizer), images(1)[0]
    copies = {p: {k: v.clone() for k, v in optimizer.state[p].items() if torch.is_tensor(v)} for p in old}
    assert set(before) == old

    dyrep.expand_(model, ["0", "3"], calibration=[x], optimizer=optimizer)
    after = state_objects(optimizer)
    for parameter in old:
        assert after[parameter] == before[parameter]
        for key, value in copies[parameter].items():
            assert torch.equal(optimizer.state[parameter][key], value) or key == "ax"  # ASGD's average of the weights
    assert sorted(held_parameters(optimizer)) == sorted(id(p) for p in model.parameters())

    new = {p: p.detach().clone() for p in model.parameters() if p not in old}
    assert new
    first, second = (train_step(model, optimizer, x) for _ in range(2))
    assert second < first
    for parameter, value in new.items():
        assert not torch.equal(parameter, value)
        assert set(optimizer.state[parameter]) == set(optimizer.state[model[3].weight])

    doomed = list(model[3].branches["1x1-KxK"].parameters()) + list(model[3].branches["1xK"].parameters())
    kept = state_objects(optimizer)
    dyrep.cut_(model, "3", ["1x1-KxK", "1xK"], optimizer=optimizer)
    for parameter in doomed:
        assert parameter not in optimizer.state
        assert id(parameter) not in held_parameters(optimizer)
    assert state_objects(optimizer) == {p: ids for p, ids in kept.items() if not any(p is d for d in doomed)}
    train_step(model, optimizer, x)
    dyrep.cut_(model, ["0", "3"], optimizer=optimizer)
    assert set(optimizer.state) == old
    assert sorted(held_parameters(optimizer)) == sorted(id(p) for p in model.parameters())
    weight = model[3].weight.detach().clone()
    train_step(model, optimizer, x)
    assert not torch.equal(model[3].weight, weight)


def test_lbfgs_steps_with_a_closure_after_expansion_and_cut_and_drops_its_flat_history():
    model = conv_bn_net().eval()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x = images(1)[0]
    train_step(model, optimizer, x)
    assert optimizer.state
    for edit in (
        lambda: dyrep.expand_(model, "3", calibration=[x], optimizer=optimizer),
        lambda: dyrep.cut_(model, "3", ["1x1"], optimizer=optimizer),
        lambda: dyrep.cut_(model, "3", optimizer=optimizer),
    ):
        edit()
        assert not optimizer.state
        weight = model[3].weight.detach().clone()
        first = train_step(model, optimizer, x)
        assert train_step(model, optimizer, x) < first
        assert not torch.equal(model[3].weight, weight)


def test_new_adagrad_parameters_start_from_the_groups_accumulator():
    model = conv_bn_net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.25)
    dyrep.expand_(model, "3", ["1x1"], optimizer=optimizer)
    for parameter in model[3].branches.parameters():
        assert torch.equal(optimizer.state[parameter]["sum"], torch.full_like(parameter, 0.25))
        assert float(optimizer.state[parameter]["step"]) == 0


SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda t: 0.9**t, lambda t: 1 / (1 + t)]),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=12),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=12),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=8),
        ],
        milestones=[3],
    ),
}


@pytest.mark.filterwarnings("error", "ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_scheduler_gives_the_same_rates_with_and_without_edits(kind):
    def run(edit: bool) -> list[list[tuple[float, float]]]:
        torch.manual_seed(0)
        model = conv_bn_net()
        optimizer = torch.optim.SGD(decay_groups(model), lr=0.05, momentum=0.9)
        scheduler, seen = SCHEDULERS[kind](optimizer), []
        for step in range(10):
            if edit and step == 3:
                dyrep.expand_(model, ["0", "3"], calibration=images(1), optimizer=optimizer)
            if edit and step == 6:
                dyrep.cut_(model, "3", optimizer=optimizer)
            train_step(model, optimizer, images(1)[0])
            scheduler.step()
            seen.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
        return seen

    assert run(edit=True) == run(edit=False)


def test_conv_outside_the_optimizer_is_refused_with_the_ways_out():
    model = conv_bn_net()
    optimizer = torch.optim.SGD(model[8].parameters(), lr=0.1)
    before = picture(model, optimizer)
    with pytest.raises(
        OptimizerError,
        match=r"the weight of layer '3' is not in the optimizer, so its branches would not be trained: "
        r"add it to a parameter group, leave the layer out, or pass optimizer=None",
    ):
        dyrep.expand_(model, "3", optimizer=optimizer)
    assert_same_picture(picture(model, optimizer), before)


class Wrapper:
    """Looks like an optimizer from outside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups, self.state = optimizer.param_groups, optimizer.state


@pytest.mark.parametrize("operate", [dyrep.expand_, dyrep.cut_])
def test_anything_but_a_torch_optimizer_is_refused_by_its_type(operate):
    model = conv_bn_net()
    real = torch.optim.SGD(model.parameters(), lr=0.1)
    dyrep.expand_(model, "3", ["1x1"], optimizer=real)
    before = picture(model)
    for optimizer in (Wrapper(real), object()):
        with pytest.raises(
            OptimizerError,
            match=rf"{type(optimizer).__name__} is not a torch\.optim\.Optimizer; pass the optimizer itself",
        ):
            operate(model, "3", optimizer=optimizer)
        assert_same_picture(picture(model), before)


def images_fixed() -> torch.Tensor:
    return torch.linspace(-2, 2, 4 * 3 * 64).reshape(4, 3, 8, 8).cos()


def freeze_branches_(block: nn.Module) -> None:
    block.branches.eval()
    block.branches.requires_grad_(False)


def trajectory(bias: bool, **options):
    """The folded kernel and bias after one more step, of an expanded model and of its plain twin, and ΣF_j, Σb_j."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, bias=bias),
        nn.ReLU(),
        nn.Conv2d(4, 2, 1),
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    batches = images(6, dtype=torch.float64)
    for batch in batches[:3]:
        train_step(model, optimizer, batch)
    twin = copy.deepcopy(model)
    plain_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, **options)
    load_state_by_name_(plain_optimizer, twin, state_by_name(optimizer, model))
    dyrep.expand_(model, "3", gamma=0.5, calibration=batches, optimizer=optimizer)
    freeze_branches_(model[3])
    added = [branch.folded(torch.float64) for branch in model[3].branches.values()]
    train_step(model, optimizer, batches[4])
    train_step(twin, plain_optimizer, batches[4])
    kernel, shift = model[3].folded()
    sums = sum(k for k, _ in added).detach(), sum(b for _, b in added).detach() if bias else None
    return (kernel.detach(), None if shift is None else shift.detach()), (twin[3].weight, twin[3].bias), sums


EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "momentum"])
def test_step_with_frozen_branches_equals_the_plain_models_step(bias, nesterov):
    (kernel, shift), (plain_kernel, plain_shift), (added, _) = trajectory(bias, nesterov=nesterov)
    assert added.abs().max() > 0.01
    torch.testing.assert_close(kernel, plain_kernel.detach(), **EXACT)
    if bias:
        torch.testing.assert_close(shift, plain_shift.detach(), **EXACT)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("nesterov", "factor"), [(True, 1.9), (False, 1.0)], ids=["nesterov", "momentum"])
def test_weight_decay_misses_exactly_what_the_branches_hold(bias, nesterov, factor):
    decay = 0.05
    (kernel, shift), (plain_kernel, plain_shift), sums = trajectory(bias, nesterov=nesterov, weight_decay=decay)
    term = 0.1 * decay * factor
    torch.testing.assert_close(kernel - plain_kernel.detach(), term * sums[0], **EXACT)
    assert (term * sums[0]).abs().max() > 1e-4
    if bias:
        torch.testing.assert_close(shift - plain_shift.detach(), term * sums[1], **EXACT)
