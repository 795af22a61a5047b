"""Killed anywhere, started again: the run ends as if nothing had happened."""

import random
import signal
import subprocess
import time

import pytest
from engine_helpers import EVERY_STEP, FLAGS, SMALL, STEPS, assert_same, lines, result, start, wait_until

import dyrep
from dyrep.engine.checkpoints import BEST, LAST, PREVIOUS, read
from dyrep.events import EventLog

LONGER = f"{FLAGS} --epochs 8 --ema 0.9 --model noisy_net:build --batch-size 16"
"""Some seconds of training."""


def killed_at(moment, file, count):
    return ["SIGKILL", moment, file, count]


def test_the_run_improves_with_every_epoch_and_grows_and_cuts(whole_small):
    """So that the moments below are what they say."""
    assert whole_small["best"]["epoch"] == 3
    assert [len(event.get("edits", [])) for event in whole_small["events"]] == [0, 1, 2]


MOMENTS = {
    "after the first branches have grown": ("expanded", "", 1),
    "in the second structure update": ("expanded", "", 2),
    "with half of the first checkpoint written": ("half written", LAST, 2),
    "with half of a later checkpoint written": ("half written", LAST, 20),
    "with half of the best checkpoint written": ("half written", BEST, 4),
    "before a checkpoint gets its name": ("before rename", LAST, 9),
    "before the folder with a new checkpoint is synchronised": ("after rename", LAST, 9),
    "after the last step but before its checkpoint": ("before rename", LAST, 3 * STEPS),
    "after the checkpoint of the last step": ("after rename", LAST, 3 * STEPS),
    "between the best and the last checkpoint": ("after rename", BEST, 2),
    "between the best and the last checkpoint of the last epoch": ("after rename", BEST, 3),
    "before the last checkpoint becomes the previous one": ("linked", "", 5),
    "after the last checkpoint has become the previous one": ("after rename", PREVIOUS, 5),
    "in the middle of a line of events": ("half written", "events.jsonl", 1),
    "in the middle of a line of metrics": ("half written", "metrics.jsonl", 1),
    "in the middle of the last line of metrics": ("half written", "metrics.jsonl", 3),
    "in the middle of the line of its start": ("half written", "sessions.jsonl", 1),
    "before the run has a config": ("before rename", "config.json", 1),
    "before the run has events": ("before rename", "events.jsonl", 1),
    "before the folded network is there": ("before rename", "plain.safetensors", 1),
    "between the folded network and the summary": ("before rename", "summary.json", 1),
    "right after the summary": ("after rename", "summary.json", 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed(moment, driver, whole_small, tmp_path):
    assert driver(EVERY_STEP, tmp_path, killed_at(*MOMENTS[moment])) == -signal.SIGKILL
    for file in tmp_path.glob("*.ckpt"):
        read(file)  # whatever has its name is whole
    assert driver(EVERY_STEP, tmp_path) == 0
    assert_same(result(tmp_path), whole_small)


def test_a_run_killed_before_its_first_checkpoint_starts_over(driver, whole_small, tmp_path):
    assert driver(SMALL, tmp_path, killed_at("expanded", "", 2)) == -signal.SIGKILL
    assert not (tmp_path / LAST).exists()
    assert [row["epoch"] for row in lines(tmp_path / "metrics.jsonl")] == [1]
    assert driver(SMALL, tmp_path) == 0
    assert_same(result(tmp_path), whole_small)


def test_a_run_killed_again_and_again_even_while_it_resumes(driver, whole_small, tmp_path):
    plans = [
        ("half written", LAST, 8),
        ("before rename", "metrics.jsonl", 1),
        ("after rename", "metrics.jsonl", 1),
        ("before rename", "events.jsonl", 1),
        ("after rename", "events.jsonl", 1),
        ("half written", "sessions.jsonl", 1),
        ("before rename", PREVIOUS, 1),
        ("linked", "", 1),
        ("after rename", PREVIOUS, 1),
        ("half written", LAST, 1),
        ("expanded", "", 1),
        ("half written", "events.jsonl", 1),
        ("half written", "metrics.jsonl", 1),
        ("before rename", LAST, 4),
        ("expanded", "", 1),
        ("after rename", LAST, 3),
        ("half written", "metrics.jsonl", 1),
    ]
    for plan in plans:
        assert driver(EVERY_STEP, tmp_path, killed_at(*plan)) == -signal.SIGKILL, plan
    assert driver(EVERY_STEP, tmp_path) == 0
    assert_same(result(tmp_path), whole_small)


def test_half_a_checkpoint_is_left_beside_the_one_before_and_then_removed(driver, tmp_path):
    assert driver(EVERY_STEP, tmp_path, killed_at("half written", LAST, 8)) == -signal.SIGKILL
    (left,) = tmp_path.glob("*.part")
    assert 0 < left.stat().st_size < (tmp_path / LAST).stat().st_size
    assert read(tmp_path / LAST)["step"] == 3
    assert read(tmp_path / PREVIOUS)["step"] == 3  # it had its second name already
    assert driver(f"{EVERY_STEP} --stop-after 1", tmp_path) == 0
    assert not list(tmp_path.glob("*.part"))


def test_lines_torn_by_several_kills_in_a_row_do_not_make_a_log_unreadable(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("started")
    log.write("update")
    for torn in ('{"seq": 2, "type": "upd', '\n{"seq": 0, "ty', '\n{"seq'):
        with open(path, "a") as file:
            file.write(torn)
        assert [event["type"] for event in dyrep.read_events(path)] == ["started", "update"]
    later = EventLog(path)
    later.write("started")
    later.resume(2)
    assert [event["type"] for event in later.events] == ["started", "update", "resumed"]


# -- at random moments ------------------------------------------------------------------------------------------


def seconds_of(driver, flags, out):
    """How long an uninterrupted run takes here, to kill others within that time on fast machines and slow ones."""
    began = time.monotonic()
    assert driver(flags, out) == 0
    return time.monotonic() - began


def a_moment(driver, flags, out):
    """A small part of an uninterrupted run, in seconds, also if that ran under load and the next ones do not."""
    return min(0.1 * seconds_of(driver, flags, out), 0.2)


def kill_until_done(flags, out, folder, delay, at_most):
    """Start a run again and again, killing it some time after its first checkpoint; how often it was killed."""

    def written():
        return (out / LAST).stat().st_mtime_ns if (out / LAST).exists() else 0

    for kills in range(at_most):
        before = written()
        process = start(flags, out, folder)
        wait_until(process, lambda: written() != before)  # noqa: B023
        try:
            output, _ = process.communicate(timeout=delay())
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        else:
            assert process.returncode == 0, output.decode()
            return kills
    process = start(flags, out, folder)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output.decode()
    return at_most


@pytest.mark.slow
def test_the_command_killed_at_random_moments(driver, noisy_net, tmp_path):
    latest = a_moment(driver, LONGER, tmp_path / "whole")
    draw = random.Random(0)
    often = f"{LONGER} --checkpoint-minutes 0.001"
    kills = kill_until_done(often, tmp_path / "run", noisy_net, lambda: draw.uniform(0, latest), at_most=2)
    assert kills == 2
    first, *resumed = lines(tmp_path / "run" / "sessions.jsonl")
    assert (first["epoch"], first["step"]) == (0, 0)
    assert len(resumed) == 2
    assert all(session["epoch"] + session["step"] > 0 for session in resumed)
    assert_same(result(tmp_path / "run"), result(tmp_path / "whole"))


@pytest.mark.slow
def test_the_command_killed_at_many_random_moments(driver, noisy_net, tmp_path):
    latest = a_moment(driver, LONGER, tmp_path / "whole")
    for seed, minutes in ((1, 0.0), (2, 0.001)):
        draw, out = random.Random(seed), tmp_path / f"run{seed}"
        flags = f"{LONGER} --checkpoint-minutes {minutes}"
        assert kill_until_done(flags, out, noisy_net, lambda: draw.uniform(0, latest), at_most=6) > 2  # noqa: B023
        assert_same(result(out), result(tmp_path / "whole"))


@pytest.mark.slow
def test_small_runs_killed_at_many_random_moments(driver, whole_small, tmp_path):
    latest = 1.2 * seconds_of(driver, SMALL, tmp_path / "whole")
    draw = random.Random(3)
    kills = 0
    for number in range(25):
        out = tmp_path / str(number)
        flags = f"{SMALL} --checkpoint-minutes {draw.choice([0, 0.0005, 0.002])}"
        while (status := driver(flags, out, after=draw.uniform(0.05, 1) * latest)) != 0:
            assert status == -signal.SIGKILL, driver.said
            kills += 1
        assert_same(result(out), whole_small)
    assert kills > 10
