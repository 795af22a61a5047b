"""What learns in a run: the network and all that changes together with it, wired up by the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dyrep.controller import DyRep
from dyrep.engine.averages import WeightAverage
from dyrep.engine.data.loader import Batch
from dyrep.engine.evolving import convert_model_, make_controller, step_scorer
from dyrep.engine.precision import computing_in, make_precision
from dyrep.engine.randomness import seed_everything
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.resources import uses_channels_last
from dyrep.engine.setup import make_data, make_model, make_optimizer, uses_graph
from dyrep.engine.step import TrainStep
from dyrep.engine.tasks import task_of
from dyrep.engine.world import World
from dyrep.errors import ConfigError
from dyrep.events import EventLog
from dyrep.execution import Clock
from dyrep.models.backbones import train_
from dyrep.norm import sync_norms_
from dyrep.surgery.costs import costs
from dyrep.surgery.edits import Edit
from dyrep.surgery.executing import set_execution_
from dyrep.surgery.structure import structure
from dyrep.wording import counted


class Learner:
    """A network with its data, optimizer, moving average, controller and training step.

    Args:
        recipe: what to train and how.
        settings: where and with what.
        world: the processes that train together.
        message: told in words what a person should know.
        initialised: whether the network gets its initial weights, see `make_model`.

    Attributes:
        recipe: what is trained and how.
        world: the processes that train together.
        task: what is learnt.
        precision: dtype of convolutions and products.
        data: the loaders.
        model: the bare model.
        converted: what was made of the model before training.
        optimizer: of the model.
        average: moving average of the weights, if the recipe wants one.
        scaler: of the loss, for float16.
        log: what has happened to the structure; in memory until it is moved to a file.
        controller: changes the model's structure; None for methods that never do.
        train_on: trains on a batch.
        size: parameters, multiply-adds and branches of the model as it is now.
        described: its structure in a few words.

    Raises:
        ConfigError: settings that do not go together.
        DataError: the data is missing or damaged.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: RunSettings,
        world: World,
        message: Callable[[str], None],
        *,
        initialised: bool = True,
    ) -> None:
        self.recipe, self.world = recipe, world
        self.precision = make_precision(recipe.precision, world.device)
        self.task = task_of(recipe)
        if world.device.type == "cuda":
            torch.backends.cudnn.benchmark = self.task.same_shapes
        self.data = make_data(recipe, settings, world)
        seed_everything(recipe.seed, "weights")
        self.model, self.converted = self._make_model(settings, initialised)
        seed_everything(recipe.seed, "training", world.rank)
        self.optimizer = make_optimizer(self.model, recipe, world.device)
        self.average = None if recipe.ema is None else WeightAverage(self.model, recipe.ema)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.precision == torch.float16)
        trained = self._wrapped()
        self.log = EventLog()
        averages = [] if self.average is None else [self.average.module]
        self.controller = make_controller(
            recipe, trained, self.optimizer, averages, self.scaler, self.log, begins=initialised
        )
        if self.converted:
            edits = [edit.as_dict() for edit in self.converted]
            self.log.write("converted", method=recipe.method, epochs=recipe.epochs, edits=edits)
        self.train_on = self._make_step(trained, settings, message)
        self.set_execution_()
        self.measure()

    def _make_model(self, settings: RunSettings, initialised: bool) -> tuple[nn.Module, list[Edit]]:
        """The network of the recipe's method on its device, and what was made of the plain one for that."""
        recipe, device = self.recipe, self.world.device
        shape = {"channels": self.data.channels, "size": self.data.size}
        model = make_model(recipe, classes=len(self.data.classes), **shape, initialised=initialised)
        _train_mode_(model, recipe)  # frozen norms are in eval mode from the start
        converted = convert_model_(model, recipe, self.task.example(**shape, device="cpu"))
        if recipe.sync_norms:
            if device.type != "cuda":
                raise ConfigError("--sync-norms needs GPUs: torch synchronises batch norms there alone")
            model = sync_norms_(nn.SyncBatchNorm.convert_sync_batchnorm(model))
        channels_last = uses_channels_last(settings, device)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return model.to(device).to(memory_format=layout), converted

    def _wrapped(self) -> nn.Module:
        """The model as it is called in training."""
        if self.world.size == 1:
            return self.model
        return DistributedDataParallel(
            self.model, device_ids=[self.world.device] if self.world.device.type == "cuda" else None
        )

    def _make_step(self, trained: nn.Module, settings: RunSettings, message: Callable[[str], None]) -> TrainStep:
        graph, reason = uses_graph(settings, self.world, same_shapes=self.task.same_shapes)
        if reason:
            message(reason)
        return TrainStep(
            trained,
            self.optimizer,
            self.data.train,
            precision=self.precision,
            average=self.average,
            scaler=self.scaler,
            graph=graph,
            message=message,
            clock=Clock(self.recipe.sigma_every, managed=True),
            learn=self.task.learn,
            scorer=step_scorer(self.controller),
        )

    @property
    def example(self) -> Any:
        """A batch of one empty image, to count what the model costs."""
        return self.task.example(channels=self.data.channels, size=self.data.size, device=self.world.device)

    @property
    def evaluated(self) -> nn.Module:
        """The model that counts: the moving average if there is one."""
        return self.model if self.average is None else self.average.module

    def description(self) -> dict[str, Any]:
        """What it takes, besides weights, to rebuild the model as it is now."""
        return {
            "recipe": self.recipe.to_dict(),
            "classes": list(self.data.classes),
            "channels": self.data.channels,
            "size": self.data.size,
            "structure": structure(self.model),
        }

    def train_mode_(self) -> None:
        """Put the model into training mode, but for what the recipe wants to stay as it is."""
        _train_mode_(self.model, self.recipe)

    def set_execution_(self) -> None:
        """Run all blocks there are now as the recipe says."""
        recipe, clock = self.recipe, self.train_on.clock
        set_execution_(
            self.model, recipe.execution, images=recipe.sigma_images, gradient=recipe.sigma_gradient, clock=clock
        )

    def evolve_(self, call: Callable[[Iterable[Batch]], list[Edit]], epoch: int) -> list[Edit]:
        """Let the controller change the structure if that is due, in the precision the model trains in.

        Args:
            call: the controller's ``epoch_end`` or ``step_end``.
            epoch: whose batches are measured on.
        """
        before = self._stage()
        with computing_in(self.precision, self.world.device):
            edits = call(self.data.train.calibration(epoch))
        if self._stage() != before:
            self.set_execution_()
            self.train_on.recapture()
        return edits

    def _stage(self) -> Any:
        """Something that changes when captured steps are stale; not every update changes anything."""
        controller = self.controller
        if isinstance(controller, DyRep):
            return controller.attempts, controller.scorer.beginnings
        return None if controller is None else controller.updates

    @torch.no_grad()
    def measure(self) -> None:
        """Count what the structure costs now, and describe it."""
        cost = costs(self.model, self.example)
        blocks = structure(self.model)["blocks"]
        branches = sum(len(block["branches"]) for block in blocks.values())
        self.size = {"parameters": cost.parameters, "macs": cost.macs, "branches": branches}
        grown = f"{counted(len(blocks), 'block')}, {counted(branches, 'branch', 'es')}"
        self.described = grown if blocks else "plain"


def _train_mode_(model: nn.Module, recipe: Recipe) -> None:
    train_(model, norms=recipe.norms, frozen_stages=recipe.frozen_stages)
