"""Expand a convolution of a live model, or cut branches off, without changing what the model computes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from dyrep import algebra
from dyrep.block import RepConv, as_plain_, branch_for, origin_norm_for
from dyrep.branches import GAMMA, Branch, branch_list, branch_option, branch_options, is_branch
from dyrep.checking import is_number, require, require_whole
from dyrep.errors import BranchError, CalibrationError, ConfigError
from dyrep.geometry import ConvGeometry
from dyrep.norm import BranchNorm
from dyrep.scaling import GatedNorm
from dyrep.surgery import ranks
from dyrep.surgery.assembly import attach_, join_
from dyrep.surgery.calibration import CALIBRATION_BATCHES, Probe, calibrate_
from dyrep.surgery.momentum import carried_momentum, set_momentum_
from dyrep.surgery.optimizer import check_holds, check_optimizer, remove_
from dyrep.surgery.optimizer_state import copies_moved
from dyrep.surgery.preserve import Forward
from dyrep.surgery.targets import require_foldable, require_growable, resolve
from dyrep.surgery.undo import Snapshot
from dyrep.surgery.wrappers import forget_compiled, unwrap

ORIGIN_NORMS = ("none", "calibrated", "reference")


@dataclass(frozen=True)
class Edit:
    """One change of structure.

    Attributes:
        kind: ``"expand"`` or ``"cut"``.
        layer: name of the convolution.
        branches: the branches that were added or absorbed.
        detail: what the caller measured about it (scores, importances, drift), for the log.

    Example:
        >>> print(Edit("cut", "layer1.0.conv1", ("1xK", "Kx1")))
        cut layer1.0.conv1: -1xK -Kx1
    """

    kind: str
    layer: str
    branches: tuple[str, ...]
    detail: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The edit as JSON-able data."""
        return {**asdict(self), "branches": list(self.branches)}

    def __str__(self) -> str:
        sign = "+" if self.kind == "expand" else "-"
        return f"{self.kind} {self.layer}: {' '.join(sign + branch for branch in self.branches)}"


def expand_(
    model: nn.Module,
    names: str | Iterable[str],
    branches: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    *,
    gamma: float = GAMMA,
    relative_gamma: bool = False,
    calibration: Iterable[Any] | None = None,
    calibration_batches: int = CALIBRATION_BATCHES,
    forward: Forward | None = None,
    optimizer: Optimizer | None = None,
    origin_norm: str = "none",
    width: int = 1,
    generator: torch.Generator | None = None,
    distributed: bool | None = None,
) -> list[Edit]:
    """Give convolutions new branches with random weights, and take what they add out of the original kernel.

    In eval mode the model's function stays the same to rounding; in training mode nearly so, the better the more
    calibration batches there are. Either all layers are expanded or, after an error, none.

    Args:
        model: the model, changed in place.
        names: name of a convolution, or several.
        branches: which branches to add (default: all that are exact, not duplicates and not there yet); a dict gives
            them layer by layer.
        gamma: initial γ of every new branch's last norm.
        relative_gamma: measure γ in standard deviations of the layer's output; needs ``calibration``.
        calibration: batches for the new norms' statistics; without any, eval mode is still exact.
        calibration_batches: how many of them to use at most.
        forward: ``forward(model, batch)`` to run the model, where a batch is not a tensor, a tuple that begins with
            the input, or a dict of arguments.
        optimizer: the optimizer that trains the model; the new parameters join it.
        origin_norm: norm on the original kernel: ``"none"``; ``"calibrated"`` (starts as the identity) or
            ``"reference"`` (a fresh one, as published; not function-preserving in training mode). Decided when a
            convolution first grows; a block that has branches already keeps what it has.
        width: inner channels of ``1x1-KxK`` per input channel.
        generator: source of the random weights (default: torch's global one).
        distributed: whether ranks share weights and statistics (default: if torch.distributed is initialised).

    Returns:
        One `Edit` per layer.

    Raises:
        DyRepError: the layer, branch, data or optimizer does not allow it; the message says why and what to do.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)).eval()
        >>> x = torch.randn(4, 3, 8, 8)
        >>> before = model(x)
        >>> print(*expand_(model, "0", calibration=[x]))
        expand 0: +1x1 +1x1-KxK +1x1-AVG +1xK +Kx1
        >>> torch.allclose(model(x), before, atol=1e-5)
        True
    """
    model = unwrap(model)
    convs = resolve(model, names)
    require_growable(model, convs)
    check_growth(gamma, width)
    if origin_norm not in ORIGIN_NORMS:
        raise ConfigError(f"origin_norm={origin_norm!r} is unknown; valid are {', '.join(ORIGIN_NORMS)}")
    if calibration is None and (relative_gamma or origin_norm == "calibrated"):
        wish = "relative_gamma=True" if relative_gamma else "origin_norm='calibrated'"
        raise CalibrationError(f"{wish} has to see data: pass calibration=batches")
    _check_layers_named(branches, convs)
    wanted = {
        name: _wanted_branches(name, conv, branches[name] if isinstance(branches, Mapping) else branches)
        for name, conv in convs.items()
    }
    if optimizer is not None:
        check_optimizer(optimizer)
        for name, conv in convs.items():
            check_holds(optimizer, name, conv.weight)  # type: ignore[arg-type]

    grown = {
        name: {
            branch: branch_for(conv, branch, gamma=gamma, width=width, generator=generator) for branch in wanted[name]
        }
        for name, conv in convs.items()
    }
    outputs = {name: origin_norm_for(conv) if relative_gamma else None for name, conv in convs.items()}
    norms = {
        name: None if origin_norm == "none" or _has_grown(conv) else origin_norm_for(conv)
        for name, conv in convs.items()
    }
    if ranks.distributed(distributed):
        ranks.broadcast_(p for made in grown.values() for branch in made.values() for p in branch.parameters())
    if calibration is not None:
        probes = [
            Probe(name, conv, list(grown[name].values()), output=outputs[name], rest=norms[name])
            for name, conv in convs.items()
        ]
        calibrate_(
            model,
            probes,
            calibration,
            max_batches=calibration_batches,
            forward=forward,
            distributed=distributed,
        )

    before = Snapshot(convs.values(), optimizer)
    try:
        with copies_moved(optimizer, convs.values()):
            for name, conv in convs.items():
                _scale_gamma_(grown[name], outputs[name])
                _start_origin_norm_(norms[name], origin_norm)
                attach_(conv, grown[name], norms[name])
        for name, conv in convs.items():
            added: dict[str, nn.Module] = {f"branches.{key}": branch for key, branch in grown[name].items()}
            norm = norms[name]
            if norm is not None:
                added["origin_norm"] = norm
            join_(model, name, conv, added, optimizer)
    except BaseException:
        before.restore_()
        raise
    forget_compiled()
    return [Edit("expand", name, tuple(made)) for name, made in grown.items()]


