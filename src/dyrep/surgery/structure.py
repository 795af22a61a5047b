"""A model's structure as plain data, and models that take on the structure of a file."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dyrep.block import RepConv, as_block_
from dyrep.branches import BRANCHES
from dyrep.errors import StructureError
from dyrep.geometry import PLAIN_CONVS
from dyrep.surgery.edits import attach_, cut_, expand_
from dyrep.surgery.targets import is_inside, targets
from dyrep.surgery.undo import Snapshot
from dyrep.surgery.wrappers import bare, sync_group, unwrap

FORMAT = 1


def structure(model: nn.Module) -> dict[str, Any]:
    """Describe which convolutions have which branches, as JSON-able data.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
        >>> _ = expand_(model, "0", ["1x1", "residual"])
        >>> structure(model)
        {'format': 1, 'blocks': {'0': {'branches': ['1x1', 'residual'], 'origin_norm': False, 'width': 1}}}
    """
    blocks = {}
    for name, module in bare(model).named_modules():
        if isinstance(module, RepConv) and module.branches:
            blocks[name] = {
                "branches": list(module.branches),
                "origin_norm": module.origin_norm is not None,
                "width": max(branch.width for branch in module.branch_modules().values()),
            }
    return {"format": FORMAT, "blocks": blocks}


def restructure_(
    model: nn.Module,
    wanted: Mapping[str, Any],
    *,
    optimizer: Optimizer | None = None,
    gamma: float = 0.01,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Give a model a structure: cut what is not in it, expand what is missing. Eval-mode function is kept.

    New branches have random weights; load a state dict afterwards to get those of a saved model.

    Args:
        model: the model, changed in place; plain, or with any other structure.
        wanted: what `structure` returned.
        optimizer: the optimizer that trains the model.
        gamma: initial γ of new branches.
        generator: source of the random weights (default: torch's global one).

    Raises:
        StructureError: the description is malformed or names layers that this model does not have; nothing has been
            changed then.

    Example:
        >>> model, twin = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2))
        >>> _ = expand_(model, "0", ["1x1"])
        >>> structure(restructure_(twin, structure(model))) == structure(model)
        True
    """
    model = unwrap(model)
    blocks = _checked(model, wanted)
    touched = [_find(model, name) for name in {**structure(model)["blocks"], **blocks}]
    before = Snapshot([conv for conv in touched if conv is not None], optimizer)
    try:
        for name in sorted(structure(model)["blocks"], key=len, reverse=True):  # inner blocks have longer names
            if _differs(model.get_submodule(name), blocks.get(name)):
                cut_(model, name, optimizer=optimizer)
        for name in sorted(blocks, key=len):
            _reshape_(model, name, blocks[name], optimizer=optimizer, gamma=gamma, generator=generator)
    except BaseException:
        before.restore_()
        raise
    return model


@torch.no_grad()
def follow_(copy_of_model: nn.Module, model: nn.Module) -> nn.Module:
    """Give a copy of a model, such as an exponential moving average, the structure the model has now.

    Branches the copy lacks are copied from the model and taken out of the copy's own kernels, so the copy's function
    stays what it was; branches the model no longer has are absorbed. Afterwards both have the same parameters in the
    same order, as averaging them needs.

    Args:
        copy_of_model: the copy, changed in place; wrappers that keep it as ``.module`` are looked through.
        model: the model it is a copy of.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
        >>> average = torch.optim.swa_utils.AveragedModel(model)
        >>> _ = expand_(model, "0", ["1x1", "residual"])
        >>> structure(follow_(average, model).module) == structure(model)
        True
    """
    inner, source = bare(getattr(copy_of_model, "module", copy_of_model)), bare(model)
    for name in sorted(structure(inner)["blocks"], key=len, reverse=True):
        ours, theirs = inner.get_submodule(name), _find(source, name)
        assert isinstance(ours, RepConv)
        surplus = [branch for branch in ours.branches if branch not in _branch_names(theirs)]
        if surplus:
            cut_(inner, name, surplus)
    for name in sorted(structure(source)["blocks"], key=len):
        theirs, ours = source.get_submodule(name), inner.get_submodule(name)
        assert isinstance(theirs, RepConv)
        has = _branch_names(ours)
        missing = {b: copy.deepcopy(m) for b, m in theirs.branch_modules().items() if b not in has}
        if missing:
            attach_(ours, missing, copy.deepcopy(theirs.origin_norm))
        assert isinstance(ours, RepConv)
        _reorder_(ours, theirs.branches)
        for part in (ours.branches, ours.origin_norm):
            if part is not None:
                part.requires_grad_(ours.weight.requires_grad).train(ours.training)
    return copy_of_model


