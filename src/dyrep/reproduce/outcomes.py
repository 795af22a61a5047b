"""Carry a study out: train what is missing, count what is only counted, and say of every row what came out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.optimization import fuse

from dyrep import models
from dyrep.branches import BRANCHES
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.recipes import recipe
from dyrep.engine.rundir import RunDirectory
from dyrep.engine.running import structure_of_run, train
from dyrep.errors import DyRepError
from dyrep.files import PARTIAL
from dyrep.methods import METHODS, convert_
from dyrep.records import SUMMARY, finite
from dyrep.reproduce.scales import DRAWN, Scale
from dyrep.reproduce.studies import BACKBONE, Row, Study, Training
from dyrep.surgery.costs import costs
from dyrep.surgery.timing import median_ms
from dyrep.wording import beginning, metric_of

SIZE, CLASSES = 224, 1000  # of ImageNet
_SPEED_BATCH, _SPEED_STEPS = 128, 10


@dataclass
class Outcome:
    """What came out of a row.

    Attributes:
        row: the row.
        state: ``"done"``, ``"counted"``, or ``"not run"``.
        reason: why it was not run, or not for all seeds.
        figures: our figures by column, one for each seed where it is defined; counts have a single one.
        runs: folders of its runs.
    """

    row: Row
    state: str = "not run"
    reason: str = ""
    figures: dict[str, list[float]] = field(default_factory=dict)
    runs: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Workshop:
    """Where studies are carried out.

    Attributes:
        root: folder for the runs; studies that need the same run share it.
        scale: how much effort to spend.
        seeds: how many seeds of every training.
        data: folder of the data sets.
        device: where to train (default: a GPU if there is one).
        trains: whether to train what is missing; if not, what is there is shown.
        say: what to do with a message.
    """

    root: Path
    scale: Scale
    seeds: int = 1
    data: Path | None = None
    device: str | None = None
    trains: bool = True
    say: Callable[[str], None] = print

    def carry_out(self, study: Study) -> list[Outcome]:
        """All rows of a study; runs that are complete are not repeated, those that were stopped go on."""
        outcomes: list[Outcome] = []
        for row in study.rows:
            twin = next((earlier for earlier in outcomes if _are_the_same(earlier.row, row, self.scale)), None)
            outcomes.append(self._row(study, row) if twin is None else _like(twin, row))
        return outcomes

    def _row(self, study: Study, row: Row) -> Outcome:
        outcome = Outcome(row, reason=row.why_not)
        if study.columns == ("branches",):
            return _branches(outcome)
        counts_deployed = "speed" in study.columns
        if counts_deployed and row.model is not None:
            self._inspect(outcome, row.model)
        if row.training is None:
            return outcome
        for seed in range(self.seeds):
            self._seed(outcome, row.training, seed, counts_deployed)
            for column, task in row.tasks.items():
                self._task(outcome, column, task, seed)
        # where another network takes its place at this scale, its counts would stand beside those of that one
        own = not self.scale.digits or self.scale.recipe(row.training, 0) is None
        if outcome.state == "not run" and not counts_deployed and "macs" in study.columns and own:
            self._count(outcome, row.training)
        return outcome

    def _seed(self, outcome: Outcome, training: Training, seed: int, counts_deployed: bool) -> None:
        try:
            summary, folder = self._trained(training, seed)
        except DyRepError as error:
            outcome.reason = beginning(error)
            return
        found = {"accuracy": summary["test_accuracy_folded"], "cost": summary["seconds"] / 60}
        if not counts_deployed:
            found |= {"macs": summary["mean_macs"] / 1e6, "parameters": summary["mean_parameters"] / 1e6}
        for column, value in found.items():
            _add(outcome, column, value)
        outcome.runs.append(folder)
        outcome.state = "done"

    def _task(self, outcome: Outcome, column: str, training: Training, seed: int) -> None:
        """The metric of a detector or a segmentation network."""
        try:
            summary, folder = self._trained(training, seed)
        except DyRepError as error:
            outcome.reason = outcome.reason or beginning(error)
            return
        metric = metric_of(summary)
        _add(outcome, column, summary[f"test_{metric}_folded"])
        outcome.runs.append(folder)

    def _trained(self, training: Training, seed: int) -> tuple[dict[str, Any], Path]:
        """The summary of a run, and its folder; it is trained if need be.

        Raises:
            DyRepError: it cannot be trained here; the message says why.
        """
        chosen = self.scale.recipe(training, seed)
        if chosen is None:
            raise DyRepError("large networks are only counted at this scale")
        folder = self._folder(training, seed)
        run = RunDirectory(folder)
        before = Training(BACKBONE, training.backbone) if training.backbone else None
        if before is not None:
            chosen = replace(chosen, backbone=str(self._folder(before, seed)))
        if (folder / SUMMARY).exists():
            return _checked(run, training, chosen), folder
        if not self.trains:
            raise DyRepError("not trained yet")
        if before is not None:
            self._trained(before, seed)
        if training.method == "fixed":
            chosen = self._fixed(training, chosen, run, seed)
        self.say(f"{folder.name}: {chosen.epochs} epochs of {chosen.model} on {chosen.dataset}")
        settings = RunSettings(out=folder, data=self._data(training.recipe), device=self.device)
        return train(chosen, settings), folder

    def _folder(self, training: Training, seed: int) -> Path:
        return self.root / self.scale.name / f"{training.key}-seed{seed}"

    def _data(self, name: str) -> Path | None:
        """Where the data of a recipe is: at the smallest scale that of downstream tasks is drawn."""
        if name not in DRAWN:
            return self.data
        folder, draw, _ = DRAWN[name]
        if self.scale.digits:
            place = self.root / self.scale.name / "data" / folder
            return place if place.is_dir() else _drawn_whole(draw, place)
        own = None if self.data is None else self.data / folder
        return own if own is not None and own.is_dir() else self.data

    def _fixed(self, training: Training, chosen: Recipe, run: RunDirectory, seed: int) -> Recipe:
        """A recipe that trains a structure of the DyRep run with the same settings, which is trained first."""
        if run.exists:  # goes on with what it started with
            return replace(chosen, method="fixed", structure=run.recipe().structure)
        _, source = self._trained(replace(training, method="dyrep", stop=None), seed)
        structure = structure_of_run(f"{source}@{self.scale.epoch(training)}")
        return replace(chosen, method="fixed", structure=structure)

    def _count(self, outcome: Outcome, training: Training) -> None:
        """What a network costs in training that always has the same structure."""
        paper = recipe(training.recipe)
        if not (training.method == "origin" or METHODS.get(training.method, METHODS["dyrep"]).builds_blocks):
            return
        small = paper.dataset != "folder"
        image = torch.zeros(1, 3, 32, 32) if small else torch.zeros(1, 3, SIZE, SIZE)
        classes = {"cifar10": 10, "cifar100": 100}.get(paper.dataset, CLASSES)
        model = models.build(paper.model, num_classes=classes, in_channels=3)
        if training.method != "origin":
            convert_(model, training.method, example_input=image, max_kernel=paper.max_kernel)
        found = costs(model, image)
        outcome.figures = {"macs": [found.macs / 1e6], "parameters": [found.parameters / 1e6]}
        outcome.state = "counted"

    def _inspect(self, outcome: Outcome, name: str) -> None:
        """Size of a deployed network, its norms folded into convolutions, and on a GPU its speed."""
        model = fuse(models.build(name, num_classes=CLASSES, in_channels=3).eval())
        found = costs(model, torch.zeros(1, 3, SIZE, SIZE))
        outcome.figures |= {"macs": [found.macs / 1e6], "parameters": [found.parameters / 1e6]}
        outcome.state = "counted"
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda":
            outcome.figures["speed"] = [_images_per_second(model, device)]


def _drawn_whole(draw: Callable[[Path], Path], place: Path) -> Path:
    """Draw data under another name first: a folder that is there is trusted, so it must not be there in part."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=place.name, suffix=PARTIAL) as partial:
        drawn = draw(Path(partial) / place.name)
        try:
            os.replace(drawn, place)
        except OSError:  # another process was faster; it has drawn the same
            if not place.is_dir():
                raise
    return place


