"""Decoded images, kept or read when they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from dyrep.engine.data.decoded import Pictures, image_sizes, read_picture
from dyrep.errors import DataError


@pytest.fixture
def paths(tmp_path):
    for number in range(5):
        Image.new("RGB", (4 + number, 3), (number, 0, 0)).save(tmp_path / f"{number}.png")
    return [str(tmp_path / f"{number}.png") for number in range(5)]


@pytest.mark.parametrize("resident", [True, False])
def test_batches_come_in_the_order_asked_for(paths, resident):
    found = Pictures(paths, resident=resident, workers=2)
    assert len(found) == 5
    assert found[3].shape == (3, 3, 7)
    asked = [torch.tensor([4, 0]), torch.tensor([2])]
    assert [[int(p[0, 0, 0]) for p in batch] for batch in found.batches(asked)] == [[4, 0], [2]]
    assert list(found.batches([])) == []


def test_only_what_is_kept_is_read_once(paths):
    read = []

    def note(path):
        read.append(path)
        return read_picture(path)

    kept = Pictures(paths, note, resident=True)
    list(kept.batches([torch.tensor([1, 1])]))
    assert len(read) == 5
    asked = Pictures(paths, note, resident=False)
    list(asked.batches([torch.tensor([1]), torch.tensor([1])]))
    assert len(read) == 7


def test_sizes_are_width_and_height(paths, tmp_path):
    assert image_sizes(paths) == [(4 + number, 3) for number in range(5)]
    (tmp_path / "3.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"3.png cannot be read"):
        image_sizes(paths)


def test_a_damaged_file_is_named(paths, tmp_path):
    (tmp_path / "3.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"3.png cannot be decoded"):
        Pictures(paths, resident=True)


def test_grey_of_16_bits_is_brought_to_8(tmp_path):
    path = str(tmp_path / "deep.png")
    Image.fromarray(np.array([[0, 257, 32896, 65535]], np.uint16)).save(path)
    assert read_picture(path)[0].tolist() == [[0, 1, 128, 255]]
    Image.fromarray(np.array([[0, 70000]], np.int32)).save(tmp_path / "deeper.tif")
    with pytest.raises(DataError, match=r"deeper.tif has grey values from 0 to 70000, expected 8 or 16 bits"):
        read_picture(str(tmp_path / "deeper.tif"))
