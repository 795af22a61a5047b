"""What the gradient of a folded block knows about σ: nothing, its dependence on the weights, or all of it."""

from __future__ import annotations

import copy

import pytest
import torch
from execution_helpers import (
    assert_same,
    eager,
    folded_with,
    images,
    make_block,
    measuring,
    seven_branches,
    step,
)
from torch import nn

import dyrep

every_origin = pytest.mark.parametrize("origin", ["plain", "normalised", "off"])
with_and_without_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
COUNT = 4


def every_branch(origin="plain", bias=False, groups=1):
    return make_block(nn.Conv2d(4, 4, 3, padding=1, bias=bias, groups=groups, dtype=torch.float64), None, origin)


def found_with(gradient, block):
    return step(block, images(), folded_with(images=COUNT, gradient=gradient))


def with_statistics(block, found):
    """A copy of a block whose running statistics are those that a step has left."""
    block = copy.deepcopy(block)
    block.load_state_dict({name: value for name, value in found.items() if "running" in name}, strict=False)
    return block


def check_none(block):
    """The statistics are moved first; then the block is the convolution that eval mode would run."""
    found = found_with("none", block)
    moved = with_statistics(block, found)
    assert_same(found, step(moved, images(), lambda block, x: block._conv_forward(x, *block.folded())))
    assert not any(torch.equal(found[name], value) for name, value in block.named_buffers() if "running" in name)


@every_origin
@with_and_without_bias
@pytest.mark.parametrize("groups", [1, 2])
def test_none_takes_running_statistics_for_constants(origin, bias, groups):
    check_none(every_branch(origin, bias, groups))


@pytest.mark.parametrize("names", [dyrep.BRANCHES, ["residual"]])
def test_none_takes_running_statistics_for_constants_in_blocks_inside_blocks_too(names):
    block = seven_branches()
    make_block(block.branches["1x1-KxK"].conv, names)
    check_none(block)


@every_origin
@with_and_without_bias
def test_weights_takes_the_images_looked_at_for_constants(origin, bias):
    """Only kernels learn of σ, so the input's gradient is that of a norm with σ as a constant."""
    block = every_branch(origin, bias)
    with measuring(COUNT, detached=True):
        expected = step(block, images(), eager)
    found = found_with("weights", block)
    names = ("output", "gradient of input", *(name for name in expected if "running" in name))
    assert_same({name: found[name] for name in names}, {name: expected[name] for name in names})


@every_origin
@with_and_without_bias
def test_weights_differs_from_full_in_the_gradient_of_the_input_alone(origin, bias):
    block = every_branch(origin, bias)
    make_block(block.branches["1x1-KxK"].conv, ["1x1", "1xK"])
    weights, full = (found_with(gradient, block) for gradient in ("weights", "full"))
    of_input = "gradient of input"
    assert_same({**weights, of_input: full[of_input]}, full)
    assert (full[of_input] - weights[of_input]).abs().max() > 1e-3
