"""The little that several processes have to agree on: same random weights, same statistics, same plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dyrep.errors import DesyncError


def distributed(wanted: bool | None = None) -> bool:
    """Whether several processes work together (``wanted=None``: if torch.distributed says so)."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several and wanted is not False


def is_main_rank() -> bool:
    """Whether this process is the one that writes files."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor], device: torch.device | None = None) -> None:
    """Give every rank the tensors of rank 0; by way of a device that ranks can send from, if one is named."""
    for tensor in tensors:
        sent = tensor.to(device).contiguous()
        dist.broadcast(sent, src=0)
        if sent is not tensor:
            tensor.copy_(sent)


@torch.no_grad()
def average_(tensors: Iterable[Tensor]) -> None:
    """Replace every tensor by its mean over the ranks."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())


@torch.no_grad()
def largest_(tensor: Tensor) -> None:
    """Replace every element by the largest that a rank has there."""
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)


def of_first(value: Any, device: torch.device) -> Any:
    """The value that rank 0 has."""
    held = [value]
    dist.broadcast_object_list(held, src=0, device=device)
    return held[0]


def smallest(value: int, device: torch.device) -> int:
    """The smallest of the ranks' values."""
    tensor = torch.tensor(value, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return int(tensor)


def check_agreement(value: Any, what: str, device: torch.device) -> None:
    """Raise on every rank unless all of them hold the same JSON-able value."""
    if not agree(value, device):
        text = json.dumps(value, sort_keys=True)
        raise DesyncError(
            f"the ranks disagree on {what}; rank {dist.get_rank()} has {text}. Start all ranks from the same weights, "
            "configuration and checkpoint"
        )


def agree(value: Any, device: torch.device) -> bool:
    """Whether all ranks hold the same JSON-able value."""
    text = json.dumps(value, sort_keys=True)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    low = torch.tensor(digest, device=device)
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return int(low) == int(high)
