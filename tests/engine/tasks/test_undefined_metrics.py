"""Metrics where there is nothing to find: they are left out or NaN, and neither 0 nor an error."""

from __future__ import annotations

import json
import math

import pytest
import torch
from engine_helpers import make_trainer, settings
from PIL import Image
from task_recipes import Oracle, detection, segmentation
from torch import nn

from downstream_data import write_masks
from dyrep.engine.data.masks import IGNORED
from dyrep.engine.running import train
from dyrep.engine.tasks import task_of
from dyrep.engine.world import World
from dyrep.records import ROWS, SUMMARY
from dyrep.report.page import write_report

WORLD = World(torch.device("cpu"))
NAMES = ("disc", "square")


class Fixed:
    """A split of batches that are made already."""

    def __init__(self, *batches):
        self._made = batches

    def batches(self, epoch):
        return iter(self._made)

    def prepare(self, raw):
        return raw


def boxes(*labels):
    count = len(labels)
    return {
        "boxes": torch.tensor([[4.0, 4.0, 20.0, 20.0]]).repeat(count, 1),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "iscrowd": torch.zeros(count, dtype=torch.bool),
        "scores": torch.full((count,), 0.9),
    }


def measured(found, there):
    split = Fixed(([torch.zeros(3, 32, 32)], [there]))
    return task_of(detection()).evaluate(Oracle([found]), split, WORLD, torch.float32, NAMES)


@pytest.mark.parametrize("found", [boxes(), boxes(1)])
def test_without_any_box_there_is_no_map(found):
    result = measured(found, boxes())
    assert set(result) == {"map", "map50", "map75"}
    assert all(math.isnan(value) for value in result.values())


def test_a_class_without_boxes_has_no_precision():
    assert measured(boxes(1, 2), boxes(2))["map"] == 100
    assert set(measured(boxes(1, 2), boxes(2))) == {"map", "map50", "map75", "ap_square"}
    assert measured(boxes(1), boxes(2))["ap_square"] == 0  # there, and not found


def segmented(said, there):
    logits = nn.functional.one_hot(said, 3).permute(0, 3, 1, 2).float()
    split = Fixed((torch.zeros(len(said), 3, *said.shape[1:]), there))
    return task_of(segmentation()).evaluate(Oracle([logits]), split, WORLD, torch.float32, ("a", "b", "c"))


def test_a_class_that_is_neither_there_nor_said_has_no_iou():
    said, there = torch.tensor([[[0, 0, 1, 2]]]), torch.tensor([[[0, 0, 0, IGNORED]]])
    result = segmented(said, there)
    assert result["iou_a"] == pytest.approx(200 / 3)
    assert result["iou_b"] == 0  # said, and not there
    assert "iou_c" not in result  # said where nothing counts
    assert result["miou"] == pytest.approx(100 / 3)


def test_without_a_pixel_that_counts_nothing_is_known():
    result = segmented(torch.zeros(1, 2, 2, dtype=torch.int64), torch.full((1, 2, 2), IGNORED))
    assert set(result) == {"loss", "miou", "pixel_accuracy"}
    assert all(math.isnan(value) for value in result.values())


def test_nan_is_not_the_best_for_ever(data, tmp_path, monkeypatch):
    chosen = segmentation(method="origin")
    trainer = make_trainer(chosen, tmp_path, data=data(chosen))
    kept = []
    for epoch, value in enumerate((math.nan, math.nan, 3.0, math.nan, 2.0)):
        monkeypatch.setattr(trainer, "score", lambda split, value=value: {"miou": value})
        trainer.epoch = epoch
        trainer._evaluate()
        kept.append(trainer.best["epoch"])
    assert kept == [1, 2, 3, 3, 3]


def empty_(folder):
    """Make maps of classes in which no pixel counts."""
    for file in folder.glob("*.png"):
        with Image.open(file) as labels:
            empty = Image.new("L", labels.size, 11)
        empty.save(file)


def valid(text):
    """JSON as the standard has it, which knows neither NaN nor infinities."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_run_where_no_pixel_to_validate_on_counts_ends_and_writes_json(tiny_models, tmp_path):
    folder = write_masks(tmp_path / "masks", ignored=11)
    empty_(folder / "valannot")
    run = tmp_path / "run"
    train(segmentation(epochs=2), settings(run, data=folder))
    rows = [valid(line) for line in (run / ROWS).read_text().splitlines()]
    assert [row["val_miou"] for row in rows] == ["nan", "nan"]
    summary = valid((run / SUMMARY).read_text())
    assert summary["best"] == {"epoch": 2, "split": "val", "miou": "nan"}
    assert summary["val_miou"] == "nan"
    assert 0 <= summary["test_miou_folded"] <= 100
    write_report([run], tmp_path / "report.html")


def test_a_run_where_no_pixel_to_test_on_counts_is_told_and_reported(tiny_models, tmp_path, capsys):
    folder = write_masks(tmp_path / "masks", ignored=11)
    empty_(folder / "testannot")
    run = tmp_path / "run"
    chosen = segmentation(method="origin", epochs=1)
    summary = train(chosen, settings(run, data=folder))
    assert "test mIoU nan %, folded nan %" in capsys.readouterr().out
    assert (summary["test_miou"], summary["test_miou_folded"], summary["test_loss"]) == ("nan", "nan", "nan")
    assert valid((run / SUMMARY).read_text()) == summary
    assert train(chosen, settings(run, data=folder)) == summary  # read, and not trained again
    page, _ = write_report([run], tmp_path / "report.html")
    assert "mIoU is not defined on these test images" in page.read_text()
