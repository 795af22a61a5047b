"""One tensor that several operations read, and whose gradients are added up in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dyrep.kernels.availability import memory_format_of, runs_triton


def fan_out(x: Tensor, readers: int) -> tuple[Tensor, ...]:
    """The same tensor, once for every reader. Left to itself, autograd adds gradients pair by pair.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> a, b, c = fan_out(x, 3)
        >>> (a + 2 * b).sum().backward()
        >>> x.grad
        tensor([3., 3.])
    """
    if not (x.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return (x,) * readers  # a compiler sees all of them and does better
    return _FanOut.apply(x, readers)


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, readers: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.memory_format = memory_format_of(x)
        return tuple(x.view_as(x) for _ in range(readers))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given = [grad.contiguous(memory_format=ctx.memory_format) for grad in grads if grad is not None]
        # with gradients enabled somebody wants those of the gradients, which a kernel would cut off
        if len(given) > 2 and not torch.is_grad_enabled() and runs_triton(*given):
            from dyrep.kernels import summing_triton

            return summing_triton.plain_sum(given), None
        return sum(given[1:], given[0]) if given else None, None
