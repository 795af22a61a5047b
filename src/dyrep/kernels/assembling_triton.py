"""`assemble` as Triton kernels: a program for each output channel (and, forward, block of input channels)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dyrep.kernels.availability import filled, next_power_of_two, slots_for

_TILE = 8192  # elements of the large kernel that a program holds at a time: few, long loads hide latency
_LARGEST = 16384
_FACTS = 9


def assemble_(
    out: Tensor,
    base: Tensor | None,
    kernels: list[Tensor],
    scales: Tensor,
    places: list[int],
    identity: list[int],
) -> None:
    """Write the sum into ``out``."""
    slots = slots_for(len(kernels))
    facts = [fact for part in _facts(kernels, places, out.shape) for fact in part]
    facts += [0] * (_FACTS * (slots - len(kernels)))
    channels, taps, inputs = _tile(out)
    _assemble_kernel[(out.shape[0], triton.cdiv(out.shape[1], inputs))](
        out, out if base is None else base, filled(kernels or [out], slots), scales, tuple(facts),
        tuple(out.stride()), tuple((out if base is None else base).stride()), channels,
        identity[0] * out.shape[3] + identity[1] if identity else 0, len(kernels), out.shape[2], out.shape[3],
        base is not None, bool(identity), slots, inputs, taps, num_warps=_warps(inputs * taps),
    )  # fmt: skip


def backward_(
    grads: list[Tensor], along: Tensor, grad: Tensor, kernels: list[Tensor], scales: Tensor, places: list[int]
) -> None:
    """Write the gradients of the kernels and, into rows of ``along``, of their scales."""
    inputs, taps = next_power_of_two(grad.shape[1]), next_power_of_two(grad.shape[2] * grad.shape[3])
    for j, (kernel, out, facts) in enumerate(zip(kernels, grads, _facts(kernels, places, grad.shape), strict=True)):
        spread = bool(places[3 * j + 2])
        own = taps if spread else next_power_of_two(kernel.shape[2] * kernel.shape[3])
        _assemble_backward_kernel[(grad.shape[0],)](
            grad, kernel, out, scales[j], along[j], grad.stride(), out.stride(), *facts[:6], grad.shape[1],
            grad.shape[2], grad.shape[3], kernel.shape[2], kernel.shape[3], own, spread, inputs,
            num_warps=_warps(inputs * own),
        )  # fmt: skip


def fits(kernel: Tensor) -> bool:
    """Whether an output channel of a kernel fits into one program."""
    _, inputs, *size = kernel.shape
    return next_power_of_two(size[0] * size[1]) * next_power_of_two(inputs) <= _LARGEST


def _tile(kernel: Tensor) -> tuple[int, int, int]:
    taps = next_power_of_two(kernel.shape[2] * kernel.shape[3])
    return kernel.shape[1], taps, max(min(_TILE // taps, next_power_of_two(kernel.shape[1])), 1)


def _warps(elements: int) -> int:
    return 4 if elements < 4096 else 8 if elements <= 8192 else 16


def _facts(kernels: list[Tensor], places: list[int], size: torch.Size) -> list[list[int]]:
    """Numbers that describe a part: four strides, its first tap, its size, and what to divide it by."""
    facts = []
    for j, kernel in enumerate(kernels):
        top, left, spread = places[3 * j : 3 * j + 3]
        top, left = (0, 0) if spread else (top, left)
        strides = (kernel.stride(0), kernel.stride(1), *((0, 0) if spread else kernel.stride()[2:]))
        facts.append(
            [*strides, top, left, *(size[2:] if spread else kernel.shape[2:]), size[2:].numel() if spread else 1]
        )
    return facts


@triton.jit(do_not_specialize=["channels", "identity_tap", "count"])
def _assemble_kernel(
    out, base, kernels, scales, facts, out_strides, base_strides, channels, identity_tap, count,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HAS_BASE: tl.constexpr, HAS_IDENTITY: tl.constexpr,
    SLOTS: tl.constexpr, INPUTS: tl.constexpr, TAPS: tl.constexpr,
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
    for j in tl.static_range(SLOTS):
        if j < count:
            r, c = row - facts[9 * j + 4], column - facts[9 * j + 5]
            valid = inside & (r >= 0) & (r < facts[9 * j + 6]) & (c >= 0) & (c < facts[9 * j + 7])
            where = o * facts[9 * j] + i * facts[9 * j + 1] + r * facts[9 * j + 2] + c * facts[9 * j + 3]
            w = tl.load(kernels[j] + where, mask=valid, other=0.0).to(tl.float32)
            total += tl.load(scales + j * tl.num_programs(0) + o) / facts[9 * j + 8] * w
    if HAS_IDENTITY:
        scale = tl.load(scales + count * tl.num_programs(0) + o)
        total += tl.where((i == o % channels) & (t == identity_tap), scale, 0.0)
    where = o * out_strides[0] + i * out_strides[1] + row * out_strides[2] + column * out_strides[3]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["channels", "top", "left"])
def _assemble_backward_kernel(
    grad, kernel, out, scales, along, strides, out_strides, w_output, w_input, w_row, w_column, top, left, channels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr,
    SPREAD: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """The gradient of one part and of its scale, in one output channel."""
    o = tl.program_id(0)
    i = tl.arange(0, INPUTS)[None, :]
    t = tl.arange(0, TAPS)[:, None]
    grad += o * strides[0]
    if SPREAD:
        mask = (t < HEIGHT * WIDTH) & (i < channels)
        where = i * strides[1] + t // WIDTH * strides[2] + t % WIDTH * strides[3]
        g = tl.sum(tl.load(grad + where, mask=mask, other=0.0).to(tl.float32), 0)[None, :] / (HEIGHT * WIDTH)
        mask = i < channels
        at = o * w_output + i * w_input
        to = o * out_strides[0] + i * out_strides[1]
    else:
        mask = (t < ROWS * COLUMNS) & (i < channels)
        row, column = t // COLUMNS, t % COLUMNS
        where = i * strides[1] + (row + top) * strides[2] + (column + left) * strides[3]
        g = tl.load(grad + where, mask=mask, other=0.0).to(tl.float32)
        at = o * w_output + i * w_input + row * w_row + column * w_column
        to = o * out_strides[0] + i * out_strides[1] + row * out_strides[2] + column * out_strides[3]
    w = tl.load(kernel + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(along + o, tl.sum(tl.sum(g * w, 0), 0))
    tl.store(out + to, (tl.load(scales + o) * g).to(out.dtype.element_ty), mask=mask)
