"""Command lines from typed Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tyro


def parse(function: Callable[..., Any], words: Sequence[str], program: str, **options: Any) -> Any:
    """Call a function, or make an instance of a class, with arguments from a command line."""
    return tyro.cli(function, args=list(words), prog=program, **options)
