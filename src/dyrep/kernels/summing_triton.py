"""`normalised_sum` as Triton kernels: two passes over the terms forward, two backward, sums in a fixed order.

No kernel adds atomically: each block of rows writes its own partial sums, which one more small kernel adds up. Results
are the same from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dyrep.kernels.availability import Layout, filled, layout_of, next_power_of_two, slots_for

_PROGRAMS = 512  # enough to fill a large GPU several times over
_TILE = 2048  # elements that one program holds of a tensor at a time
_FINISH = (64, 32)  # rows and columns of the kernels that add partial sums up
# numbers whose value tells a compiler nothing of use: without this it would compile for ones and multiples of 16 apart
_ANY = ["images", "positions", "images_each", "positions_each", "chunks", "count", "size", "eps", "share"]


def statistics(terms: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel of every term, each of shape ``(terms, channels)``."""
    layout = layout_of(terms[0])
    rows, columns = _tile(layout)
    split = _split(layout, rows, columns)
    like: dict[str, Any] = {"device": terms[0].device, "dtype": torch.float32}
    partial = torch.empty(len(terms), 2, split.chunks, layout.channels, **like)
    pivots, mean, var = (torch.empty(len(terms), layout.channels, **like) for _ in range(3))
    grid, slots = (split.chunks, triton.cdiv(layout.channels, columns)), slots_for(len(terms))
    _statistics_kernel[grid](
        filled(terms, slots), pivots, partial, *layout, *split.per_chunk, split.chunks, len(terms), slots, rows,
        columns,
    )  # fmt: skip
    _finish_statistics_kernel[(len(terms), triton.cdiv(layout.channels, _FINISH[1]))](
        pivots, partial, mean, var, layout.channels, split.chunks, float(layout.images * layout.positions), *_FINISH
    )
    return mean, var


