"""`assemble` as Triton kernels: a program for each output channel, and block of input channels or part."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dyrep.kernels.availability import next_power_of_two

_TILE = 8192  # elements of the large kernel that a program holds at a time: few, long loads hide latency
_LARGEST = 16384


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
        base is not None, identity is not None, spread, len(kernels), inputs, taps, num_warps=_warps(inputs * taps),
    )  # fmt: skip


def backward(
    grad: Tensor, kernels: list[Tensor], scales: Tensor, places: list[int], tap: list[int]
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of the kernels, of their scales and of the identity's scale."""
    facts, spread, invariant = _facts(kernels, places, grad.shape)
    grads = [torch.empty_like(kernel) for kernel in kernels]  # dense kernels keep their strides
    inputs, taps = next_power_of_two(grad.shape[1]), next_power_of_two(grad.shape[2] * grad.shape[3])
    sizes = sum(_packed_size(kernel) << 12 * j for j, kernel in enumerate(kernels))
    along = torch.empty_like(scales)
    diagonal = torch.empty(grad.shape[0], dtype=torch.float32, device=grad.device)
    _assemble_backward_kernel[(grad.shape[0], max(len(kernels), 1))](
        grad, tuple(kernels), tuple(grads), scales, along, diagonal, tuple(facts), tuple(grad.stride()), grad.shape[1],
        tap[0], tap[1], grad.shape[2], grad.shape[3], sizes, spread, invariant, len(kernels), inputs, taps,
        num_warps=_warps(inputs * taps),
    )  # fmt: skip
    return grads, along, diagonal


def fits(kernel: Tensor) -> bool:
    """Whether an output channel of a kernel fits into one program, and its size into four bits."""
    _, inputs, *size = kernel.shape
    return max(size) < 16 and next_power_of_two(size[0] * size[1]) * next_power_of_two(inputs) <= _LARGEST


def _packed_size(kernel: Tensor) -> int:
    """Height, width and the logarithm of the power of two that is not less than their product, four bits each."""
    height, width = kernel.shape[2:]
    return height | width << 4 | (next_power_of_two(height * width).bit_length() - 1) << 8


def _tile(kernel: Tensor) -> tuple[int, int, int]:
    taps = next_power_of_two(kernel.shape[2] * kernel.shape[3])
    return kernel.shape[1], taps, max(min(_TILE // taps, next_power_of_two(kernel.shape[1])), 1)


def _warps(elements: int) -> int:
    return 4 if elements < 4096 else 8 if elements <= 8192 else 16


def _facts(kernels: list[Tensor], places: list[int], size: torch.Size) -> tuple[list[int], int, int]:
    """Eight numbers for every part (strides, first tap, size), and bits that say which are spread, and invariant."""
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
    i = (tl.program_id(1) * INPUTS + tl.arange(0, INPUTS))[None, :]
    t = tl.arange(0, TAPS)[:, None]
    row, column = t // WIDTH, t % WIDTH
    inside = (i < channels) & (t < HEIGHT * WIDTH)
    total = tl.zeros((TAPS, INPUTS), tl.float32)
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
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZES: tl.constexpr, SPREAD: tl.constexpr, INVARIANT: tl.constexpr,
    PARTS: tl.constexpr, INPUTS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0)
    for j in tl.static_range(PARTS):
        if tl.program_id(1) == j:
            at = j * tl.num_programs(0) + o
            total = _part_backward(
                grad + o * strides[0], kernels[j] + o * facts[8 * j], grads[j] + o * facts[8 * j], tl.load(scales + at),
                strides[1], strides[2], strides[3], facts[8 * j + 1], facts[8 * j + 2], facts[8 * j + 3],
                facts[8 * j + 4], facts[8 * j + 5], channels, HEIGHT, WIDTH,
                (SIZES >> (12 * j)) % 16, (SIZES >> (12 * j + 4)) % 16, 1 << ((SIZES >> (12 * j + 8)) % 16),
                (SPREAD >> j) % 2, (INVARIANT >> j) % 2, INPUTS, TAPS,
            )  # fmt: skip
            tl.store(along + at, total)
    if tl.program_id(1) == 0:
        where = grad + o * strides[0] + (o % channels) * strides[1] + tap_row * strides[2] + tap_column * strides[3]
        tl.store(diagonal + o, tl.load(where).to(tl.float32))


@triton.jit
def _part_backward(
    grad, kernel, out, scale, g_input, g_row, g_column, w_input, w_row, w_column, top, left, channels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OWN_TAPS: tl.constexpr,
    SPREAD: tl.constexpr, INVARIANT: tl.constexpr, INPUTS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one part in one output channel, and return that of its scale."""
    i = tl.arange(0, INPUTS)[None, :]
    if SPREAD:
        t = tl.arange(0, TAPS)[:, None]
        mask = (t < HEIGHT * WIDTH) & (i < channels)
        where = i * g_input + t // WIDTH * g_row + t % WIDTH * g_column
        g = tl.sum(tl.load(grad + where, mask=mask, other=0.0).to(tl.float32), 0)[None, :] / (HEIGHT * WIDTH)
        mask = i < channels
        at = i * w_input
    else:
        t = tl.arange(0, OWN_TAPS)[:, None]
        mask = (t < ROWS * COLUMNS) & (i < channels)
        row, column = t // COLUMNS, t % COLUMNS
        where = i * g_input + (row + top) * g_row + (column + left) * g_column
        g = tl.load(grad + where, mask=mask, other=0.0).to(tl.float32)
        at = i * w_input + row * w_row + column * w_column
    w = tl.load(kernel + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(tl.sum(g * w, 0), 0)
    change = scale * g
    if INVARIANT:
        change -= scale * total / tl.maximum(tl.sum(tl.sum(w * w, 0), 0), 1e-30) * w
    tl.store(out + at, change.to(out.dtype.element_ty), mask=mask)
    return total
