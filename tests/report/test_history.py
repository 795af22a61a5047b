"""What the logs of runs mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from dyrep.report import history
from dyrep.report.history import EditDrift, Life
from dyrep.report.runs import Run


def a_run(updates=(), rows=None, converted=(), summary=None, **recipe):
    """A run with these updates: (epoch, edits, more) each."""
    events = [{"type": "started", "seq": 0}]
    if converted:
        events.append({"type": "converted", "seq": 1, "edits": [edit(*each) for each in converted]})
    for epoch, edits, *more in updates:
        about = {"type": "update", "epoch": epoch, "step": 0, "edits": [edit(*each) for each in edits]}
        events.append({**about, **(more[0] if more else {})})
    rows = [{"epoch": 1, "images_per_second": 640.0, "train_seconds": 2.0}] if rows is None else rows
    about = {"method": "dyrep", "seed": 0, "epochs": 10, "batch_size": 64, **recipe}
    return Run(Path("run"), about, rows, events, [], summary)


def edit(kind, layer, branches, **detail):
    return {"kind": kind, "layer": layer, "branches": branches, "detail": detail}


INNER = "conv.branches.1x1-KxK.conv"
STORY = [
    (2, [("expand", "conv", ["1x1", "1x1-KxK"])]),
    (4, [("expand", INNER, ["residual"])]),
    (6, [("cut", "conv", ["1x1-KxK"])]),
    (8, [("expand", "conv", ["1x1-KxK"])]),
]


def spans(run):
    return [(life.layer, life.branch, life.born, life.died) for life in history.lives(run)]


def test_lives_run_from_birth_to_cut_and_nested_ones_die_with_their_parent():
    assert spans(a_run(STORY)) == [
        ("conv", "1x1", 2, None),
        ("conv", "1x1-KxK", 2, 6),
        (INNER, "residual", 4, 6),
        ("conv", "1x1-KxK", 8, None),
    ]


def test_branches_that_a_method_starts_with_live_from_the_start():
    run = a_run([(5, [("cut", "a", ["1xK"])])], converted=[("expand", "a", ["1x1", "1xK"])])
    assert spans(run) == [("a", "1x1", 0, None), ("a", "1xK", 0, 5)]
    assert history.lives(run)[0].why == "from the start"


def test_lives_say_why():
    grown = {"kind": "expand", "layer": "a", "branches": ["1x1"], "detail": {"score": 1.5}}
    cut = {"kind": "cut", "layer": "a", "branches": ["1x1"], "detail": {"importances": {"1x1": 0.0123}}}
    run = a_run([(1, [], {"edits": [grown]}), (2, [], {"edits": [cut]})])
    assert history.lives(run) == [Life("a", "1x1", 1, 2, "score 1.5", "importance 0.0123, below the mean")]
    run = a_run([(1, [], {"edits": [grown]}), (2, [], {"edits": [cut | {"detail": {"why": "as were all others"}}]})])
    assert history.lives(run) == [Life("a", "1x1", 1, 2, "score 1.5", "as were all others")]
    assert "which it was part of" in history.lives(a_run(STORY))[2].end


def test_steps_count_as_parts_of_epochs():
    updates = [(epoch, [("expand", "a", ["1x1"])], {"step": step}) for epoch, step in ((0, 10), (1, 30), (2, 45))]
    run = a_run(updates, dyrep={"unit": "step"})  # 20 steps per epoch
    assert [life.born for life in history.lives(run)] == [0.5, 1.5, 2.25]
    told = a_run(updates, dyrep={"unit": "step"}, rows=[{"epoch": 1, "steps": 40}])
    assert [life.born for life in history.lives(told)] == [0.25, 0.75, 1.125]


def test_importances_are_those_of_epochs_or_where_there_are_none_of_updates():
    found = [{"b": {"1x1": 0.1}}, {"b": {"1x1": 0.2}, "a": {"1xK": 1}}]
    rows = [{"epoch": number + 1, "importances": each} for number, each in enumerate(found)]
    assert history.importances(a_run(rows=rows)) == {"a": {"1xK": [(2, 1)]}, "b": {"1x1": [(1, 0.1), (2, 0.2)]}}
    updates = [(3, [], {"importances": {"a": {"1x1": 0.5}}})]
    assert history.importances(a_run(updates)) == {"a": {"1x1": [(3, 0.5)]}}


def test_importances_that_are_no_numbers_are_left_out():
    rows = [{"epoch": 1, "importances": {"a": {"1x1": 0.5, "1xK": "nan"}, "b": {"1x1": "inf"}}}]
    cut = [{"kind": "cut", "layer": "a", "branches": ["1xK"], "detail": {"importances": {"1xK": "nan"}}}]
    run = a_run([(1, [("expand", "a", ["1xK"])]), (2, [], {"edits": cut})], rows=rows)
    assert history.importances(run) == {"a": {"1x1": [(1, 0.5)]}}
    assert history.cuts(run) == [(2, "a", "1xK", None)]
    assert history.lives(run)[0].end == "not among the strongest"


def test_the_mean_is_that_of_the_branches_alive_without_the_origin():
    branches = {"1x1": [(1, 1.0), (2, 2.0)], "1xK": [(2, 4.0)], "KxK": [(1, 100.0), (2, 100.0)]}
    assert history.mean_importance(branches) == [(1, 1.0), (2, 3.0)]


def test_cuts_come_with_their_importance_where_it_is_known():
    cut = [{"kind": "cut", "layer": "a", "branches": ["1x1"], "detail": {"importances": {"1x1": 0.3}}}]
    assert history.cuts(a_run([(4, [], {"edits": cut})])) == [(4, "a", "1x1", 0.3)]
    assert history.cuts(a_run(STORY)) == [(6, "conv", "1x1-KxK", None)]


def test_scores_are_a_table_of_layers_and_updates():
    updates = [
        (1, [("expand", "conv10", ["1x1"])], {"scores": {"conv10": 2.0, "conv2": 1.0}}),
        (2, [], {"scores": {"conv2": "nan"}}),
        (3, [], {}),
    ]
    found = history.scores(a_run(updates))
    assert found.epochs == [1, 2]
    assert found.values == {"conv2": [1.0, None], "conv10": [2.0, None]}
    assert list(found.values) == ["conv2", "conv10"]
    assert found.chosen == [["conv10"], []]


def test_drifts_are_told_where_they_were_measured():
    edits = [
        {"kind": "expand", "layer": INNER, "branches": ["1x1"], "detail": {"drift": 1e-7, "train_drift": 1e-4}},
        {"kind": "cut", "layer": "a", "branches": ["1x1"], "detail": {"drift": 2e-7}},
        {"kind": "cut", "layer": "a", "branches": ["1xK"], "detail": {}},
    ]
    assert history.drifts(a_run([(3, [], {"edits": edits})])) == [
        EditDrift(3, "expand conv › 1x1-KxK: 1x1", "expand", 1e-7, 1e-4),
        EditDrift(3, "cut a: 1x1", "cut", 2e-7, None),
    ]


def test_columns_have_values_only_where_something_was_measured():
    measured = (50.0, "nan", float("nan"), "inf")
    rows = [{"epoch": 1}, *({"epoch": epoch, "test_accuracy": value} for epoch, value in enumerate(measured, 2))]
    assert history.series(a_run(rows=rows), "test_accuracy") == [(2, 50.0)]
    assert history.average([]) is None
    assert history.average([(1, 2.0), (2, 4.0)]) == 3.0
    assert history.average([(1, 2.0), (5, 4.0)]) == pytest.approx(3.6)


def test_a_step_takes_as_long_as_its_images():
    assert history.step_milliseconds(a_run()) == [(1, pytest.approx(100.0))]


def test_the_first_epoch_is_timed_only_if_there_is_no_other():
    rows = [{"train_seconds": 9.0, "update_seconds": 1.0}, {"train_seconds": 2.0, "update_seconds": 1.0}]
    assert history.epoch_seconds(rows) == 3.0
    assert history.epoch_seconds([{}, *rows, {"train_seconds": 4.0}]) == 3.5
    assert history.epoch_seconds(rows[:1]) == 10.0
    assert history.epoch_seconds([{"epoch": 1}]) is None


@pytest.mark.parametrize(("total", "rest"), [(10.0, 4.0), (5.0, 0.0)])
def test_time_is_shared_out(total, rest):
    rows = [{"train_seconds": 2.0, "eval_seconds": 0.5, "update_seconds": 0.5}] * 2
    assert list(history.time_shares(a_run(rows=rows)).values()) == [4.0, 1.0, 1.0]
    assert list(history.time_shares(a_run(rows=rows, summary={"seconds": total})).values()) == [4.0, 1.0, 1.0, rest]
