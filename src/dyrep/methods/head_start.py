"""Begin as blocks begin, without having them.

Blocks change two things: how a network learns, and where it starts, since a kernel with branches beside it is another
random kernel (one with a heavy centre and, if there is a residual, something of the identity). The second costs nothing
if the blocks are folded before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from dyrep.copying import copied
from dyrep.errors import CalibrationError, ConfigError
from dyrep.methods.catalogue import method as method_of
from dyrep.methods.conversion import MAX_KERNEL, convert_
from dyrep.surgery.folding import deploy
from dyrep.surgery.preserve import Forward
from dyrep.surgery.statistics import update_norms_
from dyrep.surgery.wrappers import unwrap


def start_as_(
    model: nn.Module,
    method: str,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    max_kernel: int | None = MAX_KERNEL,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    generator: torch.Generator | None = None,
) -> list[str]:
    """Give an untrained network the kernels that blocks of a method would fold to, and no blocks.

    Each kernel keeps its length: behind a batch norm this is what decides how fast it turns. Norms and everything else
    stay as they are.

    Args:
        model: the network, changed in place; not yet trained, as what it has learnt would be lost.
        method: one of `dyrep.methods.METHODS` with blocks from the start (``"repvgg"``, ``"dbb"``, ...).
        batches: a few batches to measure the blocks' norms on: images, or random numbers of their shape.
        forward: ``forward(model, batch)``, where a batch is not the model's input or a tuple that begins with it.
        max_kernel: leave larger kernels as they are (None: no limit).
        include: change only layers that match one of these patterns (``"backbone.*"``).
        exclude: never change layers that match one of these.
        generator: source of the random weights (default: torch's global one).

    Returns:
        The layers whose kernels are others now.

    Raises:
        DyRepError: the method, a layer or the batches do not allow it; nothing has been changed then.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        >>> before = model[0].weight.norm()
        >>> start_as_(model, "repvgg", [torch.randn(4, 8, 16, 16)])
        ['0']
        >>> torch.allclose(model[0].weight.norm(), before), type(model[0]).__name__
        (True, 'Conv2d')
    """
    check_head_start(method)
    model = unwrap(model)
    blocks = copied(model)
    edits = convert_(
        blocks,
        method,
        replace="conv",
        max_kernel=max_kernel,
        include=include,
        exclude=exclude,
        generator=generator,
    )
    update_norms_(blocks, batches, forward=forward)
    folded = deploy(blocks, inplace=True)
    started: dict[str, dict[str, torch.Tensor]] = {}
    for layer in (edit.layer for edit in edits):
        ours, theirs = model.get_submodule(layer), folded.get_submodule(layer)
        length = ours.weight.detach().norm() / theirs.weight.detach().norm()  # type: ignore[operator]
        started[layer] = {name: p.detach() * length for name, p in theirs.named_parameters(recurse=False)}
        if not all(bool(value.isfinite().all()) for value in started[layer].values()):
            raise CalibrationError(
                f"what reaches layer {layer!r} is not finite, or zero throughout, so its norms cannot be measured on "
                "these batches: pass others, or leave the layer out with exclude="
            )
    with torch.no_grad():
        for layer, values in started.items():
            for name, value in values.items():
                model.get_submodule(layer).get_parameter(name).copy_(value)
    return list(started)


def check_head_start(method: str) -> None:
    """Raise unless a method has blocks to start as."""
    chosen = method_of(method)
    if not chosen.builds_blocks or chosen.name == "repnas":
        valid = "one with blocks from the start, such as repvgg or dbb"
        raise ConfigError(f"a network cannot start as method {method!r}: choose {valid}")
