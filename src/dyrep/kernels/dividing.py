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
        return _scales(gammas, variances, eps)
    spread = torch.rsqrt(torch.stack(variances) + eps)
    return torch.stack([gamma.to(spread.dtype) for gamma in gammas]) * spread


@operator("scales", "(Tensor[] gammas, Tensor[] variances, float eps) -> Tensor")
def _scales(gammas: list[Tensor], variances: list[Tensor], eps: float) -> Tensor:
    from dyrep.kernels import dividing_triton

    out = torch.empty(len(gammas), len(gammas[0]), dtype=torch.float32, device=gammas[0].device)
    dividing_triton.scale_(out, gammas, variances, eps)
    return out


@_scales.register_fake
def _(gammas: list[Tensor], variances: list[Tensor], eps: float) -> Tensor:
    return torch.empty(len(gammas), len(gammas[0]), dtype=torch.float32, device=gammas[0].device)


@operator(
    "scales_backward",
    "(Tensor grad, Tensor[] gammas, Tensor[] variances, float eps, bool with_variances) -> (Tensor[], Tensor[])",
)
def _scales_backward(
    grad: Tensor, gammas: list[Tensor], variances: list[Tensor], eps: float, with_variances: bool
) -> tuple[list[Tensor], list[Tensor]]:
    from dyrep.kernels import dividing_triton

    along = _like(gammas, variances, with_variances)
    dividing_triton.backward_(*along, grad, gammas, variances, eps)
    return along


@_scales_backward.register_fake
def _(
    grad: Tensor, gammas: list[Tensor], variances: list[Tensor], eps: float, with_variances: bool
) -> tuple[list[Tensor], list[Tensor]]:
    return _like(gammas, variances, with_variances)


def _like(gammas: list[Tensor], variances: list[Tensor], with_variances: bool) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.empty_like(x) for x in gammas], [torch.empty_like(x) for x in variances] if with_variances else []


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gammas, variances, ctx.eps = inputs
    ctx.save_for_backward(*gammas, *variances)
    ctx.with_variances = any(variance.requires_grad for variance in variances)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    gammas, variances = saved[: len(saved) // 2], saved[len(saved) // 2 :]
    of_gammas, of_variances = _scales_backward(grad.contiguous(), gammas, variances, ctx.eps, ctx.with_variances)
    return of_gammas, of_variances or [None] * len(variances), None


_scales.register_autograd(_backward, setup_context=_remember)
