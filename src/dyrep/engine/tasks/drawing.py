"""Predictions as pictures: boxes and label maps, truth beside what was found."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dyrep.engine.data.folders import IMAGENET_MEAN, IMAGENET_STD
from dyrep.engine.data.masks import IGNORED
from dyrep.extras import needed
from dyrep.files import replacing

if TYPE_CHECKING:
    from PIL.Image import Image

_SMALLEST = 320  # width to which small images are enlarged, by whole factors
_LARGEST = 640  # width to which large ones are made smaller, or a sheet of photographs would take many megabytes
_TEXT, _GAP, _LINE = 13, 8, 20
_GREY = (60, 60, 60)


def colour(label: int) -> tuple[int, int, int]:
    """The colour of a class, the same in all pictures; neighbours in number are far apart in hue.

    Example:
        >>> colour(0) != colour(1)
        True
    """
    hue, brightness = (label * 0.381966) % 1, (1.0, 0.72)[label // 8 % 2]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.75, brightness)
    return round(255 * red), round(255 * green), round(255 * blue)


def pixels_of(image: Tensor) -> Image:
    """A picture of an image that was normalised with ImageNet's mean and deviation."""
    mean, std = (torch.tensor(value)[:, None, None] for value in (IMAGENET_MEAN, IMAGENET_STD))
    return _picture(image.cpu().float() * std + mean)


def labels_drawn(labels: Tensor) -> Image:
    """A picture of a label map [H, W] with a colour for every class, and black for what does not count."""
    table = np.array([colour(label) for label in range(256)], np.uint8)
    table[IGNORED] = 0
    return _resized(_pillow("Image").fromarray(table[labels.cpu().numpy().astype(np.uint8)]), smooth=False)


def boxes_drawn(
    image: Tensor, boxes: Tensor, labels: Tensor, classes: Sequence[str], scores: Tensor | None = None
) -> Image:
    """A picture of an image [3, H, W] (values 0..1) with boxes, each with its class and, if given, its score."""
    picture = _picture(image.cpu().float())
    factor = picture.width / image.shape[-1]
    draw, font = _pillow("ImageDraw").Draw(picture), _font()
    for place, (box, label) in enumerate(zip(boxes.tolist(), labels.tolist(), strict=True)):
        ink = colour(int(label) - 1)
        left, top, right, bottom = (value * factor for value in box)
        draw.rectangle((left, top, right, bottom), outline=ink, width=2)
        score = "" if scores is None else f" {float(scores[place]):.2f}"
        words = f"{classes[int(label) - 1]}{score}"
        spot = (left + 2, max(top - _TEXT - 2, 0))
        draw.rectangle(draw.textbbox(spot, words, font=font), fill=ink)
        draw.text(spot, words, fill="white" if sum(ink) < 400 else "black", font=font)
    return picture


def write_sheet(file: Path, rows: Sequence[Sequence[Image]], titles: Sequence[str], classes: Sequence[str]) -> None:
    """Write pictures in rows and columns as a PNG, atomically, with titles above and the colours of classes below."""
    widths = [max(row[column].width for row in rows) for column in range(len(titles))]
    heights = [max(picture.height for picture in row) for row in rows]
    width = sum(widths) + _GAP * (len(widths) + 1)
    legend = _legend(classes, width)
    height = _LINE + sum(heights) + _GAP * (len(heights) + 1) + _LINE * (1 + max(line for line, _, _ in legend))
    sheet = _pillow("Image").new("RGB", (width, height), "white")
    draw, font = _pillow("ImageDraw").Draw(sheet), _font()
    left = _GAP
    for column, title in enumerate(titles):
        draw.text((left, 4), title, fill=_GREY, font=font)
        top = _LINE + _GAP
        for row, tall in zip(rows, heights, strict=True):
            sheet.paste(row[column], (left, top))
            top += tall + _GAP
        left += widths[column] + _GAP
    top = _LINE + sum(heights) + _GAP * (len(heights) + 1)
    for label, (line, start, name) in enumerate(legend):
        draw.rectangle((start, top + _LINE * line, start + 12, top + _LINE * line + 12), fill=colour(label))
        draw.text((start + 17, top + _LINE * line - 1), name, fill=_GREY, font=font)
    with replacing(file) as temporary:
        sheet.save(temporary, format="PNG")


def _legend(classes: Sequence[str], width: int) -> list[tuple[int, int, str]]:
    """Line, distance from the left and name of every class."""
    found, line, left = [], 0, _GAP
    for name in classes:
        long = 17 + round(_font().getlength(name)) + 2 * _GAP
        if left + long > width and left > _GAP:
            line, left = line + 1, _GAP
        found.append((line, left, name))
        left += long
    return found


def _picture(values: Tensor) -> Image:
    pixels = (values.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return _resized(_pillow("Image").fromarray(pixels), smooth=True)


def _resized(picture: Image, *, smooth: bool) -> Image:
    """A picture of a width that is good to look at."""
    factor: float = max(1, -(-_SMALLEST // picture.width))
    if picture.width > _LARGEST:
        factor = _LARGEST / picture.width
    ways = _pillow("Image").Resampling
    how = ways.BICUBIC if smooth else ways.NEAREST
    return picture.resize((round(picture.width * factor), max(round(picture.height * factor), 1)), how)


def _font() -> Any:
    return _pillow("ImageFont").load_default(size=_TEXT)


def _pillow(part: str) -> Any:
    return needed(f"PIL.{part}", "drawing predictions")
