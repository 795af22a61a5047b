"""Everything a run trains with, made from its recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dyrep.checkpoint import with_versions
from dyrep.engine.data import Data
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.rundir import RunDirectory
from dyrep.engine.tasks import task_of
from dyrep.engine.world import World
from dyrep.errors import CheckpointError, ConfigError
from dyrep.models.backbones import load_backbone_
from dyrep.records import PLAIN
from dyrep.surgery.folding import named_tensors
from dyrep.surgery.preserve import run_batch
from dyrep.wording import beginning


def make_data(recipe: Recipe, settings: RunSettings, world: World) -> Data:
    """The loaders of a run."""
    return task_of(recipe).open_data(settings, world)


def make_model(
    recipe: Recipe, *, classes: int, channels: int, size: int | None = None, initialised: bool = True
) -> nn.Module:
    """The plain network of a recipe.

    Args:
        recipe: what is trained.
        classes: number of classes.
        channels: of an image.
        size: of images, which detectors are built for (default: the recipe's).
        initialised: whether it gets its initial weights. A network whose weights come from a checkpoint does not need
            them, and the files they were in may be gone.
    """
    task = task_of(recipe)
    model = task.build(classes=classes, channels=channels, size=size or recipe.image_size)
    lazy = next((name for name, tensor in model.state_dict(keep_vars=True).items() if is_lazy(tensor)), None)
    if lazy is not None:
        _find_shapes_(model, task.example(channels=channels, size=size or recipe.image_size or 0, device="cpu"), lazy)
    if not initialised:
        return model
    if recipe.weights is not None:
        load_plain_weights_(model, Path(recipe.weights))
    elif recipe.backbone is not None:
        load_backbone_(model, *backbone_weights(Path(recipe.backbone)))
    return model


@torch.no_grad()
def _find_shapes_(model: nn.Module, example: Any, lazy: str) -> None:
    """Run a network with lazy layers once, which gives them their shapes; in eval mode, so that it stays untrained."""
    try:
        run_batch(model.eval(), example)
    except Exception as error:
        _, images = next(named_tensors(example))
        raise ConfigError(
            f"{lazy!r} of the model has no shape before it has run, and it does not run on images of "
            f"{'x'.join(map(str, images.shape))}: {beginning(error)}. Run it once, in eval mode, in the function that "
            "makes it"
        ) from error
    model.train()


def backbone_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    """The deployed weights of a finished run, or those in a file, and what they are called in messages.

    Raises:
        CheckpointError: there is neither.
    """
    run = RunDirectory(path)
    if not run.exists:
        return _read_weights(path), str(path)
    if not (path / PLAIN).is_file():
        raise CheckpointError(
            f"the run in {path} has no {PLAIN} to take a backbone from, so it has not ended: continue it, or write the "
            f"weights it has so far with dyrep deploy {path} -o FILE and give that file"
        )
    return _read_weights(path / PLAIN), f"the run in {path} ({run.recipe().model})"


def load_plain_weights_(model: nn.Module, path: Path) -> None:
    """Load a state dict strictly from a safetensors file, or from one of `torch.save` without unpickling code."""
    try:
        model.load_state_dict(with_versions(_read_weights(path), model))
    except CheckpointError:
        raise
    except Exception as error:
        lines = beginning(error, 4)
        raise CheckpointError(f"the weights in {path} do not fit the model: {lines}") from error


def _read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from a safetensors file, or from one of `torch.save` without unpickling code."""
    try:
        state: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise CheckpointError(f"there is no file {path} to take initial weights from") from error
    except Exception as error:
        lines = beginning(error, 4)
        raise CheckpointError(
            f"{path} cannot be read, so it is damaged, or no file of weights: {lines}; give a safetensors file (named "
            "so), or a state dict written by torch.save"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__} instead of a state dict")
    return state


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


def uses_graph(settings: RunSettings, world: World, *, same_shapes: bool = True) -> tuple[bool, str]:
    """Whether steps are captured in a CUDA graph, and if that was asked for and cannot be, why."""
    if not same_shapes:
        return False, "--graph needs steps that are all alike, and a detector's are not" if settings.graph else ""
    if world.device.type != "cuda":
        return False, "--graph needs a GPU; steps run eagerly" if settings.graph else ""
    if world.size > 1:
        reason = "--graph works on a single GPU; with several, steps run eagerly"
        return False, reason if settings.graph else ""
    return settings.graph is not False, ""
