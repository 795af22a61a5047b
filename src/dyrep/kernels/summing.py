"""Normalise several tensors by their own batch statistics and add them up: what the end of a block does.

    out = base + Σ_j γ_j y_j / σ_j                       without a shift
    out = base + Σ_j γ_j (y_j - μ_j) / σ_j + β           with one (β is the sum of all)

One pass reads every y_j for its statistics, one for the sum. Backward, one pass gathers Σ g·y_j, and one writes all
gradients: each is ∂L/∂y_j = p g + q y_j + r, with p, q and r per channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dyrep.kernels.availability import memory_format_of, operator, runs_triton


def normalised_sum(
    base: Tensor | None, terms: list[Tensor], gamma: Tensor, beta: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add normalised tensors up.

    Args:
        base: what is added as it is, if anything.
        terms: tensors of shape ``(batch, channels, *spatial)``.
        gamma: their scales, shape ``(terms, channels)``, in float32 or wider.
        beta: the sum of their shifts, shape ``(channels,)``; None where the mean is to stay.
        eps: added to variances.

    Returns:
        The sum, in the dtype of ``base`` or of the first term, and every term's mean and (biased) variance, each of
        shape ``(terms, channels)``; no gradient flows through these two.

    Example:
        >>> y = torch.randn(8, 3, 4, 4)
        >>> out, mean, var = normalised_sum(None, [y], torch.ones(1, 3), torch.zeros(3), 0.0)
        >>> torch.allclose(out.var((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
        True
    """
    like = terms[0] if base is None else base
    layout = memory_format_of(like)
    base = None if base is None else base.contiguous(memory_format=layout)
    terms = [term.contiguous(memory_format=layout) for term in terms]
    beta = None if beta is None else beta.contiguous()
    return _normalised_sum(base, terms, gamma.contiguous(), beta, eps)