def cut_(
    model: nn.Module,
    names: str | Iterable[str],
    branches: Sequence[str] | None = None,
    *,
    optimizer: Optimizer | None = None,
) -> list[Edit]:
    """Absorb branches into the original kernel and drop them; a block without branches is a plain convolution again.

    It then goes on with the momentum that all of the block's parameters had together, see `carried_momentum`.

    Args:
        model: the model, changed in place.
        names: name of an expanded convolution, or several.
        branches: which branches to cut (default: all).
        optimizer: the optimizer that trains the model; it forgets the removed parameters.

    Returns:
        One `Edit` per layer.

    Raises:
        BranchError: a layer does not have such a branch.
        IneligibleLayerError: a weight that would be read or rewritten has become a computed one, by pruning perhaps.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)).eval()
        >>> _ = expand_(model, "0")
        >>> print(*cut_(model, "0", ["1x1", "1xK"]))
        cut 0: -1x1 -1xK
        >>> print(*cut_(model, "0"))
        cut 0: -1x1-KxK -1x1-AVG -Kx1 -residual
        >>> type(model[0])
        <class 'torch.nn.modules.conv.Conv2d'>
    """
    model = unwrap(model)
    convs = resolve(model, names)
    doomed = {name: _present_branches(name, conv, branches) for name, conv in convs.items()}
    require_foldable(convs, doomed)
    if optimizer is not None:
        check_optimizer(optimizer)
    whole = [
        name for name, conv in convs.items() if isinstance(conv, RepConv) and len(doomed[name]) == len(conv.branches)
    ]
    momenta = {name: carried_momentum(cast(RepConv, convs[name]), optimizer) for name in whole}
    before = Snapshot(convs.values(), optimizer)
    try:
        with copies_moved(optimizer, convs.values()):
            gone = [module for name, conv in convs.items() for module in _absorb_(conv, doomed[name])]
        if optimizer is not None:
            for name, momentum in momenta.items():
                set_momentum_(convs[name], momentum, optimizer)
            remove_(optimizer, [p for module in gone for p in module.parameters()])
    except BaseException:
        before.restore_()
        raise
    forget_compiled()
    return [Edit("cut", name, tuple(cut)) for name, cut in doomed.items()]


