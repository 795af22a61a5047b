"""What a data set of boxes is once its annotations are read, and what is wrong with boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dyrep.engine.data.decoded import image_sizes
from dyrep.errors import DataError


@dataclass(frozen=True)
class BoxFiles:
    """A split: images on disk, and the boxes in them.

    Attributes:
        paths: one file per image.
        boxes: of every image, float32 [n, 4]: left, top, right, bottom in pixels.
        labels: of every image, int64 [n], from 1 on; 0 is the background.
        crowd: of every image, bool [n]: regions that are neither learnt nor counted (COCO's crowds, VOC's difficult).
        sizes: width and height of every image file.
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
        name: of the split, for messages.
        where: what is read, for messages.

    Attributes:
        empty: how many boxes were left out.
        example: one image with such a box.
    """

    def __init__(self, name: str, where: str) -> None:
        self._name, self._where = name, where
        self._rows: list[_Row] = []
        self.empty, self.example = 0, ""

    def add(
        self,
        path: str,
        annotation: str,
        stated: tuple[float, float],
        boxes: Sequence[Sequence[float]],
        labels: Sequence[int],
        crowd: Sequence[bool],
    ) -> None:
        """Add an image.

        Args:
            path: its file.
            annotation: where its boxes are from, for messages.
            stated: width and height by the annotation; 0 is one that it does not know.
            boxes: left, top, right and bottom of each.
            labels: of the boxes.
            crowd: whether each is neither learnt nor counted.
        """
        found = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
        if not torch.isfinite(found).all():
            raise DataError(f"{annotation}: a box of {path} has a coordinate that is not finite: {boxes}")
        numbers = torch.tensor(labels, dtype=torch.int64), torch.tensor(crowd, dtype=torch.bool)
        self._rows.append(_Row(path, annotation, stated, found, *numbers))

    def split(self, workers: int = 4) -> BoxFiles:
        """All images so far, boxes clipped to them.

        Sizes are those of the files: boxes clipped by a wrong one of the annotation would be lost without a word.

        Args:
            workers: threads that look at the files.

        Raises:
            DataError: there are no images or no boxes, or an image is not there, or not of the size it should be.
        """
        if not self._rows:
            raise DataError(f"{self._where} has no images")
        sizes = image_sizes([row.path for row in self._rows], workers)
        kept = [self._clipped(row, size) for row, size in zip(self._rows, sizes, strict=True)]
        if not any((~crowd).any() for _, _, crowd in kept):
            lost = f" (boxes without area: {self.empty})" if self.empty else ""
            raise DataError(
                f"{self._where}: no image of the {self._name} split has a box that counts{lost}; crowds and difficult "
                "objects do not"
            )
        boxes, labels, crowds = zip(*kept, strict=True)
        return BoxFiles(tuple(row.path for row in self._rows), boxes, labels, crowds, tuple(sizes))

    def _clipped(self, row: _Row, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes with an area, their labels, and which are crowds."""
        if any(said > 0 and said != side for said, side in zip(row.stated, size, strict=True)):
            said, real = ("x".join(f"{side:g}" for side in sides) for sides in (row.stated, size))
            raise DataError(
                f"{row.annotation}: the annotation says {said}, {row.path} is {real}: correct the annotation (its "
                "boxes too, if they belong to another size); an image that only its EXIF data turn must be saved so"
            )
        width, height = size
        boxes = row.boxes.clone()
        boxes[:, 0::2] = boxes[:, 0::2].clamp(0, width)
        boxes[:, 1::2] = boxes[:, 1::2].clamp(0, height)
        good = (boxes[:, 2:] > boxes[:, :2]).all(1)
        if not good.all():
            self.empty += int((~good).sum())
            self.example = self.example or row.path
        return boxes[good], row.labels[good], row.crowd[good]


@dataclass(frozen=True)
class _Row:
    """An image as it was added."""

    path: str
    annotation: str
    stated: tuple[float, float]
    boxes: Tensor
    labels: Tensor
    crowd: Tensor


def emptied(collectors: Sequence[BoxCollector]) -> tuple[str, ...]:
    """A note of the boxes that were left out."""
    count = sum(collector.empty for collector in collectors)
    if not count:
        return ()
    example = next(collector.example for collector in collectors if collector.example)
    boxes = "box was" if count == 1 else "boxes were"
    return (f"{count} empty {boxes} left out (one in {example})",)
