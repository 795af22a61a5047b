"""What branch norms multiply by: γ / σ of several norms at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dyrep.kernels.availability import operator, runs_triton


def scales(gammas: list[Tensor], variances: list[Tensor], eps: float) -> Tensor:
    """``γ / sqrt(var + eps)`` of every norm, a row for each.

    On a GPU this is one kernel, and one backward: spelled out it would be half a dozen, for a few hundred numbers.

    Args:
        gammas: shape ``(channels,)`` each.
        variances: one for each γ, in float32 or wider.
        eps: of all norms.

    Returns:
        Shape ``(norms, channels)``, in float32 or wider.

    Example:
        >>> scales([torch.tensor([1.0, 6.0])], [torch.tensor([4.0, 9.0])], eps=0.0)
        tensor([[0.5000, 2.0000]])
    """
    if runs_triton(*gammas, *variances):
        return _scales(gammas, variances, eps)[0]
    spread = torch.rsqrt(torch.stack(variances) + eps)
    return torch.stack([gamma.to(spread.dtype) for gamma in gammas]) * spread


@operator("scales", "(Tensor[] gammas, Tensor[] variances, float eps) -> (Tensor, Tensor)")
def _scales(gammas: list[Tensor], variances: list[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    """The scales, and 1 / σ: a running variance may have moved on before the gradient is asked for."""
    from dyrep.kernels import dividing_triton

    out, inverse = _rows(gammas), _rows(gammas)
    dividing_triton.scale_(out, inverse, gammas, variances, eps)
    return out, inverse


@_scales.register_fake
def _(gammas: list[Tensor], variances: list[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    return _rows(gammas), _rows(gammas)


def _rows(gammas: list[Tensor]) -> Tensor:
    return torch.empty(len(gammas), len(gammas[0]), dtype=torch.float32, device=gammas[0].device)


@operator(
    "scales_backward",
    "(Tensor grad, Tensor inverse, Tensor[] gammas, Tensor[] variances) -> (Tensor[], Tensor[])",
)
def _scales_backward(
    grad: Tensor, inverse: Tensor, gammas: list[Tensor], variances: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of every γ, and of all variances that are given."""
    from dyrep.kernels import dividing_triton

    along = _like(gammas), _like(variances)
    dividing_triton.backward_(*along, grad, inverse, gammas)
    return along


@_scales_backward.register_fake
def _(
    grad: Tensor, inverse: Tensor, gammas: list[Tensor], variances: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    return _like(gammas), _like(variances)


def _like(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    gammas, variances, _ = inputs
    ctx.count = len(gammas)
    trained = any(variance.requires_grad for variance in variances)
    ctx.save_for_backward(output[1], *gammas, *(variances if trained else ()))


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    inverse, *saved = ctx.saved_tensors
    gammas, variances = saved[: ctx.count], saved[ctx.count :]
    of_gammas, of_variances = _scales_backward(grad.contiguous(), inverse, gammas, variances)
    return of_gammas, of_variances or [None] * ctx.count, None


_scales.register_autograd(_backward, setup_context=_remember)
