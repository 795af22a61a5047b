"""The dtype of convolutions and matrix products in training and evaluation."""

from __future__ import annotations

from typing import Literal

import torch

from dyrep.errors import ConfigError

Precision = Literal["auto", "fp32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What precisions are to torch, but for the one that depends on the device."""


def make_precision(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype of convolutions and products on a device.

    Raises:
        ConfigError: the device cannot compute like this.

    Example:
        >>> make_precision("auto", torch.device("cpu"))
        torch.float32
    """
    if precision == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError("precision='fp16' needs a GPU; on a CPU use fp32 or bf16")
    return DTYPES[precision]


def computing_in(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """A context in which convolutions and products are computed in a dtype; for float32 it changes nothing.

    Example:
        >>> with computing_in(torch.bfloat16, torch.device("cpu")):
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.bfloat16
    """
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
