"""`scales` as Triton kernels: a program for some channels of every norm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dyrep.kernels.availability import filled, slots_for

_TILE = 128


def scale_(out: Tensor, inverse: Tensor, gammas: list[Tensor], variances: list[Tensor], eps: float) -> None:
    """Write γ / σ of every norm into a row of ``out``, and 1 / σ into one of ``inverse``."""
    slots = slots_for(len(gammas))
    g, v = filled(gammas, slots), filled(variances, slots)
    _scale_kernel[(triton.cdiv(out.shape[1], _TILE),)](
        out, inverse, g, v, _strides(g), _strides(v), eps, out.shape[1], len(gammas), slots, _TILE,
    )  # fmt: skip


def backward_(
    of_gammas: list[Tensor], of_variances: list[Tensor], grad: Tensor, inverse: Tensor, gammas: list[Tensor]
) -> None:
    """Write the gradients of every γ, and of every variance if there is room for them; these are without gaps."""
    slots = slots_for(len(gammas))
    g = filled(gammas, slots)
    _scale_backward_kernel[(triton.cdiv(grad.shape[1], _TILE),)](
        filled(of_gammas, slots), filled(of_variances or of_gammas, slots), grad, inverse, g, _strides(g),
        grad.shape[1], len(gammas), bool(of_variances), slots, _TILE,
    )  # fmt: skip


def _strides(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(tensor.stride(0) for tensor in tensors)


@triton.jit(do_not_specialize=["channels", "count"])
def _scale_kernel(
    out, inverse, gammas, variances, g_strides, v_strides, eps, channels, count, SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = c < channels
    for j in tl.static_range(SLOTS):
        if j < count:
            variance = tl.load(variances[j] + c * v_strides[j], mask=mask, other=1.0).to(tl.float32)
            gamma = tl.load(gammas[j] + c * g_strides[j], mask=mask, other=0.0).to(tl.float32)
            spread = tl.rsqrt(variance + eps)
            tl.store(out + j * channels + c, gamma * spread, mask=mask)
            tl.store(inverse + j * channels + c, spread, mask=mask)


@triton.jit(do_not_specialize=["channels", "count"])
def _scale_backward_kernel(
    of_gammas, of_variances, grad, inverse, gammas, g_strides, channels, count, WITH_VARIANCES: tl.constexpr,
    SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = c < channels
    for j in tl.static_range(SLOTS):
        if j < count:
            along = tl.load(grad + j * channels + c, mask=mask, other=0.0)
            spread = tl.load(inverse + j * channels + c, mask=mask, other=0.0)
            tl.store(of_gammas[j] + c, (along * spread).to(of_gammas[j].dtype.element_ty), mask=mask)
            if WITH_VARIANCES:
                gamma = tl.load(gammas[j] + c * g_strides[j], mask=mask, other=0.0).to(tl.float32)
                value = -0.5 * along * gamma * spread * spread * spread
                tl.store(of_variances[j] + c, value.to(of_variances[j].dtype.element_ty), mask=mask)
