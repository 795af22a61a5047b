"""What a data set of boxes is once its annotations are read, and what is wrong with boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dyrep.engine.data.pictures import held_out
from dyrep.engine.data.splits import DataError
from dyrep.errors import ConfigError


@dataclass(frozen=True)
class BoxFiles:
    """A split: images on disk, and the boxes in them.

    Attributes:
        paths: one file per image.
        boxes: of every image, float32 [n, 4]: left, top, right, bottom in pixels.
        labels: of every image, int64 [n], from 1 on; 0 is the background.
        crowd: of every image, bool [n]: regions that are neither learnt nor counted (COCO's crowds, VOC's difficult).
        sizes: width and height of every image, as the annotations have it.
    """

    paths: tuple[str, ...]
    boxes: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    crowd: tuple[Tensor, ...]
    sizes: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, places: Tensor) -> BoxFiles:
        """Some of the images."""
        chosen = places.tolist()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return BoxFiles(**{name: tuple(part[place] for place in chosen) for name, part in values.items()})


@dataclass(frozen=True)
class BoxSource:
    """A data set.

    Attributes:
        train: the split to train on.
        val: the split to look at while training, if the data set has one besides that to test on.
        test: the split to test on.
        classes: name of every label, from label 1 on.
        notes: what a person should know about the annotations.
    """

    train: BoxFiles
    val: BoxFiles | None
    test: BoxFiles
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()


class BoxCollector:
    """Puts a split together, image by image, leaving out boxes that have no area inside their image.

    Args:
        where: what is read, for messages.

    Attributes:
        empty: how many boxes were left out.
        example: one image with such a box.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._rows: list[tuple[str, Tensor, Tensor, Tensor, tuple[int, int]]] = []
        self.empty, self.example = 0, ""

    def add(
        self, path: str, size: tuple[int, int], boxes: Sequence[Sequence[float]], labels: Sequence[int], crowd: Any
    ) -> None:
        """Add an image of some width and height."""
        found = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
        if not torch.isfinite(found).all():
            raise DataError(f"{self._where}: a box of {path} has a coordinate that is not finite: {boxes}")
        width, height = size
        found[:, 0::2] = found[:, 0::2].clamp(0, width)
        found[:, 1::2] = found[:, 1::2].clamp(0, height)
        good = (found[:, 2:] > found[:, :2]).all(1)
        if not good.all():
            self.empty += int((~good).sum())
            self.example = self.example or path
        kept = torch.tensor(labels, dtype=torch.int64)[good], torch.tensor(crowd, dtype=torch.bool)[good]
        self._rows.append((path, found[good], *kept, size))

    def split(self) -> BoxFiles:
        """All images so far.

        Raises:
            DataError: there are none.
        """
        if not self._rows:
            raise DataError(f"{self._where} has no images")
        paths, boxes, labels, crowd, sizes = zip(*self._rows, strict=True)
        return BoxFiles(paths, boxes, labels, crowd, sizes)


def emptied(collectors: Sequence[BoxCollector]) -> tuple[str, ...]:
    """A note of the boxes that were left out."""
    count = sum(collector.empty for collector in collectors)
    if not count:
        return ()
    example = next(collector.example for collector in collectors if collector.example)
    boxes = "box was" if count == 1 else "boxes were"
    return (f"{count} empty {boxes} left out (one in {example})",)


def divided(source: Any, val_split: float) -> Any:
    """A source of which some training images are held out, if asked for.

    Raises:
        ConfigError: it has images to look at already, or the number is out of range.
    """
    if not val_split:
        return source
    if source.val is not None:
        raise ConfigError(f"val_split={val_split:g}: this data set has a val split of its own; leave it out")
    if val_split >= 1 and val_split != int(val_split):
        raise ConfigError(f"val_split={val_split!r}: must be 0, a share below 1, or a whole number of images")
    total = len(source.train)
    rest, held = held_out(int(val_split) if val_split >= 1 else max(1, round(val_split * total)), total)
    return replace(source, train=source.train.take(rest), val=source.train.take(held))
