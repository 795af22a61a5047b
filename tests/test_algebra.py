"""The algebra against torch's own convolutions, pools and norms in float64."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dyrep import algebra
from dyrep.errors import ShapeError

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
SPATIAL = {1: (3,), 2: (3, 2), 3: (2, 3, 1)}
IMAGE = {1: (9,), 2: (7, 6), 3: (5, 6, 4)}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
# (groups, in channels, out channels): dense, grouped, depthwise, depthwise with multiplier
GROUPINGS = ((1, 3, 4), (2, 4, 6), (3, 3, 3), (3, 3, 6))
# units of the last place allowed per value: half precision is rounded once, the others a few times
ROUNDINGS = {torch.float16: 0.501, torch.bfloat16: 0.501, torch.float32: 4, torch.float64: 16}

every_ndim = pytest.mark.parametrize("ndim", [1, 2, 3])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
every_grouping = pytest.mark.parametrize(
    ("groups", "inputs", "outputs"), GROUPINGS, ids=["dense", "grouped", "depthwise", "multiplier"]
)


def random_norm(channels: int, dtype: torch.dtype = torch.float64) -> dict:
    return {
        "var": (torch.rand(channels, dtype=torch.float64) * 2 + 0.1).to(dtype),
        "eps": 1e-3,
        "gamma": torch.tensor([-1.3, 0.4, 1.7, -0.2, 0.9, 1.1][:channels], dtype=torch.float64).to(dtype),
        "beta": torch.randn(channels, dtype=torch.float64).to(dtype),
        "mean": torch.randn(channels, dtype=torch.float64).to(dtype),
    }


def batch_norm(y: Tensor, norm: dict) -> Tensor:
    """Torch's batch norm in eval mode and float64, for arguments as `fuse_norm` takes them."""
    wide = {key: value.double() for key, value in norm.items() if isinstance(value, Tensor)}
    mean = wide.get("mean", torch.zeros_like(wide["var"]))
    return F.batch_norm(y, mean, wide["var"], wide.get("gamma"), wide.get("beta"), training=False, eps=norm["eps"])


def norm_scale(norm: dict) -> Tensor:
    return (norm["gamma"].double() / (norm["var"].double() + norm["eps"]).sqrt()).abs()


def conv64(x: Tensor, kernel: Tensor, bias: Tensor | None = None, **arguments) -> Tensor:
    bias = None if bias is None else bias.double()
    return CONV[kernel.dim() - 2](x.double(), kernel.double(), bias, **arguments)


def single_taps(kernel: Tensor, inputs: int) -> Tensor:
    """One image per input channel, a single one in its middle: every output value is one kernel value plus bias."""
    x = torch.zeros(inputs, inputs, *(2 * k - 1 for k in kernel.shape[2:]), dtype=torch.float64)
    for channel in range(inputs):
        x[(channel, channel, *(k - 1 for k in kernel.shape[2:]))] = 1
    return x


def assert_within_roundings(actual: Tensor, expected: Tensor, magnitude: Tensor, dtype: torch.dtype) -> None:
    allowed = ROUNDINGS[dtype] * torch.finfo(dtype).eps * magnitude
    excess = (actual - expected).abs() - allowed
    assert excess.max() <= 0, f"off by {float((actual - expected).abs().max())}, allowed {float(allowed.max())}"


@every_ndim
@every_grouping
@every_dtype
def test_fuse_norm_equals_conv_then_batch_norm(ndim, groups, inputs, outputs, dtype):
    kernel = torch.randn(outputs, inputs // groups, *SPATIAL[ndim]).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    norm = random_norm(outputs, dtype)
    fused, fused_bias = algebra.fuse_norm(kernel, bias, **norm)
    assert fused.dtype == fused_bias.dtype == dtype
    assert fused.shape == kernel.shape
    x = single_taps(kernel, inputs)
    expected = batch_norm(conv64(x, kernel, bias, groups=groups), norm)
    actual = conv64(x, fused, fused_bias, groups=groups)
    terms = fused_bias.double().abs()
    if dtype not in HALVES:
        terms = norm_scale(norm) * (bias.double().abs() + norm["mean"].double().abs()) + norm["beta"].double().abs()
    assert_within_roundings(actual, expected, conv64(x, fused.abs(), terms, groups=groups), dtype)


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=4)), ids=str)
def test_fuse_norm_defaults_are_those_of_a_norm_without_that_part(given):
    kernel, norm = torch.randn(4, 3, 3, dtype=torch.float64), random_norm(4)
    bias = torch.randn(4, dtype=torch.float64) if given[0] else None
    for key, kept in zip(("gamma", "beta", "mean"), given[1:], strict=True):
        if not kept:
            del norm[key]
    fused, fused_bias = algebra.fuse_norm(kernel, bias, **norm)
    assert (fused_bias is None) == (bias is None and "beta" not in norm and "mean" not in norm)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    expected = batch_norm(F.conv1d(x, kernel, bias), norm)
    torch.testing.assert_close(F.conv1d(x, fused, fused_bias), expected, rtol=1e-12, atol=1e-12)


