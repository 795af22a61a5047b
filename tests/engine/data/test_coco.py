"""Boxes in COCO's format."""

from __future__ import annotations

import json

import pytest

from downstream_data import CLASSES, COUNTS, write_coco
from dyrep.engine.data.coco import read_coco
from dyrep.engine.data.splits import DataError


@pytest.fixture
def coco(tmp_path):
    return write_coco(tmp_path)


def change(coco, split, **values):
    path = coco / "annotations" / f"instances_{split}2017.json"
    data = json.loads(path.read_text())
    for key, edit in values.items():
        edit(data[key])
    path.write_text(json.dumps(data))


def test_categories_become_labels_without_gaps(coco):
    source = read_coco(coco)
    assert source.classes == CLASSES
    assert (len(source.train), source.val, len(source.test)) == (COUNTS["train"], None, COUNTS["val"])
    assert all(labels.tolist() == [1, 2] for labels in source.train.labels)
    assert all((boxes[:, 2:] > boxes[:, :2]).all() for boxes in source.test.boxes)


def test_images_without_boxes_stay(coco):
    change(coco, "train", annotations=lambda found: found[:] if found.clear() else None)
    source = read_coco(coco)
    assert len(source.train) == COUNTS["train"]
    assert source.train.boxes[0].shape == (0, 4)


def test_other_layouts_are_found(tmp_path):
    write_coco(tmp_path, ("train", "val", "test"))
    for split in COUNTS:
        (tmp_path / "annotations" / f"instances_{split}2017.json").rename(
            tmp_path / f"{split}2017" / "_annotations.coco.json"
        )
        (tmp_path / f"{split}2017").rename(tmp_path / ("valid" if split == "val" else split))
    (tmp_path / "annotations").rmdir()
    source = read_coco(tmp_path)
    assert (len(source.val), len(source.test)) == (COUNTS["val"], COUNTS["test"])


def test_crowds_are_marked_and_empty_boxes_left_out(coco):
    def edit(annotations):
        annotations[0]["iscrowd"] = 1
        annotations[1]["bbox"][2] = 0

    change(coco, "train", annotations=edit)
    source = read_coco(coco)
    assert source.train.crowd[0].tolist() == [True]
    assert source.notes[0].startswith("1 empty box was left out")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"annotations": lambda found: found[0].update(category_id=5)},
            "category 5, which .* it has 3, 17",
        ),
        ({"annotations": lambda found: found[0].update(image_id=99)}, "is of image 99, which is not listed"),
        ({"annotations": lambda found: found[0].update(bbox=[1, 2])}, r"has the box \[1, 2\], expected left, top"),
        (
            {"images": lambda found: found[0].update(file_name="gone.jpg")},
            "'gone.jpg' of .* is missing: looked in",
        ),
    ],
)
def test_what_is_wrong_is_named(coco, values, message):
    change(coco, "val", **values)
    with pytest.raises(DataError, match=message):
        read_coco(coco)


def test_files_that_are_missing_or_something_else_are_named(coco, tmp_path):
    (coco / "annotations" / "instances_val2017.json").write_text("[1]")
    with pytest.raises(DataError, match="lacks images, annotations, categories"):
        read_coco(coco)
    (coco / "annotations" / "instances_val2017.json").write_text("{")
    with pytest.raises(DataError, match=r"instances_val2017.json cannot be read"):
        read_coco(coco)
    (coco / "annotations" / "instances_val2017.json").unlink()
    with pytest.raises(DataError, match="no annotations to val and test: expected"):
        read_coco(coco)
