"""What a person sees while a run trains: bars on a terminal, plain lines elsewhere, curves when asked."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from dyrep.extras import needed
from dyrep.wording import METRICS, duration, metric_of

LINE_SECONDS = 10.0
"""Without a terminal an epoch is reported if the last report is at least this old, so that logs stay readable."""


@dataclass(frozen=True)
class Status:
    """Where a run is.

    Attributes:
        epoch: epochs completed.
        epochs: epochs in all.
        step: steps of this epoch completed.
        steps: steps per epoch.
        loss: mean training loss of this epoch so far.
        accuracy: training accuracy of this epoch so far, in percent; None where there is no such thing.
        images_per_second: how fast it goes.
        structure: the network's structure in a few words.
        seconds_left: expected time to the end.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: float | None
    images_per_second: float
    structure: str
    seconds_left: float


class Reporter(Protocol):
    """Tells a person what happens."""

    def message(self, text: str) -> None:
        """Say something once."""

    def status(self, status: Status) -> None:
        """Show where the run is, about once a second."""

    def epoch(self, row: dict[str, Any], status: Status) -> None:
        """Report a finished epoch."""

    def close(self) -> None:
        """Nothing more is coming."""


class SilentReporter:
    """For ranks other than the main one, and for tests."""

    def message(self, text: str) -> None:
        """Say nothing."""

    def status(self, status: Status) -> None:
        """Show nothing."""

    def epoch(self, row: dict[str, Any], status: Status) -> None:
        """Report nothing."""

    def close(self) -> None:
        """Nothing to do."""


class LineReporter(SilentReporter):
    """Plain lines, not too many."""

    def __init__(self) -> None:
        self._last = -LINE_SECONDS

    def message(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def epoch(self, row: dict[str, Any], status: Status) -> None:
        """Print a line if the last one is some time ago, and for the last epoch."""
        now = time.perf_counter()
        if now - self._last >= LINE_SECONDS or row["epoch"] == status.epochs:
            self._last = now
            self.message(describe(row, status))


class BarReporter(LineReporter):
    """Progress bars on a terminal, with the lines above them."""

    def __init__(self) -> None:
        super().__init__()
        rich = needed("rich.progress", "a progress bar", "--progress False prints lines instead")
        self._progress = rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(bar_width=24),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[about]}"),
        )
        self._epochs = self._progress.add_task("epochs", total=1, about="")
        self._steps = self._progress.add_task("steps ", total=1, about="")
        self._progress.start()

    def message(self, text: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(text, markup=False, highlight=False)

    def status(self, status: Status) -> None:
        """Redraw the bars."""
        accuracy = "" if status.accuracy is None else f"accuracy {status.accuracy:.2f} %  "
        now = f"loss {status.loss:.4f}  {accuracy}{status.images_per_second:,.0f} images/s"
        about = f"{status.structure}  {duration(status.seconds_left)} left"
        self._progress.update(self._epochs, completed=status.epoch, total=status.epochs, about=about)
        self._progress.update(self._steps, completed=status.step, total=status.steps, about=now)

    def epoch(self, row: dict[str, Any], status: Status) -> None:
        """Redraw the bars, and print a line if the last one is some time ago."""
        self.status(replace(status, step=status.steps))
        super().epoch(row, status)

    def close(self) -> None:
        """Leave the bars as they are."""
        self._progress.stop()


class Curves:
    """Curves for TensorBoard.

    Args:
        folder: where they are written.
        start: first epoch; what was written for later ones, by a process that was killed, is dropped.
    """

    def __init__(self, folder: Path, start: int) -> None:
        needed("tensorboard", "--tensorboard", "metrics.jsonl holds the same figures")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start + 1)

    def add(self, row: dict[str, Any]) -> None:
        """Add an epoch."""
        for key, value in row.items():
            if key != "epoch" and isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, row["epoch"])
        self._writer.flush()

    def close(self) -> None:
        """Nothing more is coming."""
        self._writer.close()


def make_reporter(bars: bool | None, is_main: bool) -> Reporter:
    """Bars on a terminal, lines elsewhere, nothing on other ranks than the main one."""
    if not is_main:
        return SilentReporter()
    if bars is None:
        bars = sys.stdout.isatty()
    return BarReporter() if bars else LineReporter()


def describe(row: dict[str, Any], status: Status) -> str:
    """An epoch in one line."""
    parts = [f"epoch {row['epoch']:{len(str(status.epochs))}d}/{status.epochs}"]
    accuracy = f", accuracy {row['train_accuracy']:.2f} %" if "train_accuracy" in row else ""
    parts.append(f"loss {row['train_loss']:.4f}{accuracy}")
    metric = metric_of(row)
    called = "" if metric == "accuracy" else f"{METRICS[metric]} "
    held = [split for split in ("val", "test") if f"{split}_{metric}" in row]
    parts += [f"{split} {called}{row[f'{split}_{metric}']:.2f} %" for split in held]
    parts += [status.structure, f"{status.images_per_second:,.0f} images/s", f"{duration(status.seconds_left)} left"]
    return "  ".join(parts)
