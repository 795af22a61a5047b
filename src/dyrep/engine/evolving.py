"""What a recipe's method makes of a network: blocks before training, and something that changes them during it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dyrep.controller import DyRep
from dyrep.engine.recipe import Recipe
from dyrep.engine.tasks import task_of
from dyrep.errors import ConfigError
from dyrep.events import EventLog
from dyrep.methods import RepNAS, convert_, method
from dyrep.scoring import StepScorer
from dyrep.surgery.edits import Edit


class Controller(Protocol):
    """What the training loop asks of something that changes the network's structure."""

    @property
    def updates(self) -> int:
        """How often it has changed what a training step does."""

    def epoch_end(self, batches: Iterable[Any] | None = None) -> list[Edit]:
        """Change the structure if that is due after an epoch; what was changed."""

    def state_dict(self) -> dict[str, Any]:
        """All it takes to go on, the optimizer's state included, except the model's own state dict."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the model has its structure then, and takes its own state dict."""


def convert_model_(model: nn.Module, recipe: Recipe, image: Any) -> list[Edit]:
    """Turn a plain network into that of the recipe's method, as far as that is done before training.

    Args:
        model: the network, on the CPU.
        recipe: what is trained.
        image: a batch of one image of the right shape, to run the network on.
    """
    chosen = method(recipe.method)
    patterns: dict[str, Any] = {"include": recipe.dyrep.include, "exclude": recipe.dyrep.exclude}
    if chosen.name == "dyrep":  # which begins by itself, see DyRepConfig.start_with
        return []
    given = next((name for name in ("weights", "backbone") if getattr(recipe, name) is not None), None)
    preserve = given is not None and chosen.builds_blocks
    if preserve and chosen.scaling != "norm":
        raise ConfigError(
            f"method={recipe.method} cannot start from {given}={getattr(recipe, str(given))}: it would change what the "
            f"network computes at once; leave --{given} out, or choose another method"
        )
    return convert_(
        model,
        recipe.method,
        example_input=image,
        replace=recipe.replace,
        preserve=preserve,
        gamma=recipe.dyrep.gamma if preserve or chosen.name == "fixed" else None,
        copies=recipe.copies,
        max_kernel=recipe.max_kernel,
        structure=recipe.structure,
        **patterns,
    )


def make_controller(
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    averages: list[nn.Module],
    scaler: torch.amp.GradScaler,
    log: EventLog,
    *,
    begins: bool = True,
) -> Controller | None:
    """What changes the network during training, if its method does that.

    Args:
        recipe: what is trained.
        model: the network, as it is called in training.
        optimizer: of the network.
        averages: moving averages of it.
        scaler: of the loss.
        log: what happens to the structure is written there.
        begins: whether training begins; otherwise the structure comes from a checkpoint.
    """
    chosen = method(recipe.method)
    if chosen.name == "repnas":
        return RepNAS(model, optimizer, recipe.search(), ema=averages, scaler=scaler, log=log)
    if chosen.name != "dyrep":
        return None

    task = task_of(recipe)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return task.learn(model, batch, nullcontext()).loss

    return DyRep(model, optimizer, recipe.evolution(), loss=loss, ema=averages, log=log, begins=begins)


def step_scorer(controller: Controller | None) -> StepScorer | None:
    """What sums scores at every step for a controller, if it goes by such scores."""
    return controller.scorer if isinstance(controller, DyRep) else None
