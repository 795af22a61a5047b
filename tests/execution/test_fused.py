"""A fused block computes what its branches compute one by one: output, gradients and running statistics."""

from __future__ import annotations

import pytest
import torch
from execution_helpers import (
    ALWAYS,
    NEVER,
    assert_same,
    block_cases,
    eager,
    fused_with,
    images,
    make_block,
    norms_of,
    plain_convs,
    seven_branches,
    step,
    values_per_channel,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import dyrep
from dyrep.block import RepConv
from dyrep.execution import fused
from dyrep.kernels import second_moments
from strategies import CONVS, PADDING_MODES, conv_cases

either_moments = pytest.mark.parametrize("moments_from", [ALWAYS, NEVER], ids=["moments", "no moments"])
every_origin = pytest.mark.parametrize("origin", ["plain", "normalised", "off"])
with_and_without_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
inner_or_first = pytest.mark.parametrize("first", [False, True], ids=["inner layer", "first layer"])


def check(block: RepConv, x: torch.Tensor, moments_from: int, first: bool = False) -> None:
    expected = step(block, x, eager, needs_input_gradient=not first)
    assert_same(step(block, x, fused_with(moments_from), needs_input_gradient=not first), expected)


def check_case(case, moments_from: int) -> None:
    block, x = case.block(), case.input()
    assume(values_per_channel(block, x) > 3)  # gradients through σ of two nearly vanish
    check(block, x, moments_from, first=not case.needs_input_gradient)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=block_cases(plain_convs()), moments_from=st.sampled_from([ALWAYS, NEVER]))
def test_any_block_of_an_ordinary_convolution_fuses_exactly(case, moments_from):
    check_case(case, moments_from)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=block_cases(conv_cases()), moments_from=st.sampled_from([ALWAYS, NEVER]))
def test_any_block_of_any_convolution_fuses_exactly(case, moments_from):
    check_case(case, moments_from)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(case=block_cases(plain_convs() | conv_cases()), moments_from=st.sampled_from([ALWAYS, NEVER]))
def test_any_block_fuses_exactly_in_a_long_sweep(case, moments_from):
    check_case(case, moments_from)


@either_moments
@every_origin
@inner_or_first
@with_and_without_bias
def test_the_block_of_the_paper_fuses_exactly(moments_from, origin, first, bias):
    check(seven_branches(origin=origin, bias=bias), images(), moments_from, first)


@either_moments
@every_origin
@inner_or_first
@pytest.mark.parametrize("name", ["1x1", "1x1-KxK", "1x1-AVG", "1xK", "Kx1", "residual", "KxK-2", "1x1-DCT", "DW-1x1"])
def test_every_branch_alone_fuses_exactly(moments_from, origin, first, name):
    check(make_block(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64), [name], origin), images(), moments_from, first)


@either_moments
@inner_or_first
@pytest.mark.parametrize("stride", [2, (1, 2)])
@pytest.mark.parametrize("origin", ["plain", "normalised"])
def test_strides_fuse_exactly(moments_from, first, stride, origin):
    conv = nn.Conv2d(4, 8, 3, stride=stride, padding=1, bias=False, dtype=torch.float64)
    check(make_block(conv, origin=origin), images(size=(7, 6)), moments_from, first)


@either_moments
@pytest.mark.parametrize(("kernel", "padding"), [((1, 1), 0), ((2, 2), 1), ((5, 3), (2, 1)), ((7, 7), 3), ((1, 7), 0)])
@inner_or_first
def test_every_kernel_size_fuses_exactly(moments_from, kernel, padding, first):
    conv = nn.Conv2d(4, 4, kernel, padding=padding, dtype=torch.float64)
    names = ["KxK-2", "residual"] if kernel == (1, 1) else None
    check(make_block(conv, names), images(size=(8, 9)), moments_from, first)