def weighted_sum(
    base: Tensor | None, terms: list[Tensor], gamma: Tensor, beta: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """The sum itself, statistics given."""
    like = terms[0] if base is None else base
    layout = layout_of(like)
    out = torch.empty_like(like)
    rows, columns = _tile(layout)
    grid = (layout.images * triton.cdiv(layout.positions, rows), triton.cdiv(layout.channels, columns))
    _weighted_sum_kernel[grid](
        like if base is None else base, tuple(terms), out, gamma, gamma if beta is None else beta, mean, var, eps,
        *layout, base is not None, beta is not None, len(terms), rows, columns,
    )  # fmt: skip
    return out


def backward(
    grad: Tensor, terms: list[Tensor], gamma: Tensor, mean: Tensor, var: Tensor, eps: float, shift: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of the terms, of γ and of β."""
    layout = layout_of(grad)
    rows, columns = _tile(layout)
    split = _split(layout, rows, columns)
    like: dict[str, Any] = {"device": grad.device, "dtype": torch.float32}
    sums_wanted = len(terms) + shift
    partial = torch.empty(sums_wanted, split.chunks, layout.channels, **like)
    sums = torch.empty(len(terms) + 1, layout.channels, **like)
    along_gamma = torch.empty_like(mean)
    grid, slots = (split.chunks, triton.cdiv(layout.channels, columns)), slots_for(sums_wanted)
    _reduce_kernel[grid](
        grad, filled(terms, slots), mean, partial, *layout, *split.per_chunk, split.chunks, len(terms), shift, slots,
        rows, columns,
    )  # fmt: skip
    _finish_reduce_kernel[(sums_wanted, triton.cdiv(layout.channels, _FINISH[1]))](
        partial, var, sums, along_gamma, eps, layout.channels, split.chunks, len(terms), *_FINISH
    )
    grads = [torch.empty_like(term) for term in terms]
    grid = (layout.images * triton.cdiv(layout.positions, rows), triton.cdiv(layout.channels, columns))
    _apply_kernel[grid](
        grad, tuple(terms), tuple(grads), gamma, mean, var, sums, eps, 1.0 / (layout.images * layout.positions),
        *layout, shift, len(terms), rows, columns,
    )  # fmt: skip
    return grads, along_gamma, sums[-1]


def plain_sum(tensors: list[Tensor]) -> Tensor:
    """The sum of tensors that lie in memory alike, in the dtype of the first."""
    out = torch.empty_like(tensors[0])
    _plain_sum_kernel[(triton.cdiv(out.numel(), _TILE),)](tuple(tensors), out, out.numel(), len(tensors), _TILE)
    return out


class _Split:
    """How rows are shared out between programs: so many images, or so many positions of one image, to each."""

    def __init__(self, images_each: int, positions_each: int, chunks: int) -> None:
        self.per_chunk = (images_each, positions_each)
        self.chunks = chunks


def _split(layout: Layout, rows: int, columns: int) -> _Split:
    wanted = max(_PROGRAMS // triton.cdiv(layout.channels, columns), 1)
    if layout.images >= layout.positions:
        each = triton.cdiv(layout.images, min(wanted, layout.images))
        return _Split(each, layout.positions, triton.cdiv(layout.images, each))
    per_image = max(wanted // layout.images, 1)
    each = triton.cdiv(triton.cdiv(layout.positions, rows), per_image) * rows
    return _Split(1, each, layout.images * triton.cdiv(layout.positions, each))


def _tile(layout: Layout) -> tuple[int, int]:
    """Rows (positions) and columns (channels) of a tile: long along what is contiguous in memory."""
    if layout.channels_inner:
        columns = min(max(next_power_of_two(layout.channels), 16), 64)
        return _TILE // columns, columns
    rows = min(next_power_of_two(layout.positions), 1024)
    return rows, max(min(_TILE // rows, next_power_of_two(layout.channels), 8), 1)


@triton.jit(do_not_specialize=_ANY)
def _statistics_kernel(
    terms, pivots, partial, images, positions, channels, image_stride, position_stride, channel_stride,
    images_each, positions_each, chunks, count,
    TERMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of y - pivot and of its square, per chunk of rows; the pivot is the first value of each channel."""
    chunk = tl.program_id(0)
    per_image = tl.cdiv(positions, positions_each)
    first_image = (chunk // per_image) * images_each
    first = (chunk % per_image) * positions_each
    last = tl.minimum(first + positions_each, positions)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < channels
    for j in tl.static_range(TERMS):
        if j < count:
            pivot = tl.load(terms[j] + channel * channel_stride, mask=inside, other=0.0).to(tl.float32)
            if chunk == 0:
                tl.store(pivots + j * channels + channel, pivot, mask=inside)
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            square = tl.zeros((ROWS, COLUMNS), tl.float32)
            for image in range(first_image, tl.minimum(first_image + images_each, images)):
                start = terms[j] + tl.cast(image, tl.int64) * image_stride
                for row in range(first, last, ROWS):
                    position = row + tl.arange(0, ROWS)
                    mask = (position < last)[:, None] & inside[None, :]
                    where = position.to(tl.int64)[:, None] * position_stride + channel[None, :] * channel_stride
                    y = tl.load(start + where, mask=mask, other=0.0).to(tl.float32)
                    y = tl.where(mask, y - pivot[None, :], 0.0)
                    total += y
                    square += y * y
            out = partial + (j * 2 * chunks + chunk) * channels + channel
            tl.store(out, tl.sum(total, 0), mask=inside)
            tl.store(out + chunks * channels, tl.sum(square, 0), mask=inside)


@triton.jit(do_not_specialize=_ANY)
def _finish_statistics_kernel(
    pivots, partial, mean, var, channels, chunks, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    j = tl.program_id(0)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < channels
    total = _add_up(partial + j * 2 * chunks * channels, channel, channels, chunks, ROWS, COLUMNS) / size
    square = _add_up(partial + (j * 2 + 1) * chunks * channels, channel, channels, chunks, ROWS, COLUMNS) / size
    pivot = tl.load(pivots + j * channels + channel, mask=inside, other=0.0)
    tl.store(mean + j * channels + channel, pivot + total, mask=inside)
    tl.store(var + j * channels + channel, tl.maximum(square - total * total, 0.0), mask=inside)


@triton.jit
def _add_up(start, channel, channels, chunks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(0, chunks, ROWS):
        chunk = row + tl.arange(0, ROWS)
        mask = (chunk < chunks)[:, None] & (channel < channels)[None, :]
        total += tl.load(start + chunk[:, None] * channels + channel[None, :], mask=mask, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=_ANY)
def _weighted_sum_kernel(
    base, terms, out, gamma, beta, mean, var, eps,
    images, positions, channels, image_stride, position_stride, channel_stride,
    HAS_BASE: tl.constexpr, SHIFT: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    per_image = tl.cdiv(positions, ROWS)
    image = tl.program_id(0) // per_image
    position = (tl.program_id(0) % per_image) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < channels
    mask = (position < positions)[:, None] & inside[None, :]
    where = tl.cast(image, tl.int64) * image_stride
    where += position.to(tl.int64)[:, None] * position_stride + channel[None, :] * channel_stride
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if HAS_BASE:
        total += tl.load(base + where, mask=mask, other=0.0).to(tl.float32)
    if SHIFT:
        total += tl.load(beta + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(TERMS):
        y = tl.load(terms[j] + where, mask=mask, other=0.0).to(tl.float32)
        at = j * channels + channel
        scale = tl.load(gamma + at, mask=inside, other=0.0).to(tl.float32)
        scale *= tl.rsqrt(tl.load(var + at, mask=inside, other=1.0) + eps)
        if SHIFT:
            y -= tl.load(mean + at, mask=inside, other=0.0)[None, :]
        total += scale[None, :] * y
    tl.store(out + where, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_ANY)
def _reduce_kernel(
    grad, terms, mean, partial, images, positions, channels, image_stride, position_stride, channel_stride,
    images_each, positions_each, chunks, count,
    SHIFT: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σ g·y_j (with a shift, of y_j - μ_j) for every term, and then Σ g, per chunk of rows.

    The terms come one after another: the second and further readings of g find it in the cache.
    """
    chunk = tl.program_id(0)
    per_image = tl.cdiv(positions, positions_each)
    first_image = (chunk // per_image) * images_each
    first = (chunk % per_image) * positions_each
    last = tl.minimum(first + positions_each, positions)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < channels
    for j in tl.static_range(TERMS):
        if j < count + SHIFT:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            centre = tl.zeros((COLUMNS,), tl.float32)
            if SHIFT:
                centre = tl.load(mean + tl.where(j < count, j, 0) * channels + channel, mask=inside, other=0.0)
            for image in range(first_image, tl.minimum(first_image + images_each, images)):
                offset = tl.cast(image, tl.int64) * image_stride
                for row in range(first, last, ROWS):
                    position = row + tl.arange(0, ROWS)
                    mask = (position < last)[:, None] & inside[None, :]
                    where = position.to(tl.int64)[:, None] * position_stride + channel[None, :] * channel_stride
                    g = tl.load(grad + offset + where, mask=mask, other=0.0).to(tl.float32)
                    # what comes after the terms is the sum of g alone: as if y were one
                    y = tl.load(terms[j] + offset + where, mask=mask, other=0.0).to(tl.float32)
                    total += g * tl.where(j < count, y - centre[None, :], 1.0)
            tl.store(partial + (j * chunks + chunk) * channels + channel, tl.sum(total, 0), mask=inside)


@triton.jit(do_not_specialize=_ANY)
def _finish_reduce_kernel(
    partial, var, sums, along_gamma, eps, channels, chunks, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    j = tl.program_id(0)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < channels
    total = _add_up(partial + j * chunks * channels, channel, channels, chunks, ROWS, COLUMNS)
    tl.store(sums + j * channels + channel, total, mask=inside)
    if j < count:
        rstd = tl.rsqrt(tl.load(var + j * channels + channel, mask=inside, other=1.0) + eps)
        tl.store(along_gamma + j * channels + channel, total * rstd, mask=inside)


@triton.jit(do_not_specialize=_ANY)
def _apply_kernel(
    grad, terms, grads, gamma, mean, var, sums, eps, share,
    images, positions, channels, image_stride, position_stride, channel_stride,
    SHIFT: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    per_image = tl.cdiv(positions, ROWS)
    image = tl.program_id(0) // per_image
    position = (tl.program_id(0) % per_image) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < channels
    mask = (position < positions)[:, None] & inside[None, :]
    where = tl.cast(image, tl.int64) * image_stride
    where += position.to(tl.int64)[:, None] * position_stride + channel[None, :] * channel_stride
    g = tl.load(grad + where, mask=mask, other=0.0).to(tl.float32)
    if SHIFT:
        g -= (tl.load(sums + TERMS * channels + channel, mask=inside, other=0.0) * share)[None, :]
    for j in tl.static_range(TERMS):
        at = j * channels + channel
        rstd = tl.rsqrt(tl.load(var + at, mask=inside, other=1.0) + eps)
        scale = tl.load(gamma + at, mask=inside, other=0.0).to(tl.float32) * rstd
        pull = scale * tl.load(sums + at, mask=inside, other=0.0) * rstd * rstd * share
        centre = tl.load(mean + at, mask=inside, other=0.0)
        y = tl.load(terms[j] + where, mask=mask, other=0.0).to(tl.float32)
        change = scale[None, :] * g - pull[None, :] * (y - centre[None, :])
        tl.store(grads[j] + where, change.to(grads[j].dtype.element_ty), mask=mask)


@triton.jit
def _plain_sum_kernel(tensors, out, size, COUNT: tl.constexpr, TILE: tl.constexpr):
    at = tl.cast(tl.program_id(0), tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for k in tl.static_range(COUNT):
        total += tl.load(tensors[k] + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)
