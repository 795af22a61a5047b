"""How the tests of loaders say how batches are made."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from dyrep.engine.data import Loading

CPU = torch.device("cpu")


def take_loading(options: dict[str, Any]) -> Loading:
    """Take what belongs into a `Loading` out of some options; on the CPU unless they say otherwise."""
    own = {field.name: options.pop(field.name) for field in fields(Loading) if field.name in options}
    return Loading(**{"device": CPU, **own})
