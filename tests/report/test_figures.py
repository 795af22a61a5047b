"""The figures of a report show what happened, and say it."""

from __future__ import annotations

import pytest

from dyrep.report import figures
from dyrep.report.runs import grouped, read_run
from dyrep.report.timeline import timeline
from report.run_folders import ALL, update, write_run

INNER = "conv2.branches.1x1-KxK.conv"


@pytest.fixture
def run(tmp_path):
    folder = write_run(
        tmp_path / "run",
        updates=[
            update(2, ("expand", "conv2", ALL), scores={"conv1": 1.0, "conv2": 4.0}),
            update(4, ("expand", INNER, ["1x1"]), ("cut", "conv2", ["1xK", "Kx1"]), scores={"conv1": 3.0, INNER: 2.0}),
            update(6, ("cut", "conv2", ["1x1-KxK"]), scores={"conv1": 1.0}),
        ],
        strengths={"conv2": {"1x1": 0.5, "1xK": 0.125}},
        rows=lambda row: row.update(memory_gib=1.5),
    )
    return read_run(folder)


def told(picture):
    return list(picture.told.values())


def test_the_timeline_has_a_bar_for_every_life_with_its_story(run):
    stories = told(timeline(run))
    assert len(stories) == len(ALL) + 1
    assert "conv2, 1x1: grown after epoch 2 (score 1), lived to the end" in stories
    absorbed = "absorbed after epoch 4 (importance 0.1250, below the mean)"
    assert f"conv2, 1xK: grown after epoch 2 (score 1), {absorbed}" in stories
    inside = next(story for story in stories if story.startswith("conv2 › 1x1-KxK, 1x1"))
    assert inside.endswith("absorbed after epoch 6 (with conv2 › 1x1-KxK, which it was part of)")


def test_bars_lie_where_branches_lived(run):
    axis = timeline(run).figure.axes[0]
    spans = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in axis.patches)
    assert spans == sorted([(2, 10)] * 3 + [(2, 4)] * 2 + [(2, 6), (4, 6)])


def test_curves_end_where_runs_do_and_have_a_tick_for_every_edit(run, tmp_path):
    plain = read_run(write_run(tmp_path / "plain", method="origin", accuracy=80.0))
    marks = told(figures.curves(grouped([run, plain])))
    assert "dyrep, seed 0: 90 after epoch 10" in marks
    assert "origin, seed 0: 80 after epoch 10" in marks
    assert [mark for mark in marks if mark.startswith("epoch")] == [
        "epoch 2: expand conv2",
        "epoch 4: expand conv2 › 1x1-KxK; cut conv2",
        "epoch 6: cut conv2",
    ]


def test_costs_have_a_panel_for_everything_that_was_measured(run, tmp_path):
    titles = [axis.get_title(loc="left") for axis in figures.costs(grouped([run])).figure.axes if axis.get_visible()]
    assert titles == ["multiply-adds of a forward pass, M", "parameters, M", "time of a step, ms", "peak memory, GiB"]
    without = read_run(write_run(tmp_path / "cpu"))
    axes = [axis for axis in figures.costs(grouped([without])).figure.axes if axis.get_visible()]
    assert len(axes) == 3


def test_importances_have_a_panel_for_every_block_with_mean_and_cuts(run):
    picture = figures.importance(run)
    titles = [axis.get_title(loc="left") for axis in picture.figure.axes if axis.get_visible()]
    assert titles == ["conv2", "conv2 › 1x1-KxK"]
    assert "conv2, 1xK: absorbed at epoch 4, importance 0.1250" in told(picture)
    assert "conv2, 1x1: importance 0.5000 at epoch 10" in told(picture)
    dashed = [line for line in picture.figure.axes[0].lines if line.get_linestyle() == "--"]
    assert dashed[0].get_ydata()[0] == pytest.approx((0.5 + 0.125 + 4 * 0.01) / 6)


def test_the_score_map_has_a_cell_for_every_candidate_and_marks_what_was_chosen(run):
    cells = told(figures.score_map(run))
    assert len(cells) == 5
    assert "conv2 at epoch 2: score 4, 100% of the largest, expanded" in cells
    assert "conv1 at epoch 2: score 1, 25% of the largest" in cells
    assert "conv2 › 1x1-KxK at epoch 4: score 2, 67% of the largest, expanded" in cells


def test_a_score_below_zero_does_not_look_like_a_large_one(tmp_path):
    updates = [update(2, ("expand", "conv2", ALL), scores={"conv1": -4.0, "conv2": 2.0, "conv3": 4.0})]
    picture = figures.score_map(read_run(write_run(tmp_path / "signs", updates=updates)))
    assert "conv1 at epoch 2: score -4, -100% of the largest in size" in told(picture)
    assert "conv2 at epoch 2: score 2, 50% of the largest in size, expanded" in told(picture)
    least, middle, largest = (cell.get_facecolor() for cell in picture.figure.axes[0].patches)
    assert len({least, middle, largest}) == 3
    assert [tick.get_text() for tick in picture.figure.axes[1].get_yticklabels()] == ["-largest", "0", "largest"]


def test_drifts_have_a_mark_for_every_edit_and_mode(run):
    marks = told(figures.drift(run))
    assert len(marks) == 8
    assert "epoch 4, cut conv2: 1xK, Kx1: 1.0e-04 in training mode" in marks


def test_a_run_without_structure_has_curves_and_costs_alone(tmp_path):
    run = read_run(write_run(tmp_path / "plain", method="origin"))
    assert figures.importance(run) is figures.score_map(run) is figures.drift(run) is None
    assert told(figures.costs(grouped([run])))
    assert timeline(run).svg()


def test_a_branch_that_grew_again_has_two_lines():
    assert figures._unbroken([(1, 0.1), (2, 0.2), (5, 0.3), (6, 0.4)]) == [[(1, 0.1), (2, 0.2)], [(5, 0.3), (6, 0.4)]]
    assert figures._unbroken([(1, 0.1)]) == [[(1, 0.1)]]
