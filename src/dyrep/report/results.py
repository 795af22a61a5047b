"""What came out of runs that differ in their seed alone: accuracy, cost, time, and the error of folding."""

from __future__ import annotations

import math
import statistics

from dyrep.records import finite
from dyrep.report import history
from dyrep.report.runs import Group


def accuracies(group: Group) -> list[float]:
    """The metric of folded networks on the test set, where it is defined; where no run has ended, the last measured."""
    if ended(group):
        told = [finite(run.summary[f"test_{run.metric}_folded"]) for run in group.runs if run.summary is not None]
        return [value for value in told if value is not None]
    latest = [history.series(run, f"{run.split}_{run.metric}") for run in group.runs]
    return [values[-1][1] for values in latest if values]


def macs(group: Group) -> float | None:
    """Multiply-adds of a forward pass in training, averaged over time and runs."""
    return _mean([history.average(history.series(run, "macs")) for run in group.runs])


def ended(group: Group) -> bool:
    """Whether any of its runs has."""
    return any(run.summary is not None for run in group.runs)


def fold_error(group: Group) -> float | None:
    """The largest change of the output by folding, NaN if any is; None if no run has ended."""
    errors = [float(run.summary["fold_error"]) for run in group.runs if run.summary is not None]
    return math.nan if any(map(math.isnan, errors)) else max(errors, default=None)


def fold_passed(group: Group) -> bool:
    """Whether that was within tolerance in all runs that have ended."""
    return all(run.summary["fold_passed"] for run in group.runs if run.summary is not None)


def seconds(group: Group) -> float:
    """Wall-clock time of a run; 0 if it was not written down."""
    return statistics.mean(sum(history.time_shares(run).values()) for run in group.runs)


def epoch_seconds(group: Group) -> float | None:
    """Mean time of an epoch, see `history.epoch_seconds`, averaged over runs."""
    return _mean([history.epoch_seconds(run.rows) for run in group.runs])


def plain_macs(group: Group) -> float | None:
    """Multiply-adds of its plain network, if known."""
    return next((float(run.plain_macs) for run in group.runs if run.plain_macs), None)


def can_be_timed_against(group: Group, other: Group) -> bool:
    """Whether times of two groups compare: the same network and data, in the same batches, on the same machine."""
    return _circumstances(group) == _circumstances(other)


def _mean(found: list[float | None]) -> float | None:
    """Over runs that have such a figure."""
    known = [value for value in found if value is not None]
    return statistics.mean(known) if known else None


def _circumstances(group: Group) -> set[tuple[str, ...]]:
    keys = ("model", "dataset", "image_size", "batch_size", "precision")
    return {
        (
            *(str(run.recipe.get(key)) for key in keys),
            *(str(session.get(key)) for session in run.sessions[-1:] for key in ("hardware", "device", "processes")),
        )
        for run in group.runs
    }
