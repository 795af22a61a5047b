"""From the name of a data set to its loaders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyrep.engine.data.augment import Augmentation
from dyrep.engine.data.cifar import read_cifar
from dyrep.engine.data.digits import read_digits
from dyrep.engine.data.folders import LAYOUT, common_size, load_files, read_folder
from dyrep.engine.data.loader import Loader, Loading
from dyrep.engine.data.resident import ResidentLoader
from dyrep.engine.data.splits import ImageArrays, ImageFiles, Source, fits, held_out_count, hold_out
from dyrep.engine.data.streaming import StreamingLoader
from dyrep.errors import ConfigError, DataError

CONTENTS = {
    "cifar10": "cifar10.npz, torchvision's cifar-10-batches-py, or the packed cifar10-*.tar",
    "cifar100": "cifar100.npz, torchvision's cifar-100-python, or the packed cifar100-*.tar",
    "folder": LAYOUT,
}
"""What should be in the folder of every data set that needs one."""
DATASETS = ("digits", *CONTENTS)
EVAL_FACTOR = 4
"""Batches of evaluation are so many times as large as those of training, but at most `LARGEST_EVAL_BATCH`."""
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
    loading: Loading,
    *,
    size: int | None,
    batch_size: int,
    augmentation: Augmentation,
    val_split: float,
) -> Data:
    """Read a data set and make its loaders.

    Args:
        dataset: "digits", "cifar10", "cifar100" or "folder".
        folder: where the data is; digits need none.
        loading: how batches are made. Data sets that are not image files are always kept in memory.
        size: side of the images (default: as they are; needed if files differ in size).
        batch_size: examples per training batch over all ranks.
        augmentation: of the training images.
        val_split: examples to hold out of the training split: none (0), a share (below 1), or so many.

    Raises:
        ConfigError: settings outside their range, or that do not go together.
        DataError: the data is missing or damaged.

    Example:
        >>> import torch
        >>> loading = Loading(torch.device("cpu"))
        >>> data = open_data(
        ...     "digits", None, loading, size=None, batch_size=32, augmentation=Augmentation(), val_split=0.1
        ... )
        >>> data.train.examples, data.val.examples, data.test.examples, data.size
        (1280, 144, 360, 8)
    """
    source = _read(dataset, folder)
    size = _checked_size(dataset, source, size)
    train, val = _divided(source.train, val_split)
    test = source.test
    if _stays(dataset, source, size, augmentation, loading.resident):
        train, val, test = (_in_memory(split, size, loading.workers) for split in (train, val, test))
    world = loading.world
    eval_batch_size = max(1, min(EVAL_FACTOR * batch_size, LARGEST_EVAL_BATCH) // world) * world

    # how an image is evaluated follows from the augmentation alone, not from where the images are kept
    resize = size * 256 // 224 if augmentation.crop == "resized" else size

    def loader(split: ImageArrays | ImageFiles, training: bool) -> Loader:
        ours: dict[str, Any] = {
            "mean": source.mean,
            "std": source.std,
            "batch_size": batch_size if training else eval_batch_size,
            "augmentation": augmentation if training else None,
            "shuffle": training,
        }
        if isinstance(split, ImageArrays):
            return ResidentLoader(split, loading, **ours)
        return StreamingLoader(split, loading, size=size, resize=resize, **ours)

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
            raise ConfigError(
                "the images are not all squares of one size: give image_size, to bring them to (224, say)"
            )
        return found
    own = source.train.images.shape[-1]
    if size not in (None, own):
        raise ConfigError(f"image_size={size}: the images of {dataset} are {own}x{own}; leave it out")
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
