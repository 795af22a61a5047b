"""What settings may be: checks whose errors name the setting, its value, and what would be valid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from dyrep.errors import ConfigError

Settings = TypeVar("Settings")


def require(name: str, value: Any, valid: str, holds: bool) -> None:
    """Raise unless a setting is valid.

    Raises:
        ConfigError: it is not; the message says what would be.

    Example:
        >>> require("top_k", 0, "a whole number of at least 1", is_whole(0, 1))
        Traceback (most recent call last):
        dyrep.errors.ConfigError: top_k=0: must be a whole number of at least 1
    """
    if not holds:
        raise ConfigError(f"{name}={value!r}: must be {valid}")


def require_whole(name: str, value: Any, least: int) -> None:
    """Raise unless a setting is a whole number of at least so much.

    Example:
        >>> require_whole("width", 2, 1)
    """
    require(name, value, f"a whole number of at least {least}", is_whole(value, least))


def is_whole(value: Any, least: int) -> bool:
    """Whether a value is a whole number of at least so much; True and False are not numbers.

    Example:
        >>> is_whole(1, 1), is_whole(True, 1), is_whole(1.0, 1)
        (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any, least: float = -math.inf) -> bool:
    """Whether a value is a number of at least so much; True, False and NaN are not.

    Example:
        >>> is_number(0.5, 0), is_number(True), is_number(float("nan"))
        (True, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least


def read_settings(kind: type[Settings], data: Mapping[str, Any]) -> Settings:
    """A dataclass of settings from JSON-able data, in which tuples are lists.

    Raises:
        ConfigError: there is a setting that the class does not have.
    """
    known = sorted(f.name for f in fields(kind))  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ConfigError(f"unknown settings {', '.join(unknown)}; valid are {', '.join(known)}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})


@dataclass(frozen=True)
class LayerPatterns:
    """Which layers are meant, by shell patterns on their names.

    Attributes:
        include: a layer has to match one of these.
        exclude: and none of these.

    Raises:
        ConfigError: something is not a sequence of patterns, or nothing is included.

    Example:
        >>> patterns = LayerPatterns(("backbone.*",), ("*.conv1",))
        >>> [patterns.includes(name) for name in ("backbone.0.conv2", "backbone.0.conv1", "head")]
        [True, False, False]
    """

    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            patterns = getattr(self, name)
            if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
                raise ConfigError(f"{name}={patterns!r}: give a tuple of patterns such as ('backbone.*',)")
            if name == "include" and not patterns:
                raise ConfigError("include=(): nothing would ever be expanded; ('*',) includes everything")

    def includes(self, layer: str) -> bool:
        """Whether a layer is meant."""
        return any(fnmatchcase(layer, pattern) for pattern in self.include) and not self.excludes(layer)

    def excludes(self, layer: str) -> bool:
        """Whether a pattern forbids a layer, which may be one inside a branch (``"*.branches.*"``)."""
        return any(fnmatchcase(layer, pattern) for pattern in self.exclude)
