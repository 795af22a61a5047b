"""Save all that the rest of a run depends on, and continue from there as if it had never stopped."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from dyrep.engine.learner import Learner
from dyrep.engine.randomness import random_state, restore_random_state
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.rundir import RunDirectory
from dyrep.engine.setup import suit_device_
from dyrep.errors import CheckpointError, ConfigError
from dyrep.methods import method
from dyrep.surgery.optimizer_state import load_state_by_name_, state_by_name
from dyrep.surgery.structure import structure
from dyrep.wording import beginning


@dataclass(frozen=True)
class Place:
    """How far a run has come.

    Attributes:
        epoch: epochs completed.
        step: steps of the current epoch completed.
        seconds: time it has taken.
        best: the best model so far.
    """

    epoch: int
    step: int
    seconds: float
    best: dict[str, Any] | None


class Saver:
    """Writes checkpoints of a run, and brings what learns back to where the last one was written.

    Args:
        learner: what learns.
        run: the folder of the run.
        settings: how often to save, and what may differ when the run goes on.
    """

    def __init__(self, learner: Learner, run: RunDirectory, settings: RunSettings) -> None:
        self._learner, self._run, self._settings = learner, run, settings
        self._saved_best = -1
        self.start_clock()

    def start_clock(self) -> None:
        """Count from now on how long nothing has been saved."""
        self._last_saved = time.perf_counter()

    @property
    def due(self) -> bool:
        """Whether the last checkpoint is as old as one may be."""
        return time.perf_counter() - self._last_saved >= 60 * self._settings.checkpoint_minutes

    def save(self, place: Place) -> None:
        """Write a checkpoint; all ranks have to call this together."""
        world, checkpoints, best = self._learner.world, self._run.checkpoints, place.best
        random = random_state(world)
        sums = self._learner.train_on.gathered(world)
        if world.is_main:
            # first the best: if this process dies in between, the one that goes on writes it again
            if best is not None and best["epoch"] != self._saved_best:
                checkpoints.save_best(best)
                self._saved_best = best["epoch"]
            checkpoints.save({**self._state(place), "random": random, "sums": sums})
        self.start_clock()

    def _state(self, place: Place) -> dict[str, Any]:
        learner = self._learner
        controller, average = learner.controller, learner.average
        return {
            **learner.description(),
            "world": learner.world.size,
            "epoch": place.epoch,
            "step": place.step,
            "seconds": place.seconds,
            "controller": None if controller is None else controller.state_dict(),
            "optimizer": state_by_name(learner.optimizer, learner.model) if controller is None else None,
            "model": learner.model.state_dict(),
            "average": None if average is None else average.state_dict(),
            "scaler": learner.scaler.state_dict(),
            "best": place.best,
            "rows": self._run.rows,
            "events": learner.log.events,
        }

    def resume(self) -> Place:
        """Continue from the last checkpoint.

        Raises:
            ConfigError: the recipe or the number of processes is another one, and that was not allowed.
            CheckpointError: the checkpoint cannot be read, or does not fit.
        """
        learner, world = self._learner, self._learner.world
        state = self._run.checkpoints.load(fallback=self._settings.fallback)
        self._check_same_run(state)
        self._restore_structure(state)
        self._restore_weights(state)
        if state["scaler"]:  # empty if the precision was another one
            learner.scaler.load_state_dict(state["scaler"])
        learner.train_on.take_over(state["sums"], world)
        if state["events"]:  # none if the plain method has trained so far: what a controller has just logged stays
            learner.log.restore(state["events"])
        if world.is_main:
            self._run.restore_rows(state["rows"])
        learner.measure()
        restore_random_state(state["random"], world)
        return Place(state["epoch"], state["step"], state["seconds"], state["best"])

    def _restore_structure(self, state: dict[str, Any]) -> None:
        """Give the network its branches, and the optimizer what it knows of every parameter."""
        learner = self._learner
        controlled = state["controller"]
        if learner.controller is None or controlled is None:
            saved = state["optimizer"] if controlled is None else controlled["optimizer"]
            load_state_by_name_(learner.optimizer, learner.model, saved)
        else:
            learner.controller.load_state_dict(controlled)
        suit_device_(learner.optimizer, learner.world.device)
        learner.set_execution_()

    def _restore_weights(self, state: dict[str, Any]) -> None:
        learner = self._learner
        try:
            learner.model.load_state_dict(state["model"])
        except RuntimeError as error:
            lines = beginning(error, 4)
            raise CheckpointError(f"the weights in {self._run.path} do not fit the model: {lines}") from error
        if learner.average is not None:  # one that was not there before begins with the model's own
            learner.average.load_state_dict(state["model"] if state["average"] is None else state["average"])

    def _check_same_run(self, state: dict[str, Any]) -> None:
        learner, path = self._learner, self._run.path
        saved = Recipe.from_dict(state["recipe"])
        changes = saved.differences(learner.recipe)
        if state["world"] != learner.world.size:
            changes.append(f"processes: {state['world']} against {learner.world.size}")
        if changes and not self._settings.change_settings:
            raise ConfigError(
                f"the run in {path} was started with other settings ({'; '.join(changes)}): give the same "
                "ones, another --out, or --change-settings to go on with the new ones"
            )
        evolves = learner.controller is not None and method(saved.method) is method(learner.recipe.method)
        if not evolves and state["structure"] != structure(learner.model):
            saved_blocks, blocks = state["structure"]["blocks"], structure(learner.model)["blocks"]
            has = "has no branches" if not saved_blocks else "has other branches" if blocks else "has branches already"
            raise CheckpointError(f"the model in {path} {has}, so --method {learner.recipe.method} cannot continue it")
