"""Models by name: those of this package, torchvision's, timm's, and any function of the user's own."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from dyrep.errors import ConfigError
from dyrep.extras import needed
from dyrep.models.mobilenet import mobilenet_v1
from dyrep.models.repvgg import NAMES, repvgg
from dyrep.models.vgg import small_vgg, vgg16

_OURS: dict[str, Callable[..., nn.Module]] = {
    "small_vgg": small_vgg,
    "vgg16": vgg16,
    "mobilenet_v1": mobilenet_v1,
    **{f"repvgg_{name}": functools.partial(repvgg, name) for name in NAMES},
}
_TORCHVISIONS = ("resnet18", "resnet34", "resnet50")


def names() -> list[str]:
    """The names that `build` knows without a prefix.

    Example:
        >>> names()[:4]
        ['small_vgg', 'vgg16', 'mobilenet_v1', 'repvgg_a0']
    """
    return [*_OURS, *_TORCHVISIONS]


def build(spec: str, *, num_classes: int, in_channels: int = 3, **options: Any) -> nn.Module:
    """Build a model, with random weights, by its name.

    Args:
        spec: one of `names`, ``timm:NAME``, ``torchvision:NAME``, or ``package.module:function`` for a function (or
            class) of your own, looked for in the current directory too. Your function is given ``num_classes`` and
            ``in_channels`` if it takes them.
        num_classes: classes to tell apart.
        in_channels: channels of an image.
        options: further arguments of the model's function.

    Raises:
        ConfigError: there is no such model, or it cannot be built like this; the message says what to do.
        MissingPackageError: the library it comes from is not installed.

    Example:
        >>> build("small_vgg", num_classes=5, in_channels=1).classifier
        Linear(in_features=64, out_features=5, bias=True)
    """
    wanted = {"num_classes": num_classes, "in_channels": in_channels}
    for name, value in wanted.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"model {spec!r} cannot be built with {name}={value!r}; use an integer of at least 1")
    source, colon, name = spec.partition(":")
    if colon and not (source and name):
        raise ConfigError(
            f"model {spec!r} lacks a part; write it as package.module:function, timm:NAME or torchvision:NAME"
        )
    if spec in _OURS:
        return _call(spec, _OURS[spec], wanted | options)
    if spec in _TORCHVISIONS or source == "torchvision":
        return _from_torchvision(spec, name or spec, num_classes, in_channels, options)
    if source == "timm":
        return _from_timm(spec, name, num_classes, in_channels, options)
    if colon:
        return _from_user(spec, source, name, wanted, options)
    raise ConfigError(
        f"there is no model {spec!r}{_suggest(spec, names())}; use one of {', '.join(names())}, timm:NAME, "
        "torchvision:NAME, or package.module:function for one of your own"
    )


def _from_torchvision(spec: str, name: str, num_classes: int, in_channels: int, options: dict[str, Any]) -> nn.Module:
    models = needed("torchvision", f"model {spec!r}").models
    if name not in models.list_models():
        raise ConfigError(
            f"torchvision has no model {name!r} for {spec!r}{_suggest(name, models.list_models())}; "
            "torchvision.models.list_models() lists all"
        )
    if in_channels != 3:
        raise ConfigError(
            f"model {spec!r} is torchvision's and takes images of 3 channels, not in_channels={in_channels}; "
            "use timm:NAME or a function of your own"
        )
    arguments = {"weights": None, "num_classes": num_classes, **options}
    builder = models.get_model_builder(name)
    if "weights_backbone" in _parameters(builder):  # detectors would download it by default
        arguments.setdefault("weights_backbone", None)
    return _call(spec, builder, arguments)


def _from_timm(spec: str, name: str, num_classes: int, in_channels: int, options: dict[str, Any]) -> nn.Module:
    timm = needed("timm", f"model {spec!r}")
    if not timm.is_model(name):
        raise ConfigError(
            f"timm has no model {name!r} for {spec!r}{_suggest(name, timm.list_models())}; timm.list_models() lists all"
        )
    arguments = {"pretrained": False, "num_classes": num_classes, "in_chans": in_channels, **options}
    return _call(spec, timm.create_model, {"model_name": name, **arguments})


def _from_user(spec: str, module_name: str, name: str, wanted: dict[str, int], options: dict[str, Any]) -> nn.Module:
    module = _import_as_python_m_would(spec, module_name)
    if not hasattr(module, name):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"module {module_name!r} of model {spec!r} has no {name!r}{_suggest(name, public)}; "
            "name a function of it that returns the model"
        )
    function = getattr(module, name)
    if isinstance(function, nn.Module) or not callable(function):
        raise ConfigError(
            f"model {spec!r} names something of type {type(function).__name__}; "
            "name a function or class that makes the model instead"
        )
    return _call(spec, function, {key: value for key, value in wanted.items() if _takes(function, key)} | options)


def _import_as_python_m_would(spec: str, module_name: str) -> ModuleType:
    here = os.getcwd()
    # for good, not just for now: the model may import more when it runs, and workers take over sys.path
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script without a main guard may run, and exit
        raise ConfigError(
            f"module {module_name!r} of model {spec!r} cannot be imported: {type(error).__name__}: {error}; "
            f"correct it, install it, or run from the directory it is in (now {here})"
        ) from error


def _call(spec: str, function: Callable[..., Any], arguments: dict[str, Any]) -> nn.Module:
    unknown = [name for name in arguments if not _takes(function, name)]
    if unknown:
        known = ", ".join(_parameters(function)) or "no arguments"
        raise ConfigError(f"model {spec!r} does not take {', '.join(unknown)}; it takes {known}")
    try:
        model = function(**arguments)
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ConfigError(
            f"model {spec!r} cannot be built with {given or 'no arguments'}: {type(error).__name__}: {error}; "
            "correct the function or its arguments"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model {spec!r} returned {type(model).__name__!r} and not an nn.Module; return the model itself"
        )
    return model


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function accepts an argument by this name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = _parameters(function).values()
    return any(p.kind is p.VAR_KEYWORD or (p.name == name and p.kind in by_name) for p in parameters)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some builtins do not tell
        return {}


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
