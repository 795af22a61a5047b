"""The learning rate as a function of time alone, so that there is nothing to save and nothing to get out of step."""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer

from dyrep.engine.recipe import Recipe


def learning_rate(recipe: Recipe, progress: float) -> float:
    """The learning rate after a number of epochs, which need not be whole.

    Example:
        >>> recipe = Recipe(lr=0.1, epochs=10, method="origin")
        >>> [round(learning_rate(recipe, epoch), 4) for epoch in (0, 5, 10)]
        [0.1, 0.05, 0.0]
    """
    warmup = recipe.warmup_epochs
    if progress < warmup:
        return recipe.lr * progress / warmup
    if recipe.schedule == "constant":
        return recipe.lr
    share = (progress - warmup) / (recipe.epochs - warmup)
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * (1 + math.cos(math.pi * share)) / 2


def set_learning_rate_(optimizer: Optimizer, value: float) -> None:
    """Set the learning rate of all groups; where it is a tensor, in place, as captured graphs need."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
