"""``dyrep inspect``: the structure of a run's network as a tree."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import tyro
from torch import nn

from dyrep.block import RepConv
from dyrep.engine.recipe import Recipe
from dyrep.engine.rundir import Which
from dyrep.engine.running import load_run
from dyrep.engine.tasks import task_of
from dyrep.extras import needed
from dyrep.geometry import PLAIN_CONVS, ConvGeometry
from dyrep.surgery.costs import Costs, Positions, added_macs, costs, count_parameters
from dyrep.surgery.folding import deploy
from dyrep.wording import large

_WIDE = 1000


def inspect_run(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    which: Which = "last",
    as_json: bool = False,
) -> None:
    """Show the structure of a run's network: branches with their importance, parameters and multiply-adds.

    Args:
        run: folder of the run.
        which: the network after the last epoch, or the best one.
        as_json: print JSON instead of a tree.
    """
    model, state = load_run(run, which)
    recipe = state["recipe"]
    task = task_of(Recipe.from_dict(recipe))
    found = describe(model, task.example(channels=state["channels"], size=state["size"], device="cpu"))
    title = f"{recipe['name']}, method {recipe['method']}, seed {recipe['seed']}: {recipe['model']}"
    place = f"after epoch {state['epoch']} of {recipe['epochs']}"
    if as_json:
        print(json.dumps({"run": str(run), "recipe": recipe, "epoch": state["epoch"], **found}, indent=2))
        return
    _print_tree(f"{title}, {place}", found)


def describe(model: nn.Module, image: Any) -> dict[str, Any]:
    """A model's convolutions, branches and costs as JSON-able data; multiply-adds are per image.

    Example:
        >>> import torch
        >>> found = describe(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False)), torch.zeros(1, 3, 6, 6))
        >>> found["layers"][0]["name"], found["macs"], found["parameters"]
        ('0', 3456, 216)
    """
    now, before = costs(model, image), costs(deploy(model), image)
    blocks = [name for name, m in model.named_modules() if isinstance(m, RepConv) and m.branches]
    inside = tuple(_below(name, "branches.") for name in blocks)
    outermost = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, PLAIN_CONVS) and not name.startswith(inside)
    ]
    return {
        "parameters": now.parameters,
        "macs": now.macs,
        "folding_macs": now.folding_macs,
        "plain_parameters": before.parameters,
        "plain_macs": before.macs,
        "layers": [_layer(name, conv, now) for name, conv in outermost],
    }


def _layer(name: str, conv: nn.Module, counted: Costs) -> dict[str, Any]:
    geometry = ConvGeometry.of(conv)
    positions = counted.positions.get(name, Positions())
    per_position = geometry.out_channels * geometry.in_channels // geometry.groups * geometry.taps
    found: dict[str, Any] = {
        "name": name,
        "kernel": "x".join(map(str, geometry.kernel_size)),
        "channels": [geometry.in_channels, geometry.out_channels],
        "groups": geometry.groups,
        "parameters": count_parameters(conv),
        "macs": positions.output * per_position,
        "branches": [],
    }
    if isinstance(conv, RepConv) and conv.origin_off:
        found["macs"], found["origin"] = 0, False
    if isinstance(conv, RepConv):
        found["branches"] = list(_branches(name, conv, positions, counted))
        found["macs"] += sum(branch["macs"] for branch in found["branches"])
    return found


def _branches(name: str, block: RepConv, positions: Positions, counted: Costs) -> Iterator[dict[str, Any]]:
    importances = block.importances()
    for key, branch in block.branch_modules().items():
        width = branch.width if key == "1x1-KxK" else 1
        entry: dict[str, Any] = {
            "branch": key,
            "importance": float(importances[key].detach()),
            "parameters": sum(p.numel() for p in branch.parameters()),
            # a linear block runs as the one convolution it is folded into
            "macs": 0 if block.is_linear else added_macs(block, [key], positions, width),
        }
        nested = [
            _layer(_below(name, f"branches.{key}.{path}"), inner, counted)
            for path, inner in branch.named_modules()
            if isinstance(inner, RepConv) and inner.branches and ".branches." not in f".{path}."
        ]
        if nested:
            entry["layers"] = nested
            entry["macs"] += sum(inner["macs"] for layer in nested for inner in layer["branches"])
        yield entry


def _below(name: str, path: str) -> str:
    """The name of a module inside another, which may be the model itself."""
    return f"{name}.{path}" if name else path


def _print_tree(title: str, found: dict[str, Any]) -> None:
    consoles, trees = (needed(f"rich.{part}", "a tree", "--as-json does without") for part in ("console", "tree"))
    tree = trees.Tree(title)
    for layer in found["layers"]:
        _add(tree, layer)
    # lines that are read by a program, or in a file, are not broken
    console = consoles.Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    console.print(tree)
    evolved, plain = found, {"parameters": found["plain_parameters"], "macs": found["plain_macs"]}
    console.print(f"in training: {_costs(evolved)} ({found['macs'] / max(found['plain_macs'], 1):.2f} x plain)")
    if found["folding_macs"]:
        console.print(f"per step:    {large(found['folding_macs'])} multiply-adds to fold the blocks")
    console.print(f"deployed:    {_costs(plain)}")


def _add(tree: Any, layer: dict[str, Any]) -> None:
    groups = f", {layer['groups']} groups" if layer["groups"] > 1 else ""
    dropped = "" if layer.get("origin", True) else ", without its own kernel"
    about = f"{layer['kernel']}, {layer['channels'][0]} to {layer['channels'][1]} channels{groups}{dropped}"
    # names of layers may hold brackets, which rich would take for markup
    name = layer["name"].replace("[", "\\[")
    style = "" if layer["branches"] else "dim"
    node = tree.add(f"[b]{name}[/b]  {about}  {_costs(layer)}", style=style)
    for branch in layer["branches"]:
        inner = node.add(f"{branch['branch']:8s} importance {branch['importance']:.4f}  {_costs(branch)}")
        for nested in branch.get("layers", ()):
            _add(inner, nested)


def _costs(entry: dict[str, Any]) -> str:
    return f"{large(entry['parameters'])} parameters, {large(entry['macs'])} multiply-adds"
