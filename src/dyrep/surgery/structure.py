"""A model's structure as plain data, and models that take on the structure of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from dyrep.block import RepConv, as_block_
from dyrep.branches import GAMMA, ORIGIN
from dyrep.errors import BranchError, StructureError
from dyrep.geometry import PLAIN_CONVS
from dyrep.passing import PassedNorm
from dyrep.surgery.assembly import Blueprint, assemble_, branch_names, find, norm_names, reorder_
from dyrep.surgery.edits import cut_
from dyrep.surgery.optimizer import check_holds, check_optimizer
from dyrep.surgery.optimizer_state import locate
from dyrep.surgery.targets import is_inside, refusals, require_eligible, targets
from dyrep.surgery.undo import Snapshot
from dyrep.surgery.wrappers import bare, forget_compiled, sync_group, unwrap

FORMAT = 1
Part = TypeVar("Part", bound=nn.Module)


def structure(model: nn.Module) -> dict[str, Any]:
    """Describe which convolutions have which branches, as JSON-able data.

    Example:
        >>> from dyrep.surgery.edits import expand_
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
        >>> _ = expand_(model, "0", ["1x1", "residual"])
        >>> structure(model)
        {'format': 1, 'blocks': {'0': {'branches': ['1x1', 'residual'], 'origin_norm': False, 'width': 1}}}
    """
    return {"format": FORMAT, "blocks": {name: plan.as_dict() for name, plan in _plans(bare(model)).items()}}


def importances(model: nn.Module) -> dict[str, dict[str, float]]:
    """Mean |γ| of every branch by layer, and of the origin where it has a norm, read from the device at once.

    Example:
        >>> from dyrep.surgery.edits import expand_
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
        >>> _ = expand_(model, "0", ["1x1", "residual"], gamma=0.5)
        >>> importances(model)
        {'0': {'1x1': 0.5, 'residual': 0.5}}
    """
    found = {}
    for name, block in bare(model).named_modules():
        if isinstance(block, RepConv) and block.branches:
            own = {} if block.origin_norm is None else {ORIGIN: block.origin_norm.importance}
            found[name] = own | block.importances()
    values = [value for block in found.values() for value in block.values()]
    read = iter(torch.stack(values).tolist() if values else ())
    return {name: {branch: next(read) for branch in block} for name, block in found.items()}


def restructure_(
    model: nn.Module,
    wanted: Mapping[str, Any],
    *,
    optimizer: Optimizer | None = None,
    gamma: float = GAMMA,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Give a model a structure: cut what is not in it, expand what is missing.

    Eval-mode function is kept, except where a block of the structure does without its original kernel. New branches
    have random weights; load a state dict afterwards to get those of a saved model.

    Args:
        model: the model, changed in place; plain, or with any other structure.
        wanted: what `structure` returned.
        optimizer: the optimizer that trains the model.
        gamma: initial γ of new branches.
        generator: source of the random weights (default: torch's global one).

    Raises:
        StructureError: the description is malformed or names layers that this model does not have; nothing has been
            changed then.
        IneligibleLayerError: a layer's weight would have to be rewritten and cannot be; all is as it was then.

    Example:
        >>> from dyrep.surgery.edits import expand_
        >>> model, twin = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2))
        >>> _ = expand_(model, "0", ["1x1"])
        >>> structure(restructure_(twin, structure(model))) == structure(model)
        True
    """
    model = unwrap(model)
    plans, now = _checked(model, wanted), _plans(model)
    if optimizer is not None:
        check_optimizer(optimizer)
    before = Snapshot(touched(model, wanted), optimizer)
    try:
        for name in sorted(now, key=len, reverse=True):  # inner blocks have longer names
            if not _fits(now[name], plans.get(name)):
                cut_(model, name, optimizer=optimizer)
        for name in sorted(plans, key=len):
            _reshape_(model, name, plans[name], optimizer=optimizer, gamma=gamma, generator=generator)
    except BaseException:
        before.restore_()
        raise
    forget_compiled()
    return model


def touched(model: nn.Module, wanted: Mapping[str, Any]) -> list[nn.Module]:
    """The modules that `restructure_` would change, to take a `Snapshot` of.

    Raises:
        StructureError: the description is malformed or names layers that this model does not have.
    """
    plans = _checked(model, wanted)
    norms = [plan.replaces for plan in plans.values() if plan.replaces is not None]
    found = [find(model, name) for name in [*{**_plans(model), **plans}, *norms]]
    return [module for module in found if module is not None]


