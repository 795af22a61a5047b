"""All patches that a kernel sees, as a matrix in memory. It has no gradient: it is for a network's own input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dyrep.kernels.availability import operator, runs_triton

ALIGNED = 32
"""Memory is read and written fast where every row begins at a multiple of this many numbers."""


@torch.no_grad()
def patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Every patch, zeros around the image included, as the channels of an image.

    There are ``channels * taps`` of them, and then zeros up to a multiple of `ALIGNED`.

    Example:
        >>> patches(torch.ones(1, 2, 5, 5), (3, 3), (1, 1), (1, 1), (1, 1)).shape
        torch.Size([1, 32, 5, 5])
    """
    return _patches(x, list(kernel), list(stride), list(padding), list(dilation))


@operator(
    "patches",
    "(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation) -> Tensor",
)
def _patches(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    out = _empty(x, kernel, stride, padding, dilation)
    if runs_triton(x):
        from dyrep.kernels import patching_triton

        patching_triton.write_patches_(out, x, kernel, stride, padding, dilation)
        return out
    rows = F.unfold(x, tuple(kernel), tuple(dilation), tuple(padding), tuple(stride))
    out.zero_()[:, : rows.shape[1]] = rows.reshape(out.shape[0], -1, *out.shape[2:])
    return out


@_patches.register_fake
def _(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    return _empty(x, kernel, stride, padding, dilation)


def _empty(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    batch, channels, *size = x.shape
    windows = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    ]
    entries = channels * kernel[0] * kernel[1]
    shape = (batch, entries + -entries % ALIGNED, *windows)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
