"""`assemble` as Triton kernels: a program for each output channel (and block of input channels)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dyrep.kernels.availability import next_power_of_two

_TILE = 1024  # elements of the large kernel that a program holds at a time
_FACTS = 8  # numbers that describe a part: four strides, its first tap and its size


def assemble_(
    out: Tensor,
    base: Tensor | None,
    kernels: list[Tensor],
    scales: Tensor,
    places: list[int],
    identity: Tensor | None,
    tap: list[int],
) -> None:
    """Write the sum into ``out``."""
    facts, spread, _ = _facts(kernels, places, out.shape)
    channels, taps, inputs = _tile(out)
    _assemble_kernel[(out.shape[0], triton.cdiv(out.shape[1], inputs))](
        out, out if base is None else base, tuple(kernels), scales, scales if identity is None else identity,
        tuple(facts), tuple(out.stride()), tuple((out if base is None else base).stride()), channels,
        tap[0] * out.shape[3] + tap[1], out.shape[2], out.shape[3],
        base is not None, identity is not None, spread, len(kernels), inputs, taps,
    )  # fmt: skip


def backward(
    grad: Tensor, kernels: list[Tensor], scales: Tensor, places: list[int], tap: list[int]
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of the kernels, of their scales and of the identity's scale."""
    facts, spread, invariant = _facts(kernels, places, grad.shape)
    grads = [torch.empty_like(kernel) for kernel in kernels]  # dense kernels keep their strides
    channels, taps, inputs = _tile(grad)
    along = torch.empty_like(scales)
    diagonal = torch.empty(grad.shape[0], dtype=torch.float32, device=grad.device)
    _assemble_backward_kernel[(grad.shape[0],)](
        grad, tuple(kernels), tuple(grads), scales, along, diagonal, tuple(facts), tuple(grad.stride()), channels,
        tap[0], tap[1], grad.shape[2], grad.shape[3], spread, invariant, len(kernels), inputs, taps,
    )  # fmt: skip
    return grads, along, diagonal


