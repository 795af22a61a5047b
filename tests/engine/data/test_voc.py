"""Boxes in the layout of Pascal VOC."""

from __future__ import annotations

import re

import pytest
import torch

from downstream_data import CLASSES, COUNTS, annotation, write_voc
from dyrep.engine.data.voc import read_voc
from dyrep.errors import DataError


@pytest.fixture
def voc(tmp_path):
    return write_voc(tmp_path / "VOC")


def test_splits_classes_and_boxes_are_read(voc):
    source = read_voc(voc)
    assert source.classes == CLASSES
    assert (len(source.train), len(source.val), len(source.test)) == (COUNTS["train"], COUNTS["val"], COUNTS["test"])
    assert source.notes == ()
    assert all(labels.tolist() == [1, 2] for labels in source.train.labels)
    assert all((boxes[:, 2:] > boxes[:, :2]).all() and boxes.dtype == torch.float32 for boxes in source.train.boxes)
    assert source.train.paths[0].endswith("train_0.jpg")


def test_it_is_found_one_folder_further_down_and_in_a_devkit(voc, tmp_path):
    assert len(read_voc(tmp_path).train) == COUNTS["train"]
    voc.rename(tmp_path / "VOCdevkit")
    (tmp_path / "outer" / "VOCdevkit").mkdir(parents=True)
    (tmp_path / "VOCdevkit").rename(tmp_path / "outer" / "VOCdevkit" / "VOC2012")
    assert len(read_voc(tmp_path / "outer").train) == COUNTS["train"]


def test_without_a_test_list_val_is_tested_on(voc):
    (voc / "ImageSets" / "Main" / "test.txt").unlink()
    source = read_voc(voc)
    assert source.val is None
    assert len(source.test) == COUNTS["val"]


def test_trainval_serves_where_there_is_no_train_list(voc):
    lists = voc / "ImageSets" / "Main"
    (lists / "trainval.txt").write_text((lists / "train.txt").read_text() + (lists / "val.txt").read_text())
    (lists / "train.txt").unlink()
    source = read_voc(voc)
    assert (len(source.train), source.val, len(source.test)) == (COUNTS["train"] + COUNTS["val"], None, COUNTS["test"])
    (lists / "test.txt").unlink()
    with pytest.raises(DataError, match=r"trainval.txt holds what .*val.txt would test on"):
        read_voc(voc)


def test_empty_boxes_are_left_out_and_counted_and_others_clipped(voc):
    boxes = [("disc", [5, 5, 5, 9]), ("square", [-4, 2, 20, 500]), ("disc", [80, 10, 90, 20])]
    (voc / "Annotations" / "train_0.xml").write_text(annotation((64, 48), boxes))
    source = read_voc(voc)
    assert source.notes == (f"2 empty boxes were left out (one in {voc / 'JPEGImages' / 'train_0.jpg'})",)
    assert source.train.boxes[0].tolist() == [[0, 2, 20, 48]]
    assert source.train.labels[0].tolist() == [2]


@pytest.mark.parametrize("stated", ["<width>0</width><height>0</height>", "<depth>3</depth>", ""])
def test_sizes_that_an_annotation_does_not_know_are_those_of_the_files(voc, stated):
    known = read_voc(voc).test
    path = voc / "Annotations" / "test_1.xml"
    path.write_text(re.sub("<size>.*</size>", f"<size>{stated}</size>" if stated else "", path.read_text()))
    source = read_voc(voc)
    assert source.notes == ()
    assert source.test.sizes == known.sizes
    assert torch.equal(source.test.boxes[1], known.boxes[1])


def test_endings_of_images_may_be_in_capitals(voc):
    (voc / "JPEGImages" / "val_0.jpg").rename(voc / "JPEGImages" / "val_0.JPG")
    assert read_voc(voc).val.paths[0].endswith("val_0.JPG")


def test_objects_that_are_difficult_are_marked(voc):
    (voc / "Annotations" / "val_0.xml").write_text(annotation((64, 48), [("disc", [1, 1, 9, 9])], difficult=1))
    assert read_voc(voc).val.crowd[0].tolist() == [True]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda voc: (voc / "JPEGImages" / "val_1.jpg").unlink(),
            r"JPEGImages/val_1.jpg is missing: 'val_1' is in a list",
        ),
        (lambda voc: (voc / "Annotations" / "val_1.xml").unlink(), r"val_1.xml is missing"),
        (lambda voc: (voc / "Annotations" / "val_1.xml").write_text("<a>"), r"val_1.xml is not an annotation"),
        (
            lambda voc: (voc / "Annotations" / "val_1.xml").write_text(annotation((9, 9), [("cat", [1, 1, 2, 2])])),
            r"val_1.xml has a 'cat', and no image to train on has one",
        ),
        (
            lambda voc: (voc / "Annotations" / "val_1.xml").write_text(annotation((9, 9), [("disc", ["x", 1, 2, 2])])),
            r"Annotations/val_1.xml has bndbox/xmin='x', which is not a number",
        ),
        (
            lambda voc: (voc / "Annotations" / "val_1.xml").write_text(annotation((56, 72), [("disc", [1, 1, 9, 9])])),
            r"val_1.xml: the annotation says 56x72, .*val_1.jpg is 72x56: correct the annotation",
        ),
        (
            lambda voc: (voc / "Annotations" / "val_1.xml").write_text("<annotation><object/></annotation>"),
            r"val_1.xml: an object lacks name",
        ),
        (
            lambda voc: (voc / "ImageSets" / "Main" / "val.txt").write_text("empty\n"),
            r"val.txt: no image of the val split has a box that counts \(boxes without area: 1\)",
        ),
        (lambda voc: (voc / "ImageSets" / "Main" / "train.txt").unlink(), r"has no train.txt: expected JPEGImages"),
        (lambda voc: (voc / "ImageSets" / "Main" / "train.txt").write_text(""), r"no image of it has a box"),
    ],
)
def test_what_is_wrong_is_named(voc, spoil, message):
    (voc / "Annotations" / "empty.xml").write_text(annotation((64, 48), [("disc", [5, 5, 5, 5])]))
    (voc / "JPEGImages" / "empty.jpg").write_bytes((voc / "JPEGImages" / "val_0.jpg").read_bytes())
    spoil(voc)
    with pytest.raises(DataError, match=message):
        read_voc(voc)


def test_a_folder_without_such_data_or_with_several_is_named(voc, tmp_path):
    write_voc(tmp_path / "other")
    with pytest.raises(DataError, match=r"several data sets \(VOC, other\): name one"):
        read_voc(tmp_path)
    with pytest.raises(DataError, match="no data set in the layout of Pascal VOC"):
        read_voc(voc / "JPEGImages")
