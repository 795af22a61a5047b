"""The benchmark that times the training of finished runs once more, alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import dyrep
from dyrep.cli.main import main as dyrep_main

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import alone

SHORT = "--device cpu --batch-size 500 --calibration-batches 2 --progress False"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs of digits by name."""
    folder, flags = tmp_path_factory.mktemp("runs"), {}
    flags["grown"] = "--epochs 5 --interval 2 --score snip"
    flags["grown out"] = "--epochs 4 --interval 1 --score snip --start-with 1x1 --macs-limit 1.2 --max-depth 1"
    flags["grown out"] += " --cut none --regrow"
    flags["by steps"] = "--epochs 3 --unit step --interval 2 --stop 4 --score snip"
    flags["absorbed"] = "--epochs 3 --start-with 1x1 --absorb-after 1 --interval 2 --score snip --regrow"
    flags["fixed"] = "--epochs 2 --method dbb"
    for name, words in flags.items():
        dyrep_main(["train", "digits", *f"{SHORT} {words}".split(), "--out", str(folder / name)])
    return folder


@pytest.mark.parametrize(
    ("name", "steps", "branches", "scored", "edited"),
    [
        ("grown", [4, 4, 2], [0, 6, 11], [True, True, True], 2),
        ("grown out", [2, 2, 2, 2], [6, 10, 10, 10], [True, False, False, False], 1),
        ("by steps", [2, 2, 2], [0, 6, 11], [True, True, True], 2),
        ("absorbed", [2, 4], [6, 0], [True, False], 1),
        ("fixed", [4], [18], [False], 0),
    ],
)
def test_every_structure_and_update_of_a_run_counts_for_as_long_as_it_lasted(
    runs, monkeypatch, name, steps, branches, scored, edited
):
    """Steps that take a second times the number of branches, and ten more; a hundred for an update, and to capture."""
    found = []
    real_update, real_steps = alone.update_seconds, alone.step_seconds

    def update_seconds(learner, event):
        assert real_update(learner, event) > 0
        return 100.0

    def step_seconds(learner, count):
        blocks = dyrep.structure(learner.model)["blocks"].values()
        optimized = {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
        assert optimized == {id(p) for p in learner.model.parameters()}
        watching = learner.train_on.scorer is not None and bool(learner.train_on.scorer.state_dict()["names"])
        found.append((sum(len(block["branches"]) for block in blocks), watching))
        assert min(real_steps(learner, 1)) >= 0  # which an update goes by
        return 100.0, found[-1][0] + 10.0

    monkeypatch.setattr(alone, "update_seconds", update_seconds)
    monkeypatch.setattr(alone, "step_seconds", step_seconds)
    before = {path: path.read_bytes() for path in (runs / name).iterdir()}
    minutes = alone.minutes_alone(runs / name, None, "cpu")
    assert found == list(zip(branches, scored, strict=True))
    wanted = sum(count * (more + 10.0) for count, more in zip(steps, branches, strict=True))
    assert 60 * minutes == pytest.approx(wanted + 100.0 * (len(steps) - 1) + 100.0 * edited)
    assert {path: path.read_bytes() for path in (runs / name).iterdir()} == before


def test_steps_are_those_of_the_run_and_leave_the_weights_alone(runs, monkeypatch, capsys):
    taken, learners = [], []
    real = alone.step_seconds

    def step_seconds(learner, count):
        weights = [parameter.clone() for parameter in learner.model.parameters()]
        seconds = real(learner, count)
        assert seconds[1] > 0
        assert all(old.equal(new) for old, new in zip(weights, learner.model.parameters(), strict=True))
        taken.append(learner.train_on.read().steps)
        learners.append(learner)
        return seconds

    monkeypatch.setattr(alone, "step_seconds", step_seconds)
    alone.main([str(runs / "grown"), "--device", "cpu", "--steps", "2"])
    assert capsys.readouterr().out.startswith(f"{runs / 'grown'}: 0.")
    assert len(set(map(id, learners))) == 1
    assert taken[0] > 2
    assert taken == [taken[0] * (i + 1) for i in range(3)]


def test_a_search_is_refused(runs, monkeypatch):
    recipe = alone.RunDirectory(runs / "grown").model_state()["recipe"] | {"method": "repnas"}
    monkeypatch.setattr(alone.RunDirectory, "model_state", lambda self: {"recipe": recipe})
    with pytest.raises(ValueError, match="a search is no sequence of structures"):
        alone.minutes_alone(runs / "fixed", None, "cpu")
