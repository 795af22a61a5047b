"""Blocks without norms: their branches have a scale, and the kernel is folded in every step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

import dyrep
from blocks import either_mode, images, randomize_, with_and_without_bias
from dyrep.block import RepConv, as_block_, as_plain_, branch_for, origin_scaling_for
from dyrep.errors import IneligibleLayerError
from dyrep.norm import BranchNorm
from strategies import CONVS, OF_OTHER_METHODS, PADDING_MODES, conv_cases, possible_branches, relative_error

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
every_ndim = pytest.mark.parametrize("ndim", [1, 2, 3])


def linear_block(conv: nn.Module, names: tuple[str, ...] | None = None, origin_scale: bool = True) -> RepConv:
    """A convolution with branches that have a scale and no norm."""
    block = as_block_(conv)
    names = (*possible_branches(conv), *OF_OTHER_METHODS) if names is None else names
    block.set_branches_({name: branch_for(block, name, scaling="linear") for name in names})
    if origin_scale:
        block.origin_norm = origin_scaling_for(block, "linear")
    randomize_(block)
    return block


def pad(x: Tensor, block: RepConv) -> Tensor:
    """What a convolution without padding has to read to give the same."""
    amounts = []
    for size, distance, padding in zip(block.kernel_size, block.dilation, block.geometry.pads, strict=True):
        reach = distance * (size - 1)
        amounts.append((reach // 2, reach - reach // 2) if block.padding == "same" else padding)
    mode = "constant" if block.padding_mode == "zeros" else block.padding_mode
    return F.pad(x, [amount for pair in reversed(amounts) for amount in pair], mode=mode)


def one_by_one(block: RepConv, x: Tensor) -> Tensor:
    """The origin, run by torch, and every branch, run by itself, added up."""
    ndim = len(block.kernel_size)
    padded = pad(x, block)
    y = CONV[ndim](padded, block.weight, block.bias, block.stride, 0, block.dilation, block.groups)
    if block.origin_norm is not None:
        y = y * block.origin_norm.weight.reshape(1, -1, *(1,) * ndim)
    prepadded = block.geometry.needs_prepadding
    return y + sum(branch(padded if prepadded else x) for branch in block.branches.values())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(conv_cases())
def test_a_linear_block_is_the_sum_of_its_branches_in_training_and_eval_with_the_same_gradients(case):
    conv, x = case.conv(), case.input().requires_grad_()
    block = linear_block(conv)
    assert block.is_linear
    expected = one_by_one(block, x)
    weights = torch.randn_like(expected)
    wanted = [x, *block.parameters()]
    theirs = torch.autograd.grad((expected * weights).sum(), wanted)
    scale = expected.abs().max()
    for training in (True, False):
        y = block.train(training)(x)
        assert (y - expected).abs().max() <= 1e-10 * max(scale, 1)
        mine = torch.autograd.grad((y * weights).sum(), wanted)
        for actual, reference in zip(mine, theirs, strict=True):
            assert (actual - reference).abs().max() <= 1e-10 * max(reference.abs().max(), 1)


@either_mode
def test_a_linear_block_runs_a_single_convolution(training, monkeypatch):
    block, x = linear_block(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)).train(training), images()
    calls = []
    original = nn.Conv2d._conv_forward

    def counting(self, *args):
        calls.append(self)
        return original(self, *args)

    def forbidden(*_):
        raise AssertionError("a branch ran by itself")

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", counting)
    for branch in block.branches.values():
        branch.register_forward_hook(forbidden)
    block(x)
    assert calls == [block]


@every_ndim
@either_mode
@pytest.mark.parametrize("mode", PADDING_MODES)
def test_a_linear_block_takes_a_single_image_without_batch_dimension(ndim, training, mode):
    conv = CONVS[ndim - 1](2, 2, 3, padding=1, padding_mode=mode, dtype=torch.float64)
    block = linear_block(conv).train(training)
    x = torch.randn(2, *(4,) * ndim, dtype=torch.float64)
    assert relative_error(block(x), one_by_one(block, x.unsqueeze(0))[0]) <= 1e-10


@with_and_without_bias
def test_a_linear_block_becomes_plain_again_with_the_same_function(bias):
    block, x = linear_block(nn.Conv2d(4, 4, 3, padding=1, bias=bias, dtype=torch.float64)), images()
    expected, weight = one_by_one(block, x).detach(), block.weight
    fused = block.fuse()
    assert type(fused) is nn.Conv2d
    assert (fused.bias is not None) == bias
    assert relative_error(fused(x), expected) <= 1e-10
    plain = as_plain_(block)
    assert plain.weight is weight
    assert list(plain.state_dict()) == (["weight", "bias"] if bias else ["weight"])
    assert relative_error(plain(x), expected) <= 1e-10


@with_and_without_bias
def test_setting_the_origin_of_a_linear_block_is_exact_where_its_scale_is_nearly_zero(bias):
    block = linear_block(nn.Conv2d(4, 4, 3, padding=1, bias=bias, dtype=torch.float64), names=())
    with torch.no_grad():
        block.origin_norm.weight.copy_(torch.tensor([0.0, 1e-7, -5e-5, 0.75]))
    kernel = torch.randn(4, 4, 3, 3, dtype=torch.float64)
    shift = torch.randn(4, dtype=torch.float64) if bias else None
    block.set_origin_(kernel, shift)
    x = images()
    assert relative_error(block(x), F.conv2d(x, kernel, shift, padding=1)) <= 1e-10
    assert block.origin_norm.weight[3] == 0.75


def test_one_norm_is_enough_for_a_block_not_to_be_linear():
    block = linear_block(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64), ("1x1", "residual"))
    assert block.is_linear
    block.origin_norm = BranchNorm(4, shift=True, dtype=torch.float64)
    assert not block.is_linear
    block.origin_norm = None
    assert block.is_linear
    block.set_branches_({**block.branch_modules(), "1xK": branch_for(block, "1xK")})
    assert not block.is_linear


@pytest.mark.parametrize("layer", ["0", "0.branches.1x1-KxK.conv"])
def test_a_linear_block_grows_no_branches_with_norms_which_would_never_see_a_batch(layer):
    model = nn.Sequential(linear_block(nn.Conv2d(4, 4, 3, padding=1, bias=False), ("1x1-KxK", "1x1")))
    reason = "its block is folded at every step, and a branch with a norm cannot be"
    with pytest.raises(IneligibleLayerError, match=f"layer '{layer}' cannot be expanded: {reason}"):
        dyrep.expand_(model, layer, ["1xK"])
    assert {target.name: target.reason for target in dyrep.targets(model) if target.kernel_size == (3, 3)} == {
        "0": reason,
        "0.branches.1x1-KxK.conv": reason,
    }
    assert dyrep.structure(model)["blocks"]["0"]["branches"] == ["1x1-KxK", "1x1"]


def test_a_block_that_is_searched_or_has_lost_its_kernel_does_not_grow():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False))
    dyrep.convert_(model, "repnas", replace="conv")
    with pytest.raises(IneligibleLayerError, match="its branches are being searched"):
        dyrep.expand_(model, "0", ["1x1"])
    for branch in model[0].branch_modules().values():
        branch.norm.open_for_good_()
    model[0].switch_origin_off_()
    with pytest.raises(IneligibleLayerError, match="its original kernel, which would make up for new branches, has"):
        dyrep.expand_(model, "0", ["1x1"])


@either_mode
def test_a_compiled_linear_block_equals_eager_without_a_graph_break(training):
    torch._dynamo.reset()
    block, x = linear_block(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)).train(training), images()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x), block(x)) <= 1e-12


def test_a_linear_block_under_autocast_answers_in_the_dtype_of_its_convolution():
    block, x = linear_block(nn.Conv2d(4, 4, 3, padding=1)), images(torch.float32)
    expected = block(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block(x)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, expected) <= 8 * torch.finfo(torch.bfloat16).eps
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in block.parameters())
