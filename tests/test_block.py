"""A convolution that grew branches: still the same object, and always one convolution in eval mode."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

import dyrep
from blocks import add_origin_norm_, assert_state_is, full_block, images, snapshot, with_and_without_bias
from dyrep.block import RepConv, as_block_, as_plain_
from dyrep.branches import BRANCHES
from dyrep.errors import IneligibleLayerError
from strategies import CONVS, PADDING_MODES, carrying, conv_cases, grown_block, relative_error

BLOCKS = (dyrep.RepConv1d, dyrep.RepConv2d, dyrep.RepConv3d)
every_ndim = pytest.mark.parametrize("ndim", [1, 2, 3])
either_half = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@settings(max_examples=500, deadline=None, derandomize=True)
@given(case=conv_cases(), origin_norm=st.booleans())
def test_a_block_with_every_possible_branch_folds_exactly_and_trains(case, origin_norm):
    conv, x = case.conv(), case.input()
    plain_shape, plain_type = conv(x).shape, type(conv)
    block = grown_block(conv)
    if origin_norm:
        add_origin_norm_(block)
    block.eval()
    fused = block.fuse()
    assert type(fused) is plain_type
    with torch.no_grad():
        assert relative_error(fused(x), block(x)) <= 1e-10
    y = block.train()(x)
    assert y.shape == plain_shape
    y.square().sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


# One object, before and after --------------------------------------------------------------------------------------


@every_ndim
def test_becoming_a_block_keeps_object_parameters_keys_and_function(ndim):
    conv = CONVS[ndim - 1](2, 3, 3, padding=1)
    x = torch.randn(2, 2, *(4,) * ndim)
    before, state, parameters = conv(x), snapshot(conv), dict(conv.named_parameters())
    block = as_block_(conv)
    assert block is conv
    assert type(block) is BLOCKS[ndim - 1]
    assert isinstance(block, CONVS[ndim - 1])
    assert isinstance(block, RepConv)
    assert_state_is(block, state)
    assert all(parameter is parameters[name] for name, parameter in block.named_parameters())
    assert torch.equal(block(x), before)


@every_ndim
def test_becoming_plain_again_leaves_no_trace(ndim):
    conv = CONVS[ndim - 1](2, 2, 3, padding=1)
    attributes, state, weight = set(vars(conv)), snapshot(conv), conv.weight
    plain = as_plain_(as_block_(conv))
    assert plain is conv
    assert type(plain) is CONVS[ndim - 1]
    assert set(vars(plain)) == attributes
    assert plain.weight is weight
    assert not plain._modules
    assert_state_is(plain, state)


@with_and_without_bias
@pytest.mark.parametrize("origin_norm", [True, False], ids=["origin norm", "no origin norm"])
def test_becoming_plain_again_folds_the_branches_into_the_same_parameters(bias, origin_norm):
    block, x = full_block(bias=bias).eval(), images()
    if origin_norm:
        add_origin_norm_(block)
    expected, weight, shift = block(x).detach(), block.weight, block.bias
    plain = as_plain_(block)
    assert plain is block
    assert plain.weight is weight
    assert plain.bias is shift
    assert list(plain.state_dict()) == (["weight", "bias"] if bias else ["weight"])
    assert relative_error(plain(x), expected) <= 1e-10


def test_aliases_hooks_and_optimizers_keep_their_convolution():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    model = nn.ModuleDict({"one": conv, "two": nn.Sequential(conv)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    calls = []
    conv.register_forward_pre_hook(lambda *_: calls.append("before"))
    conv.register_forward_hook(lambda *_: calls.append("after"))
    block = grown_block(conv, list(BRANCHES))
    assert model["one"] is model["two"][0] is block
    assert optimizer.param_groups[0]["params"][0] is block.weight
    model["two"](torch.randn(2, 4, 5, 5))
    as_plain_(block)(torch.randn(2, 4, 5, 5))
    assert calls == ["before", "after"] * 2


def test_a_block_becomes_a_block_only_once():
    block = full_block()
    branches = dict(block.branches)
    assert as_block_(block) is block
    assert dict(block.branches) == branches


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        (nn.Linear(2, 2), "Linear"),
        (nn.ConvTranspose2d(2, 2, 3), "ConvTranspose2d"),
        (type("Standardised", (nn.Conv2d,), {})(2, 2, 3), "Standardised"),
    ],
    ids=["linear", "transposed", "subclass"],
)
def test_only_torch_s_own_convolutions_become_blocks(module, shown):
    before = type(module)
    with pytest.raises(IneligibleLayerError, match=rf"^{shown} is not one of torch's plain convolutions$"):
        as_block_(module)
    assert type(module) is before


@every_ndim
def test_a_block_constructed_directly_is_a_convolution_without_branches(ndim):
    torch.manual_seed(0)
    block = BLOCKS[ndim - 1](2, 3, 3, padding=1)
    torch.manual_seed(0)
    plain = CONVS[ndim - 1](2, 3, 3, padding=1)
    x = torch.randn(2, 2, *(4,) * ndim)
    assert torch.equal(block(x), plain(x))
    assert list(block.state_dict()) == list(plain.state_dict())


def test_a_block_with_branches_lists_them():
    block = grown_block(nn.Conv2d(2, 2, 3, padding=1), ["1x1", "residual"])
    assert block.extra_repr().endswith("padding=(1, 1), branches=[1x1, residual]")


def test_importances_are_the_mean_magnitudes_of_gamma():
    block = full_block()
    expected = {name: branch.norm.weight.detach().abs().mean() for name, branch in block.branches.items()}
    assert list(block.importances()) == list(BRANCHES)
    for name, value in block.importances().items():
        torch.testing.assert_close(value.double(), expected[name])


# Folding -----------------------------------------------------------------------------------------------------------


@with_and_without_bias
def test_fuse_leaves_the_block_untouched(bias):
    block, x = add_origin_norm_(full_block(bias=bias)).eval(), images()
    state, expected = snapshot(block), block(x)
    parameters, modules, kind = dict(block.named_parameters()), dict(block.named_modules()), type(block)
    fused = block.fuse()
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.zero_()
    assert type(block) is kind
    assert_state_is(block, state)
    assert all(parameter is parameters[name] for name, parameter in block.named_parameters())
    assert dict(block.named_modules()) == modules
    assert torch.equal(block(x), expected)


def test_the_fused_convolution_is_a_plain_module_of_its_own():
    block = add_origin_norm_(full_block())
    block.weight.requires_grad_(False)
    fused = block.fuse()
    assert type(fused) is nn.Conv2d
    assert set(vars(fused)) == set(vars(nn.Conv2d(4, 4, 3)))
    assert list(fused.state_dict()) == ["weight", "bias"]
    assert fused.weight.data_ptr() != block.weight.data_ptr()
    assert not fused.weight.requires_grad
    assert fused.bias.requires_grad
    assert (fused.weight.dtype, fused.training) == (block.weight.dtype, block.training)
    assert all(isinstance(p, nn.Parameter) and p.grad_fn is None for p in fused.parameters())


def test_a_hook_put_on_the_fused_convolution_stays_off_the_block():
    block = full_block()
    calls = []
    block.fuse().register_forward_hook(lambda *_: calls.append("fused"))
    block(images())
    assert calls == []


def test_the_fused_convolution_fits_the_plain_model_key_for_key():
    block, x = full_block().eval(), images()
    plain = nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)
    plain.load_state_dict(block.fuse().state_dict(), strict=True)
    assert relative_error(plain(x), block(x)) <= 1e-10


@with_and_without_bias
def test_folded_is_differentiable_down_to_every_branch_weight(bias):
    block, x = add_origin_norm_(full_block(bias=bias)).eval(), images()
    kernel, shift = block.folded()
    parameters = list(block.parameters())
    folded = torch.autograd.grad(torch.conv2d(x, kernel, shift, padding=1).tanh().sum(), parameters)
    direct = torch.autograd.grad(block(x).tanh().sum(), parameters)
    assert all(relative_error(a, b) <= 1e-10 for a, b in zip(folded, direct, strict=True))


def test_folded_answers_in_the_dtype_asked_for():
    block = full_block(torch.float32)
    assert block.folded()[0].dtype == torch.float32
    assert {t.dtype for t in block.folded(torch.float64)} == {torch.float64}


@with_and_without_bias
@pytest.mark.parametrize("origin_norm", [True, False], ids=["origin norm", "no origin norm"])
def test_origin_folded_is_the_origin_without_its_branches(bias, origin_norm):
    block, x = full_block(bias=bias).eval(), images()
    if origin_norm:
        add_origin_norm_(block)
    kernel, shift = block.origin_folded(torch.float64)
    block.branches = nn.ModuleDict()
    assert relative_error(torch.conv2d(x, kernel, shift, padding=1), block(x)) <= 1e-10


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)], ids=["64", "32"])
@with_and_without_bias
def test_set_origin_is_exact_even_where_gamma_is_nearly_zero(bias, dtype, tolerance):
    block = add_origin_norm_(as_block_(nn.Conv2d(4, 4, 3, padding=1, bias=bias, dtype=dtype))).eval()
    with torch.no_grad():
        block.origin_norm.weight.copy_(torch.tensor([0.0, 1e-7, -5e-5, 0.8]))
    kernel = torch.randn(4, 4, 3, 3, dtype=torch.float64)
    shift = torch.randn(4, dtype=torch.float64) if bias else None
    weight, gamma = block.weight, block.origin_norm.weight
    block.set_origin_(kernel, shift)
    assert block.weight is weight
    assert block.origin_norm.weight is gamma
    x = images()
    expected = torch.conv2d(x, kernel, shift, padding=1)
    y = block(x.to(dtype))
    for channel in range(4):
        assert relative_error(y[:, channel], expected[:, channel]) <= tolerance


def test_set_origin_keeps_a_gamma_that_can_be_undone():
    block = add_origin_norm_(as_block_(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)))
    with torch.no_grad():
        block.origin_norm.weight.copy_(torch.tensor([0.5, -0.01, 2.0, 0.0]))
    before = block.origin_norm.weight.clone()
    block.set_origin_(torch.randn(4, 4, 3, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64))
    assert torch.equal(block.origin_norm.weight[:3], before[:3])
    assert block.origin_norm.weight[3] > 0.1


@with_and_without_bias
def test_set_origin_without_a_norm_is_weight_and_bias(bias):
    block = as_block_(nn.Conv2d(4, 4, 3, bias=bias, dtype=torch.float64))
    kernel = torch.randn(4, 4, 3, 3, dtype=torch.float64)
    shift = torch.randn(4, dtype=torch.float64) if bias else None
    block.set_origin_(kernel, shift)
    assert torch.equal(block.weight, kernel)
    assert (block.bias is None) if shift is None else torch.equal(block.bias, shift)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"stride": 2}, {"groups": 2}, {"padding": 2, "dilation": 2}, {"padding_mode": "reflect"}, {"padding": "same"}],
    ids=str,
)
def test_a_block_inside_a_branch_folds_exactly(arguments):
    arguments = {"padding": 1, **arguments}
    block = grown_block(nn.Conv2d(4, 4, 3, dtype=torch.float64, **arguments))
    inner = grown_block(block.branches["1x1-KxK"].conv)
    innermost = grown_block(inner.branches["1x1-KxK"].conv)
    add_origin_norm_(inner)
    x = images()
    y = block.train()(x)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in block.parameters())
    block.eval()
    assert len(innermost.branches) >= 4
    assert relative_error(block.fuse()(x), block(x)) <= 1e-10


def test_a_block_inside_a_collapsed_branch_folds_exactly():
    block = full_block().eval()
    grown_block(block.branches["1xK"].conv)
    grown_block(block.branches["Kx1"].conv)
    block.eval()
    x = images()
    assert relative_error(block.fuse()(x), block(x)) <= 1e-10


# Running -----------------------------------------------------------------------------------------------------------


@every_ndim
@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_single_image_without_batch_dimension_gives_the_same_as_a_batch_of_one(ndim, mode, training):
    conv = CONVS[ndim - 1](2, 2, 3, padding=1, padding_mode=mode, dtype=torch.float64)
    block = add_origin_norm_(grown_block(conv)).train(training)
    x = torch.randn(2, *(4,) * ndim, dtype=torch.float64)
    alone, batched = block(x), block(x.unsqueeze(0))
    assert alone.dim() == ndim + 1
    assert torch.equal(alone, batched[0])


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("groups", [1, 4], ids=["dense", "depthwise"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_under_autocast_a_block_answers_in_the_dtype_of_its_convolution(name, groups, training):
    conv = nn.Conv2d(4, 4, 3, padding=1, groups=groups)
    x = images(torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = conv(x).dtype
        block = grown_block(conv, [name]).train(training)
        y = block(x)
    assert expected == torch.bfloat16
    assert y.dtype == expected
    y.float().square().sum().backward()
    assert y.isfinite().all()
    assert all(t.grad.isfinite().all() for t in (x, *block.parameters()))
    assert {p.grad.dtype for p in block.parameters()} == {torch.float32}
    assert block.branches[name].norm.running_var.dtype == torch.float32


def test_under_autocast_a_full_block_stays_close_to_float32():
    block, x = full_block(torch.float32).eval(), images(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block(x)
    assert relative_error(y, block(x)) <= 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("arguments", [{}, {"padding_mode": "reflect"}, {"groups": 4}], ids=str)
def test_channels_last_stays_channels_last(training, arguments):
    block = add_origin_norm_(full_block(torch.float32, **arguments)).to(memory_format=torch.channels_last)
    x = images(torch.float32).to(memory_format=torch.channels_last)
    y = block.train(training)(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert not y.is_contiguous()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_deep_copy_is_equal_and_independent(training):
    block, x = add_origin_norm_(full_block()).train(training), images()
    twin = copy.deepcopy(block)
    assert type(twin) is type(block)
    assert torch.equal(twin(x), block(x))
    assert_state_is(twin, snapshot(block))
    state = snapshot(block)
    shared = {t.data_ptr() for t in block.state_dict().values()} & {t.data_ptr() for t in twin.state_dict().values()}
    assert not shared
    with torch.no_grad():
        for tensor in twin.state_dict().values():
            tensor.add_(1)
    as_plain_(twin)
    assert_state_is(block, state)
    assert isinstance(block, RepConv)


def test_a_pickled_block_comes_back_equal():
    block, x = add_origin_norm_(full_block()).eval(), images()
    twin = pickle.loads(pickle.dumps(block))
    assert type(twin) is type(block)
    assert torch.equal(twin(x), block(x))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("arguments", [{}, {"padding_mode": "circular", "bias": False}], ids=["zeros", "circular"])
def test_compiled_without_a_graph_break_it_equals_eager(training, arguments):
    torch._dynamo.reset()
    block = add_origin_norm_(full_block(**arguments)).train(training)
    twin = copy.deepcopy(block)
    x = images().requires_grad_()
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    y, expected = compiled(x), block(x)
    assert relative_error(y, expected) <= 1e-12
    weights = torch.randn_like(y)
    mine = torch.autograd.grad((y * weights).sum(), (x, *twin.parameters()))
    theirs = torch.autograd.grad((expected * weights).sum(), (x, *block.parameters()))
    assert all(relative_error(a, b) <= 1e-10 for a, b in zip(mine, theirs, strict=True))
    for key, value in block.state_dict().items():
        assert relative_error(twin.state_dict()[key], value) <= 1e-12, key


@either_half
@pytest.mark.parametrize("origin_norm", [True, False], ids=["origin norm", "no origin norm"])
@every_ndim
def test_a_half_precision_block_trains_and_folds(half, origin_norm, ndim):
    block = grown_block(CONVS[ndim - 1](4, 4, 3, padding=1))
    if origin_norm:
        add_origin_norm_(block)
    block.to(half)
    x = torch.randn(3, 4, *(5, 4, 3)[:ndim]).to(half).requires_grad_()
    y = block(x)
    assert y.dtype == half
    y.float().square().mean().backward()
    assert all(t.grad.dtype == half and t.grad.isfinite().all() for t in (x, *block.parameters()))
    block.eval()
    exact = copy.deepcopy(block).double()
    fused = block.fuse()
    assert fused.weight.dtype == half
    expected = exact(x.double())
    summands = expected.abs().max() * (1 + len(block.branches))
    allowed = 4 * torch.finfo(half).eps * summands
    assert (fused(x).double() - expected).abs().max() <= allowed
    assert (block(x).double() - expected).abs().max() <= allowed


@either_half
def test_the_fused_half_precision_kernel_is_the_exact_one_rounded_once(half):
    block = full_block().to(half)
    kernel, bias = copy.deepcopy(block).double().folded(torch.float64)
    fused = block.fuse()
    assert torch.equal(fused.weight, kernel.to(half))
    assert torch.equal(fused.bias, bias.to(half))


def test_an_empty_batch_gives_an_empty_output_and_finite_gradients():
    block = add_origin_norm_(full_block())
    y = block(images(batch=0))
    assert y.shape == (0, 4, 6, 5)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in block.parameters())


def test_a_block_without_branches_runs_the_convolution_alone():
    conv = nn.Conv2d(4, 4, 3, padding="same", padding_mode="reflect", dtype=torch.float64)
    x = images()
    expected = conv(x)
    assert torch.equal(as_block_(conv)(x), expected)


def test_the_branches_add_to_the_convolution():
    block, x = full_block().eval(), images()
    origin = carrying(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64), block.weight, block.bias)
    parts = sum(branch(x) for branch in block.branches.values())
    assert relative_error(block(x), origin(x) + parts) <= 1e-12


def test_block_with_a_pruned_kernel_is_not_fused():
    block = as_block_(nn.Conv2d(4, 4, 3, padding=1))
    prune.l1_unstructured(block, "weight", amount=0.5)
    weight = block.weight.clone()
    with pytest.raises(IneligibleLayerError, match=r"^the block cannot be folded: its weight is computed"):
        block.fuse()
    assert torch.equal(block.weight, weight)
