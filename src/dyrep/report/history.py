"""What a run's logs mean: lives of branches, importances, scores, drifts, costs, and where the time went."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dyrep.branches import ORIGIN
from dyrep.records import finite
from dyrep.report.pictures import in_order, short
from dyrep.report.runs import Run

Series = list[tuple[float, float]]
"""Epochs and values."""


@dataclass
class Life:
    """When a branch lived, and why.

    Attributes:
        layer: the convolution it belonged to.
        branch: its name.
        born: epoch at whose end it was grown; 0 if it was there from the start.
        died: epoch at whose end it was absorbed; None if it lived to the end.
        why: what it was grown for, in words.
        end: what it was absorbed for, in words.
    """

    layer: str
    branch: str
    born: float
    died: float | None = None
    why: str = ""
    end: str = ""


@dataclass(frozen=True)
class EditDrift:
    """How much an edit changed what the network computes.

    Attributes:
        epoch: when.
        edit: what was done, in words.
        kind: ``"expand"`` or ``"cut"``.
        evaluated: relative change of the output in eval mode.
        training: the same in training mode; None if it was not measured.
    """

    epoch: float
    edit: str
    kind: str
    evaluated: float
    training: float | None


@dataclass(frozen=True)
class Scores:
    """Scores of all candidates at all updates.

    Attributes:
        epochs: when the updates were.
        values: score by layer, one for each update; None where the layer was no candidate.
        chosen: layers that each update expanded.
    """

    epochs: list[float]
    values: dict[str, list[float | None]]
    chosen: list[list[str]]


def epoch_of(run: Run, event: dict[str, Any]) -> float:
    """When something happened, in epochs, or in steps where the run counts these."""
    if run.unit == "step":
        return float(event["step"])
    if run.recipe.get("dyrep", {}).get("unit") != "step":
        return float(event.get("epoch") or 0)
    return float(event["step"]) / _steps_per_epoch(run)


def _steps_per_epoch(run: Run) -> int:
    """As it was written down, or what it must have been; an epoch that was interrupted tells too few."""
    batch = run.recipe["batch_size"]
    told = [
        row.get("steps") or round(row["images_per_second"] * row["train_seconds"] / batch)
        for row in run.rows
        if "steps" in row or "images_per_second" in row
    ]
    return max([*told, 1])


def lives(run: Run) -> list[Life]:
    """Every branch that ever lived, in order of birth; those inside a cut branch die with it."""
    found: list[Life] = []
    for event in run.events:
        if event["type"] not in ("converted", "update"):
            continue
        now = 0.0 if event["type"] == "converted" else epoch_of(run, event)
        for edit in event["edits"]:
            detail = edit.get("detail", {})
            for branch in edit["branches"]:
                if edit["kind"] == "expand":
                    score = finite(detail.get("score"))
                    why = "from the start" if not now else "" if score is None else f"score {score:.3g}"
                    found.append(Life(edit["layer"], branch, now, why=why))
                else:
                    _end(found, edit["layer"], branch, now, detail)
    return found


def _end(found: list[Life], layer: str, branch: str, now: float, detail: dict[str, Any]) -> None:
    strength = finite(detail.get("importances", {}).get(branch))
    weak = "not among the strongest" if strength is None else f"importance {strength:.4f}, below the mean"
    reason = detail.get("why", weak)
    inside = f"{layer}.branches.{branch}."
    for life in (life for life in found if life.died is None):
        if (life.layer, life.branch) == (layer, branch):
            life.died, life.end = now, reason
        elif life.layer.startswith(inside):
            life.died, life.end = now, f"with {short(layer)} › {branch}, which it was part of"


def importances(run: Run) -> dict[str, dict[str, Series]]:
    """Importance of every branch over time, by layer."""
    found: dict[str, dict[str, Series]] = {}
    rows = [(float(row["epoch"]), row["importances"]) for row in run.rows if "importances" in row]
    if not rows:  # a loop of the user's own notes them at updates alone
        rows = [(epoch_of(run, event), event.get("importances") or {}) for event in run.updates]
    for epoch, layers in rows:
        for layer, branches in layers.items():
            for branch, value in branches.items():
                known = finite(value)
                if known is not None:
                    found.setdefault(layer, {}).setdefault(branch, []).append((epoch, known))
    return dict(sorted(found.items(), key=lambda item: in_order(item[0])))


def mean_importance(branches: dict[str, Series]) -> Series:
    """The mean over the branches of a block, which the cut rule compares them with."""
    at: dict[float, list[float]] = {}
    for branch, series in branches.items():
        if branch != ORIGIN:
            for epoch, value in series:
                at.setdefault(epoch, []).append(value)
    return [(epoch, sum(values) / len(values)) for epoch, values in sorted(at.items())]


def cuts(run: Run) -> list[tuple[float, str, str, float | None]]:
    """Epoch, layer, branch and importance of every branch that was absorbed."""
    return [
        (epoch_of(run, event), edit["layer"], branch, finite(edit.get("detail", {}).get("importances", {}).get(branch)))
        for event in run.updates
        for edit in event["edits"]
        if edit["kind"] == "cut"
        for branch in edit["branches"]
    ]


def scores(run: Run) -> Scores:
    """Scores of all candidates at all updates that had any."""
    updates = [event for event in run.updates if event.get("scores")]
    layers = sorted({layer for event in updates for layer in event["scores"]}, key=in_order)
    values = {layer: [finite(event["scores"].get(layer)) for event in updates] for layer in layers}
    chosen = [[edit["layer"] for edit in event["edits"] if edit["kind"] == "expand"] for event in updates]
    return Scores([epoch_of(run, event) for event in updates], values, chosen)


def drifts(run: Run) -> list[EditDrift]:
    """What every edit changed, where it was measured."""
    found = []
    for event in run.updates:
        for edit in event["edits"]:
            detail = edit.get("detail", {})
            evaluated, training = finite(detail.get("drift")), finite(detail.get("train_drift"))
            if evaluated is not None:
                words = f"{edit['kind']} {short(edit['layer'])}: {', '.join(edit['branches'])}"
                found.append(EditDrift(epoch_of(run, event), words, edit["kind"], evaluated, training))
    return found


def series(run: Run, key: str) -> Series:
    """A column of the metrics over epochs, where it has values."""
    pairs = [(float(row["epoch"]), finite(row.get(key))) for row in run.rows]
    return [(epoch, value) for epoch, value in pairs if value is not None]


def step_milliseconds(run: Run) -> Series:
    """Time of a training step over epochs."""
    batch = run.recipe.get("batch_size")
    return [(epoch, 1000 * batch / rate) for epoch, rate in series(run, "images_per_second") if rate and batch]


def epoch_seconds(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean time of an epoch in rows of metrics, structure updates included; None if no row has a time.

    The first epoch compiles and captures, so it counts only if there is no other.

    Example:
        >>> epoch_seconds([{"train_seconds": 9.0}, {"train_seconds": 2.0, "update_seconds": 0.5}])
        2.5
    """
    spent = [row["train_seconds"] + row.get("update_seconds", 0.0) for row in rows if "train_seconds" in row]
    return statistics.mean(spent[1:] or spent) if spent else None


def average(values: Series) -> float | None:
    """Mean over time, as the paper reports costs; a value stands for the time since the one before."""
    if not values:
        return None
    times = [0.0, *(epoch for epoch, _ in values)]
    spans = [after - before for before, after in itertools.pairwise(times)]
    return sum(value * span for (_, value), span in zip(values, spans, strict=True)) / sum(spans)


def time_shares(run: Run) -> dict[str, float]:
    """Seconds by what they were spent on."""
    shares = {
        "training": sum(row.get("train_seconds", 0.0) for row in run.rows),
        "evaluation": sum(row.get("eval_seconds", 0.0) for row in run.rows),
        "structure updates": sum(row.get("update_seconds", 0.0) for row in run.rows),
    }
    if run.summary is not None:
        rest = run.summary["seconds"] - sum(shares.values())
        shares["the rest (reading data, checkpoints, folding)"] = max(rest, 0.0)
    return shares
