"""Mean and second moments of a batch: what the statistics of every pointwise convolution over it follow from.

For y = W x the mean is W m and the variance diag(W (G - m mᵀ) Wᵀ), where m is the mean of x and G that of x xᵀ. So a
pointwise branch need not be run to be normalised, and being normalised it can be added to a kernel that runs anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dyrep.kernels.availability import layout_of, memory_format_of, operator, runs_triton


def second_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over all images and positions of x and of x xᵀ.

    Args:
        x: shape ``(batch, channels, *spatial)``.

    Returns:
        Shapes ``(channels,)`` and ``(channels, channels)``, in float32 or wider.

    Example:
        >>> mean, second = second_moments(torch.ones(2, 3, 4, 4))
        >>> mean, second[0]
        (tensor([1., 1., 1.]), tensor([1., 1., 1.]))
    """
    return _second_moments(x.contiguous(memory_format=memory_format_of(x)))


@operator(
    "second_moments",
    "(Tensor x) -> (Tensor, Tensor)",
)
def _second_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    if runs_triton(x):
        from dyrep.kernels import moments_triton

        return moments_triton.second_moments(x)
    wide = x if x.dtype == torch.float64 else x.float()
    rows = wide.movedim(1, -1).reshape(-1, x.shape[1])
    with torch.autocast(x.device.type, enabled=False):  # it would narrow the product
        return rows.mean(0), rows.T @ rows / rows.shape[0]


@_second_moments.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], x.shape[1], dtype=dtype)


def _remember(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, along_mean: Tensor, along_second: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    batch, channels, *spatial = x.shape
    count = x.numel() // channels
    mix = ((along_second + along_second.T) / count).to(x.dtype)
    push = (along_mean / count).to(x.dtype)
    if layout_of(x).channels_inner:
        rows = x.movedim(1, -1).reshape(-1, channels)  # a view, as channels are innermost
        return torch.addmm(push, rows, mix).reshape(batch, *spatial, channels).movedim(-1, 1)
    return (torch.matmul(mix, x.flatten(2)) + push[:, None]).reshape(x.shape)


_second_moments.register_autograd(_backward, setup_context=_remember)