def statistics(terms: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of every channel of tensors of equal shape, each of shape ``(terms, channels)``.

    Example:
        >>> mean, var = statistics([torch.ones(2, 3, 4, 4)])
        >>> mean, var
        (tensor([[1., 1., 1.]]), tensor([[0., 0., 0.]]))
    """
    layout = memory_format_of(terms[0])
    return _statistics([term.contiguous(memory_format=layout) for term in terms])


@operator(
    "statistics",
    "(Tensor[] terms) -> (Tensor, Tensor)",
)
def _statistics(terms: list[Tensor]) -> tuple[Tensor, Tensor]:
    if runs_triton(*terms):
        from dyrep.kernels import summing_triton

        return summing_triton.statistics(terms)
    dims = [d for d in range(terms[0].dim()) if d != 1]
    wide = (term if term.dtype == torch.float64 else term.float() for term in terms)
    pairs = [torch.var_mean(term, dim=dims, correction=0) for term in wide]
    return torch.stack([mean for _, mean in pairs]), torch.stack([var for var, _ in pairs])


@_statistics.register_fake
def _(terms: list[Tensor]) -> tuple[Tensor, Tensor]:
    dtype = _wide_dtype(terms[0])
    shape = (len(terms), terms[0].shape[1])
    return terms[0].new_empty(shape, dtype=dtype), terms[0].new_empty(shape, dtype=dtype)


def _remember_statistics(ctx: Any, inputs: tuple[list[Tensor]], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[0], output[0])


def _statistics_backward(ctx: Any, along_mean: Tensor, along_var: Tensor) -> list[Tensor]:
    *terms, mean = ctx.saved_tensors
    count = terms[0].numel() // terms[0].shape[1]
    slope, offset = 2 * along_var / count, (along_mean - 2 * along_var * mean) / count
    return [
        torch.addcmul(_over_channels(o, term), _over_channels(s, term), term).to(term.dtype)
        for term, s, o in zip(terms, slope, offset, strict=True)
    ]


_statistics.register_autograd(_statistics_backward, setup_context=_remember_statistics)


@operator(
    "normalised_sum",
    "(Tensor? base, Tensor[] terms, Tensor gamma, Tensor? beta, float eps) -> (Tensor, Tensor, Tensor)",
)
def _normalised_sum(
    base: Tensor | None, terms: list[Tensor], gamma: Tensor, beta: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if runs_triton(*terms, gamma):
        from dyrep.kernels import summing_triton

        mean, var = summing_triton.statistics(terms)
        return summing_triton.weighted_sum(base, terms, gamma, beta, mean, var, eps), mean, var
    mean, var = _statistics(terms)
    wide = [term.to(gamma.dtype) for term in terms]
    scale = gamma * torch.rsqrt(var + eps)
    total = torch.zeros_like(wide[0])
    for s, term in zip(scale, wide, strict=True):
        total = total + _over_channels(s, term) * term
    if beta is not None:
        total = total + _over_channels(beta - (scale * mean).sum(0), wide[0])
    if base is not None:
        total = total + base
    like = terms[0] if base is None else base
    return torch.empty_like(like).copy_(total), mean, var


@_normalised_sum.register_fake
def _(
    base: Tensor | None, terms: list[Tensor], gamma: Tensor, beta: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, var = (terms[0].new_empty(gamma.shape, dtype=_wide_dtype(terms[0])) for _ in range(2))
    return torch.empty_like(terms[0] if base is None else base), mean, var


@operator(
    "normalised_sum_backward",
    "(Tensor grad, Tensor[] terms, Tensor gamma, Tensor mean, Tensor var, float eps, "
    "bool shift) -> (Tensor[], Tensor, Tensor)",
)
def _normalised_sum_backward(
    grad: Tensor, terms: list[Tensor], gamma: Tensor, mean: Tensor, var: Tensor, eps: float, shift: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of the terms, of γ and (with a shift; otherwise it means nothing) of β."""
    if runs_triton(grad, *terms, gamma):
        from dyrep.kernels import summing_triton

        return summing_triton.backward(grad, terms, gamma, mean, var, eps, shift)
    wide = grad.to(gamma.dtype)
    dims = [d for d in range(wide.dim()) if d != 1]
    count = wide.numel() // wide.shape[1]
    rstd = torch.rsqrt(var + eps)
    total = wide.sum(dims)
    grads, along = [], []
    for term, g, m, r in zip(terms, gamma, mean, rstd, strict=True):
        centred = term.to(gamma.dtype) - _over_channels(m, wide)
        s = (wide * (centred if shift else term.to(gamma.dtype))).sum(dims)
        flow = wide - _over_channels(total / count, wide) if shift else wide
        change = _over_channels(g * r, wide) * flow - _over_channels(g * s * r**3 / count, wide) * centred
        grads.append(torch.empty_like(term).copy_(change))
        along.append(s * r)
    return grads, torch.stack(along), total


@_normalised_sum_backward.register_fake
def _(
    grad: Tensor, terms: list[Tensor], gamma: Tensor, mean: Tensor, var: Tensor, eps: float, shift: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    return [torch.empty_like(term) for term in terms], torch.empty_like(gamma), torch.empty_like(gamma[0])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    base, terms, gamma, beta, eps = inputs
    _, mean, var = output
    ctx.save_for_backward(*terms, gamma, mean, var)
    ctx.has_base, ctx.shift, ctx.eps = base is not None, beta is not None, eps


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    *terms, gamma, mean, var = ctx.saved_tensors
    grad = grad.contiguous(memory_format=memory_format_of(terms[0]))
    grads, along_gamma, total = _normalised_sum_backward(grad, terms, gamma, mean, var, ctx.eps, ctx.shift)
    return grad if ctx.has_base else None, grads, along_gamma, total if ctx.shift else None, None


_normalised_sum.register_autograd(_backward, setup_context=_remember)


def _wide_dtype(term: Tensor) -> torch.dtype:
    return torch.float64 if term.dtype == torch.float64 else torch.float32


def _over_channels(value: Tensor, like: Tensor) -> Tensor:
    return value.reshape(1, -1, *(1 for _ in like.shape[2:]))
