"""Copies of a model, such as moving averages, that take on its structure and keep their own function."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from dyrep.block import RepConv
from dyrep.copying import copied
from dyrep.errors import StructureError
from dyrep.geometry import PLAIN_CONVS, ConvGeometry
from dyrep.surgery.assembly import attach_, branch_names, find, reorder_
from dyrep.surgery.edits import cut_
from dyrep.surgery.structure import structure
from dyrep.surgery.targets import is_inside, require_foldable
from dyrep.surgery.wrappers import bare

Part = TypeVar("Part", bound=nn.Module)


@torch.no_grad()
def follow_(copy_of_model: nn.Module, model: nn.Module) -> nn.Module:
    """Give a copy of a model, such as an exponential moving average, the structure the model has now.

    Branches the copy lacks are copied from the model and taken out of the copy's own kernels, so the copy's function
    stays what it was; branches the model no longer has are absorbed. Afterwards both have the same parameters in the
    same order, as averaging them needs.

    Args:
        copy_of_model: the copy, changed in place; wrappers that keep it as ``.module`` are looked through.
        model: the model it is a copy of.

    Raises:
        StructureError: it is no copy of this model; the message names the first layer that does not match.

    Example:
        >>> from dyrep.surgery.edits import expand_
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
        >>> average = torch.optim.swa_utils.AveragedModel(model)
        >>> _ = expand_(model, "0", ["1x1", "residual"])
        >>> structure(follow_(average, model).module) == structure(model)
        True
    """
    check_copy(copy_of_model, model)
    inner, source = inside(copy_of_model, model), bare(model)
    wanted = structure(source)["blocks"]
    for name in sorted(structure(inner)["blocks"], key=len, reverse=True):
        ours = inner.get_submodule(name)
        assert isinstance(ours, RepConv)
        theirs = find(source, name)
        surplus = [branch for branch in ours.branches if branch not in branch_names(theirs)]
        # a block may be a norm alone, and a norm beside the kernel comes and goes with the whole of it
        keeps = isinstance(theirs, RepConv) and (theirs.origin_norm is None) == (ours.origin_norm is None)
        if surplus or not keeps:
            cut_(inner, name, surplus if keeps else None)
    for name in sorted(wanted, key=len):
        theirs, ours = source.get_submodule(name), inner.get_submodule(name)
        assert isinstance(theirs, RepConv)
        has = branch_names(ours)
        missing = {b: _copied_to(m, theirs, ours) for b, m in theirs.branch_modules().items() if b not in has}
        _check_followable(name, ours, theirs)
        if missing:
            require_foldable({name: ours}, {name: ()})  # its kernel is rewritten
            norm = None if theirs.origin_norm is None else _copied_to(theirs.origin_norm, theirs, ours)
            attach_(ours, missing, norm)
        assert isinstance(ours, RepConv)
        reorder_(ours, theirs.branches)
        for part in (ours.branches, ours.origin_norm):
            if part is not None:
                part.requires_grad_(ours.weight.requires_grad).train(ours.training)
    return copy_of_model


def inside(copy_of_model: nn.Module, model: nn.Module) -> nn.Module:
    """The module that a moving average keeps as ``.module``, or a plain copy itself, without wrappers."""
    if type(copy_of_model) is type(bare(model)):  # a copy, whatever of its own it calls "module"
        return copy_of_model
    return bare(getattr(copy_of_model, "module", copy_of_model))


def check_copy(copy_of_model: nn.Module, model: nn.Module) -> None:
    """Raise unless a copy has every convolution of a model, whatever branches either has.

    Other layers may differ: a teacher that lacks a head of its student can follow it too.

    Raises:
        StructureError: it does not; the message names the first layer that does not match.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3))
        >>> check_copy(torch.optim.swa_utils.AveragedModel(model), model)
    """
    inner, source = inside(copy_of_model, model), bare(model)
    blocks = [name for name, module in source.named_modules() if isinstance(module, RepConv)]
    for name, theirs in source.named_modules():
        if not isinstance(theirs, PLAIN_CONVS) or any(is_inside(name, block) for block in blocks):
            continue
        ours = find(inner, name)
        if not isinstance(ours, PLAIN_CONVS):
            has = "does not exist" if ours is None else f"is a {type(ours).__name__}"
            raise StructureError(
                f"layer {name!r} of the copy {has}, and the model's is a convolution: make the copy from this model"
            )
        facts, wanted = _facts(ours), _facts(theirs)
        for key, value in facts.items():
            if value != wanted[key]:
                raise StructureError(
                    f"layer {name!r} of the copy has {key}={value}, and the model's has {wanted[key]}: make the copy "
                    "from this model"
                )


def _facts(conv: nn.Module) -> dict[str, Any]:
    """What two convolutions have to have in common, under the names that torch has for it."""
    facts = {**asdict(ConvGeometry.of(conv)), "bias": conv.bias is not None}
    return {"padding" if key == "pads" else key: value for key, value in facts.items()}


def _copied_to(part: Part, theirs: nn.Module, ours: nn.Module) -> Part:
    """A part of a model's block for that of an average, which may be kept in another precision or elsewhere."""
    have, want = (cast(Tensor, conv.weight) for conv in (theirs, ours))
    return copied(part) if (have.device, have.dtype) == (want.device, want.dtype) else copied(part).to(want)


def _check_followable(name: str, ours: nn.Module, theirs: RepConv) -> None:
    """Raise if two blocks differ in more than their branches, which cannot be made up for."""
    has_norm = isinstance(ours, RepConv) and ours.passed_norm is not None
    off = isinstance(ours, RepConv) and ours.origin_off
    if has_norm != (theirs.passed_norm is not None) or off != theirs.origin_off:
        raise StructureError(
            f"layer {name!r}: the copy was made before the model was converted, and cannot follow: make it afterwards"
        )