@every_ndim
@every_grouping
@every_dtype
def test_unfuse_norm_gives_what_the_norm_turns_into_the_kernel(ndim, groups, inputs, outputs, dtype):
    kernel = torch.randn(outputs, inputs // groups, *SPATIAL[ndim]).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    norm = random_norm(outputs, dtype)
    plain, plain_bias = algebra.unfuse_norm(kernel, bias, **norm)
    assert plain.dtype == plain_bias.dtype == dtype
    x = single_taps(kernel, inputs)
    expected = conv64(x, kernel, bias, groups=groups)
    actual = batch_norm(conv64(x, plain, plain_bias, groups=groups), norm)
    scale, terms = norm_scale(norm), plain_bias.double().abs()
    if dtype not in HALVES:
        terms = (bias.double().abs() + norm["beta"].double().abs()) / scale + norm["mean"].double().abs()
    magnitude = conv64(x, plain.abs(), terms, groups=groups) * scale.reshape(-1, *(1,) * ndim)
    assert_within_roundings(actual, expected, magnitude, dtype)


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=4)), ids=str)
def test_unfuse_norm_undoes_fuse_norm_whichever_parts_are_given(given):
    kernel, norm = torch.randn(4, 2, 3, 2, dtype=torch.float64), random_norm(4)
    bias = torch.randn(4, dtype=torch.float64) if given[0] else None
    for key, kept in zip(("gamma", "beta", "mean"), given[1:], strict=True):
        if not kept:
            del norm[key]
    there = algebra.fuse_norm(kernel, bias, **norm)
    back, back_bias = algebra.unfuse_norm(*there, **norm)
    torch.testing.assert_close(back, kernel, rtol=1e-12, atol=1e-12)
    assert (back_bias is None) == (there[1] is None)
    if back_bias is not None:
        wanted = torch.zeros(4, dtype=torch.float64) if bias is None else bias
        torch.testing.assert_close(back_bias, wanted, rtol=1e-12, atol=1e-12)


