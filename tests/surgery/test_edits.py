"""Expanding and cutting keep the function."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

import dyrep
from dyrep.branches import branch_options
from dyrep.geometry import ConvGeometry
from dyrep.surgery.edits import Edit
from surgery_helpers import (
    conv,
    conv_bn_net,
    held_parameters,
    images,
    relative_change,
    train_step,
)
from training import eval_output

KINDS = ("conv", "conv-BN", "conv-bias", "conv-bias-BN", "grouped", "depthwise")


def make_layers(kind: str, channels: int, kernel: tuple[int, int], stride: int, mode: str) -> list[nn.Module]:
    padding = tuple(k // 2 for k in kernel)
    groups = {"grouped": 2, "depthwise": channels}.get(kind, 1)
    conv = nn.Conv2d(channels, channels, kernel, stride, padding, groups=groups, bias="bias" in kind, padding_mode=mode)
    return [conv, nn.BatchNorm2d(channels), nn.ReLU()] if "BN" in kind else [conv, nn.ReLU()]


@st.composite
def nets(draw) -> nn.Module:
    """One to three layers of any kind over four channels, between a stem and a head that stay plain."""
    layers: list[nn.Module] = []
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)):
        kernel = draw(st.sampled_from([(3, 3), (3, 3), (2, 2), (1, 3), (5, 3)]))
        stride = draw(st.sampled_from([1, 1, 2]))
        mode = draw(st.sampled_from(["zeros", "zeros", "reflect"]))
        layers += make_layers(kind, 4, kernel, stride, mode)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), *layers, nn.Conv2d(4, 5, 1))


def draw_expansion(data, model: nn.Module, batches: list[torch.Tensor]) -> dict | None:
    """Arguments of an expansion that is possible now."""
    candidates = [target for target in dyrep.targets(model) if target.eligible and target.depth <= 2]
    if not candidates:
        return None
    target = data.draw(st.sampled_from(candidates), label="layer")
    options = branch_options(ConvGeometry.of(model.get_submodule(target.name)))
    possible = [name for name, option in options.items() if option.possible and name not in target.present]
    chosen = st.lists(st.sampled_from(possible), min_size=1, unique=True)
    origin_norm = data.draw(st.sampled_from(["none", "none", "calibrated", "reference"]), label="origin norm")
    calibrated = origin_norm == "calibrated" or data.draw(st.booleans(), label="calibrated")
    return {
        "names": target.name,
        "branches": data.draw(st.none() | chosen, label="branches"),
        "origin_norm": origin_norm,
        "calibration": batches if calibrated else None,
        "width": data.draw(st.sampled_from([1, 1, 2]), label="width"),
    }


def draw_cut(data, model: nn.Module) -> dict | None:
    """Arguments of a cut that is possible now."""
    blocks = dyrep.structure(model)["blocks"]
    if not blocks:
        return None
    name = data.draw(st.sampled_from(sorted(blocks)), label="layer")
    some = st.lists(st.sampled_from(blocks[name]["branches"]), min_size=1, unique=True)
    return {"names": name, "branches": data.draw(st.none() | some, label="branches")}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_any_sequence_of_expansions_training_and_cuts_preserves_the_function(dtype, tolerance, data):
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    model = data.draw(nets(), label="net").to(dtype)
    plain_keys, plain_model = list(model.state_dict()), copy.deepcopy(model)
    batches = images(2, size=9, dtype=dtype)
    x = images(1, size=9, dtype=dtype)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train_step(model, optimizer, batches[0])
    for _ in range(data.draw(st.integers(2, 6), label="steps")):
        before = eval_output(model, x)
        action = data.draw(st.sampled_from(["expand", "expand", "train", "cut"]), label="action")
        if action == "train":
            train_step(model.train(), optimizer, batches[1])
            continue
        arguments = draw_expansion(data, model, batches) if action == "expand" else draw_cut(data, model)
        if arguments is None:
            continue
        operate = dyrep.expand_ if action == "expand" else dyrep.cut_
        operate(model, **arguments, optimizer=optimizer)
        assert relative_change(eval_output(model, x), before) <= tolerance
        assert sorted(held_parameters(optimizer)) == sorted(id(p) for p in model.parameters())
    evolved = eval_output(model, x)
    plain = dyrep.deploy(model)
    assert list(plain.state_dict()) == plain_keys
    assert relative_change(eval_output(plain, x), evolved) <= tolerance
    plain_model.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(eval_output(plain_model, x), eval_output(plain, x))


def net_around(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), *middle, nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1))


def frozen_batch_norm() -> FrozenBatchNorm2d:
    norm = FrozenBatchNorm2d(8)
    norm.running_mean.uniform_(-0.2, 0.2)
    norm.running_var.uniform_(0.1, 0.4)
    return norm


DRIFT_NETS = {
    "conv-BN": lambda: net_around(conv(bias=False), nn.BatchNorm2d(8)),
    "conv with bias-BN": lambda: net_around(conv(), nn.BatchNorm2d(8)),
    "conv without BN": lambda: net_around(conv()),
    "conv without bias and BN": lambda: net_around(conv(bias=False)),
    "conv-FrozenBatchNorm2d": lambda: net_around(conv(bias=False), frozen_batch_norm()),
    "conv-BN in eval mode": lambda: net_around(conv(bias=False), nn.BatchNorm2d(8)),
}


def train_with_frozen_norms_(model: nn.Module, frozen: bool) -> None:
    model.train()
    for module in model.modules():
        if frozen and isinstance(module, nn.BatchNorm2d):
            module.eval()


@torch.no_grad()
def train_output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(model)(x)


@pytest.mark.parametrize("kind", DRIFT_NETS)
def test_expansion_changes_training_mode_output_by_at_most_one_percent(kind):
    model = DRIFT_NETS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        train_with_frozen_norms_(model, frozen=kind.endswith("eval mode") and step >= 3)
        train_step(model, optimizer, torch.randn(16, 3, 12, 12))
    x, calibration = torch.randn(16, 3, 12, 12), [torch.randn(16, 3, 12, 12) for _ in range(20)]
    before = train_output(model, x)
    dyrep.expand_(model, "2", calibration=calibration, optimizer=optimizer)
    drift = relative_change(train_output(model, x), before)
    assert 0 < drift <= 1e-2
    if kind.endswith("eval mode"):
        assert not model[3].training
        assert model.training


@pytest.mark.parametrize("gamma", [0.01, 0.1, 1.0])
def test_calibrated_origin_norm_knows_the_origin_that_remains_beside_the_branches(gamma):
    model, x = DRIFT_NETS["conv without BN"]().train(), torch.randn(32, 3, 12, 12)
    before = train_output(model, x)
    dyrep.expand_(model, "2", gamma=gamma, calibration=[x], origin_norm="calibrated")
    assert relative_change(train_output(model, x), before) <= 1e-2


def test_calibrated_origin_norm_drifts_no_more_on_an_expanded_conv_than_on_a_plain_one():
    x, calibration = torch.randn(16, 3, 12, 12), [torch.randn(16, 3, 12, 12) for _ in range(20)]
    first = DRIFT_NETS["conv without BN"]().train()
    second = copy.deepcopy(first)
    dyrep.expand_(second, "2", ["1x1"], gamma=1.0, calibration=calibration)
    drifts = []
    for model in (first, second):
        before = train_output(model, x)
        dyrep.expand_(model, "2", ["1x1-AVG"], calibration=calibration, origin_norm="calibrated")
        drifts.append(relative_change(train_output(model, x), before))
    assert drifts[1] <= 2 * drifts[0]


@pytest.mark.parametrize("origin_norm", ["none", "calibrated", "reference"])
@pytest.mark.parametrize("calibrated", [True, False])
def test_every_origin_norm_preserves_eval_output_and_is_cut_with_the_last_branch(origin_norm, calibrated):
    if origin_norm == "calibrated" and not calibrated:
        pytest.skip("needs data")
    model = net_around(conv(), nn.BatchNorm2d(8)).double()
    keys, x = list(model.state_dict()), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    before = eval_output(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dyrep.expand_(
        model, "2", gamma=0.5, calibration=[x] if calibrated else None, origin_norm=origin_norm, optimizer=optimizer
    )
    assert (model[2].origin_norm is not None) == (origin_norm != "none")
    assert sorted(held_parameters(optimizer)) == sorted(id(p) for p in model.parameters())
    assert relative_change(eval_output(model, x), before) <= 1e-10
    train_step(model, optimizer, x)
    before = eval_output(model, x)
    dyrep.cut_(model, "2", ["1x1", "residual"], optimizer=optimizer)
    assert (model[2].origin_norm is not None) == (origin_norm != "none")
    assert relative_change(eval_output(model, x), before) <= 1e-10
    dyrep.cut_(model, "2", optimizer=optimizer)
    assert type(model[2]) is nn.Conv2d
    assert list(model.state_dict()) == keys
    assert sorted(held_parameters(optimizer)) == sorted(id(p) for p in model.parameters())
    assert relative_change(eval_output(model, x), before) <= 1e-10


def test_a_block_of_an_origin_norm_alone_as_a_search_may_leave_it_keeps_that_when_it_grows():
    model, x = conv_bn_net(), images(1)[0]
    dyrep.expand_(model, "3", ["1x1"], calibration=[x], origin_norm="calibrated")
    model[3].set_branches_({})
    norm, before = model[3].origin_norm, eval_output(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dyrep.expand_(model, "3", ["Kx1"], calibration=[x], origin_norm="calibrated", optimizer=optimizer)
    assert model[3].origin_norm is norm
    assert relative_change(eval_output(model, x), before) <= 1e-5
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in model.parameters()}


def test_cut_is_exact_where_the_origin_norm_has_channels_near_zero():
    model = nn.Sequential(conv()).double()
    x = torch.randn(4, 8, 8, 8, dtype=torch.float64)
    dyrep.expand_(model, "0", calibration=[x], origin_norm="calibrated")
    with torch.no_grad():
        model[0].origin_norm.weight[0] = 0.0
        model[0].origin_norm.weight[1] = 1e-9
        model[0].origin_norm.weight[2] = -0.3
    before = eval_output(model, x)
    dyrep.cut_(model, "0", ["1x1", "Kx1"])
    assert relative_change(eval_output(model, x), before) <= 1e-10
    dyrep.expand_(model, "0", ["1x1"], calibration=[x])
    assert relative_change(eval_output(model, x), before) <= 1e-10


def test_nested_expansion_is_exact_at_every_depth():
    model = conv_bn_net(torch.float64)
    batches, x = images(2, dtype=torch.float64), images(1, dtype=torch.float64)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    name = "3"
    for depth in range(3):
        before = eval_output(model, x)
        dyrep.expand_(model, name, gamma=0.3, calibration=batches, optimizer=optimizer)
        assert relative_change(eval_output(model, x), before) <= 1e-10
        train_step(model, optimizer, batches[0])
        by_name = {target.name: target for target in dyrep.targets(model)}
        name += ".branches.1x1-KxK.conv"
        assert by_name[name].depth == depth + 1
        assert by_name[name].eligible
    before = eval_output(model, x)
    dyrep.cut_(model, "3", ["1x1-KxK"], optimizer=optimizer)
    assert relative_change(eval_output(model, x), before) <= 1e-10
    assert sorted(held_parameters(optimizer)) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize(("kind", "size"), [(nn.Conv1d, (12,)), (nn.Conv3d, (6, 5, 4))], ids=["1-d", "3-d"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_convs_of_other_dimensions_are_expanded_cut_and_deployed_exactly(kind, size, bias):
    model = nn.Sequential(kind(4, 4, 3, padding=1, bias=bias), nn.ReLU(), kind(4, 6, 3, stride=2, bias=bias)).double()
    x = torch.randn(4, 4, *size, dtype=torch.float64)
    before = eval_output(model, x)
    dyrep.expand_(model, ["0", "2"], gamma=0.5, calibration=[x])
    assert relative_change(eval_output(model, x), before) <= 1e-10
    dyrep.expand_(model, "0.branches.1x1-KxK.conv", gamma=0.5, calibration=[x], origin_norm="calibrated")
    dyrep.cut_(model, "2", ["1x1-AVG"])
    assert relative_change(eval_output(model, x), before) <= 1e-10
    assert dyrep.verify(model, dyrep.deploy(model), x).passed


def test_outer_and_inner_block_can_be_cut_in_one_call():
    model = conv_bn_net(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = images(1, dtype=torch.float64)[0]
    before = eval_output(model, x)
    inner = "3.branches.1x1-KxK.conv"
    dyrep.expand_(model, "3", calibration=[x], optimizer=optimizer)
    dyrep.expand_(model, inner, calibration=[x], optimizer=optimizer)
    dyrep.cut_(model, ["3", inner], optimizer=optimizer)
    assert type(model[3]) is nn.Conv2d
    assert relative_change(eval_output(model, x), before) <= 1e-10
    assert sorted(held_parameters(optimizer)) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_keep_their_function_to_rounding(dtype):
    model = nn.Sequential(conv())
    x = torch.randn(4, 8, 8, 8)
    model.to(dtype)
    before = eval_output(model, x.to(dtype))
    dyrep.expand_(model, "0", calibration=[x.to(dtype)])
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert relative_change(eval_output(model, x.to(dtype)), before) <= 8 * torch.finfo(dtype).eps


def test_width_multiplies_the_inner_channels_and_keeps_the_function():
    model = conv_bn_net(torch.float64)
    x = images(1, dtype=torch.float64)[0]
    before = eval_output(model, x)
    dyrep.expand_(model, "3", ["1x1-KxK"], gamma=0.5, width=2, calibration=[x])
    branch = model[3].branches["1x1-KxK"]
    assert branch.point.out_channels == branch.conv.in_channels == branch.inner_norm.weight.numel() == 12
    assert relative_change(eval_output(model, x), before) <= 1e-10


def test_width_multiplies_the_inner_channels_of_every_group():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2)).double()
    x = torch.randn(4, 4, 8, 8, dtype=torch.float64)
    before = eval_output(model, x)
    dyrep.expand_(model, "0", ["1x1-KxK"], gamma=0.5, width=2, calibration=[x])
    assert model[0].branches["1x1-KxK"].point.weight.shape == (8, 2, 1, 1)
    assert relative_change(eval_output(model, x), before) <= 1e-10


def test_gamma_is_absolute_by_default():
    model = conv_bn_net()
    dyrep.expand_(model, "3", gamma=0.02, calibration=images(2))
    for branch in model[3].branches.values():
        assert torch.equal(branch.norm.weight, torch.full((6,), 0.02))


def test_relative_gamma_is_measured_in_standard_deviations_of_the_origin_output():
    model = nn.Sequential(conv()).double()
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-2, 2, 8).reshape(-1, 1, 1, 1))
    batches = [torch.randn(4, 8, 8, 8, dtype=torch.float64) for _ in range(3)]
    outputs = torch.stack([eval_output(model, batch) for batch in batches])
    variance = outputs.transpose(1, 2).flatten(2).var(dim=2).mean(0)
    before = eval_output(model, batches[0])
    dyrep.expand_(model, "0", gamma=0.1, relative_gamma=True, calibration=batches)
    for branch in model[0].branches.values():
        torch.testing.assert_close(branch.norm.weight.detach(), 0.1 * variance.sqrt(), rtol=1e-10, atol=0)
    assert relative_change(eval_output(model, batches[0]), before) <= 1e-10


def test_branches_run_in_training_mode_by_their_own_batch_statistics():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False)).double().train()
    x = torch.randn(4, 4, 8, 8, dtype=torch.float64)
    dyrep.expand_(model, "0", ["1x1", "residual"], gamma=0.5, calibration=[x])
    mapped = F.conv2d(x, model[0].branches["1x1"].conv.weight)
    expected = F.conv2d(x, model[0].weight, padding=1)
    for branch_output in (mapped, x):
        deviation = branch_output.var(dim=(0, 2, 3), correction=0, keepdim=True)
        expected = expected + 0.5 * branch_output / (deviation + 1e-5).sqrt()
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_edits_are_reported_in_order_and_as_json():
    model = conv_bn_net()
    made = dyrep.expand_(model, ["3", "0"], ["1xK", "1x1"])
    assert made == [Edit("expand", "3", ("1xK", "1x1")), Edit("expand", "0", ("1xK", "1x1"))]
    assert str(made[0]) == "expand 3: +1xK +1x1"
    (cut,) = dyrep.cut_(model, "3", ["1x1"])
    assert str(cut) == "cut 3: -1x1"
    assert json.loads(json.dumps(cut.as_dict())) == {"kind": "cut", "layer": "3", "branches": ["1x1"], "detail": {}}


def test_branches_can_be_given_layer_by_layer():
    model, x = conv_bn_net(), images(1)[0]
    before = eval_output(model, x)
    made = dyrep.expand_(model, ["0", "3"], {"3": ["residual"], "0": ["1x1", "Kx1"]}, calibration=[x])
    assert [edit.branches for edit in made] == [("1x1", "Kx1"), ("residual",)]
    assert relative_change(eval_output(model, x), before) <= 1e-5


def test_names_may_come_from_a_generator_and_repeat():
    model = conv_bn_net()
    x = images(1)[0]
    before = eval_output(model, x)
    made = dyrep.expand_(model, (name for name in ("0", "3", "0")), ["1x1"], calibration=[x])
    assert [edit.layer for edit in made] == ["0", "3"]
    assert relative_change(eval_output(model, x), before) <= 1e-5


def test_one_branch_can_be_named_without_a_list():
    model = nn.Sequential(nn.Conv2d(3, 3, 3))
    assert dyrep.expand_(model, "0", "1x1")[0].branches == ("1x1",)
    assert dyrep.cut_(model, "0", "1x1")[0].branches == ("1x1",)
