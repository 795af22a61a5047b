"""From the name of a data set to its loaders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dyrep.engine.data.augment import Augmentation
from dyrep.engine.data.folders import LAYOUT, common_size
from dyrep.engine.data.loader import Loader
from dyrep.engine.data.pictures import fits
from dyrep.engine.data.resident import ResidentLoader
from dyrep.engine.data.sources import load_files, read_cifar, read_digits, read_folder
from dyrep.engine.data.splits import DataError, ImageArrays, ImageFiles, Source, held_out_count, hold_out
from dyrep.engine.data.streaming import StreamingLoader
from dyrep.errors import ConfigError

CONTENTS = {
    "cifar10": "cifar10.npz, torchvision's cifar-10-batches-py, or the packed cifar10-*.tar",
    "cifar100": "cifar100.npz, torchvision's cifar-100-python, or the packed cifar100-*.tar",
    "folder": LAYOUT,
}
"""What should be in the folder of every data set that needs one."""
DATASETS = ("digits", *CONTENTS)
LARGEST_EVAL_BATCH = 1000


@dataclass(frozen=True)
class Data:
    """A data set ready for training.

    Attributes:
        train: batches to train on.
        val: examples held out of the training split, if asked for.
        test: batches to test on.
        classes: name of every label.
        channels: of the images.
        size: side of the images; of a detector's the shorter one.
        notes: what a person should know about the data.
    """

    train: Loader
    val: Loader | None
    test: Loader
    classes: tuple[str, ...]
    channels: int
    size: int
    notes: tuple[str, ...] = ()


def open_data(
    dataset: str,
    folder: Path | None,
    *,
    size: int | None,
    batch_size: int,
    augmentation: Augmentation,
    val_split: float,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    resident: bool | None = None,
    workers: int = 4,
    rank: int = 0,
    world: int = 1,
    eval_batch_size: int | None = None,
) -> Data:
    """Read a data set and make its loaders.

    Args:
        dataset: "digits", "cifar10", "cifar100" or "folder".
        folder: where the data is; digits need none.
        size: side of the images (default: as they are; needed if files differ in size).
        batch_size: examples per training batch over all ranks.
        augmentation: of the training images.
        val_split: examples to hold out of the training split: none (0), a share (below 1), or so many.
        seed: of order and augmentation. The examples held out do not depend on it.
        device: where the batches are needed.
        dtype: of the images.
        channels_last: memory layout of the images.
        resident: keep image files decoded on the device (default: if the augmentation allows it, and they take at
            most 4 GiB); other data sets always are.
        workers: processes that decode image files.
        rank: which rank this is.
        world: number of ranks.
        eval_batch_size: examples per evaluation batch over all ranks (default: four times batch_size, at most 1000).

    Raises:
        ConfigError: settings outside their range, or that do not go together.
        DataError: the data is missing or damaged.

    Example:
        >>> data = open_data(
        ...     "digits", None, size=None, batch_size=32, augmentation=Augmentation(), val_split=0.1, seed=0,
        ...     device=torch.device("cpu"),
        ... )
        >>> data.train.examples, data.val.examples, data.test.examples, data.size
        (1280, 144, 360, 8)
    """
    source = _read(dataset, folder)
    size = _checked_size(dataset, source, size)
    train, val = _divided(source.train, val_split)
    test = source.test
    if _stays(dataset, source, size, augmentation, resident):
        train, val, test = (_in_memory(split, size, workers) for split in (train, val, test))
    if eval_batch_size is None:
        eval_batch_size = max(1, min(4 * batch_size, LARGEST_EVAL_BATCH) // world) * world

    # how an image is evaluated follows from the augmentation alone, not from where the images are kept
    resize = size * 256 // 224 if augmentation.crop == "resized" else size
    shared: dict[str, Any] = {
        "device": device,
        "mean": source.mean,
        "std": source.std,
        "seed": seed,
        "rank": rank,
        "world": world,
        "dtype": dtype,
        "channels_last": channels_last,
    }

    def loader(split: ImageArrays | ImageFiles, training: bool) -> Loader:
        ours = {
            **shared,
            "batch_size": batch_size if training else eval_batch_size,
            "augmentation": augmentation if training else None,
            "shuffle": training,
        }
        if isinstance(split, ImageArrays):
            return ResidentLoader(split, **ours)
        return StreamingLoader(split, size=size, workers=workers, resize=resize, **ours)

    return Data(
        train=loader(train, True),
        val=None if val is None else loader(val, False),
        test=loader(test, False),
        classes=source.classes,
        channels=len(source.mean),
        size=size,
    )


def _read(dataset: str, folder: Path | None) -> Source:
    if dataset not in DATASETS:
        raise ConfigError(f"dataset={dataset!r}: must be one of {', '.join(DATASETS)}")
    if dataset == "digits":
        return read_digits()
    if folder is None:
        raise DataError(f"the data set {dataset!r} needs its folder: give --data DIR, with {CONTENTS[dataset]} in DIR")
    return read_folder(folder) if dataset == "folder" else read_cifar(dataset, folder)


def _checked_size(dataset: str, source: Source, size: int | None) -> int:
    if isinstance(source.train, ImageFiles):
        found = size or common_size(source.train)
        if found is None:
            raise ConfigError("the images are not all squares of one size: give the size to bring them to (224, say)")
        return found
    own = source.train.images.shape[-1]
    if size not in (None, own):
        raise ConfigError(f"size={size}: the images of {dataset} are {own}x{own}; leave it out")
    return own


def _divided(split: ImageArrays | ImageFiles, val_split: float) -> tuple[Any, Any]:
    """What remains to train on, and what is held out, if anything."""
    if val_split == 0:
        return split, None
    return hold_out(split, held_out_count(val_split, len(split.labels)))


def _stays(dataset: str, source: Source, size: int, augmentation: Augmentation, resident: bool | None) -> bool:
    """Whether the data set is kept on the device."""
    streamed = augmentation.files_only()
    if isinstance(source.train, ImageArrays):
        if streamed:
            raise ConfigError(f"{streamed[0]} needs image files (dataset='folder'): {dataset} is kept in memory")
        if resident is False:
            raise ConfigError(f"resident=False: {dataset} is always kept in memory; only image files can be streamed")
        return True
    if resident and streamed:
        raise ConfigError(f"resident=True: {streamed[0]} needs images to be read one by one; leave one of them out")
    count = len(source.train.labels) + len(source.test.labels)
    return not streamed and fits(count * 3 * size * size, resident)


def _in_memory(split: Any, size: int, jobs: int) -> Any:
    return load_files(split, size, max(1, jobs)) if isinstance(split, ImageFiles) else split
