"""Boxes in the layout of Pascal VOC: Annotations, ImageSets and JPEGImages."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from dyrep.engine.data.boxes import BoxCollector, BoxSource, emptied
from dyrep.engine.data.folders import EXTENSIONS
from dyrep.engine.data.reading import reading
from dyrep.errors import DataError

LAYOUT = "JPEGImages/*.jpg, Annotations/*.xml and ImageSets/Main/{train,val,test}.txt"


def read_voc(folder: Path, workers: int = 4) -> BoxSource:
    """Read the annotations of a data set in the layout of Pascal VOC.

    It is looked for in the folder, in its subfolders, and in VOCdevkit. Images are trained on if they are in
    ``train.txt`` (or ``trainval.txt``, if there is no ``train.txt``), looked at while training if in ``val.txt``, and
    tested on if in ``test.txt``; without the latter ``val.txt`` is what is tested on. Objects marked difficult are
    neither learnt nor counted.

    Args:
        folder: where it is.
        workers: threads that look at the image files.

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
    collectors = {name: BoxCollector(name, str(there[name])) for name in used}
    for name, collector in collectors.items():
        for stem in _stems(there[name]):
            _add(collector, root, stem, labels)
    splits = {name: collector.split(workers) for name, collector in collectors.items()}
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
    read = ((_path(root, stem), _annotation(root, stem)) for stem in _stems(split))
    found = {_text(thing, "name", path) for path, annotation in read for thing in annotation.findall("object")}
    if not found:
        raise DataError(f"{split}: no image of it has a box, so there is nothing to learn")
    return tuple(sorted(found))


def _path(root: Path, stem: str) -> Path:
    return root / "Annotations" / f"{stem}.xml"


def _annotation(root: Path, stem: str) -> ElementTree.Element:
    path = _path(root, stem)
    try:
        return ElementTree.fromstring(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} is missing: {stem!r} is in a list of ImageSets/Main") from error
    except ElementTree.ParseError as error:
        raise DataError(f"{path} is not an annotation ({error}): get it anew") from error


def _add(collector: BoxCollector, root: Path, stem: str, classes: dict[str, int]) -> None:
    annotation, path = _annotation(root, stem), _path(root, stem)
    boxes, labels, difficult = [], [], []
    for thing in annotation.findall("object"):
        name = _text(thing, "name", path)
        if name not in classes:
            raise DataError(f"{path} has a {name!r}, and no image to train on has one")
        boxes.append([_number(thing, f"bndbox/{side}", path) for side in ("xmin", "ymin", "xmax", "ymax")])
        labels.append(classes[name])
        difficult.append((thing.findtext("difficult") or "0").strip() == "1")
    stated = _stated(annotation, "size/width", path), _stated(annotation, "size/height", path)
    collector.add(str(_image(root, stem)), str(path), stated, boxes, labels, difficult)


def _image(root: Path, stem: str) -> Path:
    for ending in EXTENSIONS:
        for spelt in (ending, ending.upper()):
            path = root / "JPEGImages" / f"{stem}{spelt}"
            if path.is_file():
                return path
    raise DataError(f"{root / 'JPEGImages' / stem}.jpg is missing: {stem!r} is in a list of ImageSets/Main")


def _stated(annotation: ElementTree.Element, what: str, path: Path) -> float:
    """A side of the image, or 0 if the annotation does not say."""
    text = (annotation.findtext(what) or "").strip()
    return _parsed(text, what, path) if text else 0.0


def _text(thing: ElementTree.Element, what: str, path: Path) -> str:
    found = (thing.findtext(what) or "").strip()
    if not found:
        raise DataError(f"{path}: an object lacks {what}")
    return found


def _number(thing: ElementTree.Element, what: str, path: Path) -> float:
    return _parsed(_text(thing, what, path), what, path)


def _parsed(text: str, what: str, path: Path) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise DataError(f"{path} has {what}={text!r}, which is not a number") from error
