"""The batches that an update measures on, read from a loader of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

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
        CalibrationError: there are no batches in it, or it is a single batch.
        DesyncError: another rank has none, or could not read its own.

    Example:
        >>> read_batches(iter([]), 20, torch.device("cpu"))
        Traceback (most recent call last):
        dyrep.errors.CalibrationError: no batches in what was given (empty, or used up): give a loader or a list
    """
    found, refused = None, None
    try:
        if batches is not None:
            _refuse_what_holds_no_batches(batches)
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


def _refuse_what_holds_no_batches(batches: Any) -> None:
    """Raise if something is one batch, or holds single examples, where a loader of batches is asked for."""
    kind = type(batches).__name__
    parts = batches if isinstance(batches, (tuple, list)) else ()
    differ = all(isinstance(part, Tensor) for part in parts) and len({part.dim() for part in parts}) > 1
    if isinstance(batches, (Tensor, Mapping)) or differ:
        raise CalibrationError(f"these batches are a single one (a {kind}): give the loader, or a list, [batch]")
    if isinstance(batches, Dataset) and not isinstance(batches, Iterable):
        raise CalibrationError(
            f"these batches are a data set (a {kind}), which holds single examples: give a DataLoader of it, with "
            "batch_size=None if its items are batches"
        )
