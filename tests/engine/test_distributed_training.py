"""Several processes train one network: together to the end, through deaths, signals and restarts."""

import re
import time

import pytest
import torch
from engine_helpers import assert_same, lines, result, without_times
from launching import STEPS, torchrun

import dyrep
from dyrep.engine import checkpoints
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.setup import make_data
from dyrep.engine.world import World
from dyrep.errors import ConfigError

OFTEN = ("--checkpoint-minutes", "0")
"""Save whenever the processes ask each other: after 20 steps and after every epoch."""


def finished(folder, out, *more, **options):
    done = torchrun(folder, out, *more, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def kept_by(folder, ranks):
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


def saved_place(stopped, out, reason="SIGTERM"):
    """Where a job that was terminated says that it has saved, which has to be where it did."""
    found = re.search(
        rf"^{reason}: saved at (epoch (\d+), step (\d+)) in (.*); the same command continues$", stopped.stdout, re.M
    )
    assert found, stopped.stdout
    state = checkpoints.read(out / "last.ckpt")
    assert (state["epoch"] + 1, state["step"] + 1) == (int(found[2]), int(found[3]))
    assert found[4] == str(out)
    return found[1]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """A run of two processes that nothing happened to."""
    folder = tmp_path_factory.mktemp("together")
    return folder, finished(folder, folder / "run")


def test_two_processes_finish_and_end_with_the_same_weights(together):
    folder, _ = together
    first, second = kept_by(folder, 2)
    assert_same(second, first)
    assert first["structure"]["blocks"]
    assert any("branches" in key for key in first["parameters"])
    assert any("branches" in key for key in first["optimizer"])
    assert not torch.equal(first["average"]["0.weight"], first["parameters"]["0.weight"])
    assert first["summary"]["fold_passed"]
    assert first["summary"]["processes"] == 2
    assert first["summary"]["test_accuracy"] > 60


def test_one_process_alone_writes_and_speaks(together):
    folder, done = together
    run = folder / "run"
    written = ["best.ckpt", "config.json", "events.jsonl", "last.ckpt", "metrics.jsonl", "plain.safetensors"]
    assert sorted(path.name for path in run.iterdir()) == [*written, "sessions.jsonl", "summary.json"]
    assert [row["epoch"] for row in lines(run / "metrics.jsonl")] == [1, 2, 3]
    assert [event["type"] for event in lines(run / "events.jsonl")] == ["started", "update", "update"]
    (session,) = lines(run / "sessions.jsonl")
    assert session["processes"] == 2
    told = done.stdout.splitlines()
    assert sum(line.startswith("digits, method dyrep") for line in told) == 1
    assert sum(line.startswith("epoch 3/3") for line in told) == 1
    assert sum(line.startswith("test accuracy") for line in told) == 1


def test_a_batch_that_cannot_be_divided_among_the_processes_is_refused():
    world = World(torch.device("cpu"), 1, 3)
    with pytest.raises(ConfigError, match="batch_size=32: must be a multiple of the number of ranks, 3"):
        make_data(Recipe(batch_size=32), RunSettings(), world)


@pytest.mark.slow
def test_without_norms_two_processes_learn_what_one_learns(tmp_path):
    """Norms see the part of a batch that a process has; without them only the order of additions differs."""
    flags = ("--model", "incidents:without_norms", "--method", "origin", "--lr", "0.02", "--label-smoothing", "0.1")
    for ranks in (1, 2):
        finished(tmp_path, tmp_path / f"of{ranks}", *flags, ranks=ranks)
    rows = [lines(tmp_path / f"of{ranks}" / "metrics.jsonl") for ranks in (1, 2)]
    for alone, shared in zip(*rows, strict=True):
        assert shared["lr"] == alone["lr"]
        for key in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
            assert shared[key] == pytest.approx(alone[key], rel=2e-3), key
    assert rows[0][2]["train_loss"] < 0.7 * rows[0][0]["train_loss"]
    weights = [checkpoints.read(tmp_path / f"of{ranks}" / "last.ckpt")["model"] for ranks in (1, 2)]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
def test_three_processes_finish_and_end_with_the_same_weights(tmp_path):
    finished(tmp_path, tmp_path / "run", ranks=3)
    first, *others = kept_by(tmp_path, 3)
    for other in others:
        assert_same(other, first)
    assert first["structure"]["blocks"]
    assert first["summary"]["processes"] == 3
    assert [row["epoch"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("step", [30, STEPS + 30, 2 * STEPS + 5])
def test_killed_and_resumed_equals_never_stopped(step, together, tmp_path):
    folder, _ = together
    out = tmp_path / "run"
    killed = torchrun(tmp_path, out, *OFTEN, incident=f"die@{step}@0,1")
    assert killed.returncode != 0
    state = checkpoints.read(out / "last.ckpt")
    epoch, inside = divmod(step - 1, STEPS)
    assert (state["epoch"], state["step"]) == (epoch, 20 if inside >= 20 else 0)
    finished(tmp_path, out)
    assert len(lines(out / "sessions.jsonl")) == 2
    assert_same(result(out), result(folder / "run"))
    for ours, theirs in zip(kept_by(tmp_path, 2), kept_by(folder, 2), strict=True):
        assert_same(without_times(ours), without_times(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_dies_ends_the_job_and_the_same_command_goes_on(rank, together, tmp_path):
    folder, _ = together
    out = tmp_path / "run"
    began = time.perf_counter()
    broken = torchrun(tmp_path, out, *OFTEN, incident=f"die@{STEPS + 30}@{rank}")
    assert time.perf_counter() - began < 60
    assert broken.returncode != 0
    assert f"dyrep: rank {1 - rank} lost another of the 2 processes (" in broken.stderr
    assert "continues from its last checkpoint when the same command is given again" in broken.stderr
    assert not (out / "summary.json").exists()
    done = finished(tmp_path, out, *OFTEN)
    assert f"continuing the run in {out} at epoch 2, step 21" in done.stdout
    assert_same(result(out), result(folder / "run"))


@pytest.mark.slow
def test_a_job_that_is_terminated_saves_and_the_same_command_goes_on(together, tmp_path):
    folder, _ = together
    out = tmp_path / "run"
    stopped = torchrun(tmp_path, out, incident=f"terminate the job@{STEPS + 5}@0")
    assert stopped.returncode != 0
    place = saved_place(stopped, out)
    assert place in ("epoch 2, step 21", "epoch 3, step 1")  # depending on how fast the signal travels
    assert len(checkpoints.read(out / "last.ckpt")["random"]) == 2
    done = finished(tmp_path, out)
    assert f"continuing the run in {out} at {place}\n" in done.stdout
    assert_same(result(out), result(folder / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_stops_all_of_them_in_order(rank, tmp_path):
    out = tmp_path / "run"
    stopped = torchrun(tmp_path, out, incident=f"terminate@{STEPS + 5}@{rank}")
    assert stopped.returncode != 0
    reason = "SIGTERM" if rank == 0 else "a signal to another process"
    assert saved_place(stopped, out, reason) == "epoch 2, step 21"
    assert "lost another" not in stopped.stderr


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_process_stops_all_of_them(tmp_path):
    out = tmp_path / "run"
    began = time.perf_counter()
    broken = torchrun(tmp_path, out, *OFTEN, incident=f"overflow@{STEPS + 30}@1", seconds=90)
    assert time.perf_counter() - began < 60
    assert broken.returncode != 0
    assert "dyrep: the loss is not finite at epoch 2, step 30. It began with " in broken.stderr
    state = checkpoints.read(out / "last.ckpt")
    assert (state["epoch"], state["step"]) == (1, 20)
    assert all(torch.isfinite(value).all() for value in state["model"].values() if value.is_floating_point())
    finished(tmp_path, out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dyrep.errors.SettingsChangedWarning")
def test_another_number_of_processes_is_refused_unless_asked_for(tmp_path):
    out = tmp_path / "run"
    killed = torchrun(tmp_path, out, *OFTEN, incident=f"die@{STEPS + 30}@0,1")
    assert killed.returncode != 0
    before = (out / "last.ckpt").read_bytes()
    for ranks in (1, 3):
        refused = torchrun(tmp_path, out, ranks=ranks)
        assert refused.returncode != 0
        assert f"was started with other settings (processes: 2 against {ranks})" in refused.stderr
        assert "--change-settings to go on with the new ones" in refused.stderr
    assert (out / "last.ckpt").read_bytes() == before
    assert [event["type"] for event in dyrep.read_events(out / "events.jsonl")] == ["started", "update"]
    finished(tmp_path, out, "--change-settings", ranks=3)
    assert [row["epoch"] for row in lines(out / "metrics.jsonl")] == [1, 2, 3]
    assert all(0 < row["train_accuracy"] <= 100 for row in lines(out / "metrics.jsonl"))
    first, *others = kept_by(tmp_path, 3)
    for other in others:
        assert_same(other, first)


@pytest.mark.slow
def test_a_batch_that_cannot_be_divided_ends_the_job_with_the_reason(tmp_path):
    broken = torchrun(tmp_path, tmp_path / "run", "--batch-size", "35")
    assert broken.returncode != 0
    assert "dyrep: batch_size=35: must be a multiple of the number of ranks, 2" in broken.stderr
    assert "Traceback" not in broken.stderr.partition("elastic")[0]
