"""What settings may be: checks whose errors name the setting, its value, and what would be valid."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

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


def require_types(settings: Any) -> None:
    """Raise unless numbers, names, yes or no, and choices of a dataclass are what their annotations say.

    Other fields, such as tuples, are not looked at.

    Raises:
        ConfigError: one is not; the message says what would be valid.

    Example:
        >>> from dyrep.engine.recipe import RunSettings
        >>> require_types(RunSettings(stop_after=3))
        >>> RunSettings(stop_after="3")
        Traceback (most recent call last):
        dyrep.errors.ConfigError: stop_after='3': must be a whole number or None
    """
    for name, kinds in _kinds(settings.__class__).items():
        value = getattr(settings, name)
        if kinds and not any(_is_a(value, kind) for kind in kinds):
            require(name, value, " or ".join(map(_kind_in_words, kinds)), False)


@functools.cache
def _kinds(settings: type) -> dict[str, tuple[Any, ...]]:
    """What every field may be; nothing if that is not for `require_types` to say."""
    hints = {name: hint for name, hint in get_type_hints(settings).items() if name in settings.__dataclass_fields__}  # type: ignore[attr-defined]
    kinds = {
        name: get_args(hint) if isinstance(hint, types.UnionType) or get_origin(hint) is Union else (hint,)
        for name, hint in hints.items()
    }
    known = (*_KINDS, types.NoneType)
    return {
        name: found if all(kind in known or get_origin(kind) is Literal for kind in found) else ()
        for name, found in kinds.items()
    }


_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _kind_in_words(kind: Any) -> str:
    return f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else _KINDS.get(kind, "None")


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
