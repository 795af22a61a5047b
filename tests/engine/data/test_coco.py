"""Boxes in COCO's format."""

from __future__ import annotations

import json

import pytest
import torch

from downstream_data import CLASSES, COUNTS, write_coco
from dyrep.engine.data.coco import read_coco
from dyrep.errors import DataError


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
    def edit(annotations):
        annotations[:] = [annotation for annotation in annotations if annotation["image_id"] != 0]

    change(coco, "train", annotations=edit)
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
        ({"annotations": list.clear}, r"val2017.json: no image of the val split has a box that counts; crowds"),
        (
            {"annotations": lambda found: [annotation.update(iscrowd=1) for annotation in found]},
            r"no image of the val split has a box that counts",
        ),
        (
            {"images": lambda found: found[0].update(width=48, height=64)},
            r"val2017.json, image 0: the annotation says 48x64, .*000000.png is 64x48: correct the annotation",
        ),
        ({"images": lambda found: found[1].update(id=0)}, r"val2017.json has two images with the id 0"),
        ({"images": lambda found: found[0].pop("file_name")}, r"val2017.json: images has an entry .* proper file_name"),
        ({"images": lambda found: found[0].update(width="64")}, r"val2017.json: image 0 has the size \('64', 48\)"),
        ({"annotations": lambda found: found[0].update(bbox=list("1234"))}, r"val2017.json: annotation 0 has the box"),
        ({"annotations": lambda found: found[0].update(bbox=[1, None, 2, 3])}, "annotation 0 has the box"),
        ({"annotations": lambda found: found[0].update(bbox=None)}, r"annotations has an entry without a proper bbox"),
        (
            {"annotations": lambda found: found.append(None)},
            r"annotations has .* a proper image_id: None",
        ),
        ({"categories": lambda found: found[0].pop("name")}, r"categories has an entry without a proper name"),
        ({"categories": lambda found: found.append("cat")}, r"categories has an entry without a proper id: 'cat'"),
        (
            {"categories": lambda found: found[0].update(name="cat")},
            r"category 3 is 'cat' in .*val2017.json and 'disc' in .*train2017.json",
        ),
        ({"categories": lambda found: found[1].update(id=3)}, r"val2017.json has two categories with the id 3"),
        ({"categories": lambda found: found[1].update(name="disc")}, r"two categories with the name 'disc'"),
    ],
)
def test_what_is_wrong_is_named(coco, values, message):
    change(coco, "val", **values)
    with pytest.raises(DataError, match=message):
        read_coco(coco)


def test_training_annotations_must_hold_a_box(coco):
    change(coco, "train", annotations=list.clear)
    with pytest.raises(DataError, match=r"train2017.json: no image of the train split has a box"):
        read_coco(coco)


@pytest.mark.parametrize("unknown", [0, None])
def test_sizes_that_an_annotation_does_not_know_are_those_of_the_files(coco, unknown):
    known = read_coco(coco).test
    change(coco, "val", images=lambda found: [image.update(width=unknown, height=unknown) for image in found])
    source = read_coco(coco)
    assert source.test.sizes == known.sizes
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(source.test.boxes, known.boxes, strict=True))


def test_files_that_are_missing_or_something_else_are_named(coco, tmp_path):
    (coco / "annotations" / "instances_val2017.json").write_text("[1]")
    with pytest.raises(DataError, match="lacks images, annotations, categories"):
        read_coco(coco)
    (coco / "annotations" / "instances_val2017.json").write_text('{"images": {}, "annotations": [], "categories": []}')
    with pytest.raises(DataError, match=r"expected images to be a list, found {}"):
        read_coco(coco)
    (coco / "annotations" / "instances_val2017.json").write_text("{")
    with pytest.raises(DataError, match=r"instances_val2017.json cannot be read"):
        read_coco(coco)
    (coco / "annotations" / "instances_val2017.json").unlink()
    with pytest.raises(DataError, match="no annotations to val and test: expected"):
        read_coco(coco)
