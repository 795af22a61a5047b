"""Batches for detectors: lists of images of any sizes, and a dict of boxes and labels for every one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dyrep.engine.data.boxes import BoxFiles, BoxSource
from dyrep.engine.data.coco import LAYOUT as COCO_LAYOUT
from dyrep.engine.data.coco import read_coco
from dyrep.engine.data.decoded import Pictures
from dyrep.engine.data.loader import Batch, Loading, Raw, Replay
from dyrep.engine.data.opening import Data
from dyrep.engine.data.order import Order, derived_generator
from dyrep.engine.data.splits import divided, fits
from dyrep.engine.data.voc import LAYOUT as VOC_LAYOUT
from dyrep.engine.data.voc import read_voc
from dyrep.errors import ConfigError, DataError

READERS = {"voc": (read_voc, VOC_LAYOUT), "coco": (read_coco, COCO_LAYOUT)}
EVAL_BATCH = 8


class BoxLoader:
    """Images as float32 [3, H, W] with values 0..1, and targets as torchvision's detectors want them.

    A raw batch is a tensor of place and flip [b, 2] and the b images as pixels. Targets of evaluation hold ``iscrowd``
    too; in training such boxes are left out.

    Args:
        files: the split.
        loading: how batches are made.
        batch_size: images per batch over all ranks.
        flip: mirror every second training image, at random.
        shuffle: whether this is for training; see `Order` for what that means for the last batch and the ranks.

    Attributes:
        steps: batches per epoch on this rank.
        examples: images per epoch over all ranks.
        paths: the image files.
    """

    def __init__(
        self,
        files: BoxFiles,
        loading: Loading,
        *,
        batch_size: int,
        flip: bool = False,
        shuffle: bool = False,
    ) -> None:
        self._order = Order(len(files), batch_size, shuffle, loading.rank, loading.world)
        self.steps, self.examples, self.paths = self._order.steps, self._order.examples, files.paths
        self._flip, self._seed, device = flip and shuffle, loading.seed, loading.device
        resident = bool(loading.resident)
        self._pictures = Pictures(files.paths, device=device, resident=resident, workers=loading.workers)
        self._targets = [
            {"boxes": boxes.to(device), "labels": labels.to(device), "iscrowd": crowd.to(device)}
            for boxes, labels, crowd in zip(files.boxes, files.labels, files.crowd, strict=True)
        ]
        if shuffle:
            self._targets = [_without_crowds(target) for target in self._targets]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Raw]:
        """Raw batches of an epoch."""
        return self._batches("train", epoch, start)

    def prepare(self, raw: Raw) -> Batch:
        """A list of images and a list of targets."""
        plan, pictures = raw[0], raw[1:]
        images, targets = [], []
        for (place, flip), picture in zip(plan.tolist(), pictures, strict=True):
            image, target = picture.float().div_(255), dict(self._targets[place])
            if flip:
                image, target["boxes"] = image.flip(-1), _mirrored(target["boxes"], image.shape[-1])
            images.append(image)
            targets.append(target)
        return images, targets

    def calibration(self, epoch: int) -> Iterable[Batch]:
        """Prepared batches, drawn independently of the epoch's training batches; the same at every iteration."""
        return Replay(lambda: map(self.prepare, self._batches("calibration", epoch)))

    def _batches(self, stream: str, epoch: int, start: int = 0) -> Iterator[Raw]:
        count = self._order.count
        if self._order.training:
            generator = derived_generator(self._seed, epoch, stream)
            order = torch.randperm(count, generator=generator)
            flips = torch.randint(2, (count,), generator=generator) * int(self._flip)
            plan = torch.column_stack([order, flips])
        else:
            plan = torch.column_stack([torch.arange(count), torch.zeros(count, dtype=torch.int64)])
        plans = list(self._order.batches(self._order.own(plan), start))
        pictures = self._pictures.batches(own[:, 0] for own in plans)
        for own, found in zip(plans, pictures, strict=True):
            yield (own, *found)


def open_detection(
    dataset: str,
    folder: Path | None,
    loading: Loading,
    *,
    size: int | None,
    batch_size: int,
    flip: bool,
    val_split: float,
) -> Data:
    """Read a data set of boxes and make its loaders.

    Args:
        dataset: "voc" or "coco".
        folder: where it is.
        loading: how batches are made.
        size: length to which the detector brings the shorter side of images (default: that of the first image).
        batch_size: images per training batch over all ranks.
        flip: mirror training images at random.
        val_split: images to hold out, where the data set has no split of its own to look at while training.

    Raises:
        ConfigError: settings outside their range.
        DataError: the data is missing or damaged.
    """
    read, layout = READERS[dataset]
    if folder is None:
        raise DataError(f"the data set {dataset!r} needs its folder: give --data DIR, with {layout} in DIR")
    source: BoxSource = divided(read(Path(folder), loading.workers), val_split)
    splits = [split for split in (source.train, source.val, source.test) if split is not None]
    for name, split in (("left to train on", source.train), ("held out", source.val)):
        if val_split and split is not None and all(crowd.all() for crowd in split.crowd):
            raise ConfigError(f"val_split={val_split:g}: no image that is {name} has a box: hold out another number")
    kept = sum(3 * width * height for split in splits for width, height in split.sizes)
    loading = replace(loading, resident=fits(kept, loading.resident))

    def evaluated(split: BoxFiles) -> BoxLoader:
        # a detector fills images of a batch up to one size, and what it finds would depend on the others
        count = EVAL_BATCH if len(set(split.sizes)) == 1 else 1
        return BoxLoader(split, loading, batch_size=count * loading.world)

    train = BoxLoader(source.train, loading, batch_size=batch_size, flip=flip, shuffle=True)
    return Data(
        train=train,
        val=None if source.val is None else evaluated(source.val),
        test=evaluated(source.test),
        classes=source.classes,
        channels=3,
        size=size or min(source.train.sizes[0]),
        notes=source.notes,
    )


def _without_crowds(target: dict[str, Tensor]) -> dict[str, Tensor]:
    single = ~target["iscrowd"]
    return {"boxes": target["boxes"][single], "labels": target["labels"][single]}


def _mirrored(boxes: Tensor, width: int) -> Tensor:
    left, top, right, bottom = boxes.unbind(1)
    return torch.stack([width - right, top, width - left, bottom], 1)
