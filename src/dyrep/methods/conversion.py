"""Turn a network into that of another method before it is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from dyrep.branches import GAMMA, branch_list, is_branch
from dyrep.checking import LayerPatterns, is_whole, require
from dyrep.errors import ConfigError, IneligibleLayerError
from dyrep.geometry import PLAIN_CONVS, ConvGeometry
from dyrep.methods.catalogue import Method, why_not
from dyrep.methods.catalogue import method as method_of
from dyrep.methods.starting import OREPA_SCALES, start_
from dyrep.surgery.assembly import Blueprint, assemble_
from dyrep.surgery.beginning import MAX_KERNEL
from dyrep.surgery.edits import Edit, check_growth
from dyrep.surgery.followers import following_norms
from dyrep.surgery.optimizer import check_holds, check_optimizer
from dyrep.surgery.preserve import Forward
from dyrep.surgery.structure import restructure_
from dyrep.surgery.structure import structure as structure_of
from dyrep.surgery.targets import refusals
from dyrep.surgery.undo import Snapshot
from dyrep.surgery.wrappers import forget_compiled, unwrap

Replace = Literal["conv", "conv+norm"]
REPLACE: tuple[Replace, ...] = get_args(Replace)
COPIES = 4  # of MobileOne-S0
MOST_COPIES = 99


def convert_(
    model: nn.Module,
    method: str,
    *,
    example_input: Any = None,
    forward: Forward | None = None,
    branches: Sequence[str] | None = None,
    replace: Replace | None = None,
    preserve: bool = False,
    gamma: float | None = None,
    copies: int = COPIES,
    max_kernel: int | None = MAX_KERNEL,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    structure: Mapping[str, Any] | None = None,
    optimizer: Optimizer | None = None,
    generator: torch.Generator | None = None,
) -> list[Edit]:
    """Turn a network's convolutions into the blocks of a method, before training. `dyrep.deploy` folds them again.

    The blocks begin as their authors let them begin, so the network's function changes: it is meant for a network that
    is yet to be trained. For a trained one there is ``preserve=True``.

    Args:
        model: the model, changed in place.
        method: one of `dyrep.methods.METHODS`. ``"origin"`` changes nothing; ``"repnas"`` makes the blocks that
            `dyrep.RepNAS` searches; ``"fixed"`` makes those of ``structure``. For ``"dyrep"`` see `dyrep.DyRep`.
        example_input: a batch to find out by which norm follows which convolution; needed to replace norms.
        forward: ``forward(model, batch)`` to run the model, where a batch is not a tensor, a tuple that begins with
            the input, or a dict of arguments.
        branches: which branches blocks have, of those that fit (default: as published).
        replace: what a block takes the place of: ``"conv"`` alone, with the batch norm after the sum of its branches
            kept, or ``"conv+norm"`` where a batch norm follows (default: as published, see the method).
        preserve: take what the branches compute out of the original kernel, so that the network's function in eval
            mode stays what it was.
        gamma: initial γ of every branch (default: 1, and 0.01 with ``preserve``).
        copies: how many KxK kernels a block of ``"mobileone"`` has, the original one included.
        max_kernel: leave larger kernels as they are (None: no limit).
        include: convert only layers that match one of these patterns (``"backbone.*"``).
        exclude: never convert layers that match one of these.
        structure: what `dyrep.structure` returned, for ``"fixed"``, which it decides alone.
        optimizer: the optimizer that trains the model, if it exists already.
        generator: source of the random weights (default: torch's global one).

    Returns:
        One `Edit` per layer; its ``detail`` says which norm the block replaces, or why it does not.

    Raises:
        DyRepError: the method, a layer or the optimizer does not allow it; nothing has been changed then.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        >>> for edit in convert_(model, "dbb", example_input=torch.randn(1, 3, 8, 8)):
        ...     print(edit, edit.detail)
        expand 0: +1x1-KxK +1x1-AVG +1x1 {'replaces': '1'}
    """
    chosen = _with_branches(_checked_method(method, structure, preserve), branches)
    model = unwrap(model)
    gamma = (GAMMA if preserve or chosen.name == "fixed" else 1.0) if gamma is None else gamma
    check_growth(gamma, width=1)
    fine = is_whole(copies, 1) and copies <= MOST_COPIES
    require("copies", copies, f"a whole number from 1 to {MOST_COPIES}", fine)
    if optimizer is not None:
        check_optimizer(optimizer)
    if structure is not None:
        _refuse_search(structure)
        restructure_(model, structure, optimizer=optimizer, gamma=gamma, generator=generator)
        made = structure_of(model)["blocks"]
        return [Edit("expand", name, tuple(block["branches"])) for name, block in made.items()]
    if not chosen.builds_blocks:
        return []
    convs = _chosen_layers(model, chosen, copies, max_kernel, LayerPatterns(include, exclude))
    if optimizer is not None:
        for name, conv in convs.items():
            check_holds(optimizer, name, conv.weight)  # type: ignore[arg-type]
    norms, reasons = _norms_to_replace(model, chosen, convs, replace, example_input, forward)
    plans = {
        name: Blueprint(
            chosen.branches_for(ConvGeometry.of(conv), copies),
            origin_norm=True,
            width=chosen.width_for(ConvGeometry.of(conv)),
            scaling=chosen.scaling,
            replaces=norms.get(name),
        )
        for name, conv in convs.items()
    }
    before = Snapshot([*convs.values(), *(model.get_submodule(norm) for norm in norms.values())], optimizer)
    try:
        for name, plan in plans.items():
            block = assemble_(
                model, name, plan, gamma=gamma, preserve=preserve, optimizer=optimizer, generator=generator
            )
            if not preserve:
                start_(block, chosen, gamma, generator)
    except BaseException:
        before.restore_()
        raise
    forget_compiled()
    details = {name: {"replaces": norm} for name, norm in norms.items()}
    details |= {name: {"norm kept": reason} for name, reason in reasons.items()}
    return [Edit("expand", name, plan.branches, details.get(name, {})) for name, plan in plans.items()]


def _with_branches(chosen: Method, branches: Sequence[str] | None) -> Method:
    """A method whose blocks have other branches."""
    if branches is None:
        return chosen
    if not chosen.builds_blocks:
        raise ConfigError(f"method={chosen.name!r} has no blocks whose branches could be given: leave branches out")
    if isinstance(branches, str) or not branches or not all(is_branch(branch) for branch in branches):
        raise ConfigError(f"branches={branches!r}: give a list from {branch_list()}, or None for those of the method")
    unknown = [branch for branch in branches if chosen.name == "orepa" and branch not in OREPA_SCALES]
    if unknown:
        valid = ", ".join(chosen.branches)
        raise ConfigError(f"branches={branches!r}: orepa says nothing of how {unknown[0]!r} starts; valid are {valid}")
    return dataclasses.replace(chosen, branches=tuple(dict.fromkeys(branches)))


def _refuse_search(structure: Mapping[str, Any]) -> None:
    blocks = structure.get("blocks") if isinstance(structure, Mapping) else None
    for name, block in blocks.items() if isinstance(blocks, Mapping) else ():
        if isinstance(block, Mapping) and block.get("scaling") == "gated":
            raise ConfigError(
                f"layer {name!r}: the structure is that of a search which has not ended, so nothing is fixed"
            )


def _checked_method(name: str, structure: Mapping[str, Any] | None, preserve: bool) -> Method:
    chosen = method_of(name)
    if chosen.name == "dyrep":
        raise ConfigError(
            f"method={name!r} changes the network while it trains, so there is nothing to convert before: "
            "use dyrep.DyRep"
        )
    if (chosen.name == "fixed") != (structure is not None):
        raise ConfigError("method='fixed' and structure= belong together: pass what dyrep.structure returned")
    if preserve and chosen.scaling == "linear":
        raise ConfigError(
            f"method={name!r} has no norms, so its branches start at full strength: preserve=True is for the others"
        )
    return chosen


def _chosen_layers(
    model: nn.Module,
    chosen: Method,
    copies: int,
    max_kernel: int | None,
    patterns: LayerPatterns,
) -> dict[str, nn.Module]:
    """The convolutions to convert, by name; one that is shared by several names counts once."""
    cannot = refusals(model)
    convs: dict[str, nn.Module] = {}
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, PLAIN_CONVS) and name not in cannot:
            continue
        reason = cannot.get(name) or ("" if patterns.includes(name) else "excluded by include and exclude")
        if getattr(module, "branches", None):
            raise ConfigError(f"layer {name!r} has branches already: convert a plain model, or dyrep.deploy it first")
        if not reason:
            geometry = ConvGeometry.of(module)
            reason = why_not(chosen, geometry, max_kernel)
            if not reason and not chosen.branches_for(geometry, copies):
                reason = "no branch of the method fits it"
        if reason:
            reasons[name] = reason
        else:
            convs[name] = module
    if not convs:
        found = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:5])
        raise IneligibleLayerError(f"method {chosen.name!r} finds nothing to convert ({found or 'no convolutions'})")
    return convs


def _norms_to_replace(
    model: nn.Module,
    chosen: Method,
    convs: Mapping[str, nn.Module],
    replace: Replace | None,
    example_input: Any,
    forward: Forward | None,
) -> tuple[dict[str, str], dict[str, str]]:
    wanted = (REPLACE[1] if chosen.replaces_norm else REPLACE[0]) if replace is None else replace
    if wanted not in REPLACE:
        raise ConfigError(f"replace={replace!r} is unknown; valid are {', '.join(REPLACE)}")
    if wanted == "conv":
        return {}, {}
    if chosen.scaling == "linear":
        raise ConfigError(f"method={chosen.name!r} has no norms of its own and needs the model's: use replace='conv'")
    if example_input is None:
        raise ConfigError(
            f"method={chosen.name!r} replaces batch norms too, and has to run the model to see which belongs to which "
            "convolution: pass example_input=batch, or replace='conv' to keep the norms"
        )
    return following_norms(model, convs, example_input, forward)
