"""Edits that are refused or fail leave everything as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import dyrep
from dyrep.errors import BranchError, CalibrationError, ConfigError, IneligibleLayerError, OptimizerError
from dyrep.surgery import assembly, edits
from surgery_helpers import (
    COMPUTED,
    assert_same_picture,
    conv_bn_net,
    images,
    picture,
    train_step,
)
from training import eval_output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"branches": ["3x3"]}, "unknown branch '3x3' for layer '3'; valid are 1x1, 1x1-KxK, 1x1-AVG, 1xK, Kx1, res"),
        ({"branches": ["KxK"]}, "unknown branch 'KxK' for layer '3'; valid are 1x1, "),
        ({"branches": ["1x1"]}, r"layer '3' has branch '1x1' already; it can still grow \['1x1-KxK', '1x1-AVG'"),
        ({"branches": []}, r"no branches given for layer '3'; it can grow \['1x1-KxK', '1x1-AVG', '1xK', 'Kx1'"),
    ],
    ids=["unknown", "origin", "present", "none"],
)
def test_bad_branch_is_refused_with_the_valid_ones(arguments, message):
    model = conv_bn_net()
    dyrep.expand_(model, "3", ["1x1"])
    before = picture(model)
    with pytest.raises(BranchError, match=message):
        dyrep.expand_(model, "3", **arguments)
    assert_same_picture(picture(model), before)


def test_impossible_branch_is_refused_with_the_reason_and_the_valid_ones():
    model = conv_bn_net()
    before = picture(model)
    with pytest.raises(
        BranchError,
        match=r"layer '0' cannot have branch 'residual': the residual needs as many output as input channels "
        r"\(3 in, 6 out\); it can grow \['1x1', '1x1-KxK', '1x1-AVG', '1xK', 'Kx1'\]",
    ):
        dyrep.expand_(model, ["3", "0"], ["residual"])
    assert_same_picture(picture(model), before)


def test_layer_with_nothing_left_to_add_is_refused():
    model = conv_bn_net()
    dyrep.expand_(model, "0")
    with pytest.raises(BranchError, match="layer '0' has no branch to add: it has every branch already"):
        dyrep.expand_(model, "0")


@pytest.mark.parametrize(
    ("layer", "branches", "message"),
    [
        ("3", ["1xK"], "layer '3' has no branch '1xK'; it has 1x1, residual"),
        ("3", ["1x1", "3x3"], "layer '3' has no branch '3x3'; it has 1x1, residual"),
        ("0", None, "layer '0' has no branches to cut"),
        ("0", ["1x1"], "layer '0' has no branches to cut"),
    ],
)
def test_cutting_what_is_not_there_is_refused(layer, branches, message):
    model = conv_bn_net()
    dyrep.expand_(model, "3", ["1x1", "residual"])
    before = picture(model)
    with pytest.raises(BranchError, match=message):
        dyrep.cut_(model, ["3", layer], branches)
    assert_same_picture(picture(model), before)


def test_cutting_an_empty_list_of_branches_is_refused():
    model = conv_bn_net()
    dyrep.expand_(model, "3", ["1x1", "residual"])
    before = picture(model)
    with pytest.raises(BranchError, match="no branches given to cut from layer '3'; it has 1x1, residual"):
        dyrep.cut_(model, "3", [])
    assert_same_picture(picture(model), before)


@pytest.mark.parametrize(
    ("branches", "message"),
    [
        ({"3": ["1x1"]}, r"layer '0' is to grow, but branches= does not say what"),
        ({"3": ["1x1"], "0": ["1x1"], "4": ["1x1"]}, r"branches= names layer '4', which is not among .*: 0, 3"),
    ],
    ids=["missing", "unknown"],
)
def test_branches_given_for_other_layers_than_those_that_grow_are_refused(branches, message):
    model = conv_bn_net()
    before = picture(model)
    with pytest.raises(BranchError, match=message):
        dyrep.expand_(model, ["0", "3"], branches)
    assert_same_picture(picture(model), before)


def test_unknown_origin_norm_is_refused_with_the_valid_ones():
    with pytest.raises(ConfigError, match="origin_norm='batch' is unknown; valid are none, calibrated, reference"):
        dyrep.expand_(conv_bn_net(), "3", origin_norm="batch")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"origin_norm": "calibrated"}, "origin_norm='calibrated' has to see data: pass calibration=batches"),
        ({"relative_gamma": True}, "relative_gamma=True has to see data: pass calibration=batches"),
    ],
)
def test_settings_that_need_data_are_refused_without(arguments, message):
    model = conv_bn_net()
    before = picture(model)
    with pytest.raises(CalibrationError, match=message):
        dyrep.expand_(model, "3", **arguments)
    assert_same_picture(picture(model), before)


class Unreached(nn.Module):
    """Its second convolution is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Conv2d(3, 4, 3)
        self.unused = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.used(x)


