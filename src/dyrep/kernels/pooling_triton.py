"""`average_pool` and its transpose as one Triton kernel that gathers: nothing is written twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dyrep.kernels.availability import memory_format_of, next_power_of_two
from dyrep.kernels.pooling import pooled_size

_TILE = 1024


def pool(x: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    """Average over windows."""
    size = [pooled_size(*sizes) for sizes in zip(x.shape[2:], kernel, stride, padding, strict=True)]
    return _gather(x, size, kernel, stride, padding, transposed=False)


def spread(grad: Tensor, size: list[int], kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    """Give every input of size ``size`` its share of the gradients of the windows it was in."""
    return _gather(grad, size, kernel, stride, padding, transposed=True)


def _gather(
    x: Tensor, size: list[int], kernel: list[int], stride: list[int], padding: list[int], transposed: bool
) -> Tensor:
    batch, channels = x.shape[:2]
    out = torch.empty((batch, channels, *size), dtype=x.dtype, device=x.device, memory_format=memory_format_of(x))
    inner = x.stride(1) == 1
    columns = min(next_power_of_two(channels), 64 if inner else 4)
    rows = max(min(_TILE // columns, next_power_of_two(size[0] * size[1])), 1)
    grid = (batch * triton.cdiv(size[0] * size[1], rows), triton.cdiv(channels, columns))
    _average_kernel[grid](
        x, out, channels, *x.shape[2:], *size, *x.stride(), *out.stride(),
        *kernel, *stride, *padding, transposed, rows, columns,
    )  # fmt: skip
    return out


@triton.jit
def _average_kernel(
    x, out, channels, height, width, out_height, out_width,
    x_image, x_channel, x_row, x_column, out_image, out_channel, out_row, out_column,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    per_image = tl.cdiv(out_height * out_width, ROWS)
    image = (tl.program_id(0) // per_image).to(tl.int64)
    position = (tl.program_id(0) % per_image) * ROWS + tl.arange(0, ROWS)
    row, column = position // out_width, position % out_width
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (position < out_height * out_width)[:, None] & (channel < channels)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    start = x + image * x_image + channel[None, :] * x_channel
    for kh in tl.static_range(KH):
        for kw in tl.static_range(KW):
            if TRANSPOSED:
                r, c = row + PH - kh, column + PW - kw
                valid = (r % SH == 0) & (c % SW == 0) & (r >= 0) & (c >= 0)
                r, c = r // SH, c // SW
                valid = valid & (r < height) & (c < width)
            else:
                r, c = row * SH - PH + kh, column * SW - PW + kw
                valid = (r >= 0) & (r < height) & (c >= 0) & (c < width)
            where = r[:, None] * x_row + c[:, None] * x_column
            total += tl.load(start + where, mask=inside & valid[:, None], other=0.0).to(tl.float32)
    where = row[:, None] * out_row + column[:, None] * out_column + channel[None, :] * out_channel
    tl.store(out + image * out_image + where, (total / (KH * KW)).to(out.dtype.element_ty), mask=inside)