@either_moments
@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize(("kernel", "padding"), [(3, 1), (4, "same"), ((2, 3), "same"), (3, 0)])
def test_every_padding_fuses_exactly(moments_from, mode, kernel, padding):
    conv = nn.Conv2d(4, 4, kernel, padding=padding, padding_mode=mode, dtype=torch.float64)
    check(make_block(conv), images(), moments_from)


@either_moments
@pytest.mark.parametrize(("groups", "out_channels"), [(2, 4), (2, 6), (4, 4), (4, 8)])
@every_origin
def test_groups_fuse_exactly(moments_from, groups, out_channels, origin):
    conv = nn.Conv2d(4, out_channels, 3, padding=1, groups=groups, bias=False, dtype=torch.float64)
    check(make_block(conv, origin=origin), images(), moments_from)


@either_moments
@pytest.mark.parametrize("ndim", [1, 3])
def test_one_and_three_dimensions_fuse_exactly(moments_from, ndim):
    conv = CONVS[ndim - 1](4, 4, 3, padding=1, dtype=torch.float64)
    check(make_block(conv), images(size=(5,) * ndim), moments_from)


@either_moments
@every_origin
@inner_or_first
def test_gates_get_their_gradient(moments_from, origin, first):
    block = make_block(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64), dyrep.BRANCHES, origin, scaling="gated")
    expected = step(block, images(), eager)
    assert sum("drawn" in name for name in expected) == 6 + (origin == "normalised")
    check(block, images(), moments_from, first)


@either_moments
@inner_or_first
def test_a_wide_inner_layer_fuses_exactly(moments_from, first):
    conv = nn.Conv2d(4, 6, 3, padding=1, bias=False, dtype=torch.float64)
    check(make_block(conv, ["1x1-KxK", "1x1"], width=2), images(), moments_from, first)


@either_moments
@inner_or_first
@pytest.mark.parametrize("everywhere", [False, True], ids=["inner eager", "inner fused"])
def test_blocks_inside_blocks_fuse_exactly(moments_from, first, everywhere, monkeypatch):
    block = seven_branches(bias=False)
    inner = make_block(block.branches["1x1-KxK"].conv, dyrep.BRANCHES)
    make_block(inner.branches["1x1-KxK"].conv, ["1x1", "Kx1"])
    x = images()
    expected = step(block, x, eager, needs_input_gradient=not first)
    if everywhere:
        monkeypatch.setattr("dyrep.execution.choose", lambda *_, **__: "fused")
    assert_same(step(block, x, fused_with(moments_from), needs_input_gradient=not first), expected)


@either_moments
@pytest.mark.parametrize("method", ["repvgg", "acnet", "dbb", "dbb7", "mobileone", "repnas"])
@pytest.mark.parametrize("replace", ["conv", "conv+norm"])
def test_the_blocks_of_other_methods_fuse_exactly(moments_from, method, replace):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)).double()
    dyrep.convert_(model, method, example_input=images(), replace=replace)
    block = model[0]
    with torch.no_grad():
        for norm in norms_of(block):
            norm.weight.uniform_(0.5, 1.5)
    assert (norms_of(block)[0].bias is not None) == (replace == "conv+norm")
    for first in (False, True):
        check(block, images(), moments_from, first)


@either_moments
def test_kernels_that_are_not_trained_get_no_gradient(moments_from):
    block = seven_branches()
    for parameter in (block.weight, block.branches["1x1"].conv.weight, block.branches["1x1-KxK"].point.weight):
        parameter.requires_grad_(False)
    check(block, images(), moments_from)


@either_moments
def test_norms_keep_their_own_momentum(moments_from):
    block = seven_branches()
    for position, norm in enumerate(norms_of(block)):
        norm.momentum = (0.05, 0.3)[position % 2]
    check(block, images(), moments_from)


