"""Add scaled kernels of different sizes up to one kernel: folding a block at every step.

    K = base + Σ_j a_j · place(W_j) + a · identity

`place` puts a small kernel at its taps of the large one, or spreads a pointwise one evenly over all of them. On a GPU
one pass reads everything and writes K in the dtype of the convolution; backward there is one for every W_j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dyrep.kernels.availability import memory_format_of, operator, runs_triton


@dataclass(frozen=True)
class Part:
    """A kernel to be added to a larger one.

    Attributes:
        kernel: shape ``(out, in / groups, height, width)``.
        tap: where its first tap goes; of no meaning if it is spread.
        spread: whether it is pointwise and stands for an average over all taps.
    """

    kernel: Tensor
    tap: tuple[int, int] = (0, 0)
    spread: bool = False


def assemble(
    base: Tensor | None,
    parts: list[Part],
    scales: Tensor,
    *,
    size: tuple[int, int],
    identity: tuple[int, int] | None = None,
    dtype: torch.dtype,
) -> Tensor:
    """Add kernels up.

    Args:
        base: a kernel of full size that is added as it is.
        parts: kernels that are scaled.
        scales: shape ``(parts, out)``, in float32 or wider; one row more for the identity matrix.
        size: height and width of the result.
        identity: at which tap the identity matrix (per group) goes; None: there is none.
        dtype: of the result.

    Example:
        >>> center = Part(torch.ones(1, 1, 1, 1), tap=(1, 1))
        >>> assemble(None, [center], torch.full((1, 1), 2.0), size=(3, 3), dtype=torch.float32)[0, 0]
        tensor([[0., 0., 0.],
                [0., 2., 0.],
                [0., 0., 0.]])
    """
    places = [int(value) for part in parts for value in (*part.tap, part.spread)]
    kernels = [part.kernel for part in parts]
    tap = list(identity or ())
    return _assemble(base, kernels, scales.contiguous(), places, tap, list(size), dtype)


@operator(
    "assemble",
    "(Tensor? base, Tensor[] kernels, Tensor scales, int[] places, int[] identity, int[] size, ScalarType dtype) "
    "-> Tensor",
)
def _assemble(
    base: Tensor | None,
    kernels: list[Tensor],
    scales: Tensor,
    places: list[int],
    identity: list[int],
    size: list[int],
    dtype: torch.dtype,
) -> Tensor:
    like = kernels[0] if base is None else base
    out = _empty(like, size, dtype)
    if runs_triton(like, *kernels, scales, out):
        from dyrep.kernels import assembling_triton

        assembling_triton.assemble_(out, base, kernels, scales, places, identity)
        return out
    total = torch.zeros(out.shape, dtype=scales.dtype, device=out.device)
    if base is not None:
        total += base
    for kernel, scale, place in zip(kernels, scales[: len(kernels)], _by_part(places), strict=True):
        total += scale[:, None, None, None] * _placed(kernel.to(scales.dtype), size, place)
    if identity:
        rows = torch.arange(len(total), device=out.device)
        total[rows, rows % total.shape[1], identity[0], identity[1]] += scales[-1]
    return out.copy_(total)


@_assemble.register_fake
def _(
    base: Tensor | None,
    kernels: list[Tensor],
    scales: Tensor,
    places: list[int],
    identity: list[int],
    size: list[int],
    dtype: torch.dtype,
) -> Tensor:
    return _empty(kernels[0] if base is None else base, size, dtype)


@operator(
    "assemble_backward",
    "(Tensor grad, Tensor[] kernels, Tensor scales, int[] places, int[] identity) -> (Tensor[], Tensor)",
)
def _assemble_backward(
    grad: Tensor, kernels: list[Tensor], scales: Tensor, places: list[int], identity: list[int]
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the kernels and of their scales."""
    grads, along = [torch.empty_like(kernel) for kernel in kernels], torch.empty_like(scales)
    if identity:
        inputs = grad.shape[1]
        blocks = grad[:, :, identity[0], identity[1]].reshape(-1, inputs, inputs)  # one for each group
        along[-1].copy_(blocks.diagonal(dim1=1, dim2=2).reshape(-1))
    if _by_triton(grad, *kernels, scales):
        from dyrep.kernels import assembling_triton

        assembling_triton.backward_(grads, along, grad, kernels, scales, places)
        return grads, along
    wide = grad.to(scales.dtype)
    for j, (kernel, place) in enumerate(zip(kernels, _by_part(places), strict=True)):
        top, left, spread = place
        w = kernel.to(scales.dtype)
        here = wide[:, :, top : top + w.shape[2], left : left + w.shape[3]]
        part = wide.mean((2, 3), keepdim=True) if spread else here
        grads[j].copy_(scales[j][:, None, None, None] * part)
        along[j].copy_((part * w).sum((1, 2, 3)))
    return grads, along


@_assemble_backward.register_fake
def _(
    grad: Tensor, kernels: list[Tensor], scales: Tensor, places: list[int], identity: list[int]
) -> tuple[list[Tensor], Tensor]:
    return [torch.empty_like(kernel) for kernel in kernels], torch.empty_like(scales)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    base, kernels, scales, ctx.places, ctx.identity, _, _ = inputs
    ctx.save_for_backward(*kernels, scales)
    ctx.base_dtype = None if base is None else base.dtype
    ctx.memory_format = memory_format_of(output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *kernels, scales = ctx.saved_tensors
    grad = grad.contiguous(memory_format=ctx.memory_format)
    along_base = None if ctx.base_dtype is None else grad.to(ctx.base_dtype)
    grads, along_scales = _assemble_backward(grad, kernels, scales, ctx.places, ctx.identity)
    # torch takes an empty list of numbers for one of tensors
    nothing: list[list[Any] | None] = [None if numbers else [] for numbers in (ctx.places, ctx.identity)]
    return along_base, grads, along_scales, *nothing, None, None


_assemble.register_autograd(_backward, setup_context=_remember)


def _by_triton(grad: Tensor, *others: Tensor) -> bool:
    if not runs_triton(grad, *others):
        return False
    from dyrep.kernels import assembling_triton

    return assembling_triton.fits(grad)


def _empty(like: Tensor, size: list[int], dtype: torch.dtype) -> Tensor:
    shape = (*like.shape[:2], *size)
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=memory_format_of(like))


def _by_part(places: list[int]) -> list[tuple[int, int, int]]:
    return [(places[i], places[i + 1], places[i + 2]) for i in range(0, len(places), 3)]


def _placed(kernel: Tensor, size: list[int], place: tuple[int, int, int]) -> Tensor:
    top, left, spread = place
    if spread:
        return kernel.expand(*kernel.shape[:2], *size) / (size[0] * size[1])
    below, right = size[0] - top - kernel.shape[2], size[1] - left - kernel.shape[3]
    return F.pad(kernel, (left, right, top, below))
