"""Cast several weights at once: a training step in low precision casts every one of them, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dyrep.kernels.availability import operator, runs_triton


def cast_all(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors in another dtype, with a gradient.

    Example:
        >>> [t.dtype for t in cast_all([torch.ones(2), torch.ones(3)], torch.bfloat16)]
        [torch.bfloat16, torch.bfloat16]
    """
    if not tensors or all(tensor.dtype == dtype for tensor in tensors):
        return list(tensors)
    if len({tensor.dtype for tensor in tensors}) > 1:
        return [tensor.to(dtype) for tensor in tensors]
    return _cast_all(list(tensors), dtype)


@operator(
    "cast_all",
    "(Tensor[] tensors, ScalarType dtype) -> Tensor[]",
)
def _cast_all(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    out = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    dense = all(tensor.stride() == other.stride() for tensor, other in zip(tensors, out, strict=True))
    if dense and runs_triton(*tensors, *out):
        from dyrep.kernels import casting_triton

        casting_triton.copy_all_(out, tensors)
    else:
        torch._foreach_copy_(out, tensors)
    return out


@_cast_all.register_fake
def _(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]


def _remember(ctx: Any, inputs: tuple[list[Tensor], torch.dtype], output: list[Tensor]) -> None:
    ctx.dtype = inputs[0][0].dtype


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    given = iter(_cast_all([grad for grad in grads if grad is not None], ctx.dtype))
    return [None if grad is None else next(given) for grad in grads], None


_cast_all.register_autograd(_backward, setup_context=_remember)