def check_growth(gamma: float, width: int) -> None:
    """Raise unless a branch can start with this γ and inner width."""
    fine = is_number(gamma) and 0 < gamma < math.inf
    require("gamma", gamma, "a positive, finite number (the paper's is 0.01)", fine)
    require_whole("width", width, 1)


def _wanted_branches(name: str, conv: nn.Module, branches: Sequence[str] | None) -> list[str]:
    branches = [branches] if isinstance(branches, str) else branches
    present = set(conv.branches) if isinstance(conv, RepConv) else set()
    options = branch_options(ConvGeometry.of(conv))
    if branches is None:
        chosen = [b for b, option in options.items() if not option.reason and b not in present]
        if not chosen:
            reasons = sorted({option.reason for option in options.values() if option.reason})
            why = "it has every branch already" if present else "; ".join(reasons)
            raise BranchError(f"layer {name!r} has no branch to add: {why}")
        return chosen
    valid = [b for b, option in options.items() if option.possible and b not in present]
    for branch in branches:
        if not is_branch(branch):
            raise BranchError(f"unknown branch {branch!r} for layer {name!r}; valid are {branch_list()}")
        if branch in present:
            raise BranchError(f"layer {name!r} has branch {branch!r} already; it can still grow {valid}")
        option = branch_option(branch, ConvGeometry.of(conv))
        if not option.possible:
            raise BranchError(f"layer {name!r} cannot have branch {branch!r}: {option.reason}; it can grow {valid}")
    if not branches:
        raise BranchError(f"no branches given for layer {name!r}; it can grow {valid}")
    return list(dict.fromkeys(branches))


def _check_layers_named(branches: Any, convs: Mapping[str, nn.Module]) -> None:
    """Raise if branches are given layer by layer, but for other layers than those that are to grow."""
    if not isinstance(branches, Mapping):
        return
    for name in (*branches, *convs):
        if name not in branches:
            raise BranchError(f"layer {name!r} is to grow, but branches= does not say what: add it, or leave it out")
        if name not in convs:
            raise BranchError(f"branches= names layer {name!r}, which is not among those to grow: {', '.join(convs)}")


def _present_branches(name: str, conv: nn.Module, branches: Sequence[str] | None) -> list[str]:
    branches = [branches] if isinstance(branches, str) else branches
    present = list(conv.branches) if isinstance(conv, RepConv) else []
    if branches is not None and not branches:
        raise BranchError(f"no branches given to cut from layer {name!r}; it has {', '.join(present) or 'none'}")
    if branches is None and isinstance(conv, RepConv) and conv.origin_norm is not None:
        return present  # of a block that may consist of a norm alone
    if not present:
        raise BranchError(f"layer {name!r} has no branches to cut")
    assert isinstance(conv, RepConv)
    if branches is not None and any(isinstance(norm, GatedNorm) for norm in conv.scalings()):
        raise BranchError(f"layer {name!r} is being searched: finish the search before cutting branches one by one")
    for branch in branches or ():
        if branch not in present:
            raise BranchError(f"layer {name!r} has no branch {branch!r}; it has {', '.join(present)}")
    return present if branches is None else list(dict.fromkeys(branches))


def _has_grown(conv: nn.Module) -> bool:
    """Whether a convolution has grown before, with a norm on its kernel or without."""
    return isinstance(conv, RepConv) and (bool(conv.branches) or conv.origin_norm is not None)


@torch.no_grad()
def _start_origin_norm_(norm: BranchNorm | None, kind: str) -> None:
    if norm is None:
        return
    if kind == "calibrated":
        norm.make_identity_()
    else:  # as published: mean 0, variance 1, whatever calibration saw
        norm.running_var.fill_(1)
        if norm.running_mean is not None:
            norm.running_mean.zero_()


@torch.no_grad()
def _scale_gamma_(branches: Mapping[str, Branch], output: BranchNorm | None) -> None:
    if output is not None:
        for branch in branches.values():
            branch.norm.weight.mul_(output.deviation)


@torch.no_grad()
def _absorb_(block: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Absorb branches into the origin, and with the last one its norm too; returns what the block has lost."""
    assert isinstance(block, RepConv)
    if len(names) == len(block.branches):
        gone = [*block.branches.values(), *([] if block.origin_norm is None else [block.origin_norm])]
        as_plain_(block)
        return gone
    dtype = algebra.exact_dtype(block.weight)
    absorbed = {name: block.branch_modules()[name] for name in names}
    folded = (branch.folded(dtype) for branch in absorbed.values())
    block.set_origin_(*algebra.add(block.origin_folded(dtype), *folded))
    block.set_branches_({name: branch for name, branch in block.branch_modules().items() if name not in absorbed})
    return list(absorbed.values())
