"""The processes that train together, and the device of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dyrep.errors import ConfigError, DyRepError, LostRankError
from dyrep.wording import beginning

_SIGNS_OF_A_LOST_PEER = ("connection closed", "connection reset", "broken pipe", "gloo", "by peer", "timed out")


@dataclass(frozen=True)
class World:
    """This process among those that train together.

    Attributes:
        device: where this process computes.
        rank: its number.
        size: how many there are.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Which of some flags is raised on any rank."""
        if self.size == 1:
            return list(flags)
        raised = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in raised.tolist()]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Tensor) -> list[Tensor]:
        """A tensor of the same shape from every rank, on the CPU, in order of rank."""
        if self.size == 1 or not value.numel():
            return [value.cpu()] * self.size
        parts = [torch.empty_like(value, device=self.device) for _ in range(self.size)]
        dist.all_gather(parts, value.to(self.device))
        return [part.cpu() for part in parts]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined_world(device: str | None = None, timeout_minutes: float = 10) -> Iterator[World]:
    """Join the processes started by torchrun, or be alone.

    Args:
        device: as in `RunSettings`.
        timeout_minutes: how long to wait for a process that does not answer.

    Raises:
        ConfigError: the device is not there.
        LostRankError: another process died; what it says applies to this one too.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = pick_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(chosen)
        return
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    try:
        yield World(chosen, dist.get_rank(), size)
        dist.barrier()
    except RuntimeError as error:
        if isinstance(error, DyRepError) or not _lost_a_peer(error):
            raise
        raise LostRankError(
            f"rank {dist.get_rank()} lost another of the {size} processes ({beginning(error)[:200]}): see "
            "what that one printed. The run continues from its last checkpoint when the same command is given again"
        ) from error
    dist.destroy_process_group()  # not after an error: it could wait for those that are gone


def pick_device(device: str | None, local_rank: int = 0) -> torch.device:
    """The device of a process: the one asked for, or its own GPU, or the CPU.

    Example:
        >>> pick_device("cpu")
        device(type='cpu')
    """
    if device is None:
        return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device {device!r} is not a device; valid are cpu, cuda, cuda:0, ...") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device!r}: only cpu and cuda devices are supported")
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        index = local_rank if chosen.index is None else chosen.index
        if index >= count:
            raise ConfigError(f"--device {device!r}: there is no GPU number {index}, this machine has {count}")
        return torch.device("cuda", index)
    return chosen


def _lost_a_peer(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistBackendError) or any(sign in text for sign in _SIGNS_OF_A_LOST_PEER)