def prepare_(model: nn.Module) -> nn.Module:
    """Make a plain model able to take on whatever structure a state dict has; its keys and function do not change.

    A strict `load_state_dict` then grows and sheds branches as the file says. Build the optimizer after loading: one
    that exists already would not hold the new parameters (`dyrep.load` can take care of that).

    Example:
        >>> from dyrep.surgery.edits import expand_
        >>> model, twin = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2))
        >>> _ = expand_(model, "0", ["1x1"])
        >>> prepare_(twin).load_state_dict(model.state_dict())
        <All keys matched successfully>
    """
    inner = unwrap(model)
    group = sync_group(inner)
    frozen = refusals(inner).keys() - refusals(inner, trained=False)
    for target in targets(inner):
        if target.eligible or target.present or target.name in frozen:
            as_block_(inner.get_submodule(target.name)).prepare_(group)
    return model


def _plans(model: nn.Module) -> dict[str, Blueprint]:
    """What every block of a model consists of."""
    names = norm_names(model)
    return {
        name: Blueprint.of(module, names)
        for name, module in model.named_modules()
        if isinstance(module, RepConv) and (module.branches or module.origin_norm is not None)
    }


def _reshape_(
    model: nn.Module,
    name: str,
    plan: Blueprint,
    *,
    optimizer: Optimizer | None,
    gamma: float,
    generator: torch.Generator | None,
) -> None:
    """Give one convolution the branches it should have."""
    before = model.get_submodule(name)
    has = branch_names(before)
    surplus = [branch for branch in has if branch not in plan.branches]
    lacks_norm = plan.origin_norm and getattr(before, "origin_norm", None) is None
    if lacks_norm or not set(plan.branches) <= set(has):
        require_eligible(model, {name: before}, trained=False)
        weight, joined = cast(nn.Parameter, before.weight), optimizer
        frozen = not weight.requires_grad and not getattr(before, "origin_off", False)
        if optimizer is not None and frozen and locate(optimizer, weight) is None:
            joined = None  # it is not trained, and neither are its branches
        if joined is not None:
            check_holds(joined, name, weight)
        try:
            grown = assemble_(model, name, plan, gamma=gamma, optimizer=joined, generator=generator)
        except BranchError as error:
            raise StructureError(f"layer {name!r}: {error}") from error
        if frozen:
            grown.requires_grad_(False)
    if surplus:
        cut_(model, name, surplus, optimizer=optimizer)
    block = model.get_submodule(name)
    assert isinstance(block, RepConv)
    reorder_(block, plan.branches)


def _checked(model: nn.Module, wanted: Mapping[str, Any]) -> dict[str, Blueprint]:
    if (
        not isinstance(wanted, Mapping)
        or wanted.get("format") != FORMAT
        or not isinstance(wanted.get("blocks"), Mapping)
    ):
        raise StructureError(f"not a structure of format {FORMAT}: {str(wanted)[:200]}")
    plans = {name: Blueprint.from_dict(name, given) for name, given in wanted["blocks"].items()}
    for name, plan in plans.items():
        _check_layer(model, name, plans)
        norm = None if plan.replaces is None else find(model, plan.replaces)
        if plan.replaces is not None and not isinstance(norm, (PassedNorm, nn.modules.batchnorm._BatchNorm)):
            raise StructureError(
                f"layer {name!r}: the structure replaces the norm {plan.replaces!r}, which this model does not have"
            )
    return plans


def _check_layer(model: nn.Module, name: str, plans: Mapping[str, Blueprint]) -> None:
    """Raise unless a layer is a convolution of the model, or the one inside a branch that will be there."""
    if any(is_inside(name, block) for block in {**_plans(model), **plans}):
        outer, _, inner = name.rpartition("branches.")
        branch, around = inner.removesuffix(".conv"), plans.get(outer.removesuffix("."))
        if inner == branch or around is None or branch not in around.branches:
            raise StructureError(f"layer {name!r} is inside a branch that the structure does not have")
    elif not isinstance(find(model, name), PLAIN_CONVS):
        raise StructureError(
            f"the structure names layer {name!r}, which this model does not have: is it the same architecture?"
        )


def _fits(block: Blueprint, plan: Blueprint | None) -> bool:
    """Whether a block differs from what is wanted in its set of branches alone; if not, it has to be folded first."""
    if plan is None:
        return False
    same = ("origin_norm", "scaling", "replaces", "origin")
    if any(getattr(block, name) != getattr(plan, name) for name in same):
        return False
    if not plan.origin and set(block.branches) != set(plan.branches):
        return False  # there is no original kernel to take a branch's part over
    return "1x1-KxK" not in block.branches or "1x1-KxK" not in plan.branches or block.width == plan.width
