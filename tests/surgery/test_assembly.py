"""Blocks built to a plan: the plan as plain data, and what becomes of the model, its function and its optimizer."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from dyrep.block import RepConv
from dyrep.branches import BRANCHES
from dyrep.errors import StructureError
from dyrep.norm import BranchNorm
from dyrep.passing import PassedNorm
from dyrep.surgery.assembly import Blueprint, assemble_, norm_names
from surgery_helpers import held_parameters, images, picture, relative_change, train_step
from training import eval_output

ALL_BRANCHES = (*BRANCHES, "KxK-2", "1x1-DCT", "DW-1x1")
with_and_without_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])

every_kind = pytest.mark.parametrize(
    ("scaling", "replaces"), [("norm", None), ("linear", None), ("gated", None), ("norm", "2"), ("gated", "2")]
)


@torch.no_grad()
def trained_net(bias: bool = False, eps: float = 1e-3, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A 1x1, a convolution and a batch norm with the statistics, γ and β of one that has been trained."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1, bias=bias), nn.BatchNorm2d(4, eps=eps))
    norm = model[2]
    norm.weight.copy_(torch.tensor([0.8, -1.3, 0.4, 1.1]))
    norm.bias.copy_(torch.tensor([0.1, -0.5, 2.0, 0.0]))
    norm.running_mean.copy_(torch.tensor([0.3, -1.0, 0.0, 4.0]))
    norm.running_var.copy_(torch.tensor([0.01, 2.0, 0.4, 9.0]))
    return model.to(dtype)


def image() -> Tensor:
    return images(1, dtype=torch.float64)[0]


# Plans as data -----------------------------------------------------------------------------------------------------

PLANS = {
    "usual": Blueprint(("1x1", "residual")),
    "origin norm": Blueprint(("1x1",), origin_norm=True),
    "wide": Blueprint(("1x1-KxK",), width=3),
    "linear": Blueprint(("1x1-DCT", "DW-1x1"), origin_norm=True, scaling="linear"),
    "gated": Blueprint(BRANCHES, origin_norm=True, scaling="gated"),
    "in place of a norm": Blueprint(("KxK-2", "KxK-3"), origin_norm=True, replaces="features.1"),
    "in place of a norm, gated": Blueprint(("1xK",), origin_norm=True, scaling="gated", replaces="2"),
    "without the origin": Blueprint(("1xK", "Kx1"), origin=False),
    "without the origin, in place of a norm": Blueprint(("1x1",), replaces="2", origin=False),
}


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_goes_through_json(kind):
    plan = PLANS[kind]
    assert Blueprint.from_dict("3", json.loads(json.dumps(plan.as_dict()))) == plan


def test_what_is_usual_and_was_not_always_there_is_left_out():
    assert PLANS["usual"].as_dict() == {"branches": ["1x1", "residual"], "origin_norm": False, "width": 1}
    assert PLANS["linear"].as_dict() == {
        "branches": ["1x1-DCT", "DW-1x1"],
        "origin_norm": True,
        "width": 1,
        "scaling": "linear",
    }
    assert PLANS["without the origin, in place of a norm"].as_dict() == {
        "branches": ["1x1"],
        "origin_norm": False,
        "width": 1,
        "replaces": "2",
        "origin": False,
    }


def test_a_plan_without_the_newer_fields_is_read_as_usual():
    assert Blueprint.from_dict("3", {"branches": ["1x1"]}) == Blueprint(("1x1",))


MALFORMED = {
    "no branches": ({}, "branches must be a list from 1x1, .*, got None"),
    "branches a string": ({"branches": "1x1"}, "branches must be a list from .*, got '1x1'"),
    "unknown branch": ({"branches": ["1x1", "5x5"]}, r"branches must be a list from .*, got \['1x1', '5x5'\]"),
    "the origin as a branch": ({"branches": ["KxK"]}, r"branches must be a list from .*, got \['KxK'\]"),
    "a number as a branch": ({"branches": [3]}, r"branches must be a list from .*, got \[3\]"),
    "empty": ({"branches": []}, "a block needs at least one branch; leave plain layers out"),
    "unknown field": ({"branches": ["1x1"], "color": "red"}, "'color' is unknown; valid are branches, origin_norm, .*"),
    "zero width": ({"branches": ["1x1"], "width": 0}, "width must be a positive whole number, got 0"),
    "fractional width": ({"branches": ["1x1"], "width": 1.5}, "width must be a positive whole number, got 1.5"),
    "width in words": ({"branches": ["1x1"], "width": "2"}, "width must be a positive whole number, got '2'"),
    "unknown scaling": (
        {"branches": ["1x1"], "scaling": "batch"},
        "scaling must be one of norm, linear, gated, got 'batch'",
    ),
    "no scaling": ({"branches": ["1x1"], "scaling": None}, "scaling must be one of norm, linear, gated, got None"),
    "linear in place of a norm": (
        {"branches": ["1x1"], "origin_norm": True, "scaling": "linear", "replaces": "2"},
        "a block in place of a norm, '2', needs norms on all its branches",
    ),
    "in place of a norm without one on the origin": (
        {"branches": ["1x1"], "replaces": "2"},
        "a block in place of a norm, '2', needs norms on all its branches",
    ),
    "origin norm in words": ({"branches": ["1x1"], "origin_norm": "no"}, "origin_norm must be .*, got 'no'"),
    "origin in words": ({"branches": ["1x1"], "origin": "no"}, "origin must be .*, got 'no'"),
    "a norm on an origin that is off": (
        {"branches": ["1x1"], "origin_norm": True, "origin": False},
        "there is no origin",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_plan_is_refused_with_the_layer_and_the_value(kind):
    data, message = MALFORMED[kind]
    with pytest.raises(StructureError, match=rf"^layer 'body\.3': {message}"):
        Blueprint.from_dict("body.3", data)


@pytest.mark.parametrize("kind", [kind for kind, plan in PLANS.items() if plan.replaces in (None, "2")])
def test_an_assembled_block_describes_itself_as_its_plan(kind):
    model, plan = trained_net(), PLANS[kind]
    block = assemble_(model, "1", plan, gamma=0.1)
    assert block is model[1]
    assert isinstance(block, RepConv)
    assert Blueprint.of(block, norm_names(model)) == plan
    assert norm_names(model) == ({} if plan.replaces is None else {id(model[2]): "2"})


# The function ------------------------------------------------------------------------------------------------------


@with_and_without_bias
@pytest.mark.parametrize("origin_norm", [True, False], ids=["origin norm", "no origin norm"])
@pytest.mark.parametrize("scaling", ["norm", "linear", "gated"])
def test_preserving_keeps_the_eval_function_for_every_scaling(scaling, origin_norm, bias):
    model, x = trained_net(bias), image()
    before, weight = eval_output(model, x), model[1].weight
    block = assemble_(
        model, "1", Blueprint(ALL_BRANCHES, origin_norm=origin_norm, scaling=scaling), gamma=0.7, preserve=True
    )
    assert relative_change(eval_output(model, x), before) <= 1e-10
    assert block.weight is weight
    assert list(block.branches) == list(ALL_BRANCHES)
    assert {branch.norm.kind for branch in block.branches.values()} == {scaling}
    assert all(bool((branch.norm.weight == 0.7).all()) for branch in block.branches.values())
    assert (block.origin_norm is not None) == origin_norm
    assert type(model[2]) is nn.BatchNorm2d


@with_and_without_bias
@pytest.mark.parametrize("scaling", ["norm", "gated"])
@pytest.mark.parametrize("eps", [1e-3, 1e-5])
def test_preserving_keeps_the_eval_function_in_place_of_a_norm(scaling, eps, bias):
    model, x = trained_net(bias, eps=eps), image()
    before = eval_output(model, x)
    plan = Blueprint(ALL_BRANCHES, origin_norm=True, scaling=scaling, replaces="2")
    block = assemble_(model, "1", plan, gamma=0.7, preserve=True)
    assert type(model[2]) is PassedNorm
    assert block.passed_norm is model[2]
    assert relative_change(eval_output(model, x), before) <= 1e-10
    assert relative_change(block(model[0](x)), before) > 1e-3


def test_preserving_in_place_of_a_norm_survives_channels_that_it_has_switched_off():
    model, x = trained_net(), image()
    with torch.no_grad():
        model[2].weight[1] = 0
        model[2].running_var[2] = 0
    before = eval_output(model, x)
    assemble_(model, "1", Blueprint(("1x1", "residual"), origin_norm=True, replaces="2"), gamma=0.3)
    assert relative_change(eval_output(model, x), before) <= 1e-10


@every_kind
def test_without_preserving_nothing_is_taken_out_of_the_original_kernel(scaling, replaces):
    model, x = trained_net(bias=True), image()
    weight, bias = model[1].weight.detach().clone(), model[1].bias.detach().clone()
    before = eval_output(model, x)
    plan = Blueprint(("1x1", "residual"), origin_norm=True, scaling=scaling, replaces=replaces)
    block = assemble_(model, "1", plan, gamma=1.0, preserve=False)
    assert torch.equal(block.weight, weight)
    assert torch.equal(block.bias, bias)
    assert bool((block.origin_norm.weight == 1).all())
    assert list(block.branches) == ["1x1", "residual"]
    assert relative_change(eval_output(model, x), before) > 0.1


def test_without_the_original_kernel_only_branches_count():
    model, x = trained_net(), image()
    block = assemble_(model, "1", Blueprint(("1x1", "residual"), replaces="2", origin=False), gamma=0.5)
    assert block.origin_off
    assert block.origin_norm is None
    assert not block.weight.any()
    y = model[0](x)
    expected = sum(branch(y) for branch in block.eval().branches.values())
    assert relative_change(eval_output(model, x), expected) <= 1e-12


def test_a_block_is_given_what_it_lacks_and_keeps_what_it_has():
    model, x = trained_net(), image()
    before = eval_output(model, x)
    block = assemble_(model, "1", Blueprint(("1x1",), origin_norm=True, replaces="2"), gamma=0.5)
    kept, norm = block.branches["1x1"], block.origin_norm
    assert assemble_(model, "1", Blueprint(("1xK", "1x1"), origin_norm=True, replaces="2"), gamma=0.25) is block
    assert block.branches["1x1"] is kept
    assert block.origin_norm is norm
    assert list(block.branches) == ["1x1", "1xK"]
    assert bool((block.branches["1xK"].norm.weight == 0.25).all())
    assert relative_change(eval_output(model, x), before) <= 1e-10


def test_weights_come_from_the_generator_alone():
    models = [trained_net() for _ in range(3)]
    state = torch.get_rng_state()
    for model, seed in zip(models, (1, 1, 2), strict=True):
        assemble_(model, "1", Blueprint(("1x1",)), gamma=0.1, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(torch.get_rng_state(), state)
    first, same, other = (model[1].branches["1x1"].conv.weight for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_new_parts_have_the_mode_dtype_and_memory_format_of_the_convolution(training):
    model = trained_net(dtype=torch.float32).to(memory_format=torch.channels_last).train(training)
    block = assemble_(model, "1", Blueprint(ALL_BRANCHES, origin_norm=True, scaling="gated"), gamma=0.1)
    assert {module.training for module in block.modules()} == {training}
    assert {value.dtype for value in block.state_dict().values()} == {torch.float32}
    assert block.branches["KxK-2"].conv.weight.is_contiguous(memory_format=torch.channels_last)


# The optimizer -----------------------------------------------------------------------------------------------------


@every_kind
def test_new_kernels_join_the_weight_and_new_factors_join_the_norms(scaling, replaces):
    model = trained_net(dtype=torch.float32)
    named = list(model.named_parameters())
    optimizer = torch.optim.SGD(
        [
            {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 1e-4},
            {"params": [(n, p) for n, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=0.05,
        momentum=0.9,
    )
    train_step(model, optimizer, images(1)[0])
    plan = Blueprint(ALL_BRANCHES, origin_norm=True, scaling=scaling, replaces=replaces)
    assemble_(model, "1", plan, gamma=0.1, optimizer=optimizer)
    assert sorted(held_parameters(optimizer)) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    for group, dims in zip(optimizer.param_groups, ({4}, {1}), strict=True):
        assert {p.dim() for p in group["params"]} == dims
        assert group["param_names"] == [names[id(p)] for p in group["params"]]
    train_step(model, optimizer, images(1)[0])


def test_without_an_optimizer_none_is_touched():
    model = trained_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = picture(model, optimizer)["groups"]
    assemble_(model, "1", Blueprint(("1x1",)), gamma=0.1)
    assert picture(model, optimizer)["groups"] == before


# Synchronised statistics -------------------------------------------------------------------------------------------


def synchronised(module: nn.Module) -> set[bool]:
    return {norm.synchronized for norm in module.modules() if isinstance(norm, BranchNorm)}


@pytest.mark.parametrize("scaling", ["norm", "gated"])
def test_norms_of_a_block_are_synchronised_where_the_model_s_are(scaling):
    plan = Blueprint(("1x1", "1x1-KxK"), origin_norm=True, scaling=scaling)
    for convert in (True, False):
        model = trained_net()
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if convert else model
        assert synchronised(assemble_(model, "1", plan, gamma=0.1)) == {convert}


@pytest.mark.parametrize("others", [True, False], ids=["one of several norms", "the only norm"])
def test_norms_of_a_block_in_place_of_a_synchronised_norm_are_synchronised(others):
    model = trained_net()
    if others:
        model.append(nn.BatchNorm2d(4))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    block = assemble_(model, "1", Blueprint(("1x1", "1x1-KxK"), origin_norm=True, replaces="2"), gamma=0.1)
    assert synchronised(block) == {True}
