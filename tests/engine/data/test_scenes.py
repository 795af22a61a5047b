"""Drawn data sets are what the readers expect."""

from __future__ import annotations

from dyrep.engine.data.folders import read_folder
from dyrep.engine.data.masks import read_masks
from dyrep.engine.data.scenes import CLASSES, COUNTS, write_box_scenes, write_class_scenes, write_mask_scenes
from dyrep.engine.data.voc import read_voc


def test_scenes_can_be_read_in_every_layout(tmp_path):
    boxes = read_voc(write_box_scenes(tmp_path / "boxes"))
    assert (len(boxes.train), len(boxes.val), len(boxes.test)) == tuple(COUNTS.values())
    assert (boxes.classes, boxes.notes) == (CLASSES, ())
    masks = read_masks(write_mask_scenes(tmp_path / "masks"))
    assert (len(masks.train), masks.classes) == (COUNTS["train"], ("0", "1", "2"))
    assert read_folder(write_class_scenes(tmp_path / "classes", count=3)).classes == CLASSES


def test_they_are_the_same_every_time(tmp_path):
    first, second = (write_mask_scenes(tmp_path / name, {"train": 2}) for name in "ab")
    for path in first.rglob("*.png"):
        assert path.read_bytes() == (second / path.relative_to(first)).read_bytes()
