"""Asked to stop, a run saves, says so, and can be continued."""

import os
import signal
import threading

import pytest
from engine_helpers import EVERY_STEP, SMALL, STEPS, assert_same, result, start, wait_until

from dyrep.engine.checkpoints import LAST, read
from dyrep.engine.signals import stop_request

NAMES = {"SIGTERM": "SIGTERM", "SIGINT": "Ctrl-C", "SIGUSR1": "SIGUSR1"}
HANDLED = [signal.Signals[number] for number in NAMES]


@pytest.mark.parametrize(("number", "reason"), NAMES.items())
def test_a_signal_is_noted_and_nothing_else_happens(number, reason):
    with stop_request() as request:
        assert not request
        signal.raise_signal(signal.Signals[number])
        assert request
        assert request.reason == reason


def test_the_handlers_there_were_come_back_even_after_an_error():
    before = [signal.getsignal(number) for number in HANDLED]
    with stop_request() as request:
        assert [signal.getsignal(number) for number in HANDLED] == [request._receive] * 3
    assert [signal.getsignal(number) for number in HANDLED] == before
    with pytest.raises(ZeroDivisionError), stop_request():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in HANDLED] == before


def test_only_a_second_ctrl_c_interrupts():
    with stop_request() as request:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with stop_request() as request:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert request


def test_in_another_thread_nothing_is_changed():
    before = [signal.getsignal(number) for number in HANDLED]
    seen = []

    def work():
        with stop_request() as request:
            seen.append((bool(request), [signal.getsignal(number) for number in HANDLED]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


@pytest.mark.parametrize(
    ("number", "moment", "place"),
    [
        ("SIGTERM", ("expanded", "", 1), (1, 0)),
        ("SIGINT", ("expanded", "", 2), (2, 0)),
        ("SIGINT", ("half written", LAST, 6), (0, 4)),
        ("SIGTERM", ("before rename", LAST, STEPS + 2), (1, 3)),
        ("SIGTERM", ("half written", "metrics.jsonl", 2), (2, 0)),
        ("SIGINT", ("before rename", "config.json", 1), (0, 1)),
        ("SIGUSR1", ("before rename", LAST, 9), (1, 4)),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_at_once_and_ends(number, moment, place, driver, whole_small, tmp_path):
    assert driver(EVERY_STEP, tmp_path, [number, *moment]) == 128 + signal.Signals[number]
    epoch, step = place
    name = NAMES[number]
    message = f"{name}: saved at epoch {epoch + 1}, step {step + 1} in {tmp_path}; the same command continues\n"
    assert driver.said.endswith(message)
    state = read(tmp_path / LAST)
    assert (state["epoch"], state["step"]) == place
    assert driver(EVERY_STEP, tmp_path) == 0
    assert f"continuing the run in {tmp_path} at epoch {epoch + 1}, step {step + 1}\n" in driver.said
    assert_same(result(tmp_path), whole_small)


def test_a_signal_after_the_last_step_does_not_keep_a_run_from_ending(driver, whole_small, tmp_path):
    assert driver(SMALL, tmp_path, ["SIGTERM", "half written", "metrics.jsonl", 3]) == 0
    assert_same(result(tmp_path), whole_small)


def test_a_second_ctrl_c_ends_the_run_at_once_and_leaves_the_checkpoint_before(driver, whole_small, tmp_path):
    in_its_checkpoint = ["SIGINT", "half written", LAST, 2 * (STEPS + 1)]
    status = driver(EVERY_STEP, tmp_path, ["SIGINT", "before rename", LAST, STEPS], in_its_checkpoint)
    assert status == -signal.SIGINT
    assert "saved" not in driver.said
    state = read(tmp_path / LAST)
    assert (state["epoch"], state["step"]) == (1, 0)
    assert not list(tmp_path.glob("*.part"))
    assert driver(EVERY_STEP, tmp_path) == 0
    assert_same(result(tmp_path), whole_small)


def test_the_command_says_that_it_has_saved_and_exits_as_shells_expect(driver, noisy_net, tmp_path):
    """The real command, and signals from outside."""
    flags = SMALL.replace("--epochs 3", "--epochs 20")
    assert driver(flags, tmp_path / "whole") == 0
    run = tmp_path / "run"
    sessions = run / "sessions.jsonl"
    for count, (number, name, status) in enumerate([(signal.SIGTERM, "SIGTERM", 143), (signal.SIGINT, "Ctrl-C", 130)]):
        process = start(flags, run, noisy_net)
        assert wait_until(process, lambda: sessions.exists() and sessions.read_bytes().count(b"\n") > count)  # noqa: B023
        os.kill(process.pid, number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == status, output.decode()
        last = output.decode().splitlines()[-1]
        assert last.startswith(f"{name}: saved at epoch ")
        assert last.endswith(f"in {run}; the same command continues")
    assert driver(flags, run) == 0
    assert_same(result(run), result(tmp_path / "whole"))