def test_fuse_norm_undoes_unfuse_norm():
    kernel, bias, norm = torch.randn(4, 2, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64), random_norm(4)
    back, back_bias = algebra.fuse_norm(*algebra.unfuse_norm(kernel, bias, **norm), **norm)
    torch.testing.assert_close(back, kernel, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(back_bias, bias, rtol=1e-12, atol=1e-12)


def test_unfuse_norm_names_the_channel_whose_scale_is_zero():
    gamma = torch.tensor([1.0, 1.0, 0.0, 0.0])
    with pytest.raises(ShapeError, match=r"^cannot undo a norm whose scale is zero \(channel 2\): it passes nothing"):
        algebra.unfuse_norm(torch.randn(4, 2, 3), None, var=torch.ones(4), eps=1e-5, gamma=gamma)


@pytest.mark.parametrize("function", [algebra.fuse_norm, algebra.unfuse_norm])
@pytest.mark.parametrize("wrong", ["var", "gamma", "beta", "mean", "bias"])
def test_a_norm_of_the_wrong_size_is_named_with_both_shapes(function, wrong):
    arguments = {**random_norm(4), "bias": torch.randn(4)}
    arguments[wrong] = torch.ones(3)
    message = rf"^{wrong} of shape \(3,\) does not fit a kernel of shape \(4, 2, 3, 3\)$"
    with pytest.raises(ShapeError, match=message):
        function(torch.randn(4, 2, 3, 3, dtype=torch.float64), **arguments)


@pytest.mark.parametrize("value", [torch.ones(()), torch.ones(1), torch.ones(4, 1)], ids=lambda v: str(tuple(v.shape)))
def test_a_norm_that_would_only_broadcast_is_refused(value):
    with pytest.raises(ShapeError, match=r"^var of shape .* does not fit a kernel of shape \(4, 2, 3\)$"):
        algebra.fuse_norm(torch.randn(4, 2, 3), None, var=value, eps=1e-5)


@every_ndim
@every_dtype
def test_pad_kernel_default_is_the_centre_left_of_the_middle_for_even_room(ndim, dtype):
    size = {1: (4,), 2: (5, 4), 3: (3, 4, 2)}[ndim]
    small = {1: (1,), 2: (3, 1), 3: (1, 1, 2)}[ndim]
    first = {1: (1,), 2: (1, 1), 3: (1, 1, 0)}[ndim]
    kernel = torch.randn(2, 3, *small).to(dtype)
    expected = torch.zeros(2, 3, *size, dtype=dtype)
    window = tuple(slice(f, f + s) for f, s in zip(first, small, strict=True))
    expected[(slice(None), slice(None), *window)] = kernel
    padded = algebra.pad_kernel(kernel, size)
    assert padded.dtype == dtype
    assert torch.equal(padded, expected)


@every_ndim
def test_pad_kernel_at_any_tap_reads_a_shifted_image(ndim):
    size, small = {1: (4,), 2: (3, 4), 3: (3, 2, 4)}[ndim], {1: (2,), 2: (1, 2), 3: (1, 2, 3)}[ndim]
    kernel = torch.randn(2, 3, *small, dtype=torch.float64)
    x = torch.randn(2, 3, *(6,) * ndim, dtype=torch.float64)
    for tap in itertools.product(*(range(t - s + 1) for t, s in zip(size, small, strict=True))):
        padded = CONV[ndim](x, algebra.pad_kernel(kernel, size, tap))
        direct = CONV[ndim](x, kernel)
        window = tuple(slice(t, t + 6 - n + 1) for t, n in zip(tap, size, strict=True))
        torch.testing.assert_close(padded, direct[(..., *window)], rtol=1e-12, atol=1e-12)


def test_pad_kernel_to_its_own_size_changes_nothing():
    kernel = torch.randn(2, 3, 3, 2)
    padded = algebra.pad_kernel(kernel, (3, 2))
    assert torch.equal(padded, kernel)
    assert padded.data_ptr() != kernel.data_ptr()


@pytest.mark.parametrize("size", [(2, 3), (3,), (3, 3, 3)], ids=str)
def test_pad_kernel_refuses_a_size_that_is_too_small_or_has_other_dimensions(size):
    with pytest.raises(ShapeError, match=r"^a kernel of spatial size \(3, 3\) does not fit into \(" + f"{size[0]}"):
        algebra.pad_kernel(torch.randn(1, 1, 3, 3), size)


@pytest.mark.parametrize("tap", [(3, 0), (0, -1), (1,), (0, 0, 0)], ids=str)
def test_pad_kernel_refuses_a_tap_outside(tap):
    shown = str(tap).replace("(", r"\(").replace(")", r"\)")
    message = rf"^a kernel of spatial size \(1, 1\) placed at {shown} sticks out of \(3, 3\)$"
    with pytest.raises(ShapeError, match=message):
        algebra.pad_kernel(torch.randn(1, 1, 1, 1), (3, 3), tap)


@every_ndim
@every_grouping
@every_dtype
def test_compose_equals_pointwise_then_kernel(ndim, groups, inputs, outputs, dtype):
    middle = 2 * groups
    first = torch.randn(middle, inputs // groups, *(1,) * ndim).to(dtype)
    second = torch.randn(outputs, middle // groups, *SPATIAL[ndim]).to(dtype)
    composed = algebra.compose(first, second, groups)
    assert composed.dtype == dtype
    assert composed.shape == (outputs, inputs // groups, *SPATIAL[ndim])
    x = single_taps(second, inputs)
    expected = conv64(conv64(x, first, groups=groups), second, groups=groups)
    actual = conv64(x, composed, groups=groups)
    magnitude = conv64(conv64(x, first.abs(), groups=groups), second.abs(), groups=groups)
    if dtype in HALVES:
        rounded = torch.finfo(dtype).eps * ROUNDINGS[dtype]
        magnitude = actual.abs() + magnitude * torch.finfo(torch.float32).eps * 4 / rounded
    assert_within_roundings(actual, expected, magnitude, dtype)


@every_ndim
@every_grouping
def test_compose_is_exact_with_stride_padding_and_dilation_of_the_second(ndim, groups, inputs, outputs):
    first = torch.randn(3 * groups, inputs // groups, *(1,) * ndim, dtype=torch.float64)
    second = torch.randn(outputs, 3, *SPATIAL[ndim], dtype=torch.float64)
    x = torch.randn(2, inputs, *IMAGE[ndim], dtype=torch.float64)
    arguments = {"stride": 2, "padding": 1, "dilation": 2, "groups": groups}
    expected = CONV[ndim](CONV[ndim](x, first, groups=groups), second, **arguments)
    actual = CONV[ndim](x, algebra.compose(first, second, groups), **arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", [torch.ones(3, 2, 1, 3), torch.ones(3, 2, 1)], ids=lambda t: str(tuple(t.shape)))
def test_compose_wants_the_first_kernel_pointwise(first):
    shown = str(tuple(first.shape)).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ShapeError, match=rf"^the first kernel must be pointwise in 2 dimensions, got {shown}$"):
        algebra.compose(first, torch.ones(4, 3, 3, 3))


@pytest.mark.parametrize(
    ("first", "second", "groups"),
    [
        ((5, 2, 1), (4, 3, 3), 1),
        ((4, 2, 1), (4, 4, 3), 2),
        ((4, 2, 1), (3, 2, 3), 2),
        ((3, 2, 1), (4, 2, 3), 2),
        ((4, 2, 1), (4, 4, 3), 0),
    ],
    ids=["middle channels differ", "per group", "outputs not divisible", "middle not divisible", "no groups"],
)
def test_compose_names_kernels_and_groups_that_do_not_fit(first, second, groups):
    def shown(shape):
        return r"\(" + ", ".join(map(str, shape)) + r"\)"

    message = (
        rf"^kernels {shown(first)} and {shown(second)} do not compose with groups={groups}: "
        rf"the first gives {first[0]} channels, the second takes {second[1]} per group$"
    )
    with pytest.raises(ShapeError, match=message):
        algebra.compose(torch.ones(first), torch.ones(second), groups)


@every_ndim
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 1), (3, 1)])
def test_average_kernel_equals_average_pooling_with_zeros_counted(ndim, groups, stride, padding):
    size = {1: (3,), 2: (3, 2), 3: (2, 3, 4)}[ndim]
    x = torch.randn(2, 4, *IMAGE[ndim], dtype=torch.float64)
    kernel = algebra.average_kernel(4, size, groups, dtype=torch.float64)
    assert kernel.shape == (4, 4 // groups, *size)
    expected = POOL[ndim](x, size, stride, padding, count_include_pad=True)
    actual = CONV[ndim](x, kernel, stride=stride, padding=padding, groups=groups)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@every_dtype
def test_average_kernel_is_the_nearest_value_in_its_dtype(dtype):
    kernel = algebra.average_kernel(4, (3, 3), 2, dtype=dtype)
    assert kernel.dtype == dtype
    expected = torch.zeros(4, 2, 3, 3, dtype=torch.float64)
    for out in range(4):
        expected[out, out % 2] = 1 / 9
    assert torch.equal(kernel, expected.to(dtype))


@every_ndim
@pytest.mark.parametrize("groups", [1, 2, 4])
@every_dtype
def test_identity_kernel_at_any_tap_picks_that_pixel(ndim, groups, dtype):
    size = {1: (4,), 2: (3, 2), 3: (2, 3, 2)}[ndim]
    x = torch.randn(2, 4, *IMAGE[ndim], dtype=torch.float64)
    for tap in itertools.product(*map(range, size)):
        kernel = algebra.identity_kernel(4, size, groups, tap, dtype=dtype)
        assert kernel.dtype == dtype
        window = tuple(slice(t, t + n - k + 1) for t, n, k in zip(tap, IMAGE[ndim], size, strict=True))
        assert torch.equal(conv64(x, kernel, groups=groups), x[(..., *window)])


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_identity_kernel_default_tap_is_the_centre(groups):
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    kernel = algebra.identity_kernel(4, (3, 5), groups, dtype=torch.float64)
    assert torch.equal(F.conv2d(x, kernel, padding=(1, 2), groups=groups), x)


@pytest.mark.parametrize("function", [algebra.average_kernel, algebra.identity_kernel])
@pytest.mark.parametrize("groups", [3, 0])
def test_channels_that_cannot_be_grouped_are_named(function, groups):
    with pytest.raises(ShapeError, match=rf"^4 channels cannot be split into {groups} groups$"):
        function(4, (3, 3), groups)


@every_ndim
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 7])
def test_cosine_filters_are_one_wave_per_channel_shared_out_between_the_dimensions(ndim, channels):
    size = SPATIAL[ndim]
    waves = algebra.cosine_filters(channels, size, dtype=torch.float64)
    assert waves.shape == (channels, *size)
    per_dimension = -(-channels // ndim)
    for channel in range(channels):
        along, number = channel // per_dimension, channel % per_dimension + 1
        for place in itertools.product(*map(range, size)):
            expected = math.cos(math.pi * (place[along] + 0.5) * number / size[along])
            assert abs(float(waves[(channel, *place)]) - expected) <= 1e-15


def test_cosine_filters_along_one_dimension_are_orthogonal_below_its_size():
    waves = algebra.cosine_filters(4, (5,), dtype=torch.float64)
    torch.testing.assert_close(waves @ waves.T, 2.5 * torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-14)


@every_dtype
def test_cosine_filters_are_the_nearest_values_in_their_dtype(dtype):
    exact = algebra.cosine_filters(6, (3, 4), dtype=torch.float64)
    assert torch.equal(algebra.cosine_filters(6, (3, 4), dtype=dtype), exact.to(dtype))


def test_kernel_makers_use_the_default_dtype_and_the_device_asked_for():
    assert algebra.average_kernel(2, (3,)).dtype == torch.get_default_dtype()
    assert algebra.cosine_filters(2, (3,)).dtype == torch.get_default_dtype()
    assert algebra.cosine_filters(2, (3,), device="meta").device.type == "meta"
    assert algebra.identity_kernel(2, (3,), device="meta").device.type == "meta"
    assert algebra.average_kernel(2, (3,), device="meta").device.type == "meta"


@every_ndim
@every_grouping
@every_dtype
def test_add_equals_the_sum_of_parallel_convolutions(ndim, groups, inputs, outputs, dtype):
    shape = (outputs, inputs // groups, *SPATIAL[ndim])
    pairs = [(torch.randn(shape).to(dtype), torch.randn(outputs).to(dtype)) for _ in range(2)]
    kernel, bias = algebra.add(*pairs)
    assert kernel.dtype == bias.dtype == dtype
    x = single_taps(kernel, inputs)
    expected = sum(conv64(x, k, b, groups=groups) for k, b in pairs)
    magnitude = conv64(x, kernel.abs(), bias.abs(), groups=groups)
    assert_within_roundings(conv64(x, kernel, bias, groups=groups), expected, magnitude, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_add_of_many_half_precision_kernels_is_rounded_once(dtype):
    pairs = [(torch.randn(3, 2, 3).to(dtype), torch.randn(3).to(dtype)) for _ in range(7)]
    kernel, bias = algebra.add(*pairs)
    assert kernel.dtype == bias.dtype == dtype
    assert torch.equal(kernel, sum(k.double() for k, _ in pairs).to(dtype))
    assert torch.equal(bias, sum(b.double() for _, b in pairs).to(dtype))


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)), ids=str)
def test_add_counts_a_missing_bias_as_zero(given):
    biases = [torch.randn(4, dtype=torch.float64) if g else None for g in given]
    pairs = [(torch.randn(4, 2, 3, dtype=torch.float64), b) for b in biases]
    kernel, bias = algebra.add(*pairs)
    x = torch.randn(2, 2, 6, dtype=torch.float64)
    torch.testing.assert_close(
        F.conv1d(x, kernel, bias), sum(F.conv1d(x, k, b) for k, b in pairs), rtol=1e-12, atol=1e-12
    )
    assert (bias is None) == (not any(given))


def test_add_of_one_pair_is_a_copy_of_that_pair():
    kernel, bias = torch.randn(4, 2, 3), torch.randn(4)
    same, same_bias = algebra.add((kernel, bias))
    assert torch.equal(same, kernel)
    assert torch.equal(same_bias, bias)
    assert same.data_ptr() != kernel.data_ptr()
    assert same_bias.data_ptr() != bias.data_ptr()


@pytest.mark.parametrize("owner", [0, 1])
def test_add_returns_a_copy_of_the_only_bias(owner):
    bias = torch.randn(4)
    pairs = [(torch.randn(4, 2, 3), bias if i == owner else None) for i in range(2)]
    _, total = algebra.add(*pairs)
    assert torch.equal(total, bias)
    assert total.data_ptr() != bias.data_ptr()


def test_add_needs_a_pair():
    with pytest.raises(ShapeError, match=r"^add needs at least one \(kernel, bias\) pair$"):
        algebra.add()


def test_add_names_kernels_of_different_shapes():
    with pytest.raises(ShapeError, match=r"^kernels of shapes \(4, 2, 3\) and \(4, 2, 1\) cannot be added$"):
        algebra.add((torch.ones(4, 2, 3), None), (torch.ones(4, 2, 1), None))


@pytest.mark.parametrize("shape", [(3,), (1,), (4, 1), ()], ids=str)
@pytest.mark.parametrize("wrong_one", [0, 1])
def test_add_names_a_bias_of_the_wrong_shape_even_if_it_would_broadcast(shape, wrong_one):
    pairs = [(torch.ones(4, 2, 3), torch.ones(4)), (torch.ones(4, 2, 3), torch.ones(4))]
    pairs[wrong_one] = (pairs[wrong_one][0], torch.ones(shape))
    shown = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ShapeError, match=rf"^bias of shape {shown} does not fit a kernel of shape \(4, 2, 3\)$"):
        algebra.add(*pairs)


