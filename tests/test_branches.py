"""Every branch is the kernel it claims to be, and the function the paper describes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from dyrep.branches import (
    BRANCHES,
    BranchOption,
    branch_option,
    branch_options,
    folded_conv,
    is_branch,
    is_copy,
    make_branch,
)
from dyrep.errors import BranchError
from dyrep.geometry import ConvGeometry
from strategies import (
    CONVS,
    OF_OTHER_METHODS,
    PADDING_MODES,
    carrying,
    conv_cases,
    fitting_branch,
    possible_branches,
    randomize_norms_,
    relative_error,
)

EVERY_BRANCH = (*BRANCHES, *OF_OTHER_METHODS)


@settings(max_examples=220, deadline=None, derandomize=True)
@given(conv_cases())
def test_every_possible_branch_computes_what_its_folded_kernel_does_in_the_origin(case):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        conv, x = case.conv(dtype), case.input(dtype)
        for name in (*possible_branches(conv), *OF_OTHER_METHODS):
            branch = fitting_branch(name, conv).eval()
            kernel, bias = branch.folded(torch.float64)
            with torch.no_grad():
                y = branch(ConvGeometry.of(conv).branch_input(x))
                error = (y - carrying(conv, kernel, bias)(x)).abs().max()
                # a cosine wave over equal pixels cancels to next to nothing, so its terms are what rounding goes by
                terms = carrying(conv, kernel.abs(), None if bias is None else bias.abs())(x.abs())
            assert error <= tolerance * terms.max(), f"{name} in {dtype} is off by {error}"


# The same maps as dense matrices, written out pixel by pixel -------------------------------------------------------


def source_pixel(position: int, size: int, mode: str) -> int | None:
    """Which pixel of a row the padded row shows at ``position``; None for a zero."""
    if 0 <= position < size:
        return position
    if mode == "zeros":
        return None
    if mode == "circular":
        return position % size
    if mode == "replicate":
        return min(max(position, 0), size - 1)
    return -position if position < 0 else 2 * (size - 1) - position


def dense_convolution(weight: np.ndarray, conv: nn.Conv2d, image: tuple[int, int], taps, pads) -> np.ndarray:
    """The matrix from all input pixels to all output pixels, for a kernel that sits at ``taps`` of the full one."""
    outputs, per_group = weight.shape[:2]
    groups, mode = conv.groups, conv.padding_mode
    rows, columns = (
        (size + sum(pads[a]) - conv.dilation[a] * (conv.kernel_size[a] - 1) - 1) // conv.stride[a] + 1
        for a, size in enumerate(image)
    )
    matrix = np.zeros((outputs, rows, columns, per_group * groups, *image))
    for out, row, column, i in itertools.product(range(outputs), range(rows), range(columns), range(per_group)):
        channel = out // (outputs // groups) * per_group + i
        for (u, tap_row), (v, tap_column) in itertools.product(enumerate(taps[0]), enumerate(taps[1])):
            y = source_pixel(row * conv.stride[0] + tap_row * conv.dilation[0] - pads[0][0], image[0], mode)
            x = source_pixel(column * conv.stride[1] + tap_column * conv.dilation[1] - pads[1][0], image[1], mode)
            if y is not None and x is not None:
                matrix[out, row, column, channel, y, x] += weight[out, i, u, v]
    return matrix.reshape(outputs * rows * columns, -1)


def dense_pointwise(weight: np.ndarray, groups: int, pixels: int) -> np.ndarray:
    outputs, per_group = weight.shape[:2]
    matrix = np.zeros((outputs, pixels, per_group * groups, pixels))
    for out, i, pixel in itertools.product(range(outputs), range(per_group), range(pixels)):
        matrix[out, pixel, out // (outputs // groups) * per_group + i, pixel] = weight[out, i, 0, 0]
    return matrix.reshape(outputs * pixels, -1)


def scaled_rows(matrix: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A norm's scale, one value per channel, after the map."""
    return matrix * np.repeat(scale, matrix.shape[0] // len(scale))[:, None]


def norm_scale(norm: nn.Module) -> np.ndarray:
    return (norm.weight / (norm.running_var + norm.eps).sqrt()).detach().numpy()


def by_the_paper(name: str, branch: nn.Module, conv: nn.Conv2d, image: tuple[int, int]) -> np.ndarray:
    """The linear part of a branch, operation by operation."""
    kernel, pixels = conv.kernel_size, image[0] * image[1]
    if conv.padding == "same":
        reach = [d * (k - 1) for d, k in zip(conv.dilation, kernel, strict=True)]
        pads = [(r // 2, r - r // 2) for r in reach]
    else:
        pads = [(0, 0), (0, 0)] if conv.padding == "valid" else [(p, p) for p in conv.padding]
    everywhere, middle = [list(range(k)) for k in kernel], [[(k - 1) // 2] for k in kernel]

    def weight(module: nn.Module) -> np.ndarray:
        return module.weight.detach().numpy()

    if name == "residual":
        return scaled_rows(np.eye(conv.in_channels * pixels), norm_scale(branch.norm))
    if name == "1x1-AVG":
        channels = conv.out_channels
        average = np.full((channels, 1, *kernel), 1 / (kernel[0] * kernel[1]))
        pool = nn.Conv2d(channels, channels, kernel, conv.stride, 0, conv.dilation, channels)
        pool.padding_mode = conv.padding_mode
        matrix = dense_convolution(average, pool, image, everywhere, pads)
        if branch.point is not None:
            matrix = matrix @ dense_pointwise(weight(branch.point), conv.groups, pixels)
    elif name == "1x1-DCT":
        channels = conv.out_channels
        waves = np.empty((channels, 1, *kernel))
        for channel, row, column in itertools.product(range(channels), *map(range, kernel)):
            along, number = divmod(channel, -(-channels // 2))
            waves[channel, 0, row, column] = math.cos(
                math.pi * ((row, column)[along] + 0.5) * (number + 1) / kernel[along]
            )
        filters = nn.Conv2d(channels, channels, kernel, conv.stride, 0, conv.dilation, channels)
        filters.padding_mode = conv.padding_mode
        matrix = dense_convolution(waves, filters, image, everywhere, pads)
        matrix = matrix @ dense_pointwise(weight(branch.point), conv.groups, pixels)
    elif name == "DW-1x1":
        channels = conv.in_channels
        filters = nn.Conv2d(channels, 8 * channels, kernel, conv.stride, 0, conv.dilation, channels)
        filters.padding_mode = conv.padding_mode
        matrix = dense_convolution(weight(branch.depthwise), filters, image, everywhere, pads)
        matrix = dense_pointwise(weight(branch.point), conv.groups, matrix.shape[0] // (8 * channels)) @ matrix
    elif name == "1x1-KxK":
        first = dense_pointwise(weight(branch.point), conv.groups, pixels)
        first = scaled_rows(first, norm_scale(branch.inner_norm))
        matrix = dense_convolution(weight(branch.conv), conv, image, everywhere, pads) @ first
    else:
        rows = everywhere[0] if name in ("Kx1", "KxK-2") else middle[0]
        columns = everywhere[1] if name in ("1xK", "KxK-2") else middle[1]
        matrix = dense_convolution(weight(branch.conv), conv, image, (rows, columns), pads)
    return scaled_rows(matrix, norm_scale(branch.norm))


DENSE_CASES = {
    "plain": {"channels": (2, 3), "kernel_size": 3, "padding": 1},
    "residual fits": {"channels": (2, 2), "kernel_size": 3, "padding": 1},
    "strided groups": {"channels": (4, 4), "kernel_size": 3, "padding": 1, "stride": 2, "groups": 2},
    "even same": {"channels": (2, 2), "kernel_size": (4, 2), "padding": "same"},
    "dilated": {"channels": (2, 2), "kernel_size": 3, "padding": (2, 1), "dilation": 2},
    "dilated residual": {"channels": (2, 2), "kernel_size": 3, "padding": 2, "dilation": 2},
    "depthwise": {"channels": (3, 3), "kernel_size": 3, "padding": 1, "groups": 3},
    "multiplier": {"channels": (2, 4), "kernel_size": 3, "padding": 1, "groups": 2},
    "valid": {"channels": (2, 2), "kernel_size": (2, 3), "padding": "valid", "stride": (1, 2)},
    "wide padding": {"channels": (2, 2), "kernel_size": 3, "padding": (2, 3)},
    "one row": {"channels": (2, 2), "kernel_size": (1, 3), "padding": (0, 1)},
    **{
        mode: {"channels": (2, 2), "kernel_size": (3, 2), "padding": (1, 2), "padding_mode": mode}
        for mode in PADDING_MODES[1:]
    },
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("case", DENSE_CASES)
def test_every_branch_is_the_matrix_of_the_operations_it_is_named_after(case, bias):
    arguments = dict(DENSE_CASES[case])
    image = (4, 5)
    conv = nn.Conv2d(*arguments.pop("channels"), bias=bias, dtype=torch.float64, **arguments)
    geometry = ConvGeometry.of(conv)
    basis = torch.eye(conv.in_channels * 20, dtype=torch.float64).reshape(-1, conv.in_channels, *image)
    for name in (*possible_branches(conv), *OF_OTHER_METHODS):
        branch = fitting_branch(name, conv).eval()
        with torch.no_grad():
            nothing = branch(geometry.branch_input(torch.zeros_like(basis[:1])))
            columns = branch(geometry.branch_input(basis)) - nothing
        expected = by_the_paper(name, branch, conv, image)
        np.testing.assert_allclose(columns.flatten(1).numpy().T, expected, rtol=0, atol=1e-12, err_msg=name)
        constant = np.zeros(conv.out_channels)
        if bias:
            norm = branch.norm
            constant = (norm.bias - norm.running_mean * torch.from_numpy(norm_scale(norm))).detach().numpy()
        np.testing.assert_allclose(
            nothing[0].numpy(), np.broadcast_to(constant[:, None, None], nothing.shape[1:]), rtol=0, atol=1e-12
        )


class PublishedSequence(nn.Module):
    """1x1, batch norm, padding with what the norm makes of a zero, then pool or KxK, then batch norm."""

    def __init__(self, point: Tensor, last, gamma: tuple[Tensor, Tensor], padding: int, groups: int, eps: float):
        super().__init__()
        self.point = nn.Parameter(point.clone())
        self.inner, self.outer = (nn.BatchNorm2d(len(g), eps=eps, dtype=torch.float64) for g in gamma)
        with torch.no_grad():
            self.inner.weight.copy_(gamma[0])
            self.outer.weight.copy_(gamma[1])
            self.inner.bias.normal_()
            self.outer.bias.normal_()
        self.last, self.padding, self.groups = last, padding, groups

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.conv2d(x, self.point, groups=self.groups)
        y = self.inner(mixed)
        var, mean = torch.var_mean(mixed, (0, 2, 3), correction=0)
        zero = self.inner.bias - mean * self.inner.weight * torch.rsqrt(var + self.inner.eps)
        edge = zero.reshape(1, -1, 1, 1)
        padded = F.pad(y - edge, [self.padding] * 4) + edge
        return self.outer(self.last(padded))


def assert_equal_up_to_a_constant_per_channel(actual: Tensor, expected: Tensor) -> None:
    difference = actual - expected
    spread = difference - difference.mean((0, 2, 3), keepdim=True)
    assert spread.abs().max() <= 1e-10 * expected.abs().max()


def loss(y: Tensor) -> Tensor:
    """Blind to a constant per channel."""
    return ((y - y.mean((0, 2, 3), keepdim=True)) ** 3).sum()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_pooling_first_without_the_inner_norm_is_the_published_1x1_avg_in_training(groups, stride):
    conv = nn.Conv2d(4, 6, 3, stride, 1, groups=groups, bias=False, dtype=torch.float64)
    branch = make_branch("1x1-AVG", ConvGeometry.of(conv), shift=False, dtype=torch.float64)
    randomize_norms_(branch)
    branch.norm.eps = 1e-30
    gamma = torch.rand(6, dtype=torch.float64) + 0.5, branch.norm.weight.detach()
    pool = nn.AvgPool2d(3, stride, 0)
    published = PublishedSequence(branch.point.weight.detach(), pool, gamma, padding=1, groups=groups, eps=1e-30)
    x = torch.randn(3, 4, 6, 5, dtype=torch.float64, requires_grad=True)
    y, expected = branch(x), published(x)
    assert_equal_up_to_a_constant_per_channel(y, expected)
    mine = torch.autograd.grad(loss(y), (x, branch.point.weight, branch.norm.weight))
    theirs = torch.autograd.grad(loss(expected), (x, published.point, published.outer.weight))
    assert all(relative_error(a, b) <= 1e-10 for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_scale_only_inner_norm_is_the_published_1x1_kxk_in_training(groups, stride):
    conv = nn.Conv2d(4, 6, 3, stride, 1, groups=groups, bias=False, dtype=torch.float64)
    branch = make_branch("1x1-KxK", ConvGeometry.of(conv), shift=False, dtype=torch.float64)
    randomize_norms_(branch)
    last = nn.Conv2d(4, 6, 3, stride, 0, groups=groups, bias=False, dtype=torch.float64)
    last.weight = nn.Parameter(branch.conv.weight.detach().clone())
    gamma = branch.inner_norm.weight.detach(), branch.norm.weight.detach()
    published = PublishedSequence(branch.point.weight.detach(), last, gamma, padding=1, groups=groups, eps=1e-5)
    x = torch.randn(3, 4, 6, 5, dtype=torch.float64, requires_grad=True)
    y, expected = branch(x), published(x)
    assert_equal_up_to_a_constant_per_channel(y, expected)
    wanted = (x, branch.point.weight, branch.inner_norm.weight, branch.conv.weight, branch.norm.weight)
    mine = torch.autograd.grad(loss(y), wanted)
    wanted = (x, published.point, published.inner.weight, last.weight, published.outer.weight)
    theirs = torch.autograd.grad(loss(expected), wanted)
    assert all(relative_error(a, b) <= 1e-10 for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("ndim", "kernel", "dilation", "padding", "size"),
    [(1, 2, 4, 2, 1), (1, 2, 5, 3, 1), (1, 4, 4, 6, 1), (2, (2, 3), (4, 1), (2, 1), (1, 3))],
    ids=["two taps", "further apart", "four taps", "2-d"],
)
def test_an_image_smaller_than_the_reach_of_a_dilated_even_kernel(ndim, kernel, dilation, padding, size):
    conv = CONVS[ndim - 1](2, 2, kernel, padding=padding, dilation=dilation, bias=False, dtype=torch.float64)
    x = torch.randn(2, 2, *(size if isinstance(size, tuple) else (size,)), dtype=torch.float64)
    for name in (*possible_branches(conv), *OF_OTHER_METHODS):
        branch = fitting_branch(name, conv).eval()
        plain = carrying(conv, *branch.folded(torch.float64))
        assert relative_error(branch(ConvGeometry.of(conv).branch_input(x)), plain(x)) <= 1e-10, name


# Copies of the origin, and branches of other methods ---------------------------------------------------------------


@pytest.mark.parametrize("name", [*BRANCHES, "1x1-DCT", "DW-1x1", "KxK-2", "KxK-9", "KxK-10", "KxK-42", "KxK-99"])
def test_these_are_branches(name):
    assert is_branch(name)
    assert is_copy(name) == name.startswith("KxK")


@pytest.mark.parametrize(
    "name", ["KxK", "KxK-0", "KxK-1", "KxK-02", "KxK-2 ", "KxK-2\n", "KxK-x", "xKxK-2", "1x1-2", "kxk-2", "DW-KxK", ""]
)
def test_these_are_no_branches(name):
    assert not is_branch(name)
    assert not is_copy(name)
    with pytest.raises(BranchError, match=r"^unknown branch"):
        make_branch(name, ConvGeometry.of(nn.Conv2d(2, 2, 3)), shift=True)


@pytest.mark.parametrize(
    ("conv", "shown"), [(nn.Conv2d(2, 4, 1), "1x1"), (nn.Conv1d(2, 2, 1), "1"), (nn.Conv3d(2, 2, 1), "1x1x1")]
)
def test_a_pointwise_kernel_can_be_copied_but_there_is_nothing_to_filter(conv, shown):
    geometry = ConvGeometry.of(conv)
    assert branch_option("KxK-2", geometry).possible
    for name in ("1x1-DCT", "DW-1x1"):
        reason = f"the kernel is {shown}: there is nothing to filter"
        assert branch_option(name, geometry) == BranchOption(False, reason=reason)
        with pytest.raises(BranchError) as caught:
            make_branch(name, geometry, shift=True)
        assert str(caught.value) == f"branch {name!r} is not possible: {reason}"


@pytest.mark.parametrize("arguments", [{}, {"stride": 2}, {"groups": 2}, {"padding": 1}], ids=str)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_copy_of_a_pointwise_convolution_folds_exactly(ndim, arguments):
    conv = CONVS[ndim - 1](4, 6, 1, dtype=torch.float64, **arguments)
    branch = fitting_branch("KxK-3", conv).eval()
    assert branch.conv.weight.shape == conv.weight.shape
    x = torch.randn(2, 4, *(4,) * ndim, dtype=torch.float64)
    assert relative_error(branch(x), carrying(conv, *branch.folded(torch.float64))(x)) <= 1e-10


@pytest.mark.parametrize("name", EVERY_BRANCH)
def test_options_one_by_one_agree_with_the_list_of_all(name):
    geometry = ConvGeometry.of(nn.Conv2d(2, 2, (1, 3), stride=(1, 2), padding=(0, 1)))
    if name in BRANCHES:
        assert branch_option(name, geometry) == branch_options(geometry)[name]
    else:
        assert name not in branch_options(geometry)


@pytest.mark.parametrize("name", EVERY_BRANCH)
def test_a_branch_with_a_scale_alone_is_a_kernel_in_training_too(name):
    conv = nn.Conv2d(2, 2, 3, padding=1, bias=False, dtype=torch.float64)
    branch = make_branch(name, ConvGeometry.of(conv), shift=False, gamma=0.3, scaling="linear", dtype=torch.float64)
    assert not any(key.endswith("running_var") for key in branch.state_dict())
    x = torch.randn(3, 2, 5, 4, dtype=torch.float64)
    plain = carrying(conv, *branch.folded(torch.float64))
    assert relative_error(branch.train()(x), plain(x)) <= 1e-10
    assert relative_error(branch.folded(torch.float64)[0], 0.3 * branch.kernel(torch.float64)) <= 1e-12


def test_the_cosine_filters_are_not_saved_and_not_trained():
    branch = fitting_branch("1x1-DCT", nn.Conv2d(2, 3, 3, bias=False))
    assert list(branch.state_dict()) == ["norm.weight", "norm.running_var", "point.weight"]
    assert not branch.filters.requires_grad


def test_the_depthwise_branch_filters_every_channel_eight_times():
    branch = fitting_branch("DW-1x1", nn.Conv2d(4, 6, 3, groups=2))
    assert branch.depthwise.weight.shape == (32, 1, 3, 3)
    assert branch.point.weight.shape == (6, 16, 1, 1)


# How branches are made ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_BRANCH)
def test_a_branch_has_the_gamma_dtype_and_shift_asked_for(name):
    geometry = ConvGeometry.of(nn.Conv2d(2, 2, 3, padding=1))
    for shift in (True, False):
        branch = make_branch(name, geometry, shift=shift, gamma=0.25, dtype=torch.float64)
        assert torch.equal(branch.norm.weight, torch.full((2,), 0.25, dtype=torch.float64))
        assert (branch.norm.bias is not None) == shift
        assert {p.dtype for p in branch.parameters()} == {torch.float64}
        assert all(m.bias is None for m in branch.modules() if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize("name", EVERY_BRANCH)
def test_weights_come_from_the_generator_alone(name):
    geometry = ConvGeometry.of(nn.Conv2d(2, 2, 3, padding=1))
    before = torch.get_rng_state()
    made = [
        make_branch(name, geometry, shift=True, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    first, same, other = ([p for n, p in b.named_parameters() if "norm" not in n] for b in made)
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert all(p.isfinite().all() for p in first)


@pytest.mark.parametrize("name", ["1x1", "1x1-KxK", "1x1-AVG", "1xK", "Kx1", *OF_OTHER_METHODS])
def test_weights_spread_like_those_of_torch(name):
    geometry = ConvGeometry.of(nn.Conv2d(16, 32, 3, padding=1, groups=2))
    for module in make_branch(name, geometry, shift=False).modules():
        if isinstance(module, nn.Conv2d):
            drawn = module.weight.detach()
            reference = nn.Conv2d(
                module.in_channels, module.out_channels, module.kernel_size, groups=module.groups
            ).weight.detach()
            bound = 1 / (drawn[0].numel() ** 0.5)
            assert 0.95 * bound < drawn.abs().max() <= bound
            assert 0.9 < float(drawn.std() / reference.std()) < 1.1


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_width_is_the_number_of_inner_channels_per_input_channel(width, groups):
    conv = nn.Conv2d(4, 6, 3, padding=1, groups=groups, bias=False, dtype=torch.float64)
    branch = fitting_branch("1x1-KxK", conv, width=width).eval()
    assert branch.point.out_channels == branch.conv.in_channels == 4 * width
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    assert relative_error(branch(x), carrying(conv, *branch.folded(torch.float64))(x)) <= 1e-10


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_depthwise_average_has_nothing_but_its_norm(ndim):
    conv = CONVS[ndim - 1](3, 3, 3, padding=1, groups=3)
    branch = make_branch("1x1-AVG", ConvGeometry.of(conv), shift=False)
    assert [name for name, _ in branch.named_parameters()] == ["norm.weight"]


@pytest.mark.parametrize("name", EVERY_BRANCH)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_half_precision_branches_run_and_train(ndim, dilation, half, name):
    conv = CONVS[ndim - 1](2, 2, 3, padding=dilation, dilation=dilation).to(half)
    branch = fitting_branch(name, conv)
    x = torch.randn(2, 2, *(4,) * ndim).to(half).requires_grad_()
    y = branch(x)
    assert y.dtype == half
    y.float().square().sum().backward()
    assert all(t.grad.dtype == half and t.grad.isfinite().all() for t in (x, *branch.parameters()))
    plain = carrying(conv.double(), *branch.folded(torch.float64))
    assert relative_error(branch.eval()(x), plain(x.double())) <= 8 * torch.finfo(half).eps


@pytest.mark.parametrize("name", EVERY_BRANCH)
def test_the_folded_kernel_carries_gradients_to_every_parameter(name):
    conv = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64)
    branch = fitting_branch(name, conv)
    kernel, bias = branch.folded(torch.float64)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    parameters = list(branch.parameters())
    through_kernel = torch.autograd.grad(F.conv2d(x, kernel, bias, padding=1).tanh().sum(), parameters)
    directly = torch.autograd.grad(branch.eval()(x).tanh().sum(), parameters)
    assert all(relative_error(a, b) <= 1e-10 for a, b in zip(through_kernel, directly, strict=True))


def test_folded_conv_of_a_plain_convolution_is_its_weight_and_bias():
    conv = nn.Conv1d(2, 3, 3)
    kernel, bias = folded_conv(conv, torch.float64)
    assert torch.equal(kernel, conv.weight.double())
    assert torch.equal(bias, conv.bias.double())
    assert folded_conv(nn.Conv1d(2, 3, 3, bias=False), torch.float64)[1] is None