def test_failed_calibration_of_the_second_layer_changes_nothing():
    model = Unreached()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    train_step(model, optimizer, images(1)[0])
    before = picture(model, optimizer)
    with pytest.raises(CalibrationError, match="calibration never reached 'unused'"):
        dyrep.expand_(model, ["used", "unused"], calibration=images(2), optimizer=optimizer)
    assert_same_picture(picture(model, optimizer), before)
    assert not model.used._forward_hooks
    assert not model.used._forward_pre_hooks


def test_optimizer_that_lacks_the_second_layer_changes_nothing():
    model = conv_bn_net()
    optimizer = torch.optim.SGD([model[0].weight, model[1].weight], lr=0.1)
    before = picture(model, optimizer)
    with pytest.raises(OptimizerError, match="the weight of layer '3' is not in the optimizer"):
        dyrep.expand_(model, ["0", "3"], calibration=images(1), optimizer=optimizer)
    assert_same_picture(picture(model, optimizer), before)


def test_failure_half_way_through_an_expansion_changes_nothing(monkeypatch):
    model = conv_bn_net()
    dyrep.expand_(model, "3", ["1x1"], origin_norm="reference")
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    train_step(model, optimizer, images(1)[0])
    before, x = picture(model, optimizer), images(1)[0]
    output, real, layers = eval_output(model, x), assembly.insert_, []

    def failing(optimizer, model, conv, added, name):
        layers.append(name)
        real(optimizer, model, conv, added, name)
        if name == "3":
            raise RuntimeError("no room")

    monkeypatch.setattr(assembly, "insert_", failing)
    with pytest.raises(RuntimeError, match="no room"):
        dyrep.expand_(model, ["0", "3"], calibration=[x], optimizer=optimizer)
    assert layers == ["0", "3"]
    assert_same_picture(picture(model, optimizer), before)
    assert torch.equal(eval_output(model, x), output)


@pytest.mark.parametrize(("part", "last"), [("_absorb_", 2), ("remove_", 1)], ids=["second layer", "optimizer"])
def test_failure_half_way_through_a_cut_changes_nothing(part, last, monkeypatch):
    model = conv_bn_net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    dyrep.expand_(model, ["0", "3"], calibration=images(1), optimizer=optimizer, origin_norm="calibrated")
    train_step(model, optimizer, images(1)[0])
    before, x = picture(model, optimizer), images(1)[0]
    output = eval_output(model, x)

    real, calls = getattr(edits, part), []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == last:
            raise RuntimeError("no room")
        return real(*arguments)

    monkeypatch.setattr(edits, part, failing)
    with pytest.raises(RuntimeError, match="no room"):
        dyrep.cut_(model, ["0", "3"], optimizer=optimizer)
    assert_same_picture(picture(model, optimizer), before)
    assert torch.equal(eval_output(model, x), output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": float("nan")}, "gamma=nan: must be a positive, finite number"),
        ({"gamma": float("inf")}, "gamma=inf"),
        ({"gamma": 0}, "gamma=0"),
        ({"gamma": -1.0}, r"gamma=-1\.0"),
        ({"width": 0}, "width=0: must be a whole number of at least 1"),
        ({"width": 1.5}, r"width=1\.5"),
    ],
)
def test_values_that_would_harm_the_model_are_refused(arguments, message):
    model = nn.Sequential(nn.Conv2d(3, 3, 3))
    with pytest.raises(ConfigError, match=message):
        dyrep.expand_(model, "0", **arguments)
    assert type(model[0]) is nn.Conv2d


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("branches", [None, ["1x1"]])
@pytest.mark.parametrize("layer", ["3", "3.branches.1x1.conv"])
@pytest.mark.parametrize("way", COMPUTED)
def test_cutting_where_a_weight_became_a_computed_one_is_refused_and_changes_nothing(way, layer, branches):
    model, x = conv_bn_net(torch.float64), images(1, dtype=torch.float64)[0]
    dyrep.expand_(model, ["0", "3"], gamma=0.5, calibration=[x], origin_norm="calibrated")
    model.eval().requires_grad_(False)
    COMPUTED[way][0](model.get_submodule(layer))
    output, before = model(x), picture(model)
    with pytest.raises(IneligibleLayerError, match=f"^layer '{layer}' cannot be folded: its weight is computed"):
        dyrep.cut_(model, ["0", "3"], branches)
    assert_same_picture(picture(model), before)
    assert torch.equal(model(x), output)


def test_branch_beside_a_pruned_one_is_cut_exactly():
    model, x = conv_bn_net(torch.float64), images(1, dtype=torch.float64)[0]
    dyrep.expand_(model, "3", gamma=0.5, calibration=[x], origin_norm="calibrated")
    prune.l1_unstructured(model[3].branches["1x1"].conv, "weight", amount=0.5)
    output = eval_output(model, x)
    dyrep.cut_(model, "3", ["1xK", "1x1-KxK"])
    torch.testing.assert_close(eval_output(model, x), output, rtol=1e-10, atol=1e-10)
