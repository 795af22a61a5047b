"""The benchmark of how fast kernels turn after their blocks are absorbed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import pace


def test_angles_are_means_over_kernels_in_degrees():
    before = [torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])]
    after = [torch.tensor([0.0, 3.0]), torch.tensor([5.0, 0.0])]
    assert pace.angle(before, after) == pytest.approx(45)


def test_absorbed_kernels_turn_nearly_as_far_as_their_blocks_and_folded_ones_do_not():
    found = pace.measure(pace.SPACES["all"], seed=0, before=20, after=50)
    assert found["absorbed"] == pytest.approx(found["kept"], rel=0.2)
    assert found["absorbed as folded"] < 0.5 * found["absorbed"]
    start = pace.measure(("1x1", "1x1-KxK", "residual"), seed=0, before=20, after=2)
    assert start["absorbed as folded"] == pytest.approx(start["kept"], rel=0.2)  # momentum is carried over


def test_it_writes_what_the_table_shows(tmp_path, capsys):
    pace.main(["--out", str(tmp_path / "pace.json"), "--seeds", "2", "--before", "2", "--after", "1"])
    rows = json.loads((tmp_path / "pace.json").read_text())["rows"]
    assert [(row["branches"], row["steps"]) for row in rows] == [("1x1, residual", 1), ("all", 1)]
    assert all(len(angles) == 2 for row in rows for angles in row["degrees"].values())
    assert "degrees" in capsys.readouterr().out
