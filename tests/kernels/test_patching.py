"""`patches` against patches cut out one tap at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_helpers import OPCHECKS, Setting, both_layouts
from torch import Tensor

from dyrep.kernels import patches
from dyrep.kernels.patching import ALIGNED

Pair = tuple[int, int]
GEOMETRIES = {  # kernel, stride, padding, dilation
    "3x3": ((3, 3), (1, 1), (1, 1), (1, 1)),
    "7x7 of a stem": ((7, 7), (2, 2), (3, 3), (1, 1)),
    "all differ": ((3, 2), (1, 2), (2, 0), (2, 1)),
    "1x1": ((1, 1), (2, 3), (0, 0), (1, 1)),
    "padding above the kernel": ((2, 2), (1, 1), (3, 3), (1, 1)),
    "one patch": ((9, 7), (1, 1), (0, 0), (1, 1)),
}


def formula(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    height, width = ((padded.shape[2 + k] - dilation[k] * (kernel[k] - 1) - 1) // stride[k] + 1 for k in (0, 1))
    taps = []
    for row in range(0, kernel[0] * dilation[0], dilation[0]):
        for column in range(0, kernel[1] * dilation[1], dilation[1]):
            rows = slice(row, row + stride[0] * (height - 1) + 1, stride[0])
            columns = slice(column, column + stride[1] * (width - 1) + 1, stride[1])
            taps.append(padded[:, :, rows, columns])
    seen = torch.stack(taps, 2).flatten(1, 2)
    return F.pad(seen, (0, 0, 0, 0, 0, -seen.shape[1] % ALIGNED))


@both_layouts
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=list(GEOMETRIES))
def test_patches_are_those_of_the_formula(single, geometry, inner):
    x = single.randn(2, 3, 9, 7, inner=inner, grad=False)
    assert torch.equal(patches(x, *geometry), formula(x, *geometry))


@pytest.mark.parametrize("shape", [(1, 1, 3, 3), (3, 1, 1, 1), (2, 17, 8, 5)], ids=str)
def test_patches_of_any_shape(setting, shape):
    x = setting.randn(*shape, grad=False)
    out = patches(x, *GEOMETRIES["3x3"])
    assert out.dtype == setting.dtype
    assert torch.equal(out, formula(x, *GEOMETRIES["3x3"]))


def test_channels_are_innermost_in_memory_and_aligned(single):
    seen = patches(single.randn(2, 3, 9, 7), *GEOMETRIES["3x3"])
    assert seen.is_contiguous(memory_format=torch.channels_last)
    assert seen.shape == (2, 32, 9, 7)
    assert not seen[:, 27:].any()


def test_a_kernel_over_patches_is_a_convolution(single):
    x, weight = single.randn(2, 3, 9, 7, grad=False), single.randn(4, 3, 7, 7, grad=False)
    kernel, stride, padding, dilation = GEOMETRIES["7x7 of a stem"]
    seen = patches(x, kernel, stride, padding, dilation)[:, : 3 * 7 * 7]
    y = torch.einsum("oi,bihw->bohw", weight.flatten(1).double(), seen.double())
    torch.testing.assert_close(y, F.conv2d(x.double(), weight.double(), None, stride, padding, dilation))


def test_a_slice_of_a_larger_tensor_is_taken_as_it_is(single):
    x = single.randn(2, 3, 9, 7, grad=False)
    assert torch.equal(patches(single.slice_of(x), *GEOMETRIES["3x3"]), formula(x, *GEOMETRIES["3x3"]))


def test_there_is_no_gradient(single):
    assert not patches(single.randn(2, 3, 9, 7), *GEOMETRIES["3x3"]).requires_grad


@both_layouts
def test_the_operator_is_registered_as_pytorch_wants_it(inner):
    x = Setting("cpu", torch.float32).randn(2, 3, 9, 7, inner=inner, grad=False)
    arguments = (x, *map(list, GEOMETRIES["all differ"]))
    torch.library.opcheck(torch.ops.dyrep.patches.default, arguments, test_utils=OPCHECKS)
