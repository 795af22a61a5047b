"""How long the training of finished runs takes with the GPU to itself, where they were made side by side.

``python benchmarks/alone.py RUN [RUN ...] --data FOLDER``; ``arms.py table`` does so by itself. Every structure that
a run has had is rebuilt and trained for some steps of the same kind, scored and captured as they were, on the same
data; their time counts for all steps that the run spent on that structure. Between two structures an update is made
with the same settings, and its time counts too, that of capturing steps anew included; it may choose another layer than
the run did. What is done once, before the first step, is left out, and so are evaluation, checkpoints and folding.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dyrep.controller import DyRep
from dyrep.engine.data.loader import Raw
from dyrep.engine.learner import Learner
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.rundir import RunDirectory
from dyrep.engine.schedule import set_learning_rate_
from dyrep.engine.step import WARMUP_STEPS
from dyrep.engine.world import World, pick_device
from dyrep.events import read_events
from dyrep.execution.settings import SETTLING_STEPS
from dyrep.records import EVENTS
from dyrep.surgery.structure import restructure_


@dataclass(frozen=True)
class Stage:
    """A stretch of training with the same structure.

    Attributes:
        steps: how long it lasted.
        event: the update that it began with; None for the first one.
    """

    steps: int
    event: dict[str, Any] | None


def stages_of(events: list[dict[str, Any]], unit: str, epochs: int, steps: int) -> list[Stage]:
    """The stretches between updates.

    Args:
        events: the log of a run.
        unit: of its updates, ``"epoch"`` or ``"step"``.
        epochs: of the run.
        steps: of an epoch.

    Example:
        >>> updates = [{"type": "update", "epoch": 1, "step": 0}, {"type": "update", "epoch": 3, "step": 0}]
        >>> [stage.steps for stage in stages_of(updates, "epoch", epochs=4, steps=100)]
        [100, 200, 100]
    """
    updates = [event for event in events if event["type"] == "update"]
    began = [0, *(event["step"] if unit == "step" else event["epoch"] * steps for event in updates), epochs * steps]
    spans = [after - before for before, after in itertools.pairwise(began)]
    return [Stage(span, event) for span, event in zip(spans, [None, *updates], strict=True) if span]


def minutes_alone(folder: Path, data: Path | None, device: str | None = None, steps: int = 100) -> float:
    """How many minutes the training of a finished run takes by itself; nothing in its folder changes.

    Args:
        folder: of the run.
        data: folder of the data set.
        device: where to train (default: a GPU if there is one).
        steps: how many to take with every structure.
    """
    run = RunDirectory(folder)
    recipe = Recipe.from_dict(run.model_state()["recipe"])
    if recipe.method == "repnas":
        raise ValueError(f"{folder}: a search is no sequence of structures, so it cannot be timed like this")
    settings = RunSettings(data=data, device=device)
    learner = Learner(recipe, settings, World(pick_device(device)), print)
    seconds = 0.0
    events = read_events(run.path / EVENTS)
    for stage in stages_of(events, recipe.dyrep.unit, recipe.epochs, learner.data.train.steps):
        if stage.event is not None:
            seconds += update_seconds(learner, stage.event)
            take_on_(learner, stage.event)
        capturing, step = step_seconds(learner, steps)
        seconds += stage.steps * step
        if stage.event is not None and (stage.event["edits"] or stage.event["rolled_back"]):
            seconds += capturing
    return seconds / 60


def update_seconds(learner: Learner, event: dict[str, Any]) -> float:
    """Time of an update where a run had one; it leaves a structure of its own."""
    controller = learner.controller
    assert isinstance(controller, DyRep)
    learner.train_mode_()
    if controller.config.unit == "step":
        controller.epoch, controller.step, due = event["epoch"], event["step"] - 1, controller.step_end
    else:
        controller.epoch, due = event["epoch"] - 1, controller.epoch_end
    made = controller.updates
    wait(learner.world.device)
    began = time.perf_counter()
    learner.evolve_(due, controller.epoch)
    wait(learner.world.device)
    seconds = time.perf_counter() - began
    if controller.updates != made + 1:
        raise RuntimeError(f"no update was made where the run had its update {event['update']}")
    return seconds


def take_on_(learner: Learner, event: dict[str, Any]) -> None:
    """Give a learner the structure that an update of the run has left, and let everything follow."""
    restructure_(learner.model, event["structure"], optimizer=learner.optimizer)
    controller = learner.controller
    assert controller is not None
    state = controller.state_dict()
    # from some epoch on, or once nothing more fits, a run scores no more
    then = {key: event[key] for key in ("grown_out", "rejected")}
    counters = {**state["counters"], "epoch": event["epoch"], "step": event["step"]}
    controller.load_state_dict({**state, "counters": counters, **then})
    learner.set_execution_()
    learner.train_on.recapture()


def step_seconds(learner: Learner, steps: int) -> tuple[float, float]:
    """Time that the first steps with a structure take beyond what they take later on, and time of one of these."""
    learner.train_mode_()
    set_learning_rate_(learner.optimizer, 0.0)  # takes as long, and cannot diverge
    train_on, batches, device = learner.train_on, endless(learner), learner.world.device
    train_on.clock.step = SETTLING_STEPS  # as in the middle of training
    score_every, kinds = learner.recipe.dyrep.score_every, train_on.clock.every

    def spent(count: int) -> float:
        wait(device)
        began = time.perf_counter()
        for _ in range(count):
            train_on(next(batches))
        wait(device)
        return time.perf_counter() - began

    first = WARMUP_STEPS + score_every * kinds + 1  # each kind of step is captured
    capturing, step = spent(first), spent(steps) / steps
    return max(capturing - first * step, 0.0), step


def endless(learner: Learner) -> Iterator[Raw]:
    """Batches of one epoch after the other."""
    for epoch in itertools.count():
        yield from learner.data.train.batches(epoch, 0)


def wait(device: torch.device) -> None:
    """Wait for all that was begun on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(command: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--steps", type=int, default=100, help="how many to take with every structure")
    given = parser.parse_args(command)
    for run in given.runs:
        print(f"{run}: {minutes_alone(run, given.data, given.device, given.steps):.2f} minutes", flush=True)


if __name__ == "__main__":
    main()
