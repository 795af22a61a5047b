"""Whether Triton kernels can run, how operators are made of them, and how tensors look to them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

OLDEST_TRITON = (3, 3)
"""The first version whose kernels take tuples of pointers."""


_SLOTS = 8
_reason: str | None = None  # not functools.cache, which torch.compile warns of


@torch.compiler.assume_constant_result  # importing Triton is not a thing to trace
def unavailable() -> str:
    """Why Triton kernels cannot run on this machine's GPUs; empty if they can."""
    global _reason
    if _reason is None:
        _reason = _find_reason()
    return _reason


def _find_reason() -> str:
    try:
        triton = importlib.import_module("triton")
    except ImportError:
        return "Triton is not installed"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        return f"Triton {triton.__version__} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    if torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability() < (7, 0):
        return "this GPU is too old for Triton"
    return ""


def runs_triton(*tensors: Tensor) -> bool:
    """Whether kernels can take these tensors: those of a GPU, or of the CPU where Triton's interpreter is on."""
    if any(tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16) for tensor in tensors):
        return False
    on_gpu = all(tensor.is_cuda for tensor in tensors)
    return (on_gpu or _interpreting()) and not unavailable()


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a function an operator of torch's own kind: opaque to its compiler, safe in CUDA graphs.

    The schema is written out: not every version of torch can read it off the annotations.
    """
    return torch.library.custom_op(f"dyrep::{name}", mutates_args=(), schema=schema)


class Layout(NamedTuple):
    """A tensor ``(batch, channels, *spatial)`` as images x positions x channels, with the strides of each.

    With channels innermost all images are one: their positions follow one another.
    """

    images: int
    positions: int
    channels: int
    image_stride: int
    position_stride: int
    channel_stride: int

    @property
    def channels_inner(self) -> bool:
        """Whether neighbours in memory are channels of one position."""
        return self.channel_stride == 1


def layout_of(x: Tensor) -> Layout:
    """How a dense tensor lies in memory."""
    batch, channels = x.shape[:2]
    positions = x.numel() // max(batch * channels, 1)
    if memory_format_of(x) != torch.contiguous_format:
        return Layout(1, batch * positions, channels, 0, channels, 1)
    return Layout(batch, positions, channels, channels * positions, 1, positions)


def memory_format_of(x: Tensor) -> torch.memory_format:
    """The memory format that a tensor has, or is nearest to."""
    inner = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if inner is not None and x.is_contiguous(memory_format=inner):
        return inner
    return torch.contiguous_format


def slots_for(count: int) -> int:
    """How many tensors a kernel is compiled for that takes any number: few different ones, not one per structure."""
    return -(-max(count, 1) // _SLOTS) * _SLOTS


def filled(tensors: list[Tensor], slots: int) -> tuple[Tensor, ...]:
    """Tensors for all slots; the surplus is not read."""
    return (*tensors, *tensors[:1] * (slots - len(tensors)))


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is not less than a positive number."""
    return 1 << max(value - 1, 0).bit_length()
