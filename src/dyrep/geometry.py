"""What a convolution's hyper-parameters say about where each kernel tap reads its input.

A small kernel stands for a large one with zeros around it: ``1x1`` inside ``3x3`` reads what the centre tap reads.
To run the small kernel by itself the input has to be shifted by the taps left out, which is a smaller padding, or a
crop where the padding is used up. `ConvGeometry` does this bookkeeping once, for any stride, dilation, even kernel
and padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

Pads: TypeAlias = tuple[tuple[int, int], ...]
"""Padding before and after each spatial dimension, first dimension first; negative values crop."""

PLAIN_CONVS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""The convolutions of `torch.nn`, by number of spatial dimensions."""

ConvNd: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class ConvGeometry:
    """The hyper-parameters of one convolution, with padding resolved to numbers.

    Example:
        >>> from torch import nn
        >>> geometry = ConvGeometry.of(nn.Conv2d(8, 8, 3, padding=1))
        >>> geometry.pads_for((1, 1))
        ((0, 0), (0, 0))
    """

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    pads: Pads
    padding_mode: str

    @classmethod
    def of(cls, conv: nn.Module) -> ConvGeometry:
        """Read the geometry of a convolution, ``padding='same'`` and ``'valid'`` included."""
        assert isinstance(conv, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        kernel, dilation = tuple(conv.kernel_size), tuple(conv.dilation)
        if conv.padding == "valid":
            pads: Pads = tuple((0, 0) for _ in kernel)
        elif conv.padding == "same":
            totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
            pads = tuple((total // 2, total - total // 2) for total in totals)
        else:
            pads = tuple((int(p), int(p)) for p in conv.padding)
        return cls(
            in_channels=conv.in_channels,
            out_channels=conv.out_channels,
            kernel_size=kernel,
            stride=tuple(conv.stride),
            dilation=dilation,
            groups=conv.groups,
            pads=pads,
            padding_mode=conv.padding_mode,
        )

    @property
    def ndim(self) -> int:
        """Number of spatial dimensions."""
        return len(self.kernel_size)

    @property
    def point(self) -> tuple[int, ...]:
        """The kernel size of a pointwise convolution in this many dimensions."""
        return (1,) * self.ndim

    @property
    def taps(self) -> int:
        """Number of kernel positions."""
        return math.prod(self.kernel_size)

    @property
    def center(self) -> tuple[int, ...]:
        """The tap that stands for a collapsed dimension; left of the middle for even kernels."""
        return tuple((k - 1) // 2 for k in self.kernel_size)

    @property
    def depthwise(self) -> bool:
        """Whether every output channel reads exactly one input channel of its own."""
        return self.groups == self.in_channels == self.out_channels and self.groups > 1

    @property
    def needs_prepadding(self) -> bool:
        """Whether the padding is more than a number per dimension that every convolution can apply by itself."""
        return self.padding_mode != "zeros" or any(before != after for before, after in self.pads)

    def prepadded(self) -> ConvGeometry:
        """The same convolution over an input that `branch_input` has padded already."""
        return replace(self, pads=tuple((0, 0) for _ in self.pads), padding_mode="zeros")

    def branch_input(self, x: Tensor) -> Tensor:
        """What the branches of this convolution read: the input, batched, and padded once where they cannot do it."""
        if x.dim() == self.ndim + 1:
            x = x.unsqueeze(0)
        if not self.needs_prepadding:
            return x
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, flat(self.pads), mode=mode)

    def output_positions(self, size: Sequence[int]) -> int:
        """How many positions the convolution writes over an input of this spatial size, see `branch_input`."""
        positions = 1  # a loop, because torch.compile does not follow math.prod
        for axis, length in enumerate(size):
            padded = length if self.needs_prepadding else length + sum(self.pads[axis])
            reach = self.dilation[axis] * (self.kernel_size[axis] - 1) + 1
            positions *= max((padded - reach) // self.stride[axis] + 1, 0)
        return positions

    def pads_for(self, kernel: tuple[int, ...], tap: tuple[int, ...] | None = None) -> Pads:
        """Padding that lines a kernel with collapsed dimensions up with ``tap`` (default: `center`) of the full one.

        Args:
            kernel: the small kernel's size; each entry is 1 or this convolution's own.
            tap: where in the full kernel the collapsed dimensions sit.
        """
        pads = []
        for axis, size in enumerate(kernel):
            before, after = self.pads[axis]
            if size != self.kernel_size[axis]:
                position = (self.center if tap is None else tap)[axis]
                before -= position * self.dilation[axis]
                after -= (self.kernel_size[axis] - 1 - position) * self.dilation[axis]
            pads.append((before, after))
        return tuple(pads)

    @property
    def identity_tap(self) -> tuple[int, ...] | None:
        """The tap that reads the very position being written, or None where there is no such tap."""
        tap = []
        for (before, after), k, s, d in zip(self.pads, self.kernel_size, self.stride, self.dilation, strict=True):
            if s != 1 or before + after != d * (k - 1) or before % d:
                return None
            tap.append(before // d)
        return tuple(tap)


def pad_or_crop(x: Tensor, pads: Pads) -> Tensor:
    """Pad with zeros where an amount is positive, crop where it is negative."""
    amounts = flat(pads)
    if any(amount > 0 for amount in amounts):  # before cropping: a crop may be larger than the image
        x = F.pad(x, [max(amount, 0) for amount in amounts])
    if any(amount < 0 for amount in amounts):
        x = F.pad(x, [min(amount, 0) for amount in amounts])
    return x


def flat(pads: Pads) -> list[int]:
    """Padding in the order `torch.nn.functional.pad` wants: last dimension first."""
    return [amount for pair in reversed(pads) for amount in pair]
