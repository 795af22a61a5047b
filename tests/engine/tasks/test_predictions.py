"""Pictures of predictions: of a size to look at, without margins, and never what a run fails of."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import settings
from task_recipes import Oracle, segmentation

from dyrep.engine.running import train
from dyrep.engine.tasks import drawing, task_of
from dyrep.engine.world import World


@pytest.mark.parametrize(
    ("shape", "size"),
    [((48, 64), (320, 240)), ((300, 500), (500, 300)), ((1500, 2000), (640, 480)), ((1, 900), (640, 1))],
)
def test_pictures_are_neither_small_nor_large(shape, size):
    assert drawing.pixels_of(torch.zeros(3, *shape)).size == size
    assert drawing.labels_drawn(torch.zeros(shape, dtype=torch.int64)).size == size


def test_boxes_are_drawn_where_they_are_in_a_picture_made_smaller():
    box, label = torch.tensor([[500.0, 250.0, 1000.0, 750.0]]), torch.tensor([1])
    picture = drawing.boxes_drawn(torch.zeros(3, 1000, 2000), box, label, ("disc",))
    assert picture.size == (640, 320)
    assert picture.getpixel((160, 200)) == picture.getpixel((320, 200)) == drawing.colour(0)
    assert picture.getpixel((200, 200)) == picture.getpixel((350, 200)) == (0, 0, 0)


def test_what_images_were_filled_up_with_is_not_drawn(data, tmp_path, monkeypatch):
    rows = []
    monkeypatch.setattr(drawing, "write_sheet", lambda file, panels, *rest: rows.extend(panels))
    chosen = segmentation()
    task = task_of(chosen)
    opened = task.open_data(settings(None, data=data(chosen)), World(torch.device("cpu")))
    answers = [torch.zeros(1, 3, 64, 64) for _ in range(4)]
    assert task.draw(Oracle(answers), opened, tmp_path / "a.png")
    assert {picture.size for row in rows for picture in row} == {(320, 240)}  # of 64x48, which became 64x64


def test_an_error_while_drawing_becomes_a_message(make, data, tmp_path, monkeypatch, capsys):
    chosen = make(epochs=1, method="origin")

    def fail(*_):
        assert not (tmp_path / "summary.json").exists()  # a run that is killed here is not taken to be complete
        raise OSError("no font")

    monkeypatch.setattr(drawing, "write_sheet", fail)
    assert train(chosen, settings(tmp_path, data=data(chosen)))
    told = capsys.readouterr().out
    assert "predictions could not be drawn, all else is written: OSError: no font" in told
    assert "results in" in told
    assert (tmp_path / "summary.json").is_file()
    assert not (tmp_path / "predictions.png").exists()
