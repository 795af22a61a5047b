"""What the gradient of a folded block knows about σ: nothing, its growth with a kernel's length, or all of it."""

from __future__ import annotations

import pytest
import torch
from execution_helpers import (
    assert_same,
    eager,
    folded_with,
    images,
    make_block,
    measuring,
    norms_of,
    seven_branches,
    step,
)
from torch import Tensor, nn

import dyrep

every_origin = pytest.mark.parametrize("origin", ["plain", "normalised", "off"])
with_and_without_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
COUNT = 4
SINGLE = ("1x1", "1xK", "Kx1", "KxK-2", "1x1-AVG")
"""Branches that consist of one convolution."""
COMPOSED = ("1x1-KxK", "1x1-DCT", "DW-1x1")


def every_branch(origin="plain", bias=False, groups=1):
    return make_block(nn.Conv2d(4, 4, 3, padding=1, bias=bias, groups=groups, dtype=torch.float64), None, origin)


def found_with(gradient, block):
    return step(block, images(), folded_with(images=COUNT, gradient=gradient))


def pairs(block, found, names):
    """Kernels and their gradients."""
    parameters = dict(block.named_parameters())
    return {name: (parameters[name].detach(), found[f"gradient of {name}"]) for name in names}


def single_kernels(block) -> list[str]:
    names = [f"branches.{name}.{'point' if name == '1x1-AVG' else 'conv'}.weight" for name in SINGLE]
    return names + (["weight"] if block.origin_norm is not None else [])


def inner_product(kernel: Tensor, gradient: Tensor) -> Tensor:
    """Per output channel."""
    return (kernel * gradient).sum((1, 2, 3))


def without_length(kernel: Tensor, gradient: Tensor) -> Tensor:
    """What of a gradient is at right angles to the kernel, output channel by output channel."""
    share = inner_product(kernel, gradient) / inner_product(kernel, kernel)
    return gradient - share[:, None, None, None] * kernel


@every_origin
@with_and_without_bias
@pytest.mark.parametrize("groups", [1, 2])
def test_none_takes_sigma_for_a_constant(origin, bias, groups):
    block = every_branch(origin, bias, groups)
    with measuring(COUNT, detached=True):
        expected = step(block, images(), eager)
    assert_same(found_with("none", block), expected)


@pytest.mark.parametrize("names", [dyrep.BRANCHES, ["residual"]])
def test_none_takes_sigma_for_a_constant_in_blocks_inside_blocks_too(names):
    block = seven_branches()
    make_block(block.branches["1x1-KxK"].conv, names)
    with measuring(COUNT, detached=True):
        expected = step(block, images(), eager)
    assert_same(found_with("none", block), expected)


@every_origin
@with_and_without_bias
def test_weights_differs_from_full_in_the_gradient_of_the_input_alone(origin, bias):
    block = every_branch(origin, bias)
    make_block(block.branches["1x1-KxK"].conv, ["1x1", "1xK"])
    none, weights, full = (found_with(gradient, block) for gradient in ("none", "weights", "full"))
    of_input = "gradient of input"
    assert_same({**weights, of_input: full[of_input]}, full)
    assert_same({of_input: weights[of_input]}, {of_input: none[of_input]})
    assert (full[of_input] - none[of_input]).abs().max() > 1e-3


@every_origin
@with_and_without_bias
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_length_makes_the_gradient_of_a_kernel_orthogonal_to_it(origin, bias, groups):
    block = every_branch(origin, bias, groups)
    found = found_with("length", block)
    composed = [*(f"branches.{name}.point.weight" for name in COMPOSED), "branches.1x1-KxK.conv.weight"]
    single = [name for name in single_kernels(block) if name in dict(block.named_parameters())]
    for name, (kernel, gradient) in pairs(block, found, single + composed).items():
        scale = kernel.flatten(1).norm(dim=1) * gradient.flatten(1).norm(dim=1)
        assert (inner_product(kernel, gradient).abs() <= 1e-12 * scale.clamp(min=1)).all(), name


@every_origin
def test_length_is_none_without_the_part_along_the_kernel(origin):
    block = every_branch(origin)
    none, length = found_with("none", block), found_with("length", block)
    lost = 0.0
    for name, (kernel, gradient) in pairs(block, none, single_kernels(block)).items():
        expected = without_length(kernel, gradient)
        assert_same({name: length[f"gradient of {name}"]}, {name: expected})
        lost += float((gradient - expected).abs().max())
    assert lost > 0.1  # there was something to take away


@every_origin
@with_and_without_bias
def test_length_changes_no_other_gradient(origin, bias):
    block = every_branch(origin, bias)
    none, length = found_with("none", block), found_with("length", block)
    changed = {f"gradient of {name}" for name in single_kernels(block)}
    composed = tuple(f"gradient of branches.{name}." for name in COMPOSED)
    kept = {
        name: value
        for name, value in none.items()
        if name not in changed and (".norm." in name or not name.startswith(composed))
    }
    assert_same({name: length[name] for name in kept}, kept)
    assert "gradient of input" in kept
    assert "gradient of branches.1x1.norm.weight" in kept


def test_length_is_full_where_no_direction_of_the_input_stands_out():
    """With white input σ is the length of the kernel times a constant, so both know the same of it."""
    rows = torch.randn(6 * 30, 4, dtype=torch.float64)
    white = torch.linalg.qr(rows - rows.mean(0)).Q * 3
    x = white.reshape(6, 6, 5, 4).movedim(-1, 1)
    block = make_block(nn.Conv2d(4, 6, 3, padding=1, bias=False, dtype=torch.float64), ["1x1"])
    for norm in norms_of(block):
        norm.eps = 0.0
    full, length = (step(block, x, folded_with(images=6, gradient=gradient)) for gradient in ("full", "length"))
    name = "gradient of branches.1x1.conv.weight"
    assert_same({name: length[name]}, {name: full[name]})
    assert length[name].abs().max() > 0.1
