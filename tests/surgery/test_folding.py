"""Deploying gives the plain architecture back, and the verification notices everything that is not the same."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import dyrep
from dyrep.block import RepConv
from dyrep.errors import DyRepError, IneligibleLayerError
from dyrep.surgery.folding import FoldReport, drift, eval_outputs, relative_error, train_outputs
from surgery_helpers import (
    COMPUTED,
    assert_same_picture,
    conv_bn_net,
    images,
    picture,
    relative_change,
    train_step,
)
from training import eval_output


def evolved(dtype: torch.dtype = torch.float32, gamma: float = 0.1) -> nn.Sequential:
    """A trained model with two blocks and one inside a branch."""
    model = conv_bn_net(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = images(3, dtype=dtype)
    dyrep.expand_(model, ["0", "3"], gamma=gamma, calibration=batches, optimizer=optimizer, origin_norm="calibrated")
    dyrep.expand_(model, "3.branches.1x1-KxK.conv", gamma=gamma, calibration=batches, optimizer=optimizer)
    for batch in batches:
        train_step(model, optimizer, batch)
    return model


def test_deployed_copy_has_the_plain_keys_classes_and_function_and_leaves_the_model_alone():
    model, x = evolved(torch.float64), images(1, dtype=torch.float64)[0]
    before = picture(model)
    plain = dyrep.deploy(model)
    assert_same_picture(picture(model), before)
    reference = conv_bn_net(torch.float64)
    assert list(plain.state_dict()) == list(reference.state_dict())
    assert [type(m) for m in plain.modules()] == [type(m) for m in reference.modules()]
    assert [sorted(vars(m)) for m in plain.modules()] == [sorted(vars(m)) for m in reference.modules()]
    assert relative_change(eval_output(plain, x), eval_output(model, x)) <= 1e-10
    assert {id(p) for p in plain.parameters()}.isdisjoint(id(p) for p in model.parameters())
    reference.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(eval_output(reference, x), eval_output(plain, x))


def test_deploying_in_place_changes_the_model_itself_and_keeps_its_parameters():
    model, x = evolved(torch.float64), images(1, dtype=torch.float64)[0]
    before, weight, conv = eval_output(model, x), model[3].weight, model[3]
    assert dyrep.deploy(model, inplace=True) is model
    assert model[3] is conv
    assert type(conv) is nn.Conv2d
    assert conv.weight is weight
    assert list(model.state_dict()) == list(conv_bn_net().state_dict())
    assert relative_change(eval_output(model, x), before) <= 1e-10


def test_copy_and_in_place_give_the_same_weights():
    model = evolved()
    plain = dyrep.deploy(model)
    dyrep.deploy(model, inplace=True)
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)


@pytest.mark.parametrize("inplace", [True, False])
def test_deploying_a_plain_or_prepared_model_changes_no_value(inplace):
    for model in (conv_bn_net(), dyrep.prepare_(conv_bn_net())):
        values = {key: value.clone() for key, value in model.state_dict().items()}
        plain = dyrep.deploy(model, inplace=inplace)
        assert not any(isinstance(m, RepConv) for m in plain.modules())
        assert all(torch.equal(plain.state_dict()[key], value) for key, value in values.items())


@pytest.mark.parametrize("inplace", [True, False])
def test_deployed_model_keeps_modes_hooks_and_trainability(inplace):
    model = evolved().train()
    model[1].eval()
    model[3].eval()
    model[0].weight.requires_grad_(False)
    calls = []
    model[3].register_forward_hook(lambda *_: calls.append("hook"))
    plain = dyrep.deploy(model, inplace=inplace)
    assert [m.training for m in plain] == [i not in (1, 3) for i in range(9)]
    assert plain.training
    assert [plain[0].weight.requires_grad, plain[3].weight.requires_grad] == [False, True]
    plain(images(1)[0])
    assert calls == ["hook"]


def test_compiled_model_is_deployed_as_the_plain_one():
    model = evolved()
    plain = dyrep.deploy(torch.compile(model, backend="eager"))
    assert type(plain) is nn.Sequential
    assert list(plain.state_dict()) == list(conv_bn_net().state_dict())


def test_verification_passes_and_says_what_was_compared():
    model, x = evolved().eval(), images(1)[0]
    report = dyrep.verify(model, dyrep.deploy(model), x)
    assert report.passed
    assert bool(report)
    assert list(report.errors) == ["output"]
    assert 0 <= report.error == report.errors["output"] <= 1e-5
    assert report.missing == ()
    assert report.compared == "1 output(s) in eval mode"
    assert str(report) == (
        f"passed: 1 output(s) in eval mode; relative error per output: output {report.error:.2e} (tolerance 1e-04)"
    )


def test_verification_reports_that_models_were_given_in_training_mode_and_compares_in_eval_mode():
    model, x = evolved().train(), images(1)[0]
    plain = dyrep.deploy(model)
    before = picture(model)
    report = dyrep.verify(model, plain, x)
    assert report.passed
    assert "in eval mode (given in training mode, where branches normalise by batch" in report.compared
    assert report.compared in str(report)
    assert_same_picture(picture(model), before)
    assert model.training
    assert plain.training


def test_verification_leaves_random_numbers_alone():
    model = nn.Sequential(nn.Dropout(0.5), *evolved())
    state = torch.get_rng_state()
    assert dyrep.verify(model, dyrep.deploy(model), images_of_ones()).passed
    assert torch.equal(torch.get_rng_state(), state)


def images_of_ones() -> Tensor:
    return torch.ones(2, 3, 8, 8)


@pytest.mark.parametrize("key", ["3.weight", "4.running_var", "8.bias"])
def test_verification_fails_on_a_tampered_tensor(key):
    model, x = evolved(), images(1)[0]
    plain = dyrep.deploy(model)
    assert dyrep.verify(model, plain, x).passed
    with torch.no_grad():
        plain.state_dict()[key][0] *= 1.1
    report = dyrep.verify(model, plain, x)
    assert not report.passed
    assert not report
    assert report.error > 1e-4
    assert str(report).startswith("FAILED: 1 output(s)")


def test_verification_error_is_the_largest_difference_over_the_largest_output():
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    other = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -4.0]]))
        other[0].weight.copy_(torch.tensor([[1.5, 0.0], [0.0, -5.0]]))
    report = dyrep.verify(model, other, torch.ones(1, 2))
    assert report.errors == {"output": pytest.approx(1 / 5)}


@pytest.mark.parametrize("both", [True, False])
def test_verification_never_passes_on_nan(both):
    model, x = evolved(), images(1)[0]
    plain = dyrep.deploy(model)
    with torch.no_grad():
        plain[8].bias[0] = float("nan")
        if both:
            model[8].bias[0] = float("nan")
    report = dyrep.verify(model, plain, x)
    assert not report.passed
    assert math.isnan(report.error)
    assert "nan" in str(report)


def test_report_of_several_outputs_does_not_hide_a_nan():
    for errors in ({"a": 1e-7, "b": float("nan")}, {"a": float("nan"), "b": 1e-7}):
        report = FoldReport(errors, 1e-4, "2 output(s) in eval mode")
        assert not report.passed
        assert math.isnan(report.error)


def test_drift_over_several_outputs_does_not_hide_a_nan():
    good, bad = torch.ones(2), torch.full((2,), float("nan"))
    for after in ({"a": good, "b": bad}, {"a": bad, "b": good}):
        assert not drift(after, {"a": good, "b": good}) <= 1.0


class Heads(nn.Module):
    """A convolution under several heads, in the container that is asked for."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.container = container

    def forward(self, x: Tensor):
        y = self.conv(x)
        if self.container == "dict":
            return {"out": y, "aux": {"low": y.mean((2, 3)), "labels": y.argmax(1)}}
        if self.container == "tuple":
            return y, [y.sum(1), y.mean()]
        return Boxes(scores=y, count=7)


