"""Blocks built to a plan: what a block consists of as plain data, and how a convolution becomes one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep import algebra
from dyrep.block import RepConv, as_block_, branch_for, origin_scaling_for
from dyrep.branches import Branch, branch_list, is_branch
from dyrep.checking import is_whole
from dyrep.errors import StructureError
from dyrep.norm import BranchNorm, sync_norms_
from dyrep.passing import PassedNorm
from dyrep.scaling import SCALINGS, Scaling
from dyrep.surgery.optimizer import insert_
from dyrep.surgery.optimizer_state import copies_moved
from dyrep.surgery.wrappers import sync_group


@dataclass(frozen=True)
class Blueprint:
    """What a block consists of.

    Attributes:
        branches: its branches, in order.
        origin_norm: whether the original kernel has a norm (or scale) of its own.
        width: inner channels of ``1x1-KxK`` per input channel.
        scaling: what stands at the end of every branch, one of `dyrep.scaling.SCALINGS`.
        replaces: name of the batch norm after the convolution whose place the block takes, or None.
        origin: whether the original kernel takes part at all.

    Example:
        >>> Blueprint(("1x1", "residual")).as_dict()
        {'branches': ['1x1', 'residual'], 'origin_norm': False, 'width': 1}
    """

    branches: tuple[str, ...]
    origin_norm: bool = False
    width: int = 1
    scaling: str = "norm"
    replaces: str | None = None
    origin: bool = True

    @classmethod
    def of(cls, block: RepConv, norm_names: Mapping[int, str]) -> Blueprint:
        """Describe a block; ``norm_names`` has the names of the model's norms by their id."""
        branches = block.branch_modules()
        return cls(
            branches=tuple(branches),
            origin_norm=block.origin_norm is not None,
            width=max((branch.width for branch in branches.values()), default=1),
            scaling=next((norm.kind for norm in block.scalings()), "norm"),
            replaces=None if block.passed_norm is None else norm_names.get(id(block.passed_norm)),
            origin=not block.origin_off,
        )

    @classmethod
    def from_dict(cls, layer: str, data: Any) -> Blueprint:
        """Read what `as_dict` returned, from a file perhaps.

        Raises:
            StructureError: it is malformed.
        """
        data = data if isinstance(data, Mapping) else {}
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise StructureError(f"layer {layer!r}: {unknown[0]!r} is unknown; valid are {', '.join(known)}")
        branches = data.get("branches")
        if not isinstance(branches, list) or not all(isinstance(b, str) and is_branch(b) for b in branches):
            raise StructureError(f"layer {layer!r}: branches must be a list from {branch_list()}, got {branches!r}")
        plan = cls(**{**data, "branches": tuple(branches)})
        for name in ("origin_norm", "origin"):
            if not isinstance(getattr(plan, name), bool):
                raise StructureError(f"layer {layer!r}: {name} must be true or false, got {getattr(plan, name)!r}")
        if plan.origin_norm and not plan.origin:
            raise StructureError(f"layer {layer!r}: there is no original kernel that could have a norm")
        if not plan.branches and not plan.origin_norm:
            raise StructureError(f"layer {layer!r}: a block needs at least one branch; leave plain layers out")
        if not is_whole(plan.width, 1):
            raise StructureError(f"layer {layer!r}: width must be a positive whole number, got {plan.width!r}")
        if plan.scaling not in SCALINGS:
            raise StructureError(f"layer {layer!r}: scaling must be one of {', '.join(SCALINGS)}, got {plan.scaling!r}")
        if plan.replaces is not None and (plan.scaling == "linear" or plan.origin_norm != plan.origin):
            raise StructureError(
                f"layer {layer!r}: a block in place of a norm, {plan.replaces!r}, needs norms on all its branches"
            )
        return plan

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON-able data; what is usual and was not always there is left out."""
        unusual = {"scaling": "norm", "replaces": None, "origin": True}
        values = {key: value for key, value in asdict(self).items() if key not in unusual or value != unusual[key]}
        return {**values, "branches": list(self.branches)}


def norm_names(model: nn.Module) -> dict[int, str]:
    """Names of the norms that have stepped aside, by id."""
    return {id(module): name for name, module in model.named_modules() if isinstance(module, PassedNorm)}


def branch_names(module: nn.Module | None) -> list[str]:
    """The branches of a block; any other module has none."""
    return list(module.branches) if isinstance(module, RepConv) else []


def find(model: nn.Module, name: str) -> nn.Module | None:
    """A module by its name, if there is one."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def reorder_(block: RepConv, order: Iterable[str]) -> None:
    """Put branches in a given order, which is the order of the model's parameters."""
    by_name = block.branch_modules()
    block.set_branches_({branch: by_name[branch] for branch in order})


