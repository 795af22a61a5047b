"""`second_moments` as a Triton kernel: xᵀx with float32 sums, the rows shared out between programs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dyrep.kernels.availability import layout_of, next_power_of_two

_PROGRAMS = 528  # four for each processor of a large GPU


def second_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of x and of x xᵀ over all rows."""
    layout = layout_of(x)
    columns = min(max(next_power_of_two(layout.channels), 16), 64)
    rows = 64
    tiles = triton.cdiv(layout.channels, columns)
    blocks = layout.images * triton.cdiv(layout.positions, rows)
    splits = max(min(_PROGRAMS // (tiles * tiles), blocks), 1)
    like: dict[str, Any] = {"device": x.device, "dtype": torch.float32}
    second = torch.empty(splits, layout.channels, layout.channels, **like)
    total = torch.empty(splits, layout.channels, **like)
    _second_moments_kernel[(tiles * tiles, splits)](x, second, total, *layout, blocks, tiles, rows, columns)
    count = layout.images * layout.positions
    return total.sum(0).div_(count), second.sum(0).div_(count)


@triton.jit
def _second_moments_kernel(
    x, second, total, images, positions, channels, image_stride, position_stride, channel_stride, blocks, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    left = (tile // tiles) * COLUMNS + tl.arange(0, COLUMNS)
    right = (tile % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    per_image = tl.cdiv(positions, ROWS)
    if tile // tiles > tile % tiles:
        return  # the matrix is symmetric: the program of the tile opposite writes this one too
    product = tl.zeros((COLUMNS, COLUMNS), tl.float32)
    added = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(split, blocks, tl.num_programs(1)):
        position = (block % per_image) * ROWS + tl.arange(0, ROWS)
        start = (
            x + tl.cast(block // per_image, tl.int64) * image_stride + position.to(tl.int64)[:, None] * position_stride
        )
        inside = (position < positions)[:, None]
        a = tl.load(start + left[None, :] * channel_stride, mask=inside & (left < channels)[None, :], other=0.0)
        b = tl.load(start + right[None, :] * channel_stride, mask=inside & (right < channels)[None, :], other=0.0)
        product = tl.dot(tl.trans(a), b, acc=product, input_precision="ieee")
        added += a.to(tl.float32)
    mask = (left < channels)[:, None] & (right < channels)[None, :]
    out = second + split.to(tl.int64) * channels * channels
    tl.store(out + left[:, None] * channels + right[None, :], product, mask=mask)
    if tile // tiles < tile % tiles:
        tl.store(out + right[None, :] * channels + left[:, None], product, mask=mask)
    if tile // tiles == tile % tiles:
        tl.store(total + split * channels + left, tl.sum(added, 0), mask=left < channels)
