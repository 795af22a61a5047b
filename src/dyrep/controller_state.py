"""What the state of a controller consists of, and whether something that is loaded is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dyrep.block import RepConv
from dyrep.checking import is_whole
from dyrep.errors import CheckpointError

FORMAT = 1
_PARTS: dict[str, tuple[str, ...] | None] = {
    "config": (),
    "structure": ("format", "blocks"),
    "optimizer": ("format", "groups", "state"),
    "scorer": ("metrics", "names", "sums", "counts", "step"),
    "counters": ("epoch", "step", "updates"),
    "rejected": (),
    "next_event": None,
}
"""Parts of a state, and what has to be in them where they are dicts."""


def check_state(state: Any) -> None:
    """Raise unless everything that loading reads is there.

    Raises:
        CheckpointError: something is missing, or of another kind.

    Example:
        >>> check_state({"format": 0})
        Traceback (most recent call last):
        dyrep.errors.CheckpointError: not a DyRep state of format 1; pass what DyRep.state_dict() returned
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise CheckpointError(f"not a DyRep state of format {FORMAT}; pass what DyRep.state_dict() returned")
    for part, keys in _PARTS.items():
        if part not in state:
            raise CheckpointError(f"the DyRep state lacks {part!r}; pass what DyRep.state_dict() returned")
        if keys is None:
            continue
        if not isinstance(state[part], Mapping):
            raise CheckpointError(f"{part!r} of the DyRep state must be a dict, got {type(state[part]).__name__}")
        lost = [key for key in keys if key not in state[part]]
        if lost:
            raise CheckpointError(f"{part!r} of the DyRep state lacks {lost[0]!r}: is the file damaged?")
    whole = {**{name: state["counters"][name] for name in _PARTS["counters"] or ()}, "next_event": state["next_event"]}
    for name, value in whole.items():
        if not is_whole(value, 0):
            raise CheckpointError(f"{name!r} of the DyRep state must be a whole number of at least 0, got {value!r}")


def clocks(model: nn.Module) -> dict[str, int]:
    """Training steps of the blocks that count them by themselves, by name.

    Example:
        >>> clocks(nn.Sequential(nn.Conv2d(3, 8, 3)))
        {}
    """
    return {name: block.execution.clock.step for name, block in _counting_blocks(model)}


def set_clocks_(model: nn.Module, steps: Mapping[str, int]) -> None:
    """Let blocks go on counting from where they were; others begin anew."""
    for name, block in _counting_blocks(model):
        block.execution.clock.step = steps.get(name, 0)


def _counting_blocks(model: nn.Module) -> list[tuple[str, RepConv]]:
    blocks = ((name, module) for name, module in model.named_modules() if isinstance(module, RepConv))
    return [(name, block) for name, block in blocks if not block.execution.clock.managed]
