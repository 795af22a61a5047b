"""Boxes in COCO's format: a json file for every split, and its images beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dyrep.engine.data.boxes import BoxCollector, BoxFiles, BoxSource, emptied
from dyrep.engine.data.reading import reading
from dyrep.engine.data.splits import SPLIT_NAMES
from dyrep.errors import DataError

LAYOUT = "annotations/instances_train*.json, instances_val*.json and their images (or train.json, val.json and images/)"
_NEEDED: dict[str, dict[str, Any]] = {
    "images": {"id": (int, str), "file_name": str},
    "annotations": {"image_id": (int, str), "category_id": int, "bbox": list},
    "categories": {"id": int, "name": (str, int)},
}
"""What every entry of a file must have."""


def read_coco(folder: Path, workers: int = 4) -> BoxSource:
    """Read the annotations of a data set in COCO's format.

    Annotations are looked for in ``annotations/instances_SPLIT*.json``, ``annotations/SPLIT*.json``, ``SPLIT*.json``
    and ``SPLIT/_annotations.coco.json``; images beside them, in ``images/SPLIT*``, ``SPLIT*`` and ``images``. Without
    a test split (COCO's own has no annotations) val is what is tested on.

    Args:
        folder: where it is.
        workers: threads that look at the image files.

    Raises:
        DataError: something is missing or damaged; the message names the file.
    """
    folder = Path(folder)
    files = {split: _annotations(folder, names) for split, names in SPLIT_NAMES.items()}
    if files["train"] is None or (files["val"] is None and files["test"] is None):
        lacking = "train" if files["train"] is None else "val and test"
        raise DataError(f"{folder} has no annotations to {lacking}: expected {LAYOUT}")
    read = {split: (path, _read(path)) for split, path in files.items() if path is not None}
    categories = _categories(read)
    labels = {number: label for label, number in enumerate(categories, 1)}
    collectors = {split: BoxCollector(split, str(path)) for split, (path, _) in read.items()}
    splits: dict[str, BoxFiles] = {}
    for split, (path, data) in read.items():
        _collect(collectors[split], folder, split, path, data, labels)
        splits[split] = collectors[split].split(workers)
    test = splits.get("test", splits.get("val"))
    assert test is not None
    return BoxSource(
        train=splits["train"],
        val=splits.get("val") if "test" in splits else None,
        test=test,
        classes=tuple(categories.values()),
        notes=emptied(list(collectors.values())),
    )


def _annotations(folder: Path, names: tuple[str, ...]) -> Path | None:
    for name in names:
        for pattern in (
            f"annotations/instances_{name}*.json",
            f"annotations/{name}*.json",
            f"{name}*.json",
            f"{name}/_annotations.coco.json",
        ):
            found = sorted(folder.glob(pattern))
            if len(found) > 1:
                raise DataError(f"{folder} has several files {pattern} ({', '.join(p.name for p in found)}): keep one")
            if found:
                return found[0]
    return None


def _read(path: Path) -> dict[str, Any]:
    with reading(path):
        data = json.loads(path.read_text(encoding="utf-8"))
    lacking = [key for key in _NEEDED if not isinstance(data, dict) or key not in data]
    if lacking:
        raise DataError(f"{path} lacks {', '.join(lacking)}: it is not in COCO's format")
    for key, needs in _NEEDED.items():
        if not isinstance(data[key], list):
            raise DataError(f"{path}: expected {key} to be a list, found {data[key]!r:.60}")
        for entry in data[key]:
            for need, kinds in needs.items():
                # true and false are whole numbers to Python, not to whoever wrote the file
                found = entry.get(need) if isinstance(entry, dict) else None
                if not isinstance(found, kinds) or isinstance(found, bool):
                    raise DataError(f"{path}: {key} has an entry without a proper {need}: {entry!r:.200}")
    assert isinstance(data, dict)
    return data


def _categories(read: Mapping[str, tuple[Path, Mapping[str, Any]]]) -> dict[int, str]:
    """Names by the training split's numbers, in their order.

    Raises:
        DataError: a file has a number or a name twice, or two files have the same number for different things.
    """
    first = read["train"][0]
    known: dict[int, str] = {}
    for split, (path, data) in read.items():
        names = {category["id"]: str(category["name"]).strip() for category in data["categories"]}
        for what, values in (("id", [c["id"] for c in data["categories"]]), ("name", list(names.values()))):
            twice = next((value for value, count in Counter(values).items() if count > 1), None)
            if twice is not None:
                raise DataError(f"{path} has two categories with the {what} {twice!r}: keep one, and its annotations")
        if split == "train":
            known = dict(sorted(names.items()))
        for number in names.keys() & known.keys():
            if names[number] != known[number]:
                raise DataError(
                    f"category {number} is {names[number]!r} in {path} and {known[number]!r} in {first}: give it the "
                    "same number in all splits"
                )
    return known


def _collect(
    collector: BoxCollector,
    folder: Path,
    split: str,
    path: Path,
    data: Mapping[str, Any],
    labels: Mapping[int, int],
) -> None:
    by_image: dict[Any, list[Mapping[str, Any]]] = {image["id"]: [] for image in data["images"]}
    if len(by_image) < len(data["images"]):
        twice, _ = Counter(image["id"] for image in data["images"]).most_common(1)[0]
        raise DataError(f"{path} has two images with the id {twice!r}: whose the annotations are cannot be told")
    for annotation in data["annotations"]:
        what = f"{path}: annotation {annotation.get('id')}"
        if annotation["image_id"] not in by_image:
            raise DataError(f"{what} is of image {annotation['image_id']}, which is not listed")
        if annotation["category_id"] not in labels:
            raise DataError(
                f"{what} has category {annotation['category_id']}, which the training split has not; it has "
                f"{', '.join(map(str, labels)) or 'none'}"
            )
        if len(annotation["bbox"]) != 4 or not all(map(_number, annotation["bbox"])):
            raise DataError(f"{what} has the box {annotation['bbox']}, expected left, top, width and height")
        by_image[annotation["image_id"]].append(annotation)
    places = _places(folder, split, path)
    for image in data["images"]:
        found = by_image[image["id"]]
        sides = image.get("width") or 0, image.get("height") or 0
        if not all(map(_number, sides)):
            raise DataError(f"{path}: image {image['id']} has the size {sides}, expected width and height in pixels")
        collector.add(
            _image(places, image["file_name"], path),
            f"{path}, image {image['id']}",
            sides,
            [(x, y, x + w, y + h) for x, y, w, h in (annotation["bbox"] for annotation in found)],
            [labels[annotation["category_id"]] for annotation in found],
            [bool(annotation.get("iscrowd")) for annotation in found],
        )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _places(folder: Path, split: str, path: Path) -> list[Path]:
    """Folders in which images may be, those of a year (train2017) included."""
    own = path.stem.removeprefix("instances_")
    names = [own, *SPLIT_NAMES[split]]
    places = [path.parent, *(folder / "images" / name for name in names), *(folder / name for name in names)]
    return [place for place in (*places, folder / "images", folder) if place.is_dir()]


def _image(places: list[Path], name: str, annotations: Path) -> str:
    for place in places:
        if (place / name).is_file():
            return str(place / name)
    looked = ", ".join(str(place) for place in places)
    raise DataError(f"the image {name!r} of {annotations} is missing: looked in {looked}")
