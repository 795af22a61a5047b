"""What a data set is once it is read: a training and a test split, in memory or as files on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from dyrep.errors import ConfigError

RESIDENT_LIMIT = 4 * 2**30
SPLIT_NAMES = {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}
"""What folders and files of every split are called."""


@dataclass(frozen=True)
class ImageArrays:
    """A split that is in memory.

    Attributes:
        images: uint8 [N, C, H, W], in any memory layout.
        labels: int64 [N].
    """

    images: Tensor
    labels: Tensor

    def take(self, indices: Tensor) -> ImageArrays:
        """Some of the examples."""
        return ImageArrays(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class ImageFiles:
    """A split that is files on disk.

    Attributes:
        paths: one file per example.
        labels: int64 [N].
    """

    paths: tuple[str, ...]
    labels: Tensor

    def take(self, indices: Tensor) -> ImageFiles:
        """Some of the examples."""
        return ImageFiles(tuple(self.paths[index] for index in indices.tolist()), self.labels[indices])


@dataclass(frozen=True)
class Source:
    """A data set.

    Attributes:
        train: the split to train on.
        test: the split to test on.
        classes: name of every label.
        mean: of every channel, for values in 0..1.
        std: standard deviation of every channel.
    """

    train: ImageArrays | ImageFiles
    test: ImageArrays | ImageFiles
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


Split = TypeVar("Split", ImageArrays, ImageFiles)


def held_out_count(val_split: float, total: int) -> int:
    """How many of so many examples are held out: a share below 1, or a number.

    Raises:
        ConfigError: it is neither.

    Example:
        >>> held_out_count(0.1, 40), held_out_count(7, 40)
        (4, 7)
    """
    if not val_split > 0 or (val_split >= 1 and val_split != int(val_split)):
        raise ConfigError(f"val_split={val_split!r}: must be 0, a share below 1, or a whole number of examples")
    return int(val_split) if val_split >= 1 else max(1, round(val_split * total))


def hold_out(split: Split, count: int) -> tuple[Split, Split]:
    """Take some examples out of a split, of every class in proportion.

    They are the same whatever the seed of a run: when runs with several seeds are compared, all should choose by the
    same ones.

    Args:
        split: what to divide; it is not changed.
        count: examples to hold out.

    Returns:
        What remains and what was held out, both in the order of the split.

    Raises:
        ConfigError: the count is below 1, or leaves a class without examples.

    Example:
        >>> split = ImageFiles(("a", "b", "c", "d"), torch.tensor([0, 0, 1, 1]))
        >>> rest, held = hold_out(split, 2)
        >>> rest.labels.tolist(), held.labels.tolist(), len(set(rest.paths + held.paths))
        ([0, 1], [0, 1], 4)
    """
    total = len(split.labels)
    _check_count(count, total)
    sizes = torch.bincount(split.labels)
    shares = sizes * count // total
    largest_remainders = torch.argsort(sizes * count % total, descending=True, stable=True)
    shares[largest_remainders[: count - int(shares.sum())]] += 1
    emptied = torch.nonzero((shares == sizes) & (sizes > 0)).flatten().tolist()
    if emptied:
        raise ConfigError(
            f"cannot hold out {count} of {total} examples: class {emptied[0]}, which has {int(sizes[emptied[0]])}, "
            "would be left without any to train on"
        )
    generator = torch.Generator().manual_seed(0)
    held = torch.zeros(total, dtype=torch.bool)
    for label, share in enumerate(shares.tolist()):
        members = torch.nonzero(split.labels == label).flatten()
        held[members[torch.randperm(len(members), generator=generator)[:share]]] = True
    return split.take(torch.nonzero(~held).flatten()), split.take(torch.nonzero(held).flatten())


def held_out_places(count: int, total: int) -> tuple[Tensor, Tensor]:
    """Places of what remains and of what is held out of a list, the same whatever the seed of a run.

    Raises:
        ConfigError: the count is below 1, or nothing would remain.

    Example:
        >>> rest, held = held_out_places(2, 5)
        >>> len(rest), len(held)
        (3, 2)
    """
    _check_count(count, total)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    return order[count:].sort().values, order[:count].sort().values


def divided(source: Any, val_split: float) -> Any:
    """A source of which some training images are held out, if asked for.

    Raises:
        ConfigError: it has images to look at already, or the number is out of range.
    """
    if not val_split:
        return source
    if source.val is not None:
        raise ConfigError(f"val_split={val_split:g}: this data set has a val split of its own; leave it out")
    total = len(source.train)
    rest, held = held_out_places(held_out_count(val_split, total), total)
    return replace(source, train=source.train.take(rest), val=source.train.take(held))


def fits(size: int, resident: bool | None) -> bool:
    """Whether images of so many bytes are kept in memory: if asked for, or if they take at most 4 GiB."""
    return size <= RESIDENT_LIMIT if resident is None else resident


def _check_count(count: int, total: int) -> None:
    if not 1 <= count < total:
        raise ConfigError(f"cannot hold out {count} of {total} examples: give a number from 1 to {total - 1}")
