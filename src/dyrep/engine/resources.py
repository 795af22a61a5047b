"""What the settings of a run make of the machine it runs on."""

from __future__ import annotations

import os

import torch

from dyrep.engine.data.loader import Loading
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.world import World

MOST_READERS = 8


def uses_channels_last(settings: RunSettings, device: torch.device) -> bool:
    """Whether images and weights are laid out with channels innermost."""
    return device.type == "cuda" if settings.channels_last is None else settings.channels_last


def readers(settings: RunSettings) -> int:
    """How many processes, or threads, read image files."""
    return min(os.cpu_count() or 1, MOST_READERS) if settings.workers is None else settings.workers


def loading_of(recipe: Recipe, settings: RunSettings, world: World) -> Loading:
    """How the batches of a run are made on this rank."""
    return Loading(
        world.device,
        seed=recipe.seed,
        rank=world.rank,
        world=world.size,
        workers=readers(settings),
        resident=recipe.resident,
        channels_last=uses_channels_last(settings, world.device),
    )
