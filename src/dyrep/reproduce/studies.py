"""What a table or figure of the paper consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dyrep.engine.recipes import recipe

BACKBONE = "tiny-imagenet-resnet18"
"""Recipe of the classifiers that downstream tasks go on from; ImageNet would take days."""


@dataclass(frozen=True)
class Training:
    """A network to train.

    Attributes:
        recipe: the paper's recipe, by its name.
        method: how to train it; ``"fixed"`` trains a structure of a DyRep run again.
        settings: of the recipe, where they differ.
        dyrep: settings of DyRep, where they differ.
        stop: for DyRep, the last epoch in which the structure changes; for ``"fixed"``, the epoch after which the
            structure was taken.
        backbone: how the classifier was trained, by `BACKBONE`, from which a detector or segmentation network goes on.
    """

    recipe: str
    method: str = "dyrep"
    settings: Mapping[str, Any] = field(default_factory=dict)
    dyrep: Mapping[str, Any] = field(default_factory=dict)
    stop: int | None = None
    backbone: str = ""

    @property
    def key(self) -> str:
        """A name that no other training has: tables that share one share its runs."""
        usual = recipe(self.recipe)
        changes = {name: value for name, value in self.settings.items() if value != getattr(usual, name)}
        changes |= {name: value for name, value in self.dyrep.items() if value != getattr(usual.dyrep, name)}
        words = [self.recipe, self.method, *(f"{name}={value}" for name, value in sorted(changes.items()))]
        words += [] if self.stop is None else [f"at{self.stop}"]
        return "-".join(words + ([f"from-{self.backbone}"] if self.backbone else []))


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        label: what it is about.
        paper: the paper's figures, by column.
        training: what it takes to have our own; None if it is not a matter of training here.
        model: network to count, and to time where the table has speeds; that of the training if not given.
        group: what several lines have in common.
        why_not: why there is nothing to run.
        tasks: further trainings that other columns are about.
    """

    label: str
    paper: Mapping[str, float | str]
    training: Training | None = None
    model: str | None = None
    group: str = ""
    why_not: str = ""
    tasks: Mapping[str, Training] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """A table or figure of the paper.

    Attributes:
        name: what to type.
        source: where it is in the paper.
        title: what it is about.
        columns: what it has figures of: see `COLUMNS`.
        rows: its lines.
        picture: what is drawn: ``"curves"``, ``"cost"``, ``"block"``, or nothing.
        note: what has to be known to read it.
    """

    name: str
    source: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    picture: str = ""
    note: str = ""


COLUMNS = {
    "accuracy": "accuracy, %",
    "macs": "multiply-adds, M",
    "parameters": "parameters, M",
    "cost": "training time",
    "speed": "images per second",
    "branches": "branches",
    "mAP": "mAP, %",
    "mIoU": "mIoU, %",
}
"""Columns and their titles. Multiply-adds (the paper says FLOPs) and parameters are averages over training, except in
the table of inference speeds. The paper's training time is in GPU hours or days of a V100, ours in minutes."""
