"""`cast_all` as one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096


def copy_all_(out: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy every tensor into its counterpart, which lies in memory alike."""
    sizes = tuple(tensor.numel() for tensor in tensors)
    grid = (triton.cdiv(max(sizes), _TILE), len(tensors))
    _copy_kernel[grid](tuple(tensors), tuple(out), sizes, len(tensors), _TILE, num_warps=8)


@triton.jit
def _copy_kernel(tensors, out, sizes, COUNT: tl.constexpr, TILE: tl.constexpr):
    at = tl.cast(tl.program_id(0), tl.int64) * TILE + tl.arange(0, TILE)
    for k in tl.static_range(COUNT):
        if tl.program_id(1) == k:
            mask = at < sizes[k]
            tl.store(out[k] + at, tl.load(tensors[k] + at, mask=mask).to(out[k].dtype.element_ty), mask=mask)
