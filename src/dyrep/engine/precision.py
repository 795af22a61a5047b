"""The dtype of convolutions and matrix products in training and evaluation."""

from __future__ import annotations

import torch

from dyrep.engine.recipe import Recipe
from dyrep.errors import ConfigError

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_precision(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The dtype of convolutions and products on a device.

    Example:
        >>> make_precision(Recipe(precision="auto"), torch.device("cpu"))
        torch.float32
    """
    if recipe.precision == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    if recipe.precision == "fp16" and device.type == "cpu":
        raise ConfigError("precision='fp16' needs a GPU; on a CPU use fp32 or bf16")
    return _PRECISIONS[recipe.precision]


def computing_in(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """A context in which convolutions and products are computed in a dtype; for float32 it changes nothing.

    Example:
        >>> with computing_in(torch.bfloat16, torch.device("cpu")):
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.bfloat16
    """
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
