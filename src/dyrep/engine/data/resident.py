"""A data set that stays on the device, and is augmented there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dyrep.engine.data.augment import Augmentation, Finish
from dyrep.engine.data.loader import Batch, Loading, Raw, Replay
from dyrep.engine.data.order import Order, derived_generator
from dyrep.engine.data.splits import ImageArrays
from dyrep.errors import ConfigError


class ResidentLoader:
    """Batches of a split in the device's memory, where a batch is cropped, flipped and normalised in a few kernels.

    A raw batch is one tensor of whole numbers on the device, a row per example: for training index, top and left of
    the crop, whether it is flipped, and row and column of the cutout's centre; for evaluation the index alone.

    Args:
        arrays: the split.
        loading: how batches are made; the split is kept on its device.
        batch_size: examples per batch over all ranks.
        mean: of every channel, for values in 0..1.
        std: standard deviation of every channel.
        augmentation: how to vary images (default, and always in evaluation: not at all).
        shuffle: whether this is for training; see `Order` for what that means for the last batch and the ranks.

    Attributes:
        steps: batches per epoch on this rank.
        examples: examples per epoch over all ranks.

    Raises:
        ConfigError: a batch size that cannot be divided or filled, or an augmentation that needs files.

    Example:
        >>> arrays = ImageArrays(torch.zeros(10, 3, 8, 8, dtype=torch.uint8), torch.arange(10))
        >>> loader = ResidentLoader(
        ...     arrays,
        ...     Loading(torch.device("cpu")),
        ...     batch_size=4,
        ...     mean=(0.5,) * 3,
        ...     std=(0.5,) * 3,
        ...     augmentation=None,
        ...     shuffle=True,
        ... )
        >>> [tuple(loader.prepare(raw)[0].shape) for raw in loader.batches(epoch=0)]
        [(4, 3, 8, 8), (4, 3, 8, 8)]
    """

    def __init__(
        self,
        arrays: ImageArrays,
        loading: Loading,
        *,
        batch_size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augmentation: Augmentation | None,
        shuffle: bool,
    ) -> None:
        self._augmentation = (augmentation if shuffle else None) or Augmentation()
        if self._augmentation.files_only():
            raise ConfigError(f"{self._augmentation.files_only()[0]} needs image files: this split is in memory")
        self._order = Order(len(arrays.labels), batch_size, shuffle, loading.rank, loading.world)
        self.steps, self.examples = self._order.steps, self._order.examples
        self._seed, self._device = loading.seed, loading.device
        self._height, self._width = arrays.images.shape[2:]
        self._padding = self._augmentation.padding if self._augmentation.crop == "pad" else 0
        self._pixels = _padded(arrays.images.permute(0, 2, 3, 1).to(self._device), self._padding)
        self._labels = arrays.labels.to(self._device)
        self._down = torch.arange(self._height, device=self._device)
        across = torch.arange(self._width, device=self._device)
        self._across = torch.stack([across, across.flip(0)])  # as it is and flipped
        self._finish = Finish(
            mean,
            std,
            height=self._height,
            width=self._width,
            cutout=self._augmentation.cutout,
            device=self._device,
            channels_last=loading.channels_last,
        )

    def batches(self, epoch: int, start: int = 0) -> Iterator[Raw]:
        """Raw batches of an epoch, all of them views of one tensor on the device."""
        return self._batches("train", epoch, start)

    def prepare(self, raw: Raw) -> Batch:
        """Cut out, flip, normalise and cut holes, without waiting for the device or copying to it."""
        index = raw[0][:, 0]
        centres = raw[0][:, 4:6] if self._augmentation.cutout else None
        if self._padding or self._augmentation.flip:
            _, top, left, flip = raw[0][:, :4].unbind(1)
            rows = top[:, None] + self._down
            columns = left[:, None] + self._across[flip]
            pixels = self._pixels[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        else:
            pixels = self._pixels[index]
        return self._finish(pixels, centres), self._labels[index]

    def calibration(self, epoch: int) -> Iterable[Batch]:
        """Prepared batches, drawn independently of the epoch's training batches; the same at every iteration."""
        return Replay(lambda: map(self.prepare, self._batches("calibration", epoch)))

    def _batches(self, stream: str, epoch: int, start: int = 0) -> Iterator[Raw]:
        if self._order.training:
            plan = self._drawn(derived_generator(self._seed, epoch, stream))
        else:
            plan = torch.arange(self._order.count)[:, None]
        own = self._order.own(plan).contiguous().to(self._device)
        return ((batch,) for batch in self._order.batches(own, start))

    def _drawn(self, generator: torch.Generator) -> Tensor:
        """The whole epoch over all ranks, drawn on the CPU: the same on every device and for any number of ranks."""
        count = self._order.count
        flips = 2 if self._augmentation.flip else 1
        order = torch.randperm(count, generator=generator)
        offsets = torch.randint(2 * self._padding + 1, (count, 2), generator=generator)
        flipped = torch.randint(flips, (count,), generator=generator)
        centre_rows = torch.randint(self._height, (count,), generator=generator)
        centre_columns = torch.randint(self._width, (count,), generator=generator)
        return torch.column_stack([order, offsets, flipped, centre_rows, centre_columns])


def _padded(pixels: Tensor, padding: int) -> Tensor:
    """Black borders around images [N, H, W, C], kept so that crops need no bounds."""
    if not padding:
        return pixels.contiguous()
    count, height, width, channels = pixels.shape
    padded = pixels.new_zeros(count, height + 2 * padding, width + 2 * padding, channels)
    padded[:, padding : padding + height, padding : padding + width] = pixels
    return padded
