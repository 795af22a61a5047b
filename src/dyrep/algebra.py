"""The linear algebra of re-parameterization, as pure functions on tensors.

A convolution kernel has shape ``(out, in / groups, *spatial)`` with one, two or three spatial dimensions. Nothing
here knows about modules; every function returns new tensors in the dtype of its kernel and differentiates through.
Half-precision kernels are computed in float32 and rounded once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dyrep.errors import ShapeError


def fuse_norm(
    kernel: Tensor,
    bias: Tensor | None,
    *,
    var: Tensor,
    eps: float,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Fold a norm that follows a convolution into its kernel and bias.

    .. math:: F' = \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}} F, \qquad
              b' = \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}} (b - \mu) + \beta

    Args:
        kernel: the convolution's kernel.
        bias: its bias, or None.
        var: the norm's variance, one value per output channel.
        eps: the norm's epsilon.
        gamma: the norm's scale (default 1).
        beta: the norm's shift (default 0).
        mean: the norm's mean (default 0).

    Returns:
        Kernel and bias of the one convolution that computes both; the bias is None where it would be zero because
        none of ``bias``, ``beta`` and ``mean`` was given.

    Example:
        >>> kernel = torch.ones(2, 1, 3)
        >>> fused, bias = fuse_norm(kernel, None, var=torch.tensor([3.0, 0.0]), eps=1.0)
        >>> fused[:, 0, 0], bias
        (tensor([0.5000, 1.0000]), None)
    """
    scale = _norm_scale(kernel, var, eps, gamma)
    fused = (_wide(kernel) * _per_channel(scale, kernel)).to(kernel.dtype)
    if bias is None and beta is None and mean is None:
        return fused, None
    shift = torch.zeros_like(scale)
    if bias is not None:
        shift = shift + _channels("bias", bias, kernel)
    if mean is not None:
        shift = shift - _channels("mean", mean, kernel)
    shift = shift * scale
    if beta is not None:
        shift = shift + _channels("beta", beta, kernel)
    return fused, shift.to(kernel.dtype)