def _tile(kernel: Tensor) -> tuple[int, int, int]:
    taps = next_power_of_two(kernel.shape[2] * kernel.shape[3])
    return kernel.shape[1], taps, max(min(_TILE // taps, next_power_of_two(kernel.shape[1])), 1)


def _facts(kernels: list[Tensor], places: list[int], size: torch.Size) -> tuple[list[int], int, int]:
    facts: list[int] = []
    spreads = invariants = 0
    for j, kernel in enumerate(kernels):
        top, left, spread, invariant = places[4 * j : 4 * j + 4]
        strides = (kernel.stride(0), kernel.stride(1), *((0, 0) if spread else kernel.stride()[2:]))
        facts += [*strides, top, left, *(size[2:] if spread else kernel.shape[2:])]
        spreads |= bool(spread) << j
        invariants |= bool(invariant) << j
    return facts, spreads, invariants


@triton.jit
def _assemble_kernel(
    out, base, kernels, scales, identity, facts, out_strides, base_strides, channels, identity_tap,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HAS_BASE: tl.constexpr, HAS_IDENTITY: tl.constexpr,
    SPREAD: tl.constexpr, PARTS: tl.constexpr, INPUTS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0)
    i = (tl.program_id(1) * INPUTS + tl.arange(0, INPUTS))[:, None]
    t = tl.arange(0, TAPS)[None, :]
    row, column = t // WIDTH, t % WIDTH
    inside = (i < channels) & (t < HEIGHT * WIDTH)
    total = tl.zeros((INPUTS, TAPS), tl.float32)
    if HAS_BASE:
        where = o * base_strides[0] + i * base_strides[1] + row * base_strides[2] + column * base_strides[3]
        total += tl.load(base + where, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(PARTS):
        r, c = row - facts[8 * j + 4], column - facts[8 * j + 5]
        valid = inside & (r >= 0) & (r < facts[8 * j + 6]) & (c >= 0) & (c < facts[8 * j + 7])
        where = o * facts[8 * j] + i * facts[8 * j + 1] + r * facts[8 * j + 2] + c * facts[8 * j + 3]
        w = tl.load(kernels[j] + where, mask=valid, other=0.0).to(tl.float32)
        scale = tl.load(scales + j * tl.num_programs(0) + o)
        if (SPREAD >> j) % 2 == 1:
            scale = scale / (HEIGHT * WIDTH)
        total += scale * w
    if HAS_IDENTITY:
        total += tl.where((i == o % channels) & (t == identity_tap), tl.load(identity + o).to(tl.float32), 0.0)
    where = o * out_strides[0] + i * out_strides[1] + row * out_strides[2] + column * out_strides[3]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _assemble_backward_kernel(
    grad, kernels, grads, scales, along, diagonal, facts, strides, channels, tap_row, tap_column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SPREAD: tl.constexpr, INVARIANT: tl.constexpr,
    PARTS: tl.constexpr, INPUTS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """For every part: first the sums over all its taps, then, from the cache, its gradient."""
    o = tl.program_id(0)
    t = tl.arange(0, TAPS)[None, :]
    row, column = t // WIDTH, t % WIDTH
    for j in tl.static_range(PARTS):
        r, c = row - facts[8 * j + 4], column - facts[8 * j + 5]
        within = (t < HEIGHT * WIDTH) & (r >= 0) & (r < facts[8 * j + 6]) & (c >= 0) & (c < facts[8 * j + 7])
        scale = tl.load(scales + j * tl.num_programs(0) + o)
        spread: tl.constexpr = (SPREAD >> j) % 2 == 1
        share = 1.0 / (HEIGHT * WIDTH) if spread else 1.0
        total = 0.0
        length = 0.0
        for first in range(0, channels, INPUTS):
            i = (first + tl.arange(0, INPUTS))[:, None]
            valid = within & (i < channels)
            g = tl.load(
                grad + o * strides[0] + i * strides[1] + row * strides[2] + column * strides[3], mask=valid, other=0.0
            ).to(tl.float32)
            at = o * facts[8 * j] + i * facts[8 * j + 1] + r * facts[8 * j + 2] + c * facts[8 * j + 3]
            w = tl.load(kernels[j] + at, mask=valid, other=0.0).to(tl.float32)
            total += tl.sum(tl.sum(g * w, 1), 0)
            length += tl.sum(tl.sum(w * w, 1), 0)
        total *= share
        length *= share  # a spread kernel is read once for every tap
        tl.store(along + j * tl.num_programs(0) + o, total)
        pull = 0.0
        if (INVARIANT >> j) % 2 == 1:
            pull = scale * total / tl.maximum(length, 1e-30)
        for first in range(0, channels, INPUTS):
            i = (first + tl.arange(0, INPUTS))[:, None]
            valid = within & (i < channels)
            g = tl.load(
                grad + o * strides[0] + i * strides[1] + row * strides[2] + column * strides[3], mask=valid, other=0.0
            ).to(tl.float32)
            if spread:
                one = first + tl.arange(0, INPUTS)
                at = o * facts[8 * j] + one * facts[8 * j + 1]
                w = tl.load(kernels[j] + at, mask=one < channels, other=0.0).to(tl.float32)
                change = scale * share * tl.sum(g, 1) - pull * w
                tl.store(grads[j] + at, change.to(grads[j].dtype.element_ty), mask=one < channels)
            else:
                at = o * facts[8 * j] + i * facts[8 * j + 1] + r * facts[8 * j + 2] + c * facts[8 * j + 3]
                w = tl.load(kernels[j] + at, mask=valid, other=0.0).to(tl.float32)
                tl.store(grads[j] + at, (scale * g - pull * w).to(grads[j].dtype.element_ty), mask=valid)
    where = grad + o * strides[0] + (o % channels) * strides[1] + tap_row * strides[2] + tap_column * strides[3]
    tl.store(diagonal + o, tl.load(where).to(tl.float32))