def _add(outcome: Outcome, column: str, value: Any) -> None:
    """Note the figure of a seed; one that is not defined there leaves a gap, and no more."""
    known = finite(value)
    if known is not None:
        outcome.figures.setdefault(column, []).append(known)


def _checked(run: RunDirectory, training: Training, chosen: Recipe) -> dict[str, Any]:
    """The summary of a run, if it was trained as it would be today."""
    summary = run.read_json(SUMMARY)
    found = Recipe.from_dict(summary["recipe"])
    if training.method == "fixed":
        found = replace(found, method=chosen.method, structure=None)
    if found != chosen:
        what = "; ".join(found.differences(chosen)) or "another name"
        raise DyRepError(f"the run in {run.path} was trained with other settings ({what}): move it away")
    return summary


def _like(twin: Outcome, row: Row) -> Outcome:
    label = f"{twin.row.group}, {twin.row.label}" if twin.row.group else twin.row.label
    same = f"at this scale the same runs as {label}"
    return replace(twin, row=row, reason=same if twin.state == "done" else twin.reason)


def _branches(outcome: Outcome) -> Outcome:
    """How many parallel operations a method's block may have."""
    training = outcome.row.training
    assert training is not None
    branches = BRANCHES if training.method == "dyrep" else METHODS[training.method].branches
    outcome.figures, outcome.state = {"branches": [1 + len(branches)]}, "counted"
    return outcome


@torch.inference_mode()
def _images_per_second(model: torch.nn.Module, device: torch.device) -> float:
    """In float32 with a batch of 128, as RepVGG measures it."""
    model = model.to(device)
    images = torch.randn(_SPEED_BATCH, 3, SIZE, SIZE, device=device)
    for _ in range(_SPEED_STEPS):  # libraries choose algorithms first
        model(images)
    return 1000 * _SPEED_BATCH / median_ms(lambda: model(images), device, _SPEED_STEPS)


def planned(study: Study, scale: Scale, seeds: int) -> list[str]:
    """The runs that a study consists of, by the names of their folders."""
    if study.columns == ("branches",):
        return []
    own: list[Row] = []
    for row in study.rows:
        if not any(_are_the_same(earlier, row, scale) for earlier in own):
            own.append(row)
    listed = [training for row in own for training in (row.training, *row.tasks.values()) if training is not None]
    trainings = [training for training in listed if scale.recipe(training, 0) is not None]
    return list(dict.fromkeys(f"{training.key}-seed{seed}" for training in trainings for seed in range(seeds)))


def _are_the_same(first: Row, second: Row, scale: Scale) -> bool:
    """Whether two rows differ on paper, but not at a scale: half an epoch between updates is one, too."""
    trainings = [row.training for row in (first, second) if row.training is not None]
    if first.tasks != second.tasks:
        return False
    if len(trainings) < 2 or any(training.method == "fixed" for training in trainings):
        return False
    recipes = [found for training in trainings if (found := scale.recipe(training, 0)) is not None]
    return len(recipes) == 2 and recipes[0] == replace(recipes[1], name=recipes[0].name)
