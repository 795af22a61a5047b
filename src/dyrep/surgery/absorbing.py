"""Absorb whole blocks in the midst of training, so that what is left goes on learning as fast as they did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep.block import RepConv
from dyrep.errors import OptimizerError
from dyrep.surgery import ranks
from dyrep.surgery.edits import Edit, cut_
from dyrep.surgery.followers import reading_norms
from dyrep.surgery.lengths import factors_for, rescale_, turning_scale
from dyrep.surgery.momentum import scale_momentum_
from dyrep.surgery.optimizer_state import copies_moved, locate
from dyrep.surgery.preserve import Forward


def norms_behind(
    model: nn.Module, blocks: Mapping[str, RepConv], batch: Any, forward: Forward | None = None
) -> dict[str, str]:
    """The norm that alone reads what a block puts out, or will once that is absorbed; not all blocks have one.

    A norm that has stepped aside for its block comes back when that is absorbed, and reads it then.

    Args:
        model: the model, which is run on the batch.
        blocks: the blocks to look at, by name.
        batch: what to run it on; None leaves norms that stepped aside.
        forward: ``forward(model, batch)``, where the batch is of a kind of its own.

    Example:
        >>> from dyrep.surgery.edits import expand_
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        >>> _ = expand_(model, "0")
        >>> norms_behind(model, {"0": model[0]}, torch.randn(2, 3, 8, 8))
        {'0': '1'}
    """
    names = {id(module): name for name, module in model.named_modules()}
    aside = {layer: names[id(block.passed_norm)] for layer, block in blocks.items() if block.passed_norm is not None}
    if batch is None:
        return aside
    return reading_norms(model, blocks, batch, forward) | aside


def absorb_(
    model: nn.Module,
    layer: str,
    norm: str | None,
    *,
    optimizer: Optimizer | None = None,
    distributed: bool | None = None,
) -> tuple[list[Edit], Tensor | None]:
    """Absorb all branches of a block; if a norm reads it, at the length at which the kernel turns as fast as the block.

    Args:
        model: the model, changed in place.
        layer: name of the block.
        norm: name of the norm that alone reads it, whose statistics follow; None to leave the kernel as it is folded.
        optimizer: the optimizer that trains the model.
        distributed: whether ranks scale alike (default: if torch.distributed is initialised).

    Returns:
        The edit, and by what each channel was multiplied.

    Raises:
        OptimizerError: the optimizer does not hold a norm that comes back.

    Example:
        >>> from dyrep.surgery.edits import expand_
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
        >>> _ = expand_(model, "0", gamma=1.0)
        >>> x = torch.randn(2, 3, 8, 8)
        >>> before = model(x)
        >>> edits, factors = absorb_(model, "0", "1")
        >>> print(*edits)
        cut 0: -1x1 -1x1-KxK -1x1-AVG -1xK -Kx1
        >>> torch.allclose(model(x), before, atol=1e-5), bool((factors < 1).all())
        (True, True)
    """
    block = cast(RepConv, model.get_submodule(layer))
    if block.passed_norm is not None and optimizer is not None:
        _check_comes_back(block, layer, optimizer)
    if norm is None:
        return cut_(model, layer, optimizer=optimizer), None
    scale = turning_scale(block, torch.Generator().manual_seed(0))
    edits = cut_(model, layer, optimizer=optimizer)
    reader = model.get_submodule(norm)
    factors = factors_for(reader, scale)
    if ranks.distributed(distributed):  # a channel that hardly varies on any rank, whose factor is 1, stays
        ranks.largest_(factors)
    with copies_moved(optimizer, [block]):
        rescale_(block, reader, factors)
    if optimizer is not None:
        scale_momentum_(block, factors, optimizer)
    return [replace(edit, detail={**edit.detail, "norm": norm, "scale": float(scale)}) for edit in edits], factors


def _check_comes_back(block: RepConv, layer: str, optimizer: Optimizer) -> None:
    """Raise if a norm that steps back when its block is absorbed would be trained, but not by the optimizer."""
    norm = block.passed_norm
    assert norm is not None
    if locate(optimizer, block.weight) is None:
        return  # the layer is none of this optimizer's
    for parameter, trained in zip((norm.weight, norm.bias), norm.was_trained, strict=True):
        if trained and locate(optimizer, parameter) is None:
            raise OptimizerError(
                f"the norm that layer {layer!r} has taken the place of comes back when it is absorbed, and the "
                "optimizer does not hold its γ and β: build the optimizer from all of model.parameters()"
            )
