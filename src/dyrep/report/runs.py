"""The folders of runs, read from their text files alone: neither weights nor data are needed.

A run of `dyrep train` has everything. The log that `dyrep.DyRep` keeps in a training loop of the user's own tells of
the structure alone, and that is enough for a run without accuracies and times.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dyrep.errors import CheckpointError
from dyrep.events import read_events
from dyrep.records import CONFIG, EVENTS, ROWS, SESSIONS, SUMMARY, read_config, read_json, read_lines
from dyrep.wording import metric_of

_UNTOLD = ("seed", "name")  # settings that make no other kind of run


@dataclass(frozen=True)
class Run:
    """What happened in a run.

    Attributes:
        path: its folder.
        recipe: the settings it was trained with.
        rows: metrics, a dict for every epoch.
        events: what happened to the structure, see `dyrep.read_events`.
        sessions: a dict for every start: when, versions, hardware, settings.
        summary: what came out; None if the run has not ended yet.
        unit: what time is counted in, ``"epoch"`` or, in a loop of the user's own, perhaps ``"step"``.
    """

    path: Path
    recipe: dict[str, Any]
    rows: list[dict[str, Any]] = field(repr=False)
    events: list[dict[str, Any]] = field(repr=False)
    sessions: list[dict[str, Any]] = field(repr=False)
    summary: dict[str, Any] | None = field(repr=False)
    unit: str = "epoch"

    @property
    def method(self) -> str:
        """How it was trained."""
        return str(self.recipe["method"])

    @property
    def seed(self) -> int:
        """What its random numbers began with."""
        return int(self.recipe["seed"])

    @property
    def own_loop(self) -> bool:
        """Whether it was trained by a loop of the user's own, which folds and checks when it likes."""
        return not self.sessions

    @property
    def title(self) -> str:
        """What was trained, in words."""
        data = self.recipe.get("dataset")
        return f"{self.recipe['model']} on {data}" if data else str(self.recipe["model"])

    @property
    def epochs(self) -> int:
        """How many epochs (or steps) it has, or will have, in all."""
        return int(self.recipe["epochs"])

    @property
    def updates(self) -> list[dict[str, Any]]:
        """The updates of its structure."""
        return [event for event in self.events if event["type"] == "update"]

    @property
    def plain_macs(self) -> int | None:
        """Multiply-adds of the plain network, if known."""
        # rows and summary are counted on the same image; updates count on a batch, whose images may have another shape
        told = [] if self.summary is None else [self.summary.get("macs_plain")]
        told += [row.get("macs") for row in self.rows[:1] if row.get("branches") == 0 or self.method == "origin"]
        told += [event.get("plain_macs") for event in self.updates]
        return next((macs for macs in told if macs), None)

    @property
    def cuts(self) -> bool:
        """Whether it absorbs branches that stay weak."""
        started = [event["config"] for event in self.events if event["type"] == "started" and "config" in event]
        return any(config.get("cut", "none") != "none" for config in started)

    @property
    def metric(self) -> str:
        """Key of what tells how good its network is, see `dyrep.wording.METRICS`."""
        return metric_of(*self.rows)

    @property
    def split(self) -> str:
        """The images that curves were measured on: ``"val"`` or ``"test"``."""
        return "val" if any(f"val_{self.metric}" in row for row in self.rows) else "test"


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a run.

    Args:
        path: its folder; or the log of a training loop of your own, or a folder with ``events.jsonl``. Beside it,
            ``metrics.jsonl`` may hold an object per epoch (``epoch``, ``train_loss``, ``test_accuracy`` ...; or
            ``test_map``, ``test_miou``).

    Raises:
        CheckpointError: there is no run, it has no epoch yet, or one of its files is damaged.
    """
    folder = Path(path)
    if folder.is_file():
        return _own_loop(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    log, summary = folder / EVENTS, folder / SUMMARY
    if not (folder / CONFIG).is_file():
        if log.is_file():
            return _own_loop(log)
        raise CheckpointError(f"{folder} is not the folder of a run: it has neither {CONFIG} nor {EVENTS}")
    recipe = read_config(folder)["recipe"]
    rows = read_lines(folder / ROWS)
    if not rows:
        raise CheckpointError(f"the run in {folder} has not finished an epoch yet, so there is nothing to report")
    return Run(
        path=folder,
        recipe=recipe,
        rows=rows,
        events=read_events(log) if log.is_file() else [],
        sessions=read_lines(folder / SESSIONS),
        summary=read_json(summary) if summary.is_file() else None,
    )


def _own_loop(log: Path) -> Run:
    """A run that only the log of its structure tells of."""
    events = read_events(log)
    started = next((event for event in events if event["type"] == "started"), None)
    if started is None or "unit" not in started.get("config", {}):
        raise CheckpointError(f"{log} is not the log of dyrep.DyRep: it does not begin with its settings")
    config, unit = started["config"], started["config"]["unit"]
    updates = [event for event in events if event["type"] == "update"]
    rows = _with_costs(read_lines(log.parent / ROWS), updates, unit, log.parent) or _rows(updates, unit)
    if not rows:
        raise CheckpointError(f"{log} has no update yet, so there is nothing to report")
    end = config["total"] or rows[-1]["epoch"]
    model = log.parent.resolve().name  # what else could it be called by?
    recipe = {"method": "dyrep", "model": model, "seed": config["seed"], "epochs": end, "dyrep": config}
    return Run(log.parent, recipe, rows, events, [], None, unit)


def _rows(updates: list[dict[str, Any]], unit: str) -> list[dict[str, Any]]:
    """What training cost up to every update; what came after the last one is not written down."""
    return [{"epoch": event[unit], **_macs_at(event[unit], updates, unit)} for event in updates]


def _with_costs(
    rows: list[dict[str, Any]], updates: list[dict[str, Any]], unit: str, folder: Path
) -> list[dict[str, Any]]:
    """The user's own metrics, with what training cost meanwhile."""
    found = []
    for row in rows:
        if unit not in row:
            raise CheckpointError(f"{ROWS} in {folder}: every line needs {unit!r}, which the log counts in")
        found.append({**_macs_at(row[unit], updates, unit), **row, "epoch": row[unit]})
    return found


