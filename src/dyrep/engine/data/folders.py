"""Images in folders, one per class: ImageNet, Tiny-ImageNet, your own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from dyrep.engine.data.reading import decode, fit, pillow, reading
from dyrep.engine.data.splits import ImageArrays, ImageFiles, Source
from dyrep.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm")
LAYOUT = "train/CLASS/*.jpg and val/CLASS/*.jpg (or test/CLASS/*.jpg)"
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_LOOKS = 16  # at so many files, about, to see whether all are of one size


def read_folder(folder: Path) -> Source:
    """List the images of a data set with one folder per class.

    Understands ``train/CLASS`` and ``val/CLASS`` (or ``test/CLASS``), with images directly or deeper inside, and
    Tiny-ImageNet as it is published, with ``val/images`` and ``val/val_annotations.txt``.

    Args:
        folder: what contains train and val.

    Raises:
        DataError: a folder is missing or empty, or there is something to test on that there is nothing to train on.
    """
    folder = Path(folder)
    test = next((folder / name for name in ("val", "test") if (folder / name).is_dir()), None)
    if test is None or not (folder / "train").is_dir():
        lacking = "train" if test is not None else "val or test"
        raise DataError(f"{folder} has no folder {lacking}: expected {LAYOUT}")
    classes = _class_names(folder / "train")
    annotations = test / "val_annotations.txt"
    if annotations.is_file() and (test / "images").is_dir():
        labelled = _annotated(annotations)
    else:
        labelled = {name: _images(test / name) for name in _class_names(test)}
    unknown = sorted(set(labelled) - set(classes))
    if unknown:
        raise DataError(f"{test} has the class {unknown[0]!r}, which {folder / 'train'} has not")
    return Source(
        _split(classes, {name: _images(folder / "train" / name) for name in classes}),
        _split(classes, labelled),
        classes,
        IMAGENET_MEAN,
        IMAGENET_STD,
    )


def load_files(files: ImageFiles, size: int, jobs: int = 4) -> ImageArrays:
    """Decode images into memory.

    Args:
        files: what to read.
        size: side of the square that every image is brought to: short side resized, centre cut out.
        jobs: threads.

    Raises:
        DataError: a file cannot be decoded.
    """
    pixels = np.empty((len(files.paths), size, size, 3), np.uint8)

    def load(chunk: range) -> None:
        for index in chunk:
            pixels[index] = np.asarray(fit(decode(files.paths[index]), size, size))

    total, step = len(files.paths), 64
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(load, (range(first, min(first + step, total)) for first in range(0, total, step))))
    return ImageArrays(torch.from_numpy(pixels).permute(0, 3, 1, 2), files.labels)


def common_size(files: ImageFiles) -> int | None:
    """Side of the images if they are squares of one size, as far as a few of them tell.

    Raises:
        DataError: a file cannot be decoded.
    """
    image_module = pillow()
    sizes = set()
    for path in files.paths[:: max(1, len(files.paths) // _LOOKS)]:
        with reading(Path(path)), image_module.open(path) as image:
            sizes.add(image.size)
    width, height = sizes.pop()
    return width if not sizes and width == height else None


def _class_names(folder: Path) -> tuple[str, ...]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{folder} has no class folders: expected {LAYOUT}")
    return tuple(names)


def _images(folder: Path) -> list[str]:
    found = [
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(EXTENSIONS) and not name.startswith(".")
    ]
    if not found:
        raise DataError(f"{folder} has no images ({' '.join(EXTENSIONS)})")
    return sorted(found)


def _annotated(annotations: Path) -> dict[str, list[str]]:
    """Paths of every class by a list of file name, class and bounding box."""
    there = {os.path.basename(path): path for path in _images(annotations.parent / "images")}
    labelled: dict[str, list[str]] = {}
    with reading(annotations):
        lines = annotations.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        name, _, rest = line.partition("\t")
        if name not in there or not rest:
            raise DataError(
                f"{annotations}, line {number}: expected an image of {annotations.parent / 'images'} and its class, "
                f"found {line!r}"
            )
        labelled.setdefault(rest.split("\t")[0], []).append(there.pop(name))
    if there:
        raise DataError(f"{annotations} does not mention {min(there)} and {len(there) - 1} other images")
    return labelled


def _split(classes: tuple[str, ...], labelled: dict[str, list[str]]) -> ImageFiles:
    pairs = [(path, label) for label, name in enumerate(classes) for path in labelled.get(name, ())]
    return ImageFiles(tuple(path for path, _ in pairs), torch.tensor([label for _, label in pairs]))
