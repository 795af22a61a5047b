"""What a person sees of a run, and what TensorBoard does."""

import json
import re
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dyrep.cli.main import main
from dyrep.engine import progress
from dyrep.engine.progress import (
    LINE_SECONDS,
    BarReporter,
    Curves,
    LineReporter,
    SilentReporter,
    Status,
    describe,
    make_reporter,
)
from dyrep.errors import MissingPackageError


def status(epoch=1, **changes):
    values = {"epoch": epoch, "epochs": 120, "step": 3, "steps": 10, "loss": 0.5, "accuracy": 91.237}
    more = {"images_per_second": 12345.6, "structure": "2 blocks, 12 branches", "seconds_left": 3700.0}
    return Status(**{**values, **more, **changes})


def row(epoch=1, **values):
    return {"epoch": epoch, "train_loss": 0.51234, "train_accuracy": 91.237, "lr": 0.1, **values}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


# -- words ------------------------------------------------------------------------------------------------------


def test_an_epoch_in_one_line():
    assert describe(row(7, val_accuracy=88.0), status(7)) == (
        "epoch   7/120  loss 0.5123, accuracy 91.24 %  val 88.00 %  2 blocks, 12 branches  12,346 images/s  "
        "1 h 1 min left"
    )
    assert "val" not in describe(row(), status())
    assert "test 99.50 %" in describe(row(test_accuracy=99.5), status())


# -- lines ------------------------------------------------------------------------------------------------------


def test_lines_are_printed_for_the_first_epoch_then_now_and_then_and_for_the_last(clock, capsys):
    reporter = LineReporter()
    for epoch in range(1, 121):
        reporter.epoch(row(epoch), status(epoch))
        reporter.status(status(epoch))
        clock[0] += 1
    reporter.close()
    shown = [int(re.match(r"epoch +(\d+)/120", line)[1]) for line in capsys.readouterr().out.splitlines()]
    period = int(LINE_SECONDS)
    assert shown == [*range(1, 121, period), 120]


def test_the_first_line_does_not_wait_for_the_machine_to_have_been_up_for_long(clock, capsys):
    clock[0] = 0.0
    LineReporter().epoch(row(), status())
    assert capsys.readouterr().out.startswith("epoch")


def test_messages_are_printed_at_once(clock, capsys):
    reporter = LineReporter()
    reporter.message("one")
    reporter.message("two [not markup]")
    assert capsys.readouterr().out == "one\ntwo [not markup]\n"


# -- bars -------------------------------------------------------------------------------------------------------


def test_bars_work_where_there_is_no_terminal(capsys):
    reporter = BarReporter()
    reporter.message("hello [not markup] 12")
    reporter.status(status())
    reporter.epoch(row(test_accuracy=87.5), status())
    reporter.epoch(row(2, test_accuracy=99.0), status(2))
    reporter.close()
    told = capsys.readouterr().out
    assert "hello [not markup] 12\n" in told
    assert "test 87.50 %" in told
    assert "99.00" not in told  # too soon after the other line


def test_bars_show_where_the_run_is():
    reporter = BarReporter()
    reporter.status(status(5))
    epochs, steps = reporter._progress.tasks
    reporter.close()
    assert (epochs.completed, epochs.total, steps.completed, steps.total) == (5, 120, 3, 10)
    assert epochs.fields["about"] == "2 blocks, 12 branches  1 h 1 min left"
    assert steps.fields["about"] == "loss 0.5000  accuracy 91.24 %  12,346 images/s"


def test_bars_are_drawn_on_a_terminal_lines_elsewhere_and_nothing_on_other_ranks(monkeypatch):
    def kind(bars, is_main):
        reporter = make_reporter(bars, is_main)
        reporter.close()
        return type(reporter)

    assert kind(None, True) is LineReporter
    assert kind(True, True) is BarReporter
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert kind(None, True) is BarReporter
    assert kind(False, True) is LineReporter
    assert kind(True, False) is SilentReporter
    assert kind(None, False) is SilentReporter


def test_the_silent_one_is_silent(capsys):
    reporter = make_reporter(True, is_main=False)
    reporter.message("hello")
    reporter.status(status())
    reporter.epoch(row(test_accuracy=1.0), status())
    reporter.close()
    assert capsys.readouterr() == ("", "")


def test_a_run_can_draw_bars(tmp_path, capsys):
    words = ["train", "--method", "origin", "--epochs", "1", "--batch-size", "512", "--device", "cpu"]
    main([*words, "--progress", "True", "--out", str(tmp_path)])
    told = capsys.readouterr().out
    assert "epochs" in told
    assert "test accuracy" in told


# -- TensorBoard ------------------------------------------------------------------------------------------------


def curve(folder, tag="train_loss"):
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {event.step: event.value for event in reader.Scalars(tag)}


def test_curves_hold_every_number_of_every_epoch(tmp_path):
    curves = Curves(tmp_path, 0)
    curves.add({"epoch": 1, "train_loss": 0.5, "branches": 6, "note": "words"})
    curves.add({"epoch": 2, "train_loss": 0.25, "branches": 12})
    curves.close()
    assert curve(tmp_path) == {1: 0.5, 2: 0.25}
    assert curve(tmp_path, "branches") == {1: 6, 2: 12}
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert set(reader.Tags()["scalars"]) == {"train_loss", "branches"}


def test_epochs_that_are_trained_again_replace_those_of_a_process_that_was_killed(tmp_path):
    first = Curves(tmp_path, 0)
    for epoch in (1, 2, 3):
        first.add({"epoch": epoch, "train_loss": float(epoch)})
    first.close()
    second = Curves(tmp_path, 1)  # the checkpoint was that of epoch 1
    second.add({"epoch": 2, "train_loss": 20.0})
    second.close()
    assert curve(tmp_path) == {1: 1.0, 2: 20.0}


def test_a_run_and_its_continuation_write_one_curve(tmp_path, capsys):
    words = ["train", "--method", "origin", "--epochs", "3", "--batch-size", "512", "--device", "cpu"]
    words += ["--tensorboard", "--out", str(tmp_path)]
    main([*words, "--stop-after", "2"])
    main(words)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = curve(tmp_path / "tensorboard")
    assert found == pytest.approx({row["epoch"]: row["train_loss"] for row in rows})
    assert curve(tmp_path / "tensorboard", "test_accuracy").keys() == {1, 2, 3}


def test_curves_are_not_written_unless_asked_for(tmp_path):
    words = ["train", "--method", "origin", "--epochs", "1", "--batch-size", "512", "--device", "cpu"]
    main([*words, "--out", str(tmp_path)])
    assert not (tmp_path / "tensorboard").exists()


def test_without_the_package_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingPackageError, match=r'--tensorboard needs .* pip install "\.\[tensorboard\]"'):
        Curves(tmp_path, 0)