@torch.no_grad()
def assemble_(
    model: nn.Module,
    name: str,
    plan: Blueprint,
    *,
    gamma: float,
    preserve: bool = True,
    optimizer: Optimizer | None = None,
    generator: torch.Generator | None = None,
) -> RepConv:
    """Turn a convolution into the block of a plan, or add what a block lacks of it, with random weights.

    Args:
        model: the model, changed in place.
        name: the convolution's name.
        plan: what the block shall consist of; branches that it has beyond that are left alone.
        gamma: initial γ of new branches.
        preserve: take what new branches compute out of the original kernel, so that eval mode stays as it was. This
            is not possible if the plan has no original kernel.
        optimizer: the optimizer that trains the model; new parameters join it.
        generator: source of the random weights.
    """
    block = as_block_(model.get_submodule(name))
    replaced = None if plan.replaces is None or block.passed_norm else model.get_submodule(plan.replaces)
    if replaced is not None:
        block.replace_norm_(replaced)
    added: dict[str, nn.Module] = {}
    norm: Scaling | None = None
    if plan.origin_norm and block.origin_norm is None:
        added["origin_norm"] = norm = origin_scaling_for(block, plan.scaling)
        if replaced is not None and preserve:
            _take_over_(cast(BranchNorm, norm), replaced)
            block.origin_norm = norm
    branches = {
        branch: branch_for(block, branch, gamma=gamma, width=plan.width, scaling=plan.scaling, generator=generator)
        for branch in plan.branches
        if branch not in block.branches
    }
    if preserve and plan.origin:
        with copies_moved(optimizer, [block]):
            attach_(block, branches, norm)
    else:
        block.origin_norm = norm or block.origin_norm
        block.set_branches_({**block.branch_modules(), **branches})
    if not plan.origin:
        block.switch_origin_off_()
    added |= {f"branches.{key}": branch for key, branch in branches.items()}
    join_(model, name, block, added, optimizer)
    return block


def join_(
    model: nn.Module, name: str, conv: nn.Module, added: Mapping[str, nn.Module], optimizer: Optimizer | None
) -> None:
    """Let the new parts of a block take part in synchronised statistics, as the model's norms do, and in training."""
    synchronization = sync_group(model)
    if synchronization is not None:
        for module in added.values():
            sync_norms_(module, *synchronization)
    if optimizer is not None:
        insert_(optimizer, model, conv, added, name)


@torch.no_grad()
def attach_(conv: nn.Module, branches: Mapping[str, Branch], norm: Scaling | None) -> None:
    """Add branches (and a norm on the origin, if it has none) and take what they compute out of the origin."""
    block = as_block_(conv)
    dtype = algebra.exact_dtype(block.weight)
    kernel, bias = block.origin_folded(dtype)
    for branch in branches.values():
        added, shift = branch.folded(dtype)
        kernel = kernel - added
        bias = bias if bias is None or shift is None else bias - shift
    if norm is not None and block.origin_norm is None:
        block.origin_norm = norm
    block.set_origin_(kernel, bias)
    block.set_branches_({**block.branch_modules(), **branches})


def _take_over_(norm: BranchNorm, replaced: nn.Module) -> None:
    """Make a branch norm compute in eval mode what a batch norm, whose ε it has, did."""
    for name in ("running_mean", "running_var", "weight", "bias"):
        cast(Tensor, getattr(norm, name)).copy_(getattr(replaced, name))
