"""Where a loss or an output that is not finite came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dyrep.execution import eagerly
from dyrep.surgery.preserve import Forward, run_batch


@torch.no_grad()
def all_finite(model: nn.Module) -> bool:
    """Whether every weight of a model is a finite number; waits for the device, once."""
    return bool(torch.isfinite(torch.stack([p.detach().abs().max() for p in model.parameters() if p.numel()])).all())


@torch.no_grad()
def find_origin(
    model: nn.Module, images: Any, forward: Forward | None = None, *, otherwise: str = "the loss itself"
) -> str:
    """Say in words which layer first made something that is not finite.

    If weights are not finite already, a gradient was not: it spreads from one layer to all before it, so the last
    layer with such weights is where it began. Otherwise the batch is run again to see where it happens.

    Args:
        model: the bare model, in the mode in which it happened.
        images: the batch with which it happened; of a detector, with its targets.
        forward: runs the model on it, see `dyrep.DyRep`.
        otherwise: what is left if it was none of the layers.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        >>> _ = model[1].weight.data.fill_(float("inf"))
        >>> find_origin(model, torch.ones(1, 1))
        "the gradient of layer '1' (Linear), whose weight is not finite any more"
    """
    if not _finite(images):
        return "the images: they hold values that are not finite"
    broken = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
    if broken:
        layer, _, parameter = broken[-1].rpartition(".")
        kind = type(model.get_submodule(layer)).__name__
        return f"the gradient of layer {layer!r} ({kind}), whose {parameter} is not finite any more"
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and not _finite(output) and _finite(inputs):
                where = f"layer {name!r}" if name else "the model itself"
                found.append(f"the output of {where} ({type(module).__name__}), from finite inputs and weights")

        return hook

    # a module's hook runs after those of its children, so the first to report is the innermost
    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        with eagerly():  # fused blocks run no branch by itself
            run_batch(model, images, forward)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else f"{otherwise}: all weights and outputs of layers are finite"


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, (tuple, list)):
        return all(_finite(item) for item in value)
    if isinstance(value, Mapping):
        return all(_finite(item) for item in value.values())
    return True
