"""How a block computes what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from dyrep.checking import require_whole
from dyrep.errors import ConfigError

ExecutionName = Literal["auto", "eager", "fused", "folded"]
EXECUTIONS: tuple[str, ...] = get_args(ExecutionName)
"""Ways to run a block: see `dyrep.set_execution_`."""

SigmaGradient = Literal["none", "weights", "full"]
SIGMA_GRADIENTS: tuple[str, ...] = get_args(SigmaGradient)
"""What the gradient of a folded block knows about σ: nothing; how it depends on the
weights; how it depends on weights and input."""

MEASURED_IMAGES = 16
"""On so many images of a batch folded blocks measure σ at least, if nothing else is asked for."""

MEASURE_EVERY = 4
"""In every so manyth step folded blocks measure σ, if nothing else is asked for."""

ENOUGH_VALUES = 4096
"""So many values of a channel are enough to measure σ on."""

SETTLING_STEPS = 20
"""Steps at the beginning in all of which σ is measured, so that running statistics soon mean something."""


class Clock:
    """Counts the training steps of a folded block, which measures σ in some of them.

    As a rule every block has one of its own. Who captures steps in CUDA graphs gives all blocks the same one, captures
    a step that measures and one that does not, and moves the clock on itself: replaying a graph runs no Python.

    Args:
        every: measure in every n-th step, once the first few are over.
        managed: whether somebody else than the block moves it on. If not, whatever is captured or compiled measures.

    Attributes:
        step: steps so far.

    Example:
        >>> clock = Clock(every=4)
        >>> clock.step = 101
        >>> clock.due, clock.span
        (False, 4)
    """

    def __init__(self, every: int = 1, *, managed: bool = False) -> None:
        self.every, self.managed = every, managed
        self.step = 0

    @property
    def due(self) -> bool:
        """Whether σ is measured in the step to come."""
        return self._due_in(self.step)

    @property
    def was_due(self) -> bool:
        """Whether σ was measured in the step that is being run once more, by activation checkpointing."""
        return self._due_in(self.step if self.managed else self.step - 1)

    def _due_in(self, step: int) -> bool:
        if self.every == 1 or torch.compiler.is_compiling() or step < SETTLING_STEPS:
            return True
        if not self.managed and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return True  # whatever is captured is repeated for ever
        return step % self.every == 0

    @property
    def span(self) -> int:
        """How many steps a measurement stands for."""
        return 1 if self.step < SETTLING_STEPS else self.every


@dataclass(frozen=True)
class Execution:
    """How a block runs in training.

    Attributes:
        name: one of `EXECUTIONS`.
        images: on how many images of the batch a folded block measures σ at least.
        values: how many values of a channel it looks at at least, if the batch has so many; see `images_for`.
        gradient: one of `SIGMA_GRADIENTS`.
        clock: says in which steps a folded block measures σ.

    Example:
        >>> Execution("folded", images=0)
        Traceback (most recent call last):
        dyrep.errors.ConfigError: images=0: must be a whole number of at least 1
    """

    name: str = "auto"
    images: int = MEASURED_IMAGES
    values: int = ENOUGH_VALUES
    gradient: str = "none"
    clock: Clock = field(default_factory=Clock, compare=False)

    def __post_init__(self) -> None:
        if self.name not in EXECUTIONS:
            raise ConfigError(f"execution={self.name!r} is unknown; valid are {', '.join(EXECUTIONS)}")
        if self.gradient not in SIGMA_GRADIENTS:
            raise ConfigError(f"gradient={self.gradient!r} is unknown; valid are {', '.join(SIGMA_GRADIENTS)}")
        for what, value in (("images", self.images), ("values", self.values), ("every", self.clock.every)):
            require_whole(what, value, 1)

    def images_for(self, batch: int, positions: int) -> int:
        """On how many images of a batch to measure σ, if each has so many positions.

        A few images of many positions tell enough, and to look at more of them would cost time. Where they have few
        positions, more images are needed, and cost next to nothing.

        Example:
            >>> Execution("folded").images_for(256, 56 * 56), Execution("folded").images_for(256, 7 * 7)
            (16, 84)
        """
        values = max(self.values, 2)  # one has no spread
        return min(max(self.images, -(-values // max(positions, 1))), batch)


_only_eager = False


@contextmanager
def eagerly() -> Iterator[None]:
    """Run all blocks eagerly, whatever their setting: for hooks on their parts, or gradients of gradients."""
    global _only_eager
    before, _only_eager = _only_eager, True
    try:
        yield
    finally:
        _only_eager = before


def only_eager() -> bool:
    """Whether `eagerly` is in force."""
    return _only_eager
