"""Reading the folders of runs, and taking those together that belong together."""

from __future__ import annotations

import json
import shutil

import pytest

from dyrep.errors import CheckpointError
from dyrep.report import history
from dyrep.report.runs import grouped, read_run
from report.run_folders import own_log


def changed(folder, tmp_path, **recipe):
    """A copy of a run that claims to have been trained with other settings."""
    other = shutil.copytree(folder, tmp_path / "-".join(map(str, recipe.values())))
    config = json.loads((other / "config.json").read_text())
    for key, value in recipe.items():
        where = config["recipe"]
        *path, last = key.split("__")
        for name in path:
            where = where[name]
        where[last] = value
    (other / "config.json").write_text(json.dumps(config))
    return read_run(other)


def test_a_run_is_read_whole(folders):
    run = read_run(folders.evolved)
    assert (run.method, run.seed, run.epochs, run.split) == ("dyrep", 0, 3, "val")
    assert [row["epoch"] for row in run.rows] == [1, 2, 3]
    assert run.updates
    assert run.sessions[0]["versions"]["torch"]
    assert run.summary["fold_passed"]
    assert run.summary["importances"].keys() == run.summary["structure"]["blocks"].keys()


def test_the_cost_of_the_plain_network_is_known_from_any_run(folders):
    costs = {read_run(folder).plain_macs for folder in vars(folders).values()}
    assert costs == {read_run(folders.plain).rows[0]["macs"]}


def test_a_run_that_has_not_ended_has_no_summary(folders):
    run = read_run(folders.unfinished)
    assert run.summary is None
    assert len(run.rows) == 2


def test_a_partial_last_line_is_passed_over(folders, tmp_path):
    folder = shutil.copytree(folders.evolved, tmp_path / "run")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 4, "train_')
    assert len(read_run(folder).rows) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json is damaged"),
        ("config.json", "[]", "holds no JSON object"),
        ("config.json", '{"format": 1, "settings": {}}', "config.json is damaged: it has no recipe"),
        ("metrics.jsonl", "", "has not finished an epoch yet"),
        ("metrics.jsonl", None, "has not finished an epoch yet"),
        ("metrics.jsonl", "{\n{}\n", "line 1 of .*metrics.jsonl is damaged"),
        ("summary.json", "{", "summary.json is damaged"),
    ],
)
def test_what_is_no_run_is_refused_with_the_reason(folders, tmp_path, name, content, message):
    folder = shutil.copytree(folders.evolved, tmp_path / "run")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_run(folder)


def test_a_folder_that_is_not_there_is_named():
    with pytest.raises(CheckpointError, match="there is no folder nowhere"):
        read_run("nowhere")


def test_runs_that_differ_in_their_seed_alone_belong_together(folders):
    first, second, plain = (read_run(each) for each in (folders.evolved, folders.second, folders.plain))
    groups = grouped([second, plain, first])
    assert [(group.label, [run.seed for run in group.runs]) for group in groups] == [("dyrep", [0, 1]), ("origin", [0])]


def test_groups_of_one_method_are_called_by_what_tells_them_apart(folders, tmp_path):
    runs = [
        read_run(folders.evolved),
        changed(folders.evolved, tmp_path, dyrep__score="snip"),
        changed(folders.evolved, tmp_path, lr=0.2),
    ]
    labels = [group.label for group in grouped(runs)]
    assert labels == [
        "dyrep (lr=0.1, score=invariant)",
        "dyrep (lr=0.1, score=snip)",
        "dyrep (lr=0.2, score=invariant)",
    ]


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_the_log_of_a_loop_of_ones_own_is_a_run_too(tmp_path, unit):
    folder = own_log(tmp_path / "mine", unit)
    for path in (folder, folder / "events.jsonl"):
        run = read_run(path)
        assert (run.unit, run.epochs, run.seed, run.title, run.own_loop) == (unit, 8, 3, "mine", True)
        assert [(row["epoch"], row["macs"]) for row in run.rows] == [(2, 100), (4, 150)]
        assert history.average(history.series(run, "macs")) == pytest.approx((2 * 100 + 2 * 150) / 4)
        assert [life.born for life in history.lives(run)] == [2, 4]


def test_what_a_network_begins_with_costs_something_from_the_first_step(tmp_path):
    run = read_run(own_log(tmp_path, "epoch", begun=120))
    assert [(row["epoch"], row["macs"]) for row in run.rows] == [(2, 120), (4, 150)]
    assert run.plain_macs == 100


def test_only_runs_that_may_cut_are_said_to(folders, tmp_path):
    run = read_run(own_log(tmp_path, "epoch"))
    assert run.cuts
    run.events[0]["config"]["cut"] = "none"  # what a method makes of the settings of its recipe
    assert not run.cuts
    assert not read_run(folders.dbb).cuts


def test_metrics_beside_such_a_log_are_read(tmp_path):
    folder = own_log(tmp_path, "epoch", metrics=[{"epoch": epoch, "test_accuracy": 31.5} for epoch in (1, 3, 5)])
    assert [(row["test_accuracy"], row["macs"]) for row in read_run(folder).rows] == [
        (31.5, 100),
        (31.5, 150),
        (31.5, 300),
    ]


def test_metrics_of_a_loop_that_counts_steps_need_steps(tmp_path):
    folder = own_log(tmp_path / "good", "step", metrics=[{"step": 3, "test_accuracy": 31.5}])
    assert [row["epoch"] for row in read_run(folder).rows] == [3]
    with pytest.raises(CheckpointError, match="every line needs 'step'"):
        read_run(own_log(tmp_path / "bad", "step", metrics=[{"epoch": 3, "test_accuracy": 31.5}]))


def test_seeds_of_a_loop_of_ones_own_belong_together(tmp_path):
    runs = [read_run(own_log(tmp_path / name, "epoch")) for name in ("a", "b")]
    assert [group.label for group in grouped(runs)] == ["dyrep"]


def test_structures_that_are_trained_again_are_called_by_where_they_come_from(folders, tmp_path):
    sources = [{"source": f"somewhere/{name}@4", "blocks": {"conv1": {}}} for name in ("x", "y")]
    runs = [changed(folders.evolved, tmp_path / str(n), structure=source) for n, source in enumerate(sources)]
    assert [group.label for group in grouped(runs)] == ["dyrep (structure=x@4)", "dyrep (structure=y@4)"]


@pytest.mark.parametrize(("lines", "message"), [(0, "is not the log of dyrep.DyRep"), (1, "has no update yet")])
def test_a_log_that_tells_nothing_is_refused(tmp_path, lines, message):
    file = own_log(tmp_path, "epoch") / "events.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]))
    with pytest.raises(CheckpointError, match=message):
        read_run(file)