def unfuse_norm(
    kernel: Tensor,
    bias: Tensor | None,
    *,
    var: Tensor,
    eps: float,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Undo `fuse_norm`: the kernel and bias which, followed by the norm, give ``kernel`` and ``bias``.

    Raises:
        ShapeError: a channel of the norm has scale zero, so nothing put before it could come through.

    Example:
        >>> kernel = torch.randn(4, 2, 3, 3)
        >>> norm = dict(var=torch.rand(4) + 1, eps=1e-5, gamma=torch.rand(4) + 1)
        >>> there, _ = fuse_norm(kernel, None, **norm)
        >>> back, _ = unfuse_norm(there, None, **norm)
        >>> torch.allclose(back, kernel)
        True
    """
    scale = _norm_scale(kernel, var, eps, gamma)
    if bool((scale == 0).any()):
        dead = int((scale == 0).nonzero()[0])
        raise ShapeError(f"cannot undo a norm whose scale is zero (channel {dead}): it passes nothing through")
    plain = (_wide(kernel) / _per_channel(scale, kernel)).to(kernel.dtype)
    if bias is None and beta is None and mean is None:
        return plain, None
    shift = torch.zeros_like(scale)
    if bias is not None:
        shift = shift + _channels("bias", bias, kernel)
    if beta is not None:
        shift = shift - _channels("beta", beta, kernel)
    shift = shift / scale
    if mean is not None:
        shift = shift + _channels("mean", mean, kernel)
    return plain, shift.to(kernel.dtype)


def pad_kernel(kernel: Tensor, size: Sequence[int], tap: Sequence[int] | None = None) -> Tensor:
    """Surround a kernel with zeros up to ``size``.

    Args:
        kernel: the small kernel.
        size: spatial size wanted, at least the kernel's own in every dimension.
        tap: where the small kernel's first tap goes (default: centred, left of the middle where that is even).

    Example:
        >>> pad_kernel(torch.ones(1, 1, 1, 3), (3, 3))[0, 0]
        tensor([[0., 0., 0.],
                [1., 1., 1.],
                [0., 0., 0.]])
    """
    small, size = tuple(kernel.shape[2:]), tuple(size)
    if len(small) != len(size) or any(s > t for s, t in zip(small, size, strict=True)):
        raise ShapeError(f"a kernel of spatial size {small} does not fit into {size}")
    room = [t - s for s, t in zip(small, size, strict=True)]
    before = [r // 2 for r in room] if tap is None else list(tap)
    if len(before) != len(room) or any(b < 0 or b > r for b, r in zip(before, room, strict=True)):
        raise ShapeError(f"a kernel of spatial size {small} placed at {tuple(before)} sticks out of {size}")
    # F.pad counts dimensions from the last one
    amounts = [amount for b, r in zip(reversed(before), reversed(room), strict=True) for amount in (b, r - b)]
    return F.pad(kernel, amounts)


def compose(first: Tensor, second: Tensor, groups: int = 1) -> Tensor:
    r"""The kernel of a pointwise convolution followed by a KxK one, both with the same ``groups``.

    .. math:: F_{o,i,\cdot} = \sum_m F^{(2)}_{o,m,\cdot}\, F^{(1)}_{m,i}

    Args:
        first: pointwise kernel, shape ``(middle, in / groups, 1, ...)``.
        second: kernel applied to its output, shape ``(out, middle / groups, *K)``.
        groups: groups of both convolutions.

    Example:
        >>> first, second = torch.randn(5, 3, 1, 1), torch.randn(4, 5, 3, 3)
        >>> x = torch.randn(1, 3, 8, 8)
        >>> two = F.conv2d(F.conv2d(x, first), second)
        >>> torch.allclose(F.conv2d(x, compose(first, second)), two, atol=1e-5)
        True
    """
    if first.dim() != second.dim() or any(k != 1 for k in first.shape[2:]):
        raise ShapeError(f"the first kernel must be pointwise in {second.dim() - 2} dimensions, got {_shape(first)}")
    middle, out = first.shape[0], second.shape[0]
    if groups < 1 or middle % groups or out % groups or second.shape[1] * groups != middle:
        raise ShapeError(
            f"kernels {_shape(first)} and {_shape(second)} do not compose with groups={groups}: "
            f"the first gives {middle} channels, the second takes {second.shape[1]} per group"
        )
    a = _wide(first).reshape(groups, middle // groups, first.shape[1])
    b = _wide(second).reshape(groups, out // groups, middle // groups, -1)
    product = torch.einsum("gmi,gomk->goik", a, b)
    return product.reshape(out, first.shape[1], *second.shape[2:]).to(second.dtype)


def average_kernel(
    channels: int,
    size: Sequence[int],
    groups: int = 1,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Average pooling (zero padding counted) as a convolution kernel with ``groups`` groups.

    Example:
        >>> x = torch.randn(1, 4, 8, 8)
        >>> pooled = F.avg_pool2d(x, 3, stride=2, padding=1)
        >>> torch.allclose(F.conv2d(x, average_kernel(4, (3, 3)), stride=2, padding=1), pooled, atol=1e-6)
        True
    """
    eye = _identity_matrix(channels, groups, dtype, device)
    return eye.reshape(*eye.shape, *(1 for _ in size)).expand(*eye.shape, *size) / math.prod(size)


def identity_kernel(
    channels: int,
    size: Sequence[int],
    groups: int = 1,
    tap: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The identity map as a convolution kernel with ``groups`` groups: the identity matrix at one tap.

    Example:
        >>> x = torch.randn(1, 4, 8, 8)
        >>> torch.equal(F.conv2d(x, identity_kernel(4, (3, 3), groups=2), padding=1, groups=2), x)
        True
    """
    eye = _identity_matrix(channels, groups, dtype, device)
    return pad_kernel(eye.reshape(*eye.shape, *(1 for _ in size)), size, tap)


def cosine_filters(
    channels: int, size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Tensor:
    """One cosine wave per channel, shape ``(channels, *size)``: along the first dimension for the first channels.

    Channels are shared out between the dimensions, in order. Along a dimension of size K the i-th of its channels
    (from 1) holds cos(π (k + ½) i / K) at position k.

    Example:
        >>> cosine_filters(2, (2, 2))
        tensor([[[ 0.7071,  0.7071],
                 [-0.7071, -0.7071]],
        <BLANKLINE>
                [[ 0.7071, -0.7071],
                 [ 0.7071, -0.7071]]])
    """
    share = math.ceil(channels / len(size))
    waves = torch.empty(channels, *size, dtype=torch.float64)
    for channel in range(channels):
        dim, index = divmod(channel, share)
        positions = torch.arange(size[dim], dtype=torch.float64) + 0.5
        wave = torch.cos(math.pi * positions * (index + 1) / size[dim])
        waves[channel] = wave.reshape(-1, *(1 for _ in size[dim + 1 :])).expand(*size)
    return waves.to(dtype=torch.get_default_dtype() if dtype is None else dtype, device=device)


def add(*pairs: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Sum parallel convolutions of equal shape, given as ``(kernel, bias)``; a missing bias counts as zero.

    Example:
        >>> one = (torch.ones(2, 1, 3), None)
        >>> kernel, bias = add(one, one)
        >>> float(kernel[0, 0, 0]), bias
        (2.0, None)
    """
    if not pairs:
        raise ShapeError("add needs at least one (kernel, bias) pair")
    first = pairs[0][0]
    kernel = torch.zeros_like(_wide(first))
    bias: Tensor | None = None
    for other, other_bias in pairs:
        if other.shape != first.shape:
            raise ShapeError(f"kernels of shapes {_shape(first)} and {_shape(other)} cannot be added")
        kernel = kernel + _wide(other)
        if other_bias is not None:
            shift = _channels("bias", other_bias, other)
            bias = shift.clone() if bias is None else bias + shift
    return kernel.to(first.dtype), None if bias is None else bias.to(first.dtype)


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to fold in: float64, so that rounding happens once, or float32 where a device has nothing wider."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _identity_matrix(
    channels: int, groups: int, dtype: torch.dtype | None, device: torch.device | str | None
) -> Tensor:
    if groups < 1 or channels % groups:
        raise ShapeError(f"{channels} channels cannot be split into {groups} groups")
    return torch.eye(channels // groups, dtype=dtype, device=device).repeat(groups, 1)


def _norm_scale(kernel: Tensor, var: Tensor, eps: float, gamma: Tensor | None) -> Tensor:
    scale = torch.rsqrt(_channels("var", var, kernel) + eps)
    return scale if gamma is None else scale * _channels("gamma", gamma, kernel)


def _channels(what: str, value: Tensor, kernel: Tensor) -> Tensor:
    if tuple(value.shape) != (kernel.shape[0],):
        raise ShapeError(f"{what} of shape {_shape(value)} does not fit a kernel of shape {_shape(kernel)}")
    return _wide(value).to(_wide_dtype(kernel))


def _per_channel(value: Tensor, kernel: Tensor) -> Tensor:
    return value.reshape(-1, *(1 for _ in kernel.shape[1:]))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_wide_dtype(tensor))


def _wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
