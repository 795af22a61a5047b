"""CIFAR-10 and CIFAR-100, in every form in which people have them on disk."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dyrep.engine.data.reading import pillow, reading
from dyrep.engine.data.splits import ImageArrays, Source
from dyrep.errors import DataError
from dyrep.extras import needed

COUNTS = {"train": 50_000, "test": 10_000}
SIDE = 32
SHEET = 10  # a packed sheet shows 10 x 10 images
Half = tuple[np.ndarray, np.ndarray, str]
"""Images [N, 32, 32, 3], labels, and where they come from."""


@dataclass(frozen=True)
class _Edition:
    names: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    batches: str
    torchvision: str
    label_key: str

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.names.split())


EDITIONS = {
    "cifar10": _Edition(
        names="airplane automobile bird cat deer dog frog horse ship truck",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        batches="cifar-10-batches-py",
        torchvision="CIFAR10",
        label_key="labels",
    ),
    "cifar100": _Edition(
        names="""
            apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
            castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
            elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
            lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
            pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
            shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
            television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
        """,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        batches="cifar-100-python",
        torchvision="CIFAR100",
        label_key="fine_labels",
    ),
}


def read_cifar(name: str, folder: Path) -> Source:
    """Read CIFAR-10 or CIFAR-100 into memory.

    Looks in the folder, and in its subfolder of the data set's name, for ``cifar10.npz`` (train_images, train_labels,
    test_images, test_labels), then for ``cifar10-train-a.tar``, ``-train-b.tar`` and ``-test.tar`` (sheets of 10 x 10
    images and labels.txt), then for torchvision's folder of pickled batches, which are only ever unpickled if they
    are the original files, byte for byte.

    Args:
        name: "cifar10" or "cifar100".
        folder: where to look.

    Raises:
        DataError: it is not there, or damaged.
    """
    edition, folder = EDITIONS[name], Path(folder)
    places = (folder, folder / name)
    candidates = [
        *((place / f"{name}.npz", _from_archive) for place in places),
        *((place / f"{name}-train-a.tar", _from_sheets) for place in places),
        *((place / edition.batches, _from_batches) for place in places),
    ]
    for path, read in candidates:
        if path.exists():
            train, test = read(path, name)
            break
    else:
        raise DataError(
            f"no {name} in {folder}: looked for {', '.join(str(path.relative_to(folder)) for path, _ in candidates)}; "
            f"torchvision.datasets.{edition.torchvision}({str(folder)!r}, download=True) gets it"
        )
    return Source(
        _checked(*train, COUNTS["train"], len(edition.classes)),
        _checked(*test, COUNTS["test"], len(edition.classes)),
        edition.classes,
        edition.mean,
        edition.std,
    )


def _from_archive(path: Path, name: str) -> tuple[Half, Half]:
    with reading(path):
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"{path} is a single array, not an archive of train_images, train_labels, ...")
        with archive:
            wanted = [f"{split}_{what}" for split in COUNTS for what in ("images", "labels")]
            lacking = [key for key in wanted if key not in archive]
            if lacking:
                raise DataError(f"{path} lacks {', '.join(lacking)}: it has {', '.join(archive) or 'nothing'}")
            a, b, c, d = (archive[key] for key in wanted)
    return (a, b, f"{path} (train)"), (c, d, f"{path} (test)")


def _from_sheets(path: Path, name: str) -> tuple[Half, Half]:
    train = [_unpacked(path.with_name(f"{name}-train-{part}.tar")) for part in "ab"]
    images, labels = _unpacked(path.with_name(f"{name}-test.tar"))
    where = str(path.with_name(f"{name}-*.tar"))
    return _joined(train, f"{where} (train)"), (images, labels, f"{where} (test)")


def _unpacked(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one tar, whose sheets are in the order of their names."""
    sheets: dict[str, bytes] = {}
    labels = None
    with reading(path), tarfile.open(path, "r:") as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None and member.name == "labels.txt":
                labels = np.array([int(line) for line in file.read().split()], np.int64)
            elif file is not None and member.name.endswith(".webp"):
                sheets[member.name] = file.read()
        if labels is None or not sheets:
            raise DataError(f"{path} lacks {'labels.txt' if labels is None else 'images (*.webp)'}")
        with ThreadPoolExecutor(4) as pool:
            images = pool.map(lambda name: _cut_up(sheets[name], f"{path}, {name}"), sorted(sheets))
            return np.concatenate(list(images)), labels


def _cut_up(data: bytes, where: str) -> np.ndarray:
    whole = SHEET * SIDE
    with pillow().open(io.BytesIO(data)) as sheet:
        if sheet.size != (whole, whole):
            raise DataError(f"{where}: expected a sheet of {whole}x{whole} pixels, found {sheet.size}")
        pixels = np.asarray(sheet.convert("RGB"))
    tiles = pixels.reshape(SHEET, SIDE, SHEET, SIDE, 3).transpose(0, 2, 1, 3, 4)
    return tiles.reshape(SHEET * SHEET, SIDE, SIDE, 3)


def _from_batches(path: Path, name: str) -> tuple[Half, Half]:
    edition = EDITIONS[name]
    known = getattr(needed("torchvision.datasets", f"{name} as its authors wrote it"), edition.torchvision)
    halves = []
    for split, files in (("train", known.train_list), ("test", known.test_list)):
        batches = [_verified(path / file, md5) for file, md5 in files]
        parts = []
        for (file, _), batch in zip(files, batches, strict=True):
            with reading(path / file):
                images = np.asarray(batch["data"]).reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
                parts.append((images, np.asarray(batch[edition.label_key])))
        halves.append(_joined(parts, f"{path} ({split})"))
    return halves[0], halves[1]


def _verified(path: Path, md5: str) -> Any:
    """Unpickle a file, but only if it is the known one."""
    with reading(path):
        data = path.read_bytes()
        found = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if found != md5:
            raise DataError(f"{path} is not the original file: expected md5 {md5}, found {found}; get it anew")
        return _ArrayUnpickler(io.BytesIO(data), encoding="latin1").load()


class _ArrayUnpickler(pickle.Unpickler):
    """Knows arrays and plain values and nothing else: a second lock behind the md5, which can be forged."""

    _arrays = {  # noqa: RUF012
        "_reconstruct": np.zeros(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Look up what a pickle names, by name alone: numpy has moved its modules since these files were made."""
        if module.split(".")[0] == "numpy" and name in self._arrays:
            return self._arrays[name]
        raise pickle.UnpicklingError(f"refused to load {module}.{name}")


def _joined(parts: Iterable[tuple[np.ndarray, np.ndarray]], where: str) -> Half:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels), where


def _checked(images: np.ndarray, labels: np.ndarray, where: str, count: int, classes: int) -> ImageArrays:
    shape = (count, SIDE, SIDE, 3)
    if images.dtype != np.uint8 or images.shape != shape:
        raise DataError(f"{where}: expected images uint8 {shape}, found {images.dtype} {images.shape}")
    if labels.dtype.kind not in "iu" or labels.shape != (count,):
        raise DataError(f"{where}: expected {count} whole numbers as labels, found {labels.dtype} {labels.shape}")
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(f"{where}: expected labels 0 to {classes - 1}, found {labels.min()} to {labels.max()}")
    return ImageArrays(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels.astype(np.int64)))
