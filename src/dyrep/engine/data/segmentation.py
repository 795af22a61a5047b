"""Batches for segmentation: images, and a map with the class of every pixel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dyrep.engine.data.decoded import Pictures, image_sizes, read_picture
from dyrep.engine.data.folders import IMAGENET_MEAN, IMAGENET_STD
from dyrep.engine.data.loader import Batch, Loading, Raw, Replay
from dyrep.engine.data.masks import IGNORED, LAYOUT, MaskFiles, MaskSource, read_labels, read_masks
from dyrep.engine.data.opening import Data
from dyrep.engine.data.order import Order, derived_generator
from dyrep.engine.data.splits import divided, fits
from dyrep.errors import ConfigError, DataError
from dyrep.models.segmentation import DIVISOR

EVAL_BATCH = 16


def filled_up(side: int) -> int:
    """The length to which a side of a whole image is filled up, so that any network takes it.

    Example:
        >>> filled_up(48), filled_up(64)
        (64, 64)
    """
    return -(-side // DIVISOR) * DIVISOR


class MaskLoader:
    """Images [b, 3, H, W], normalised, and labels int64 [b, H, W] in which `IGNORED` does not count.

    In training, squares are cut at random out of images that were resized at random; without ``crop``, and in
    evaluation, images are whole and filled up at the right and at the bottom with their mean, which does not count.
    What is drawn for an example is a window of the image and whether it is mirrored. Cutting, resizing and mirroring
    are one interpolation on the device, the same operations every time, so they can be captured in a CUDA graph.

    A raw batch is places [b], windows [b, 2, 3] (in evaluation there are none: [b, 0]) and, if images are not kept,
    their pixels and labels.

    Args:
        files: the split.
        loading: how batches are made.
        classes: number of classes.
        ignore_label: number in the files that does not count.
        batch_size: images per batch over all ranks.
        crop: side of the squares that are trained on (default: whole images).
        scale: smallest and largest factor by which training images are resized.
        flip: mirror every second training image, at random.
        shuffle: whether this is for training; see `Order` for what that means for the last batch and the ranks.
        sizes: height and width of every image, if they have been read already.

    Attributes:
        steps: batches per epoch on this rank.
        examples: images per epoch over all ranks.
        paths: the image files.
    """

    def __init__(
        self,
        files: MaskFiles,
        loading: Loading,
        *,
        classes: int,
        ignore_label: int = IGNORED,
        batch_size: int,
        crop: int | None = None,
        scale: tuple[float, float] = (1.0, 1.0),
        flip: bool = False,
        shuffle: bool = False,
        sizes: Tensor | None = None,
    ) -> None:
        self.paths, self._device, self._seed = files.paths, loading.device, loading.seed
        self._crop, self._scale, self._flip = (crop, scale, flip) if shuffle else (None, (1.0, 1.0), False)
        self._layout = torch.channels_last if loading.channels_last else torch.contiguous_format
        resident, workers = bool(loading.resident), loading.workers
        labels = partial(read_labels, classes=classes, ignore_label=ignore_label)
        self._pictures = Pictures(files.paths, read_picture, resident=resident, workers=workers)
        self._maps = Pictures(files.labels, labels, resident=resident, workers=workers)
        self._sizes = _sizes(files, workers) if sizes is None else sizes
        self._differ = bool((self._sizes != self._sizes[0]).any())
        if self._differ and shuffle and crop is None:
            raise DataError(
                f"the images of {Path(files.paths[0]).parent} differ in size, so there are no batches of whole images: "
                "give --crop resized and --image-size"
            )
        if self._differ and not shuffle:
            batch_size = loading.world  # one by one
        self._order = Order(len(files), batch_size, shuffle, loading.rank, loading.world)
        self.steps, self.examples = self._order.steps, self._order.examples
        self._full = _common_size(self._sizes)
        self._mean = 255 * torch.tensor(IMAGENET_MEAN, device=self._device)[:, None, None]
        self._scaling = 1 / (255 * torch.tensor(IMAGENET_STD, device=self._device)[:, None, None])
        self._kept: tuple[Tensor, Tensor] | None = None
        if resident:
            pictures, maps = ([store[place] for place in range(len(files))] for store in (self._pictures, self._maps))
            self._kept = self._joined(pictures, maps)
            del self._pictures, self._maps  # one copy is enough

    def batches(self, epoch: int, start: int = 0) -> Iterator[Raw]:
        """Raw batches of an epoch."""
        return self._batches("train", epoch, start)

    def prepare(self, raw: Raw) -> Batch:
        """Normalised images and labels; in training without waiting for the device or, if they are kept, copying."""
        places, windows = raw[0], raw[1]
        pixels, maps = raw[2:] if self._kept is None else (kept[places] for kept in self._kept)
        images = (pixels.to(self._device) - self._mean).mul_(self._scaling)
        maps = maps.to(self._device)
        if windows.numel():
            images, maps = _cut_out(images, maps, windows.to(self._device), self._crop or self._full)
        elif self._differ:
            height, width = (filled_up(side) for side in self._sizes[int(places[0])].tolist())
            images, maps = images[..., :height, :width], maps[..., :height, :width]
        labels = maps.long()
        labels = torch.where(labels == 0, IGNORED, labels - 1)
        return images.contiguous(memory_format=self._layout), labels

    def size_of(self, place: int) -> tuple[int, int]:
        """Height and width of an image before it was filled up."""
        height, width = self._sizes[place].tolist()
        return height, width

    def calibration(self, epoch: int) -> Iterable[Batch]:
        """Prepared batches, drawn independently of the epoch's training batches; the same at every iteration."""
        return Replay(lambda: map(self.prepare, self._batches("calibration", epoch)))

    def _batches(self, stream: str, epoch: int, start: int = 0) -> Iterator[Raw]:
        if self._order.training:
            places, windows = self._drawn(derived_generator(self._seed, epoch, stream))
        else:
            places, windows = torch.arange(self._order.count), torch.zeros(self._order.count, 0)
        own = [self._order.own(part).contiguous() for part in (places, windows)]
        on_device = [self._order.batches(part.to(self._device), start) for part in own]
        if self._kept is not None:
            yield from zip(*on_device, strict=True)
            return
        asked = list(self._order.batches(own[0], start))
        pictures, maps = self._pictures.batches(asked), self._maps.batches(asked)
        for chosen, window, some, labels in zip(*on_device, pictures, maps, strict=True):
            yield (chosen, window, *self._joined(some, labels))

    def _drawn(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Places and windows of an epoch over all ranks, drawn on the CPU: the same on every device.

        A window is what `F.affine_grid` wants: where, in what was filled up, to look for every pixel of a square.
        """
        count = self._order.count
        order = torch.randperm(count, generator=generator)
        draws = torch.rand(count, 3, generator=generator, dtype=torch.float64)
        flips = 1 - 2 * torch.randint(2, (count,), generator=generator) * int(self._flip)
        if self._crop is None:
            plain = torch.zeros(count, 2, 3)
            plain[:, 0, 0], plain[:, 1, 1] = flips.float(), 1.0
            # a mirrored image is filled up at its right, too
            width = self._sizes[0, 1].item()
            plain[:, 0, 2] = torch.where(flips < 0, width / self._full[1] * 2 - 2, 0.0)
            return order, plain
        least, most = (math.log(factor) for factor in self._scale)
        side = self._crop / torch.exp(least + (most - least) * draws[:, :1])  # of the window, in pixels of the image
        # a window that is larger than the image has the image somewhere inside
        first = draws[:, 1:] * (self._sizes[order].double() - side)
        full = torch.tensor(self._full, dtype=torch.float64)
        stretch, centre = side / full, (2 * first + side) / full - 1
        windows = torch.zeros(count, 2, 3, dtype=torch.float64)
        windows[:, 0, 0], windows[:, 0, 2] = stretch[:, 1] * flips, centre[:, 1]
        windows[:, 1, 1], windows[:, 1, 2] = stretch[:, 0], centre[:, 0]
        return order, windows.float()

    def _joined(self, pictures: Sequence[Tensor], maps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Images and label maps of one size, filled up at the right and at the bottom."""
        height, width = self._full
        colour = (255 * torch.tensor(IMAGENET_MEAN)).round().to(torch.uint8)
        images = colour[None, :, None, None].expand(len(pictures), 3, height, width).contiguous()
        labels = torch.zeros(len(maps), height, width, dtype=torch.uint8)
        for place, (picture, found) in enumerate(zip(pictures, maps, strict=True)):
            images[place, :, : picture.shape[1], : picture.shape[2]] = picture
            labels[place, : found.shape[0], : found.shape[1]] = found
        return images.to(self._device), labels.to(self._device)


def open_segmentation(
    folder: Path | None,
    loading: Loading,
    *,
    size: int | None,
    crop: bool,
    scale: tuple[float, float],
    batch_size: int,
    flip: bool,
    val_split: float,
    class_names: tuple[str, ...],
    ignore_label: int,
) -> Data:
    """Read a data set of images and label maps and make its loaders.

    Args:
        folder: where it is.
        loading: how batches are made.
        size: side of the squares that are trained on; with whole images it is of no use.
        crop: whether squares are cut out of training images.
        scale: smallest and largest factor by which images are resized before.
        batch_size: images per training batch over all ranks.
        flip: mirror training images at random.
        val_split: images to hold out, where the data set has no split of its own to look at while training.
        class_names: names of the classes, see `read_masks`.
        ignore_label: number that does not count.

    Raises:
        ConfigError: settings outside their range, or that do not go together.
        DataError: the data is missing or damaged.
    """
    if folder is None:
        raise DataError(f"the data set 'masks' needs its folder: give --data DIR, with {LAYOUT} in DIR")
    if not crop and size is not None:
        raise ConfigError(f"image_size={size}: with crop=none images are taken as they are; leave it out")
    source: MaskSource = divided(read_masks(Path(folder), class_names, ignore_label, loading.workers), val_split)
    splits = [split for split in (source.train, source.val, source.test) if split is not None]
    sizes = {split: _sizes(split, loading.workers) for split in splits}
    # what is kept are colours and labels, filled up to the largest image of the split
    kept = sum(4 * len(found) * math.prod(_common_size(found)) for found in sizes.values())
    loading = replace(loading, resident=fits(kept, loading.resident))
    labels: dict[str, Any] = {"classes": len(source.classes), "ignore_label": ignore_label}

    def evaluated(split: MaskFiles) -> MaskLoader:
        return MaskLoader(split, loading, batch_size=EVAL_BATCH * loading.world, sizes=sizes[split], **labels)

    cut = size if crop else None
    drawn: dict[str, Any] = {"crop": cut, "scale": scale, "flip": flip, "shuffle": True, "sizes": sizes[source.train]}
    train = MaskLoader(source.train, loading, batch_size=batch_size, **drawn, **labels)
    return Data(
        train=train,
        val=None if source.val is None else evaluated(source.val),
        test=evaluated(source.test),
        classes=source.classes,
        channels=3,
        size=cut or max(train._full),
        notes=source.notes,
    )


def _cut_out(images: Tensor, maps: Tensor, windows: Tensor, size: int | tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Windows of images and of label maps; what is outside is the mean, and does not count.

    Autocast would round where to look to the precision of training, and to calibrate is done inside autocast: images
    would not be those that are trained on.
    """
    height, width = (size, size) if isinstance(size, int) else size
    with torch.autocast(windows.device.type, enabled=False):
        grid = F.affine_grid(windows, [len(images), 3, height, width], align_corners=False)
        images = F.grid_sample(images, grid, mode="bilinear", align_corners=False)
        numbers = F.grid_sample(maps[:, None].float(), grid, mode="nearest", align_corners=False)
    return images, numbers[:, 0].round()


def _sizes(files: MaskFiles, workers: int) -> Tensor:
    """Height and width of every image, which are those of its label map.

    Raises:
        DataError: they are not.
    """
    images, maps = image_sizes(files.paths, workers), image_sizes(files.labels, workers)
    for path, image, labels, found in zip(files.paths, images, files.labels, maps, strict=True):
        if image != found:
            shapes = " and ".join(f"{width}x{height}" for width, height in (image, found))
            raise DataError(f"{path} and its label map {labels} differ in size: {shapes}")
    return torch.tensor(images).flip(1)


def _common_size(sizes: Tensor) -> tuple[int, int]:
    """Height and width that the images of a split are filled up to."""
    height, width = sizes.amax(0).tolist()
    return filled_up(height), filled_up(width)
