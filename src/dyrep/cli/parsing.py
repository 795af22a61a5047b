"""Command lines from typed Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tyro


def parse(function: Callable[..., Any], words: Sequence[str], program: str, **options: Any) -> Any:
    """Call a function, or make an instance of a class, with arguments from a command line."""
    return tyro.cli(function, args=list(words), prog=program, **options)


def tells_its_default(cls: type, name: str) -> bool:
    """Whether a class says in words, where it describes an attribute, what its default means.

    Example:
        >>> from dyrep.engine.recipe import RunSettings
        >>> tells_its_default(RunSettings, "out"), tells_its_default(RunSettings, "data")
        (True, False)
    """
    found = re.search(rf"^ +{name}: (.*?)(?=^ +\w+: |\Z|^\s*$)", cls.__doc__ or "", re.MULTILINE | re.DOTALL)
    return found is not None and "(default" in found[1]
