"""Boxes in the layout of Pascal VOC: Annotations, ImageSets and JPEGImages."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from dyrep.engine.data.boxes import BoxCollector, BoxSource, emptied
from dyrep.engine.data.folders import EXTENSIONS
from dyrep.engine.data.reading import reading
from dyrep.engine.data.splits import DataError

LAYOUT = "JPEGImages/*.jpg, Annotations/*.xml and ImageSets/Main/{train,val,test}.txt"


def read_voc(folder: Path) -> BoxSource:
    """Read the annotations of a data set in the layout of Pascal VOC.

    It is looked for in the folder, in its subfolders, and in VOCdevkit. Images are trained on if they are in
    ``train.txt`` (or ``trainval.txt``, if there is no ``train.txt``), looked at while training if in ``val.txt``, and
    tested on if in ``test.txt``; without the latter ``val.txt`` is what is tested on. Objects marked difficult are
    neither learnt nor counted.

    Raises:
        DataError: something is missing or damaged; the message names the file.
    """
    root = _root(Path(folder))
    lists = {name: root / "ImageSets" / "Main" / f"{name}.txt" for name in ("train", "trainval", "val", "test")}
    there = {name: path for name, path in lists.items() if path.is_file()}
    first = "train" if "train" in there else "trainval"
    if first not in there or not {"val", "test"} & set(there):
        lacking = "train.txt" if first not in there else "val.txt or test.txt"
        raise DataError(f"{root / 'ImageSets' / 'Main'} has no {lacking}: expected {LAYOUT}")
    if first == "trainval" and "test" not in there:
        raise DataError(f"{lists['trainval']} holds what {lists['val']} would test on: expected train.txt or test.txt")
    used = [first, *(name for name in ("val", "test") if name in there and (first, name) != ("trainval", "val"))]
    classes = _class_names(root, there[first])
    labels = {name: label for label, name in enumerate(classes, 1)}
    collectors = {name: BoxCollector(str(there[name])) for name in used}
    for name, collector in collectors.items():
        for stem in _stems(there[name]):
            _add(collector, root, stem, labels)
    splits = {name: collector.split() for name, collector in collectors.items()}
    return BoxSource(
        train=splits[first],
        val=splits.get("val") if "test" in splits else None,
        test=splits["test"] if "test" in splits else splits["val"],
        classes=classes,
        notes=emptied(list(collectors.values())),
    )


def _root(folder: Path) -> Path:
    candidates = [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]
    candidates += sorted((folder / "VOCdevkit").glob("*"))
    found = [path for path in candidates if (path / "Annotations").is_dir() and (path / "ImageSets").is_dir()]
    if not found:
        raise DataError(f"{folder} has no data set in the layout of Pascal VOC: expected {LAYOUT}")
    if len(found) > 1:
        raise DataError(f"{folder} has several data sets ({', '.join(path.name for path in found)}): name one of them")
    return found[0]


def _stems(path: Path) -> list[str]:
    with reading(path):
        lines = path.read_text(encoding="utf-8").split("\n")
    return [line.split()[0] for line in lines if line.strip()]


def _class_names(root: Path, split: Path) -> tuple[str, ...]:
    """Every class that there is something to learn about."""
    found = {_text(thing, "name", stem) for stem in _stems(split) for thing in _objects(root, stem)}
    if not found:
        raise DataError(f"{split}: no image of it has a box, so there is nothing to learn")
    return tuple(sorted(found))


def _objects(root: Path, stem: str) -> list[ElementTree.Element]:
    return _annotation(root, stem).findall("object")


def _annotation(root: Path, stem: str) -> ElementTree.Element:
    path = root / "Annotations" / f"{stem}.xml"
    try:
        return ElementTree.fromstring(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} is missing: {stem!r} is in a list of ImageSets/Main") from error
    except ElementTree.ParseError as error:
        raise DataError(f"{path} is not an annotation ({error}): get it anew") from error


def _add(collector: BoxCollector, root: Path, stem: str, classes: dict[str, int]) -> None:
    annotation = _annotation(root, stem)
    boxes, labels, difficult = [], [], []
    for thing in annotation.findall("object"):
        name = _text(thing, "name", stem)
        if name not in classes:
            raise DataError(f"{root / 'Annotations' / stem}.xml has a {name!r}, and no image to train on has one")
        boxes.append([_number(thing, f"bndbox/{side}", stem) for side in ("xmin", "ymin", "xmax", "ymax")])
        labels.append(classes[name])
        difficult.append((thing.findtext("difficult") or "0").strip() == "1")
    size = round(_number(annotation, "size/width", stem)), round(_number(annotation, "size/height", stem))
    collector.add(str(_image(root, stem)), size, boxes, labels, difficult)


def _image(root: Path, stem: str) -> Path:
    for ending in EXTENSIONS:
        path = root / "JPEGImages" / f"{stem}{ending}"
        if path.is_file():
            return path
    raise DataError(f"{root / 'JPEGImages' / stem}.jpg is missing: {stem!r} is in a list of ImageSets/Main")


def _text(element: ElementTree.Element, path: str, stem: str) -> str:
    found = element.findtext(path)
    if found is None or not found.strip():
        raise DataError(f"the annotation of {stem!r} lacks {path} in an object")
    return found.strip()


def _number(element: ElementTree.Element, path: str, stem: str) -> float:
    text = _text(element, path, stem)
    try:
        return float(text)
    except ValueError as error:
        raise DataError(f"the annotation of {stem!r} has {path}={text!r}, which is not a number") from error