@either_moments
@with_and_without_bias
@pytest.mark.parametrize("origin", ["plain", "normalised"])
def test_gradients_add_up_over_several_passes(moments_from, bias, origin):
    block = seven_branches(origin=origin, bias=bias)
    expected = step(block, images(), eager, passes=2)
    assert_same(step(block, images(), fused_with(moments_from), passes=2), expected)


def test_without_gradients_statistics_move_all_the_same():
    block = seven_branches().train()
    with torch.no_grad():
        before = norms_of(block)[0].running_var.clone()
        fused.forward(block, images())
    assert not torch.equal(norms_of(block)[0].running_var, before)


# What is run, and what is not ---------------------------------------------------------------------------------------


class Calls:
    """Counts what fused blocks do to activations."""

    def __init__(self, monkeypatch) -> None:
        self.convolutions, self.moments = 0, []
        conv2d = torch.nn.functional.conv2d

        def counted_conv2d(*args, **kwargs):
            self.convolutions += 1
            return conv2d(*args, **kwargs)

        def counted_moments(x):
            self.moments.append(x.shape[1])
            return second_moments(x)

        monkeypatch.setattr("torch.nn.functional.conv2d", counted_conv2d)
        monkeypatch.setattr(fused, "second_moments", counted_moments)


def test_pointwise_branches_of_large_inputs_are_not_run(monkeypatch):
    block, x = seven_branches(bias=False).train(), images().requires_grad_()
    counts = {}
    for moments_from in (ALWAYS, NEVER):
        with monkeypatch.context() as patch:
            calls = Calls(patch)
            fused.forward(block, x, moments_from)
        counts[moments_from] = (calls.convolutions, len(calls.moments))
    assert counts[NEVER] == (7, 0)  # the origin, 1x1, both of 1x1-KxK, 1x1-AVG, 1xK and Kx1
    assert counts[ALWAYS] == (4, 2)  # the origin with 1x1 and 1x1-AVG in it, 1x1-KxK as one kernel, 1xK and Kx1


def test_moments_start_at_a_size_in_bytes(monkeypatch):
    block, x = seven_branches().train(), images().requires_grad_()
    for moments_from, used in ((x.numel() * 8, True), (x.numel() * 8 + 1, False)):
        with monkeypatch.context() as patch:
            calls = Calls(patch)
            fused.forward(block, x, moments_from)
        assert bool(calls.moments) == used


def test_a_first_convolution_runs_no_branch_at_all(monkeypatch):
    block, x = make_block(nn.Conv2d(3, 6, 3, padding=1, dtype=torch.float64), dyrep.BRANCHES[:5]), images(channels=3)
    calls = Calls(monkeypatch)
    fused.forward(block.train(), x)
    assert calls.convolutions == 1
    assert max(calls.moments) >= 3 * 9  # of whole patches


def test_a_first_convolution_with_large_patches_runs_its_branches(monkeypatch):
    monkeypatch.setattr(fused, "PATCH_UP_TO", 3 * 9 - 1)
    block, x = make_block(nn.Conv2d(3, 6, 3, padding=1, dtype=torch.float64), dyrep.BRANCHES[:5]), images(channels=3)
    check(block, x, NEVER, first=True)
    calls = Calls(monkeypatch)
    fused.forward(block.train(), x, NEVER)
    assert calls.convolutions > 1
    assert not calls.moments


# What would go unnoticed if a comparison compared nothing -----------------------------------------------------------


@pytest.mark.parametrize("what", ["output", "gradient of input", "gradient of weight", "branches.1x1.norm.running_var"])
def test_the_comparison_notices_a_difference(what):
    expected = step(seven_branches(), images(), eager)
    changed = expected | {what: expected[what] * (1 + 1e-7)}
    with pytest.raises(AssertionError, match=what):
        assert_same(changed, expected)


def test_a_step_leaves_the_block_as_it_is():
    block = seven_branches()
    before = {name: value.clone() for name, value in block.state_dict().items()}
    step(block, images(), eager)
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())
