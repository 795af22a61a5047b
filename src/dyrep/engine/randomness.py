"""Every random number generator a training run may draw from, as plain data."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from dyrep.engine.world import World


def seed_everything(*parts: object) -> None:
    """Seed Python, NumPy and torch from a few values.

    Example:
        >>> seed_everything(0, "weights")
        >>> first = torch.rand(())
        >>> seed_everything(0, "weights")
        >>> bool(first == torch.rand(()))
        True
    """
    digest = hashlib.sha256(repr(parts).encode()).digest()
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4], "big"))
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def random_state(world: World) -> list[dict[str, Any]]:
    """The state of all generators of every rank; all ranks have to call this together."""
    version, numbers, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state()
    assert kind == "MT19937"
    own = [
        torch.get_rng_state(),
        torch.cuda.get_rng_state(world.device) if world.device.type == "cuda" else torch.zeros(0, dtype=torch.uint8),
        torch.tensor(numbers, dtype=torch.int64),
        torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        torch.tensor(
            [float(version), float("nan") if gauss is None else gauss, place, has_gauss, cached], dtype=torch.float64
        ),
    ]
    gathered = [world.gather(part) for part in own]
    names = ("torch", "cuda", "python", "numpy", "rest")
    return [{name: parts[rank] for name, parts in zip(names, gathered, strict=True)} for rank in range(world.size)]


def restore_random_state(states: list[dict[str, Any]], world: World) -> None:
    """Restore what `random_state` returned, each rank its own; a rank that was not there keeps its fresh seed."""
    if world.rank >= len(states):
        return
    state = states[world.rank]
    version, gauss, place, has_gauss, cached = state["rest"].tolist()
    torch.set_rng_state(state["torch"])
    if world.device.type == "cuda" and state["cuda"].numel():
        torch.cuda.set_rng_state(state["cuda"], world.device)
    random.setstate((int(version), tuple(state["python"].tolist()), None if gauss != gauss else gauss))
    np.random.set_state(("MT19937", state["numpy"].numpy().astype(np.uint32), int(place), int(has_gauss), cached))
