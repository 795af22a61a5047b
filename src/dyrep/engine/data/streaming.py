"""Images that are read from disk while training goes on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dyrep.engine.data.augment import Augmentation, Finish
from dyrep.engine.data.loader import Batch, Loading, Raw, Replay
from dyrep.engine.data.order import Order, derived_generator, derived_seed
from dyrep.engine.data.reading import decode, fit
from dyrep.engine.data.splits import ImageFiles
from dyrep.errors import DataError
from dyrep.extras import needed

Key = tuple[int, str, int]
"""Epoch, stream and index: with the seed, all that decides what becomes of an example."""


class StreamingLoader:
    """Batches of images that worker processes decode and augment, normalised on the device.

    A raw batch is pixels uint8 [b, 3, size, size], labels [b], and with cutout the centres [b, 2], in pinned memory
    if the device is a GPU. It is the same for any number of workers.

    Args:
        files: the split.
        loading: how batches are made; without workers, this process decodes.
        size: side of the images.
        batch_size: examples per batch over all ranks.
        mean: of every channel, for values in 0..1.
        std: standard deviation of every channel.
        augmentation: how to vary images (default, and always in evaluation: not at all).
        shuffle: whether this is for training; see `Order` for what that means for the last batch and the ranks.
        resize: in evaluation, length to which the short side is brought before the centre is cut out (default: 256
            for a size of 224, and in proportion).

    Attributes:
        steps: batches per epoch on this rank.
        examples: examples per epoch over all ranks.

    Raises:
        ConfigError: a batch size that cannot be divided or filled.
        DataError: while iterating, a file that cannot be decoded.
        MissingPackageError: torchvision is not installed.
    """

    def __init__(
        self,
        files: ImageFiles,
        loading: Loading,
        *,
        size: int,
        batch_size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augmentation: Augmentation | None,
        shuffle: bool,
        resize: int | None = None,
    ) -> None:
        _transforms()  # so that it is missed here, and not in a worker
        augmentation = augmentation or Augmentation()
        cutout = augmentation.cutout if shuffle else 0
        if shuffle:
            change = _training_transform(size, augmentation)
        else:
            change = functools.partial(fit, resize=resize or size * 256 // 224, crop=size)
        self._examples = _Examples(files, change, loading.seed, size if cutout else None)
        self._order = Order(len(files.paths), batch_size, shuffle, loading.rank, loading.world)
        self.steps, self.examples = self._order.steps, self._order.examples
        self._seed, self._device, self._workers = loading.seed, loading.device, loading.workers
        self._finish = Finish(
            mean,
            std,
            height=size,
            width=size,
            cutout=cutout,
            device=self._device,
            channels_last=loading.channels_last,
        )

    def batches(self, epoch: int, start: int = 0) -> Iterator[Raw]:
        """Raw batches of an epoch; those before `start` are not decoded."""
        return self._batches("train", epoch, start)

    def prepare(self, raw: Raw) -> Batch:
        """Move to the device, normalise and cut holes."""
        pixels, labels, *centres = (tensor.to(self._device, non_blocking=True) for tensor in raw)
        return self._finish(pixels.permute(0, 2, 3, 1), centres[0] if centres else None), labels

    def calibration(self, epoch: int) -> Iterable[Batch]:
        """Prepared batches, drawn independently of the epoch's training batches; the same at every iteration."""
        return Replay(lambda: map(self.prepare, self._batches("calibration", epoch)))

    def _batches(self, stream: str, epoch: int, start: int = 0) -> Iterator[Raw]:
        count = self._order.count
        generator = derived_generator(self._seed, epoch, stream)
        order = torch.randperm(count, generator=generator) if self._order.training else torch.arange(count)
        batches = self._order.batches(self._order.own(order), start)
        loader: DataLoader[Any] = DataLoader(
            self._examples,
            batch_sampler=([(epoch, stream, index) for index in batch.tolist()] for batch in batches),
            num_workers=self._workers,
            collate_fn=_collate,
            pin_memory=self._device.type == "cuda",
            generator=generator,  # or else it would draw from the global one
        )
        for batch in loader:
            if isinstance(batch, str):
                raise DataError(batch)
            yield batch


class _Examples(Dataset[Any]):
    """Decoded, augmented examples by their keys; the message of the error for those that cannot be read.

    An error raised in a worker would reach the user wrapped in that worker's traceback.
    """

    def __init__(self, files: ImageFiles, change: Callable[[Any], Any], seed: int, hole_range: int | None) -> None:
        self._files, self._change, self._seed, self._hole_range = files, change, seed, hole_range

    def __getitem__(self, key: Key) -> Raw | str:
        """The example: pixels, label, and the centre of the cutout if there is one."""
        index = key[2]
        try:
            image = decode(self._files.paths[index])
        except DataError as error:
            return str(error)
        with torch.random.fork_rng(devices=[]):
            # not torch.manual_seed, which would seed the GPUs of this process too
            torch.default_generator.manual_seed(derived_seed(self._seed, *key))
            pixels = _transforms().functional.pil_to_tensor(self._change(image))
            if self._hole_range is None:
                return pixels, self._files.labels[index]
            return pixels, self._files.labels[index], torch.randint(self._hole_range, (2,))


def _collate(examples: list[Raw | str]) -> Raw | str:
    errors = [example for example in examples if isinstance(example, str)]
    if errors:
        return errors[0]
    return tuple(torch.stack(column) for column in zip(*examples, strict=True) if isinstance(column[0], Tensor))


def _training_transform(size: int, augmentation: Augmentation) -> Callable[[Any], Any]:
    """The augmentation of one image but for the cutout, drawn from torch's global generator."""
    v2 = _transforms()
    steps: list[Callable[[Any], Any]] = []
    if augmentation.crop == "resized":
        steps.append(v2.RandomResizedCrop(size, antialias=True))
    else:
        steps.append(functools.partial(fit, resize=size, crop=size))
    if augmentation.crop == "pad":
        steps.append(v2.RandomCrop(size, padding=augmentation.padding))
    if augmentation.flip:
        steps.append(v2.RandomHorizontalFlip())
    if augmentation.color_jitter:
        jitter = augmentation.color_jitter
        steps.append(v2.ColorJitter(jitter, jitter, jitter))
    if augmentation.auto_augment:
        steps.append(v2.AutoAugment())
    return v2.Compose(steps)


def _transforms() -> Any:
    return needed("torchvision.transforms.v2", "reading image files while a network trains")