@pytest.mark.parametrize("shape", [(3,), (1,)], ids=str)
def test_add_of_one_pair_checks_its_bias_too(shape):
    with pytest.raises(ShapeError, match=r"^bias of shape .* does not fit a kernel of shape \(4, 2, 3\)$"):
        algebra.add((torch.ones(4, 2, 3), torch.ones(shape)))


def positive(*shape: int) -> Tensor:
    return (torch.rand(shape, dtype=torch.float64) + 0.5).requires_grad_()


def free(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def with_norm(function):
    def run(kernel, bias, var, gamma, beta, mean):
        return function(kernel, bias, var=var, eps=1e-3, gamma=gamma, beta=beta, mean=mean)

    return run


EVERY_FUNCTION = {
    "fuse_norm": (
        with_norm(algebra.fuse_norm),
        lambda: (free(4, 2, 3, 2), free(4), positive(4), positive(4), free(4), free(4)),
    ),
    "unfuse_norm": (
        with_norm(algebra.unfuse_norm),
        lambda: (free(4, 2, 3), free(4), positive(4), positive(4), free(4), free(4)),
    ),
    "pad_kernel": (lambda k: algebra.pad_kernel(k, (3, 4), (1, 2)), lambda: (free(2, 2, 1, 2),)),
    "compose": (lambda a, b: algebra.compose(a, b, 2), lambda: (free(4, 2, 1, 1, 1), free(2, 2, 1, 2, 2))),
    "add": (
        lambda k1, b1, k2, k3, b3: algebra.add((k1, b1), (k2, None), (k3, b3)),
        lambda: (free(3, 2, 3), free(3), free(3, 2, 3), free(3, 2, 3), free(3)),
    ),
}


@pytest.mark.parametrize("name", EVERY_FUNCTION)
def test_gradients_reach_every_argument(name):
    function, arguments = EVERY_FUNCTION[name]
    assert torch.autograd.gradcheck(function, arguments())


@pytest.mark.parametrize("name", EVERY_FUNCTION)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=["float16", "float64"])
def test_inputs_are_not_modified_nor_handed_back(name, dtype):
    function, make = EVERY_FUNCTION[name]
    arguments = [a.detach().to(dtype) for a in make()]
    copies, versions = [a.clone() for a in arguments], [a._version for a in arguments]
    results = function(*arguments)
    for result in results if isinstance(results, tuple) else (results,):
        result.add_(1)
    assert [a._version for a in arguments] == versions
    assert all(torch.equal(a, c) for a, c in zip(arguments, copies, strict=True))


def test_folding_is_done_in_float64_except_where_the_device_has_none():
    assert algebra.exact_dtype(torch.zeros(1, dtype=torch.float16)) == torch.float64
    assert algebra.exact_dtype(SimpleNamespace(device=SimpleNamespace(type="mps"))) == torch.float32
