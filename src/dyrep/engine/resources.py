"""What the settings of a run make of the machine it runs on."""

from __future__ import annotations

import os

import torch

from dyrep.engine.recipe import RunSettings

MOST_READERS = 8


def uses_channels_last(settings: RunSettings, device: torch.device) -> bool:
    """Whether images and weights are laid out with channels innermost."""
    return device.type == "cuda" if settings.channels_last is None else settings.channels_last


def readers(settings: RunSettings) -> int:
    """How many processes, or threads, read image files."""
    return min(os.cpu_count() or 1, MOST_READERS) if settings.workers is None else settings.workers
