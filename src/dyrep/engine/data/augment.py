"""How training images are varied, and what both loaders do to pixels in the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dyrep.checking import is_number, require, require_whole

Crop = Literal["none", "pad", "resized"]
CROPS: tuple[Crop, ...] = get_args(Crop)
PADDING = 4
"""Pixels on each side of an image that is padded before it is cropped: what is usual for CIFAR."""


@dataclass(frozen=True)
class Augmentation:
    """Random changes of training images. The default is none.

    Attributes:
        crop: "none", "pad" (pad with black and cut out at random) or "resized" (cut out a random part and resize it).
        padding: pixels on each side for crop="pad".
        flip: mirror every second image, at random.
        cutout: side of a square, anywhere in the image, that is set to the mean; 0 for none. Part of it may be outside.
        color_jitter: strength of random brightness, contrast and saturation.
        auto_augment: the AutoAugment policy of ImageNet.

    Raises:
        ConfigError: a setting outside its range.

    Example:
        >>> Augmentation(crop="pad", flip=True).files_only()
        ()
        >>> Augmentation(crop="resized", color_jitter=0.4).files_only()
        ("crop='resized'", 'color_jitter=0.4')
    """

    crop: Crop = "none"
    padding: int = PADDING
    flip: bool = False
    cutout: int = 0
    color_jitter: float = 0.0
    auto_augment: bool = False

    def __post_init__(self) -> None:
        require("crop", self.crop, f"one of {', '.join(CROPS)}", self.crop in CROPS)
        for name in ("padding", "cutout"):
            require_whole(name, getattr(self, name), 0)
        for name in ("flip", "auto_augment"):
            require(name, getattr(self, name), "True or False", isinstance(getattr(self, name), bool))
        jitter = self.color_jitter
        fine = is_number(jitter, 0) and jitter < float("inf")
        require("color_jitter", jitter, "a number of at least 0", fine)

    def files_only(self) -> tuple[str, ...]:
        """The settings in use that need image files, one by one, rather than a data set in memory."""
        return tuple(
            f"{name}={getattr(self, name)!r}"
            for name, used in (
                ("crop", self.crop == "resized"),
                ("color_jitter", self.color_jitter > 0),
                ("auto_augment", self.auto_augment),
            )
            if used
        )


class Finish:
    """Turns pixels into what a network eats, on the device: float32, normalised, with squares cut out.

    Everything it needs is on the device from the start, so that it neither waits for the device nor copies to it, and
    can be captured in a CUDA graph.

    Args:
        mean: of every channel, for values in 0..1.
        std: standard deviation of every channel.
        height: of the images.
        width: of the images.
        cutout: side of the square that is set to zero; 0 for none.
        device: where to work.
        channels_last: memory layout of the result.

    Example:
        >>> finish = Finish((0.5,), (0.5,), height=4, width=4, cutout=2, device="cpu")
        >>> finish(torch.full((1, 4, 4, 1), 255, dtype=torch.uint8), torch.tensor([[0, 2]]))[0, 0, :2]
        tensor([[1., 0., 0., 1.],
                [1., 1., 1., 1.]])
    """

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        height: int,
        width: int,
        cutout: int,
        device: torch.device | str,
        channels_last: bool = False,
    ) -> None:
        self._mean = 255 * torch.tensor(mean, dtype=torch.float32, device=device)
        self._scale = 1 / (255 * torch.tensor(std, dtype=torch.float32, device=device))
        self._rows, self._columns = (_windows(cutout, side).to(device) for side in (height, width))
        self._layout = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, pixels: Tensor, centres: Tensor | None) -> Tensor:
        """Images [b, C, H, W] of pixels uint8 [b, H, W, C] and the centres [b, 2] of squares to cut out."""
        values = (pixels - self._mean).mul_(self._scale)
        if centres is not None:
            row, column = centres.unbind(1)
            hidden = self._rows[row][:, :, None, None] & self._columns[column][:, None, :, None]
            values.masked_fill_(hidden, 0.0)
        return values.permute(0, 3, 1, 2).to(memory_format=self._layout)


def _windows(length: int, side: int) -> Tensor:
    """Bool [side, side]: for every centre, the positions within a window of this length around it."""
    position = torch.arange(side)
    first = position[:, None] - length // 2
    return (position >= first) & (position < first + length)
