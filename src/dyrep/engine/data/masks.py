"""Images with maps of class numbers beside them: CamVid, Cityscapes-like folders, your own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dyrep.engine.data.folders import EXTENSIONS
from dyrep.engine.data.reading import pillow, reading
from dyrep.engine.data.splits import SPLIT_NAMES
from dyrep.errors import DataError

LAYOUT = (
    "train.txt and val.txt with a line 'image label' for every pair, or train/images/*.jpg and train/labels/*.png (or "
    "images/train and labels/train, or train and trainannot) and the same for val"
)
MOST_CLASSES = 254
IGNORED = 255
"""What stands for pixels that do not count, whatever they are in the files."""
_LABELS = ("labels", "masks", "annotations")


@dataclass(frozen=True)
class MaskFiles:
    """A split: images and label maps on disk.

    Attributes:
        paths: one image per example.
        labels: its label map.
    """

    paths: tuple[str, ...]
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, places: Tensor) -> MaskFiles:
        """Some of the examples."""
        chosen = places.tolist()
        return MaskFiles(tuple(self.paths[i] for i in chosen), tuple(self.labels[i] for i in chosen))


@dataclass(frozen=True)
class MaskSource:
    """A data set.

    Attributes:
        train: the split to train on.
        val: the split to look at while training, if the data set has one besides that to test on.
        test: the split to test on.
        classes: name of every label.
        notes: what a person should know about the labels.
    """

    train: MaskFiles
    val: MaskFiles | None
    test: MaskFiles
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read_masks(
    folder: Path, class_names: tuple[str, ...] = (), ignore_label: int = IGNORED, jobs: int = 4
) -> MaskSource:
    """List the images of a data set and their label maps.

    Args:
        folder: where it is, or its only subfolder with such a data set.
        class_names: of labels 0, 1, ..., the ignored one included if there are larger ones; without them those in
            ``classes.txt``, a line each; without that file there are as many classes as the training labels have
            numbers, and they are called by these.
        ignore_label: the number that does not count. It is no class: its name, if it has one, is left out, and what
            is above it moves down by one.
        jobs: threads that read label maps to count classes.

    Raises:
        DataError: a file is missing, there is nothing to train or test on, or only one class; or names are given that
            are not those of ``classes.txt``.
    """
    root = _root(Path(folder))
    found = {split: _split(root, names) for split, names in SPLIT_NAMES.items()}
    train, val, test = found["train"], found["val"], found["test"]
    if train is None or (val is None and test is None):
        lacking = "train" if train is None else "val or test"
        raise DataError(f"{root} has no images for {lacking}: expected {LAYOUT}")
    names = _names(root, class_names, ignore_label)
    if not names:
        names = _without(tuple(map(str, range(_count(train, ignore_label, jobs)))), ignore_label)
    if len(names) > MOST_CLASSES:
        raise DataError(f"{root} has {len(names)} classes: at most {MOST_CLASSES} can be told apart")
    _check_several(root, train, ignore_label)
    tested = val if test is None else test
    assert tested is not None
    return MaskSource(train, None if test is None else val, tested, names)


def read_labels(path: str, classes: int, ignore_label: int) -> Tensor:
    """A label map as uint8 [H, W]: 0 does not count, 1 is the first class, and so on.

    Raises:
        DataError: the file is not a label map, or has a label that is no class; the message names it.
    """
    labels = _numbers(path)
    counts = labels != ignore_label
    numbers = classes + (ignore_label < classes)  # in the files, where the ignored one may stand between classes
    if counts.any() and int(labels[counts].max()) >= numbers:
        wrong = int(labels[counts].max())
        raise DataError(
            f"{path} has the label {wrong}, and there are {classes} classes (0 to {numbers - 1}) and the label "
            f"{ignore_label} that is ignored: give --class-names for all of them from 0 on, or another --ignore-label"
        )
    shifted = np.where(counts, labels + (labels < ignore_label), 0).astype(np.uint8)
    return torch.from_numpy(shifted)


def _names(root: Path, given: tuple[str, ...], ignore_label: int) -> tuple[str, ...]:
    """Names of the classes as they are given or in a file; none if they are in neither.

    Raises:
        DataError: they differ, so that names of a recipe do not go to other data.
    """
    path = root / "classes.txt"
    if not path.is_file():
        return _without(given, ignore_label)
    with reading(path):
        lines = path.read_text(encoding="utf-8").split("\n")
    listed = _without(tuple(line.strip() for line in lines if line.strip()), ignore_label)
    if given and _without(given, ignore_label) != listed:
        raise DataError(
            f"{path} has the classes {', '.join(listed)}, and the recipe or --class-names says {', '.join(given)}: to "
            "take those of the file, give --class-names with nothing behind it, and the data's own --ignore-label (now "
            f"{ignore_label}); if the file is wrong, correct or remove it"
        )
    return listed


def _without(names: tuple[str, ...], ignore_label: int) -> tuple[str, ...]:
    return names[:ignore_label] + names[ignore_label + 1 :]


def _check_several(root: Path, train: MaskFiles, ignore_label: int) -> None:
    """Look at label maps until two classes have been seen, mostly in the first.

    Raises:
        DataError: that never happens.
    """
    seen: set[int] = set()
    for path in train.labels:
        seen.update(np.unique(_numbers(path)).tolist())
        if len(seen - {ignore_label}) > 1:
            return
    held = f"one class only ({(seen - {ignore_label}).pop()})" if seen - {ignore_label} else "no class"
    ignored, remedy = "", ""
    if ignore_label in seen:
        another = (
            "write it as 1 in the files" if ignore_label >= MOST_CLASSES else "give another --ignore-label, say 255"
        )
        ignored, remedy = f" and the ignored label {ignore_label}", f"; if {ignore_label} is a class, {another}"
    raise DataError(f"{root}: the label maps to train on hold {held}{ignored}: nothing to tell apart{remedy}")


def _numbers(path: str) -> np.ndarray:
    image_module = pillow()
    with reading(Path(path)), image_module.open(path) as image:
        if image.mode not in ("L", "P", "1", "I", "I;16"):
            raise DataError(
                f"{path} is a picture in colours (mode {image.mode}): a label map has one number per pixel, that of "
                "its class; convert it to an 8-bit PNG"
            )
        return np.asarray(image).astype(np.int64)


def _count(train: MaskFiles, ignore_label: int, jobs: int) -> int:
    """How many classes the training labels have."""

    def largest(path: str) -> int:
        labels = _numbers(path)
        return int(labels[labels != ignore_label].max(initial=-1))

    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        most = max(pool.map(largest, train.labels))
    if most < 0:
        raise DataError(f"the label maps of {Path(train.labels[0]).parent} hold nothing but the ignored {ignore_label}")
    if most >= MOST_CLASSES:
        raise DataError(
            f"the label maps of {Path(train.labels[0]).parent} have the label {most}: give the one that does not count "
            "with --ignore-label"
        )
    return most + 1


def _root(folder: Path) -> Path:
    candidates = [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]
    found = [path for path in candidates if _split(path, SPLIT_NAMES["train"], listing=False) is not None]
    if not found:
        raise DataError(f"{folder} has no images with label maps: expected {LAYOUT}")
    if found[0] != folder and len(found) > 1:
        raise DataError(f"{folder} has several data sets ({', '.join(path.name for path in found)}): name one of them")
    return found[0]


def _split(root: Path, names: tuple[str, ...], *, listing: bool = True) -> MaskFiles | None:
    """The pairs of a split, by its list or by its folders; not listed, it is only looked for."""
    for name in names:
        if (root / f"{name}.txt").is_file():
            return _listed(root, root / f"{name}.txt") if listing else MaskFiles((), ())
        for images, labels in _pairs_of_folders(root, name):
            if images.is_dir() and labels.is_dir():
                return _matched(images, labels) if listing else MaskFiles((), ())
    return None


def _pairs_of_folders(root: Path, name: str) -> Iterator[tuple[Path, Path]]:
    for kind in _LABELS:
        yield root / name / "images", root / name / kind
        yield root / "images" / name, root / kind / name
    yield root / name, root / f"{name}annot"


def _listed(root: Path, path: Path) -> MaskFiles:
    with reading(path):
        lines = path.read_text(encoding="utf-8").split("\n")
    pairs = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        if len(words) != 2:
            raise DataError(f"{path}, line {number}: expected an image and its label map, found {line!r}")
        found = [_found(root, word) for word in words]
        for word, there in zip(words, found, strict=True):
            if there is None:
                raise DataError(f"{path}, line {number}: {root / word} is missing")
        pairs.append((str(found[0]), str(found[1])))
    if not pairs:
        raise DataError(f"{path} lists no images")
    images, labels = zip(*pairs, strict=True)
    return MaskFiles(images, labels)


def _found(root: Path, word: str) -> Path | None:
    """A file of a list; one that is elsewhere on the machine the list is from is looked for by the end of its path."""
    if (root / word).is_file():
        return root / word
    parts = Path(word).parts[1:] if Path(word).is_absolute() else ()
    tails = (root.joinpath(*parts[start:]) for start in range(len(parts)))
    return next((path for path in tails if path.is_file()), None)


def _matched(images: Path, labels: Path) -> MaskFiles:
    there = {path.stem: path for path in sorted(labels.iterdir()) if path.suffix.lower() in EXTENSIONS}
    pictures = [path for path in sorted(images.iterdir()) if path.suffix.lower() in EXTENSIONS]
    lost = [path.name for path in pictures if path.stem not in there]
    if lost or not pictures:
        what = f"the label map of {lost[0]} is missing" if lost else f"{images} has no images"
        raise DataError(f"{what}: looked in {labels}")
    return MaskFiles(tuple(map(str, pictures)), tuple(str(there[path.stem]) for path in pictures))