def prepare_(model: nn.Module) -> nn.Module:
    """Make a plain model able to take on whatever structure a state dict has; its keys and function do not change.

    A strict `load_state_dict` then grows and sheds branches as the file says. Build the optimizer after loading: one
    that exists already would not hold the new parameters (`dyrep.load` can take care of that).

    Example:
        >>> model, twin = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2))
        >>> _ = expand_(model, "0", ["1x1"])
        >>> prepare_(twin).load_state_dict(model.state_dict())
        <All keys matched successfully>
    """
    inner = unwrap(model)
    group = sync_group(inner)
    for target in targets(inner):
        if target.eligible or target.present:
            as_block_(inner.get_submodule(target.name)).prepare_(group)
    return model


def _reshape_(
    model: nn.Module,
    name: str,
    spec: Mapping[str, Any],
    *,
    optimizer: Optimizer | None,
    gamma: float,
    generator: torch.Generator | None,
) -> None:
    """Give one convolution the branches it should have."""
    block = model.get_submodule(name)
    has = _branch_names(block)
    surplus = [branch for branch in has if branch not in spec["branches"]]
    missing = [branch for branch in spec["branches"] if branch not in has]
    if missing:
        expand_(
            model,
            name,
            missing,
            gamma=gamma,
            optimizer=optimizer,
            origin_norm="reference" if spec["origin_norm"] else "none",
            width=spec["width"],
            generator=generator,
            distributed=False,
        )
    if surplus:
        cut_(model, name, surplus, optimizer=optimizer)
    assert isinstance(block, RepConv)
    _reorder_(block, spec["branches"])


def _checked(model: nn.Module, wanted: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    if (
        not isinstance(wanted, Mapping)
        or wanted.get("format") != FORMAT
        or not isinstance(wanted.get("blocks"), Mapping)
    ):
        raise StructureError(f"not a structure of format {FORMAT}: {str(wanted)[:200]}")
    blocks: dict[str, dict[str, Any]] = {}
    for name, given in wanted["blocks"].items():
        spec = {"origin_norm": False, "width": 1, **(given if isinstance(given, Mapping) else {})}
        branches = spec.get("branches")
        if not isinstance(branches, list) or not all(isinstance(b, str) and b in BRANCHES for b in branches):
            raise StructureError(
                f"layer {name!r}: branches must be a list from {', '.join(BRANCHES)}, got {branches!r}"
            )
        if not branches:
            raise StructureError(f"layer {name!r}: a block needs at least one branch; leave plain layers out")
        if not isinstance(spec["width"], int) or spec["width"] < 1:
            raise StructureError(f"layer {name!r}: width must be a positive whole number, got {spec['width']!r}")
        blocks[name] = spec
    for name in blocks:
        _check_layer(model, name, blocks)
    return blocks


def _check_layer(model: nn.Module, name: str, blocks: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise unless a layer is a convolution of the model, or the one inside a branch that will be there."""
    if any(is_inside(name, block) for block in {**structure(model)["blocks"], **blocks}):
        outer, _, inner = name.rpartition("branches.")
        branch = inner.removesuffix(".conv")
        if inner == branch or branch not in blocks.get(outer.removesuffix("."), {}).get("branches", ()):
            raise StructureError(f"layer {name!r} is inside a branch that the structure does not have")
    elif not isinstance(_find(model, name), PLAIN_CONVS):
        raise StructureError(
            f"the structure names layer {name!r}, which this model does not have: is it the same architecture?"
        )


def _reorder_(block: RepConv, order: Iterable[str]) -> None:
    """Put branches in a given order, which is the order of the model's parameters."""
    by_name = block.branch_modules()
    block.set_branches_({branch: by_name[branch] for branch in order})


def _branch_names(module: nn.Module | None) -> list[str]:
    return list(module.branches) if isinstance(module, RepConv) else []


def _find(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _differs(block: nn.Module, spec: Mapping[str, Any] | None) -> bool:
    """Whether a block has to be folded first: it is not wanted, or differs in more than its set of branches."""
    assert isinstance(block, RepConv)
    if spec is None or (block.origin_norm is not None) != spec["origin_norm"]:
        return True
    inner = block.branch_modules().get("1x1-KxK")
    return inner is not None and "1x1-KxK" in spec["branches"] and inner.width != spec["width"]