@dataclass
class Boxes:
    """An output of the user's own class."""

    scores: Tensor
    count: int


@pytest.mark.parametrize(
    ("container", "names"),
    [
        ("dict", ["out", "aux.low"]),
        ("tuple", ["output[0]", "output[1][0]", "output[1][1]"]),
        ("object", ["scores"]),
    ],
)
def test_outputs_in_containers_are_compared_by_name(container, names):
    model, x = Heads(container), images(1)[0]
    dyrep.expand_(model, "conv", calibration=[x])
    plain = dyrep.deploy(model)
    report = dyrep.verify(model, plain, x)
    assert report.passed
    assert list(report.errors) == names
    assert report.compared.startswith(f"{len(names)} output(s)")
    with torch.no_grad():
        plain.conv.bias += 1
    report = dyrep.verify(model, plain, x)
    assert not report.passed
    assert all(error > report.tolerance for error in report.errors.values())


class Labels(nn.Module):
    """Gives class labels only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).argmax(1)


def test_verification_does_not_pass_without_anything_to_compare():
    model, other, x = Labels(), Labels(), images(1)[0]
    assert not torch.equal(model(x), other(x))
    try:
        passed = dyrep.verify(model, other, x).passed
    except DyRepError:
        passed = False
    assert not passed


def test_models_with_different_outputs_are_refused_by_name():
    with pytest.raises(DyRepError, match=r"do not have the same outputs: out, aux\.low against output\[0\], output"):
        dyrep.verify(Heads("dict"), Heads("tuple"), images(1)[0])


def test_outputs_of_different_shapes_fail():
    model, other = nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(3, 4, 3, padding=1))
    report = dyrep.verify(model, other, images(1)[0])
    assert not report.passed
    assert report.error == float("inf")


def test_keys_that_differ_fail_and_are_named():
    model, x = evolved(), images(1)[0]
    plain = dyrep.deploy(model)
    plain.register_buffer("extra", torch.zeros(1))
    report = dyrep.verify(model, plain, x)
    assert report.error <= report.tolerance
    assert not report.passed
    assert report.missing == ("extra",)
    assert str(report).endswith("; keys differ: extra")


def test_undeployed_model_fails_on_its_keys():
    model, x = evolved(), images(1)[0]
    report = dyrep.verify(model, copy.deepcopy(model), x)
    assert not report.passed
    assert "3.branches.1x1.conv.weight" in report.missing


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)],
)
def test_tolerance_follows_the_dtype(dtype, tolerance):
    model = evolved(torch.float64).to(dtype)
    x = images(1, dtype=dtype)[0]
    report = dyrep.verify(model, dyrep.deploy(model), x)
    assert report.tolerance == tolerance
    assert report.passed, str(report)
    assert report.error <= 20 * torch.finfo(dtype).eps
    assert dyrep.verify(model, dyrep.deploy(model), x, tolerance=0.5).tolerance == 0.5


@pytest.mark.parametrize("batch", ["tuple", "dict", "forward"])
def test_verification_takes_batches_of_every_kind(batch):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = evolved()

        def forward(self, pixels: Tensor) -> Tensor:
            return self.net(pixels)

    model, x = Named(), images(1)[0]
    given = {"tuple": (x, torch.zeros(4)), "dict": {"pixels": x, "label": 1}, "forward": {"image": x}}[batch]
    forward = (lambda model, batch: model(batch["image"])) if batch == "forward" else None
    assert dyrep.verify(model, dyrep.deploy(model), given, forward=forward).passed


def test_eval_and_train_outputs_leave_the_model_alone():
    model, x = evolved().train(), images(1)[0]
    model[1].eval()
    before = picture(model)
    evaluated, trained = eval_outputs(model, x), train_outputs(model, x)
    assert_same_picture(picture(model), before)
    assert torch.equal(evaluated["output"], eval_output(model, x))
    with torch.no_grad():
        assert torch.equal(trained["output"], copy.deepcopy(model)(x))
    assert drift(trained, trained) == 0
    assert drift(trained, evaluated) == relative_error(trained["output"], evaluated["output"]) > 0


def test_relative_error_is_the_maximum_norm_ratio():
    reference = torch.tensor([3.0, -4.0])
    assert relative_error(torch.tensor([3.0, -5.0]), reference) == 0.25
    assert relative_error(reference, reference) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) > 1e30
    assert relative_error(torch.ones(2), torch.ones(3)) == float("inf")
    assert math.isnan(relative_error(torch.tensor([float("nan"), 0.0]), reference))
    assert relative_error(torch.empty(0), torch.empty(0)) == 0


@pytest.mark.parametrize("interface", ["allow_tf32", "fp32_precision"])
def test_verifying_leaves_the_users_tf32_settings_alone(interface):
    switch = torch.backends.cudnn if interface == "allow_tf32" else getattr(torch.backends.cudnn, "conv", None)
    if switch is None:
        pytest.skip("this torch has one interface only")
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    original = getattr(switch, interface)
    try:
        for value in (True, False) if interface == "allow_tf32" else ("tf32", "ieee"):
            setattr(switch, interface, value)
            assert dyrep.verify(model, dyrep.deploy(model), torch.randn(1, 3, 8, 8))
            assert getattr(switch, interface) == value
    finally:
        setattr(switch, interface, original)


METHODS = ("repvgg", "dbb", "mobileone", "orepa", "repnas")


def converted(method: str) -> nn.Sequential:
    """A model of another method, trained for a few steps."""
    model = conv_bn_net(torch.float64)
    batches = images(3, dtype=torch.float64)
    dyrep.convert_(model, method, example_input=batches[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in batches:
        train_step(model, optimizer, batch)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_deployed_model_of_every_method_is_the_plain_one_with_the_same_function(method):
    model, x = converted(method), images(1, dtype=torch.float64)[0]
    before, output = picture(model), eval_output(model, x)
    plain = dyrep.deploy(model)
    assert_same_picture(picture(model), before)
    reference = conv_bn_net(torch.float64)
    assert [type(m) for m in plain.modules()] == [type(m) for m in reference.modules()]
    assert [sorted(vars(m)) for m in plain.modules()] == [sorted(vars(m)) for m in reference.modules()]
    assert relative_change(eval_output(plain, x), output) <= 1e-10
    assert dyrep.verify(model, plain, x).passed
    assert all(p.requires_grad for p in plain.parameters())
    reference.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(eval_output(reference, x), eval_output(plain, x))
    assert dyrep.deploy(model, inplace=True) is model
    assert relative_change(eval_output(model, x), output) <= 1e-10


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("method", ["repvgg", "dbb", "mobileone", "repnas"])
def test_part_of_a_model_without_the_norm_that_a_block_replaces_is_refused_and_left_alone(method, inplace):
    model = converted(method)
    part = nn.Sequential(model[0], model[1], model[2], model[3])
    before = picture(model)
    with pytest.raises(DyRepError, match=r"^layer '3' has taken the place of a norm outside this part of the model"):
        dyrep.deploy(part, inplace=inplace)
    with pytest.raises(DyRepError, match=r"^layer '' has taken the place of a norm .*: deploy the whole model$"):
        dyrep.deploy(model[0], inplace=inplace)
    assert_same_picture(picture(model), before)


def test_part_of_a_model_with_its_norm_is_deployed():
    model, x = converted("repvgg"), images(1, dtype=torch.float64)[0]
    part = nn.Sequential(*model[:2])
    expected = eval_output(part, x)
    assert relative_change(eval_output(dyrep.deploy(part), x), expected) <= 1e-10


def test_part_of_a_model_whose_blocks_keep_its_norms_is_deployed():
    model, x = converted("orepa"), images(1, dtype=torch.float64)[0]
    expected = eval_output(model[0], x)
    assert relative_change(eval_output(dyrep.deploy(model[0]), x), expected) <= 1e-10


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("layer", ["3", "3.branches.1x1.conv", "3.branches.1x1-KxK.conv.branches.1xK.conv"])
@pytest.mark.parametrize("way", COMPUTED)
def test_block_with_a_weight_that_became_a_computed_one_is_refused_until_it_is_permanent(way, layer, inplace):
    compute, make_permanent = COMPUTED[way]
    model, x = evolved(torch.float64), images(1, dtype=torch.float64)[0]
    compute(model.get_submodule(layer))
    output, before = eval_output(model, x), picture(model)
    with pytest.raises(IneligibleLayerError) as error:
        dyrep.deploy(model, inplace=inplace)
    assert str(error.value).startswith(f"layer {layer!r} cannot be folded: its weight is computed (")
    assert str(error.value).endswith("; make it permanent first")
    assert_same_picture(picture(model), before)
    make_permanent(model.get_submodule(layer))
    plain = dyrep.deploy(model, inplace=inplace)
    assert relative_change(eval_output(plain, x), output) <= 1e-10
    assert not any(isinstance(module, RepConv) for module in plain.modules())


def test_computed_norm_of_a_block_and_the_norm_that_it_replaces_are_refused():
    model = evolved()
    prune.random_unstructured(model[3].branches["1x1"].norm, "weight", amount=2)
    with pytest.raises(IneligibleLayerError, match=r"^layer '3\.branches\.1x1\.norm' cannot be folded: its weight is"):
        dyrep.deploy(model)
    model = converted("dbb")
    prune.random_unstructured(model[4], "bias", amount=2)
    with pytest.raises(
        IneligibleLayerError, match=r"^layer '3' cannot be folded: of the norm that it replaces: its bia"
    ):
        dyrep.deploy(model, inplace=True)
    model = converted("orepa")
    prune.random_unstructured(model[3].origin_norm, "factor", amount=2)
    with pytest.raises(IneligibleLayerError, match=r"^layer '3\.origin_norm' cannot be folded: its factor is computed"):
        dyrep.deploy(model)


def test_computed_weight_outside_blocks_does_not_matter():
    model, x = conv_bn_net(torch.float64), images(1, dtype=torch.float64)[0]
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    dyrep.expand_(model, "3", gamma=0.5)
    output = eval_output(model, x)
    assert relative_change(eval_output(dyrep.deploy(model), x), output) <= 1e-10
