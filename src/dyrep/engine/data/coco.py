"""Boxes in COCO's format: a json file for every split, and its images beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dyrep.engine.data.boxes import BoxCollector, BoxFiles, BoxSource, emptied
from dyrep.engine.data.reading import reading
from dyrep.engine.data.splits import DataError

LAYOUT = "annotations/instances_train*.json, instances_val*.json and their images (or train.json, val.json and images/)"
_SPLITS = {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}


def read_coco(folder: Path) -> BoxSource:
    """Read the annotations of a data set in COCO's format.

    Annotations are looked for in ``annotations/instances_SPLIT*.json``, ``annotations/SPLIT*.json``, ``SPLIT*.json``
    and ``SPLIT/_annotations.coco.json``; images beside them, in ``images/SPLIT*``, ``SPLIT*`` and ``images``. Without
    a test split (COCO's own has no annotations) val is what is tested on.

    Raises:
        DataError: something is missing or damaged; the message names the file.
    """
    folder = Path(folder)
    files = {split: _annotations(folder, names) for split, names in _SPLITS.items()}
    if files["train"] is None or (files["val"] is None and files["test"] is None):
        lacking = "train" if files["train"] is None else "val and test"
        raise DataError(f"{folder} has no annotations to {lacking}: expected {LAYOUT}")
    read = {split: (path, _read(path)) for split, path in files.items() if path is not None}
    train = read["train"][1]
    categories = sorted(train["categories"], key=lambda category: category["id"])
    labels = {category["id"]: label for label, category in enumerate(categories, 1)}
    collectors = {split: BoxCollector(str(path)) for split, (path, _) in read.items()}
    splits: dict[str, BoxFiles] = {}
    for split, (path, data) in read.items():
        _collect(collectors[split], folder, split, path, data, labels)
        splits[split] = collectors[split].split()
    test = splits.get("test", splits.get("val"))
    assert test is not None
    return BoxSource(
        train=splits["train"],
        val=splits.get("val") if "test" in splits else None,
        test=test,
        classes=tuple(str(category["name"]) for category in categories),
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
        lacking = [key for key in ("images", "annotations", "categories") if key not in data]
    if lacking:
        raise DataError(f"{path} lacks {', '.join(lacking)}: it is not in COCO's format")
    assert isinstance(data, dict)
    return data


def _collect(
    collector: BoxCollector,
    folder: Path,
    split: str,
    path: Path,
    data: Mapping[str, Any],
    labels: Mapping[int, int],
) -> None:
    known = {image["id"] for image in data["images"]}
    by_image: dict[int, list[Mapping[str, Any]]] = {}
    for annotation in data["annotations"]:
        what = f"{path}: annotation {annotation.get('id')}"
        if annotation.get("image_id") not in known:
            raise DataError(f"{what} is of image {annotation.get('image_id')}, which is not listed")
        if annotation.get("category_id") not in labels:
            raise DataError(
                f"{what} has category {annotation.get('category_id')}, which the training split has not; it has "
                f"{', '.join(map(str, labels))}"
            )
        if len(annotation.get("bbox") or ()) != 4:
            raise DataError(f"{what} has the box {annotation.get('bbox')}, expected left, top, width and height")
        by_image.setdefault(annotation["image_id"], []).append(annotation)
    places = _places(folder, split, path)
    for image in data["images"]:
        found = by_image.get(image["id"], [])
        boxes = [(x, y, x + w, y + h) for x, y, w, h in (annotation["bbox"] for annotation in found)]
        collector.add(
            _image(places, image["file_name"], path),
            (image["width"], image["height"]),
            boxes,
            [labels[annotation["category_id"]] for annotation in found],
            [bool(annotation.get("iscrowd")) for annotation in found],
        )


def _places(folder: Path, split: str, path: Path) -> list[Path]:
    """Folders in which images may be, those of a year (train2017) included."""
    own = path.stem.removeprefix("instances_")
    names = [own, *_SPLITS[split]]
    places = [path.parent, *(folder / "images" / name for name in names), *(folder / name for name in names)]
    return [place for place in (*places, folder / "images", folder) if place.is_dir()]


def _image(places: list[Path], name: str, annotations: Path) -> str:
    for place in places:
        if (place / name).is_file():
            return str(place / name)
    looked = ", ".join(str(place) for place in places)
    raise DataError(f"the image {name!r} of {annotations} is missing: looked in {looked}")
