"""Average pooling in two dimensions, zeros around the image counted, with a backward pass that only reads and adds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dyrep.kernels.availability import memory_format_of, operator, runs_triton


def average_pool(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """Average over windows, as ``F.avg_pool2d(..., count_include_pad=True)`` does, whatever the padding.

    Example:
        >>> x = torch.randn(1, 2, 6, 6)
        >>> torch.allclose(average_pool(x, (3, 3), (1, 1), (1, 1)), F.avg_pool2d(x, 3, 1, 1), atol=1e-6)
        True
    """
    return _average_pool(x.contiguous(memory_format=memory_format_of(x)), list(kernel), list(stride), list(padding))


def pooled_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """Number of windows along one dimension."""
    return (size + 2 * padding - kernel) // stride + 1


@operator(
    "average_pool",
    "(Tensor x, int[] kernel, int[] stride, int[] padding) -> Tensor",
)
def _average_pool(x: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    if runs_triton(x):
        from dyrep.kernels import pooling_triton

        return pooling_triton.pool(x, kernel, stride, padding)
    return F.avg_pool2d(_padded(x, padding), kernel, stride).contiguous(memory_format=memory_format_of(x))


@_average_pool.register_fake
def _(x: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    size = [pooled_size(*sizes) for sizes in zip(x.shape[2:], kernel, stride, padding, strict=True)]
    return torch.empty(*x.shape[:2], *size, dtype=x.dtype, device=x.device, memory_format=memory_format_of(x))


@operator(
    "average_pool_backward",
    "(Tensor grad, int[] size, int[] kernel, int[] stride, int[] padding) -> Tensor",
)
def _average_pool_backward(
    grad: Tensor, size: list[int], kernel: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    if runs_triton(grad):
        from dyrep.kernels import pooling_triton

        return pooling_triton.spread(grad, size, kernel, stride, padding)
    inner = grad.new_full((grad.shape[1], 1, *kernel), 1 / (kernel[0] * kernel[1]))
    # rows and columns at the end that no window reaches
    left = [size[d] + 2 * padding[d] - (grad.shape[2 + d] - 1) * stride[d] - kernel[d] for d in (0, 1)]
    spread = F.conv_transpose2d(grad, inner, stride=stride, groups=grad.shape[1])
    spread = F.pad(spread, (-padding[1], left[1] - padding[1], -padding[0], left[0] - padding[0]))
    return spread.contiguous(memory_format=memory_format_of(grad))


@_average_pool_backward.register_fake
def _(grad: Tensor, size: list[int], kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    shape = (*grad.shape[:2], *size)
    return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=memory_format_of(grad))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.geometry = inputs
    ctx.size, ctx.memory_format = list(x.shape[2:]), memory_format_of(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grad = grad.contiguous(memory_format=ctx.memory_format)
    return _average_pool_backward(grad, ctx.size, *ctx.geometry), None, None, None


_average_pool.register_autograd(_backward, setup_context=_remember)


def _padded(x: Tensor, padding: list[int]) -> Tensor:
    return F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
