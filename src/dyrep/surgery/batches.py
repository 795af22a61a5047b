"""The batches that an update measures on, read from a loader of the user's."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch

from dyrep.errors import CalibrationError, DesyncError
from dyrep.surgery import ranks
from dyrep.surgery.preserve import iterate


def read_batches(
    batches: Iterable[Any] | None, count: int, device: torch.device, distributed: bool | None = None
) -> list[Any] | None:
    """The first batches of a loader; None if there is none.

    Args:
        batches: the loader, or a list of batches.
        count: how many to read at most.
        device: that ranks exchange messages by.
        distributed: whether ranks read together (default: if torch.distributed is initialised). They all get some then,
            or None, or raise: one that went on by itself would wait for the others for ever.

    Raises:
        CalibrationError: there are no batches in it, or it is no loader of batches, see `iterate`.
        DesyncError: another rank has none, or could not read its own.

    Example:
        >>> read_batches(iter([]), 20, torch.device("cpu"))
        Traceback (most recent call last):
        dyrep.errors.CalibrationError: no batches in what was given (empty, or used up): give a loader or a list
    """
    found, refused = None, None
    try:
        if batches is not None:
            found = list(islice(iterate(batches), count))
            if not found:
                raise CalibrationError("no batches in what was given (empty, or used up): give a loader or a list")
    except Exception as error:
        refused = error
    has = "unreadable" if refused is not None else "no" if found is None else "some"
    alike = not ranks.distributed(distributed) or ranks.agree(has, device)
    if refused is not None:
        raise refused
    if not alike:
        raise DesyncError(
            f"this rank was given {has} batches, and another one was not, or could not read its own (its error says "
            "why): give batches on every rank, or on none"
        )
    return found
