"""What the training loop asks of a loader, and what all loaders are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Raw = tuple[Tensor, ...]
Batch = tuple[Any, Any]
"""What a network is given and what it should say: images and labels, label maps, or lists of images and of targets."""


@dataclass(frozen=True)
class Loading:
    """How batches are made, whatever they are made of.

    Attributes:
        device: where the batches are needed.
        seed: of order and augmentation, together with the epoch. The examples held out do not depend on it.
        rank: which rank this is.
        world: number of ranks.
        workers: processes, or threads, that decode image files.
        resident: whether image files are kept decoded on the device. None leaves that to what opens a data set, which
            keeps them if they take at most 4 GiB and the augmentation allows it; a loader keeps them if this is true.
        channels_last: memory layout of images that are batched.

    Example:
        >>> Loading(torch.device("cpu"), rank=1, world=2).workers
        4
    """

    device: torch.device
    seed: int = 0
    rank: int = 0
    world: int = 1
    workers: int = 4
    resident: bool | None = None
    channels_last: bool = False


class Loader(Protocol):
    """Gives batches in two steps: raw ones, fixed in shape, and what `prepare` makes of them on the device.

    The second step is the same operations every time, so that it can be captured in a CUDA graph together with the
    training step; the first is what changes. What an epoch contains depends on the seed and the epoch alone, and
    nothing here touches the global random generators.
    """

    @property
    def steps(self) -> int:
        """Batches per epoch on this rank."""

    @property
    def examples(self) -> int:
        """Examples per epoch over all ranks."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Raw]:
        """The raw batches of an epoch, from the one at position `start` on."""

    def prepare(self, raw: Raw) -> Batch:
        """Images, and what is known about them, on the device."""

    def calibration(self, epoch: int) -> Iterable[Batch]:
        """Prepared batches, augmented as in training but drawn independently of it; the same at every iteration.

        A loader for evaluation, which draws nothing, gives its own batches.
        """


class Replay(Iterable[Batch]):
    """Batches made anew, and one by one, at every iteration.

    Args:
        start: begins an iteration.

    Example:
        >>> numbers = Replay(lambda: iter([1, 2]))
        >>> list(numbers), list(numbers)
        ([1, 2], [1, 2])
    """

    def __init__(self, start: Callable[[], Iterator[Batch]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Batch]:
        return self._start()
