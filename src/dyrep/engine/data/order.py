"""Which examples come in which batch on which rank, and the random numbers of an epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dyrep.errors import ConfigError


def derived_seed(*parts: object) -> int:
    """A seed that depends on all parts, and shares nothing with the seed of any other parts.

    Example:
        >>> derived_seed(0, "train") == derived_seed(0, "train"), derived_seed(1, 11) == derived_seed(11, 1)
        (True, False)
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def derived_generator(*parts: object) -> torch.Generator:
    """A CPU generator with a derived seed."""
    return torch.Generator().manual_seed(derived_seed(*parts))


@dataclass(frozen=True)
class Order:
    """Divides the examples of an epoch into batches, and every batch among the ranks.

    Training drops the last, incomplete batch, and each rank takes its part of every batch: the batches over all ranks
    are the same for any number of ranks. Evaluation takes every example exactly once: rank r has r, r + world, ...;
    its last batch may be short.

    Attributes:
        count: examples.
        batch_size: examples per batch over all ranks.
        training: whether to train rather than to evaluate.
        rank: which rank this is.
        world: number of ranks.

    Raises:
        ConfigError: a batch size that cannot be divided or filled.

    Example:
        >>> order = Order(count=10, batch_size=4, training=True, rank=1, world=2)
        >>> order.steps, order.examples, order.own(torch.arange(10)).tolist()
        (2, 8, [2, 3, 6, 7])
    """

    count: int
    batch_size: int
    training: bool
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank={self.rank}: must be from 0 to {self.world - 1}, as there are {self.world}")
        if self.batch_size < 1 or self.batch_size % self.world:
            raise ConfigError(f"batch_size={self.batch_size}: must be a multiple of the number of ranks, {self.world}")
        if self.training and self.count < self.batch_size:
            raise ConfigError(f"batch_size={self.batch_size}: there are only {self.count} examples to train on")

    @property
    def share(self) -> int:
        """Examples per batch on this rank."""
        return self.batch_size // self.world

    @property
    def steps(self) -> int:
        """Batches per epoch on this rank. In evaluation it may differ by one between ranks."""
        if self.training:
            return self.count // self.batch_size
        return -(-len(range(self.rank, self.count, self.world)) // self.share)

    @property
    def examples(self) -> int:
        """Examples per epoch over all ranks."""
        return self.steps * self.batch_size if self.training else self.count

    def own(self, rows: Tensor) -> Tensor:
        """This rank's rows of what has one row for every example, in the order of the epoch."""
        if not self.training:
            return rows[self.rank :: self.world]
        batches = rows[: self.examples].unflatten(0, (self.steps, self.batch_size))
        return batches[:, self.rank * self.share : (self.rank + 1) * self.share].flatten(0, 1)

    def batches(self, own: Tensor, start: int = 0) -> Iterator[Tensor]:
        """Views of this rank's rows, batch by batch, from the batch at position `start` on."""
        for step in range(start, self.steps):
            yield own[step * self.share : (step + 1) * self.share]
