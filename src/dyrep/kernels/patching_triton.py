"""`patches` as a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 64, 64


def write_patches_(
    out: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> None:
    """Write all patches of ``x`` into ``out``, whose channels are innermost."""
    rows = out.numel() // out.shape[1]
    _patches_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(out.shape[1], _COLUMNS))](
        x, out, rows, x.shape[1] * kernel[0] * kernel[1], out.shape[1], *x.shape[2:], *out.shape[2:], *x.stride(),
        *kernel, *stride, *padding, *dilation, _ROWS, _COLUMNS,
    )  # fmt: skip


@triton.jit
def _patches_kernel(
    x, out, rows, entries, columns, height, width, out_height, out_width, x_image, x_channel, x_row, x_column,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    image = position // (out_height * out_width)
    top = (position // out_width) % out_height * SH - PH
    left = position % out_width * SW - PW
    entry = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = top[:, None] + (entry // KW % KH * DH)[None, :]
    column = left[:, None] + (entry % KW * DW)[None, :]
    mask = (position < rows)[:, None] & (entry < columns)[None, :]
    valid = mask & (entry < entries)[None, :] & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    where = image.to(tl.int64)[:, None] * x_image + (entry // (KH * KW))[None, :] * x_channel
    value = tl.load(x + where + row * x_row + column * x_column, mask=valid, other=0.0)
    tl.store(out + position.to(tl.int64)[:, None] * columns + entry[None, :], value, mask=mask)