def _macs_at(when: float, updates: list[dict[str, Any]], unit: str) -> dict[str, Any]:
    """Multiply-adds of the structure that was trained up to some time."""
    before = [event.get("macs") for event in updates if event[unit] < when]
    macs = before[-1] if before else next((e.get("macs_before", e.get("plain_macs")) for e in updates), None)
    return {"macs": macs} if macs else {}


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed.

    Attributes:
        label: what tells them from the others.
        runs: the runs, by seed.
    """

    label: str
    runs: tuple[Run, ...]


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs that differ in nothing but their seed, together, in order of appearance.

    A group is called by its method and whatever else it does not share with the other groups of that method.
    """
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        kinds.setdefault(json.dumps(_kind(run), sort_keys=True), []).append(run)
    found = []
    for members in kinds.values():
        others = [kind[0] for kind in kinds.values() if kind[0].method == members[0].method]
        settings = [_kind(other) for other in others]
        telling = [key for key in settings[0] if len({json.dumps(kind.get(key)) for kind in settings}) > 1]
        own = _kind(members[0])
        words = ", ".join(f"{key.removeprefix('dyrep.')}={own.get(key)}" for key in telling)
        label = f"{members[0].method} ({words})" if words else members[0].method
        found.append(Group(label, tuple(sorted(members, key=lambda run: run.seed))))
    return found


def _kind(run: Run) -> dict[str, Any]:
    """The settings of a run as one flat table, without those that make no other kind of run."""
    flat: dict[str, Any] = {}
    for key, value in run.recipe.items():
        if key == "structure" and value:  # where it was taken from says it all
            value = Path(str(value.get("source", ""))).name
        if key == "model" and run.own_loop:  # there it is the name of the folder
            continue
        inner = value if isinstance(value, dict) else None
        flat |= {key: value} if inner is None else {f"{key}.{name}": item for name, item in inner.items()}
    return {key: value for key, value in flat.items() if key.rpartition(".")[2] not in _UNTOLD}
