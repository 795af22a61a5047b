"""Every setting of a recipe as a flag."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from dyrep.cli.parsing import parse, tells_its_default
from dyrep.config import PAPER, DyRepConfig
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.recipes import RECIPES, recipe
from dyrep.engine.rundir import RunDirectory
from dyrep.engine.running import structure_of_run
from dyrep.errors import ConfigError
from dyrep.methods import RepNASConfig, takes_defaults

DEFAULT_RECIPE = "digits"
_SAID_IN_WORDS = tyro.conf.arg(help_behavior_hint="")
_PRINT = tyro.conf.arg(help="show what would be trained, as JSON, and stop")
_STRUCTURE = tyro.conf.arg(
    metavar="RUN@EPOCH", help="train, with --method fixed, the structure that another run had after this epoch"
)


def parse_training(words: list[str]) -> tuple[Recipe, RunSettings] | None:
    """The recipe and settings a command line asks for; None if it only asked to see them."""
    if words and not words[0].startswith("-"):
        base, words = recipe(words[0]), words[1:]
    else:
        base = recipe(DEFAULT_RECIPE)
        _refuse_late_recipe(words)
    about = f"Train a network, or continue a run that was stopped. Recipes: {', '.join(RECIPES)}."
    given = parse(_flags(base), words, f"dyrep train {base.name}", description=about)
    if takes_defaults(given.recipe.method):
        by_default = dataclasses.replace(base, dyrep=base.dyrep.with_defaults())
        _refuse_lost(parse(_flags(by_default), words, base.name).evolution, given.recipe.method)
    run = RunSettings(**_values(given.run))
    chosen = _recipe(base, given, run)
    if given.print_config:
        folder = run.folder(chosen.name, chosen.method, chosen.seed)
        print(json.dumps({"recipe": chosen.to_dict(), "folder": str(folder)}, indent=2))
        return None
    return chosen, run


def _refuse_late_recipe(words: list[str]) -> None:
    """Refuse a recipe that comes after flags, where it would be one more value of the last one."""
    for before, word in itertools.pairwise(words):
        if word in RECIPES and not before.startswith("-"):
            rest = " ".join(other for other in words if other != word)
            raise ConfigError(f"the recipe comes first: dyrep train {word} {rest}")


def _refuse_lost(given: Any, method: str) -> None:
    """Refuse the paper's own values, typed beside a method that has the library's defaults in their place.

    Args:
        given: settings from the command line; what was not typed has the library's defaults.
        method: as it was typed.
    """
    ours = DyRepConfig()
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if field.name in PAPER and value == PAPER[field.name] != getattr(ours, field.name):
            raise ConfigError(
                f"{field.name}={value!r} is the paper's setting, and --method {method} has the library's default "
                f"{getattr(ours, field.name)!r} in its place: leave one of the two out, or give --method "
                f"{method.replace('-default', '')} with a flag for every setting (docs/method.md lists them)"
            )


def _flags(base: Recipe) -> type:
    """A class whose fields are the flags of `dyrep train`, with a recipe's values as defaults.

    It is made from the classes of the settings, less what is not for the command line: a recipe's name, and those
    settings of the methods that follow from the recipe's own. A structure is given by the run that has it.
    """
    groups = {
        "recipe": _without(Recipe, base, ("name", "structure", "dyrep", "repnas")),
        "evolution": _without(DyRepConfig, base.dyrep, ("seed", "total")),
        "search": _without(RepNASConfig, base.repnas, ("total",)),
        "run": _without(RunSettings, RunSettings(), ()),
    }
    fields: list[Any] = [
        (name, Annotated[group, tyro.conf.OmitArgPrefixes], dataclasses.field(default=group()))
        for name, group in groups.items()
    ]
    fields.append(("structure", Annotated[str | None, _STRUCTURE], dataclasses.field(default=None)))
    fields.append(("print_config", Annotated[bool, _PRINT], dataclasses.field(default=False)))
    return dataclasses.make_dataclass("Flags", fields)


def _without(cls: type, values: Any, hidden: tuple[str, ...]) -> type:
    hints = get_type_hints(cls)
    fields: list[Any] = []
    for field in dataclasses.fields(cls):
        if field.name not in hidden:
            default = dataclasses.field(default=getattr(values, field.name))
            told = tells_its_default(cls, field.name) and getattr(values, field.name) in (None, ())
            hint = Annotated[hints[field.name], _SAID_IN_WORDS] if told else hints[field.name]
            fields.append((field.name, hint, default))
    made = dataclasses.make_dataclass(cls.__name__, fields, frozen=True)
    made.__doc__ = (cls.__doc__ or "").replace("`", "")  # marks of code, for pages
    return made


def _recipe(base: Recipe, given: Any, run: RunSettings) -> Recipe:
    own = _values(given.recipe)
    if given.structure is not None:
        own["method"] = "fixed" if own["method"] == base.method else own["method"]
        own["structure"] = _structure(given.structure, run.folder(base.name, own["method"], own["seed"]))
    own["dyrep"] = DyRepConfig(**_values(given.evolution))
    own["repnas"] = RepNASConfig(**_values(given.search))
    try:
        return Recipe(name=base.name, **own)
    except TypeError as error:
        raise ConfigError(str(error)) from error


def _values(group: Any) -> dict[str, Any]:
    return {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}


def _structure(reference: str, folder: Path) -> Mapping[str, Any]:
    """The structure of another run; a run that has been started with it goes on with what it started with."""
    run = RunDirectory(folder)
    started = run.recipe().structure if run.exists else None
    return started if started is not None and started.get("source") == reference else structure_of_run(reference)
