"""Everything a run trains with, made from its recipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from dyrep import models
from dyrep.engine.data import Augmentation, Data, open_data
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.world import World
from dyrep.errors import CheckpointError


def make_data(recipe: Recipe, settings: RunSettings, world: World) -> Data:
    """The loaders of a run."""
    return open_data(
        recipe.dataset,
        settings.data,
        size=recipe.image_size,
        batch_size=recipe.batch_size,
        augmentation=Augmentation(
            crop=recipe.crop,
            padding=recipe.crop_padding,
            flip=recipe.flip,
            cutout=recipe.cutout,
            color_jitter=recipe.color_jitter,
            auto_augment=recipe.auto_augment,
        ),
        val_split=recipe.val_split,
        seed=recipe.seed,
        device=world.device,
        channels_last=uses_channels_last(settings, world.device),
        resident=recipe.resident,
        workers=min(os.cpu_count() or 1, 8) if settings.workers is None else settings.workers,
        rank=world.rank,
        world=world.size,
    )


def make_model(recipe: Recipe, *, classes: int, channels: int) -> nn.Module:
    """The plain network of a recipe, with its initial weights."""
    model = models.build(recipe.model, num_classes=classes, in_channels=channels)
    if recipe.weights is not None:
        load_plain_weights_(model, Path(recipe.weights))
    return model


def load_plain_weights_(model: nn.Module, path: Path) -> None:
    """Load a state dict strictly from a safetensors file, or from one of `torch.save` without unpickling code."""
    try:
        state: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        model.load_state_dict(state)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path} to take initial weights from") from error
    except Exception as error:
        lines = " ".join(line.strip() for line in str(error).splitlines()[:4])
        raise CheckpointError(f"the weights in {path} do not fit the model: {lines}") from error


def make_optimizer(model: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.SGD:
    """SGD; fused on a GPU, where the learning rate is a tensor that captured graphs read."""
    decayed = [p for p in model.parameters() if recipe.decay_norms or p.dim() > 1]
    others = [p for p in model.parameters() if not (recipe.decay_norms or p.dim() > 1)]
    groups: list[dict[str, Any]] = [{"params": decayed}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    optimizer = torch.optim.SGD(
        groups,
        lr=recipe.lr,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
        fused=device.type == "cuda",
    )
    suit_device_(optimizer, device)
    return optimizer


def suit_device_(optimizer: torch.optim.SGD, device: torch.device) -> None:
    """Give an optimizer whose state may come from another device what this one needs."""
    for group in optimizer.param_groups:
        on_gpu = device.type == "cuda"
        group["fused"] = on_gpu
        group["lr"] = torch.tensor(float(group["lr"]), device=device) if on_gpu else float(group["lr"])


def uses_channels_last(settings: RunSettings, device: torch.device) -> bool:
    """Whether images and weights are laid out with channels innermost."""
    return device.type == "cuda" if settings.channels_last is None else settings.channels_last


def uses_graph(settings: RunSettings, world: World) -> tuple[bool, str]:
    """Whether steps are captured in a CUDA graph, and if that was asked for and cannot be, why."""
    if world.device.type != "cuda":
        return False, "--graph needs a GPU; steps run eagerly" if settings.graph else ""
    if world.size > 1:
        reason = "--graph works on a single GPU; with several, steps run eagerly"
        return False, reason if settings.graph else ""
    return settings.graph is not False, ""
