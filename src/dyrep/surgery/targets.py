"""Which convolutions of a model can grow, which cannot, and why."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dyrep.block import RepConv, why_computed
from dyrep.branches import branch_options
from dyrep.errors import IneligibleLayerError, UnknownLayerError
from dyrep.geometry import PLAIN_CONVS, ConvGeometry
from dyrep.scaling import ChannelScale, GatedNorm
from dyrep.surgery.wrappers import unwrap

_SCRIPTED_CONVS = [f"{kind}{n}d" for kind in ("Conv", "ConvTranspose") for n in (1, 2, 3)]
COMPLETE = "it has every branch already"
"""Why a convolution that has grown all it can is no target."""
_SELF_FOLDING = ("fuse", "reparameterize", "switch_to_deploy")


@dataclass(frozen=True)
class Target:
    """One convolution of a model.

    Attributes:
        name: its name in the model.
        eligible: whether it can grow (more) branches.
        reason: if not, why.
        branches: the branches it would grow by default.
        left_out: the branches it would not, and why.
        present: the branches it has already.
        depth: 0 for a convolution of the model, 1 for one inside a branch, and so on.
        kernel_size: its kernel.
        note: anything else a person should know before expanding it.

    Example:
        >>> [target] = targets(nn.Sequential(nn.Conv2d(3, 8, 3)))
        >>> target.name, target.eligible, "1x1" in target.branches, "residual" in target.left_out
        ('0', True, True, True)
    """

    name: str
    eligible: bool
    reason: str
    branches: tuple[str, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    present: tuple[str, ...] = ()
    depth: int = 0
    kernel_size: tuple[int, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        state = f"can grow {', '.join(self.branches)}" if self.eligible else f"left alone: {self.reason}"
        has = f" (has {', '.join(self.present)})" if self.present else ""
        return f"{self.name}{has}: {state}" + (f" [{self.note}]" if self.note else "")


def targets(model: nn.Module) -> list[Target]:
    """List every convolution of a model, with what it can grow or why it cannot.

    Args:
        model: any module, compiled or not.

    Returns:
        One `Target` per convolution, in module order; a convolution used under several names is listed once.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1))
        >>> for target in targets(model):
        ...     print(target)
        0: can grow 1x1, 1x1-KxK, 1x1-AVG, 1xK, Kx1
        2: left alone: the kernel is 1x1: a branch could only repeat it
    """
    model = unwrap(model)
    holders = _weight_holders(model)
    parents = {name: type(m).__name__ for name, m in model.named_modules() if _folds_itself(m)}
    blocks = [name for name, module in model.named_modules() if isinstance(module, RepConv)]
    closed = _closed_blocks(model)
    return [
        _describe(
            name,
            module,
            sum(is_inside(name, block) for block in blocks),
            _closed(name, closed) or _refusal(module, holders),
            parents,
        )
        for name, module in model.named_modules()
        if _is_conv(module)
    ]


def resolve(model: nn.Module, names: str | Iterable[str]) -> dict[str, nn.Module]:
    """Look convolutions up by name.

    Raises:
        UnknownLayerError: no such module, or not a convolution.
    """
    found: dict[str, nn.Module] = {}  # a module under two names counts once
    for name in [names] if isinstance(names, str) else list(names):
        try:
            module = model.get_submodule(name)
        except AttributeError:
            convs = [n for n, m in model.named_modules() if _is_conv(m)]
            close = difflib.get_close_matches(name, convs, n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(close)}?" if close else "dyrep.targets(model) lists all"
            raise UnknownLayerError(f"the model has no layer {name!r}; {hint}") from None
        if not _is_conv(module):
            raise UnknownLayerError(
                f"layer {name!r} is a {type(module).__name__}, not a convolution; dyrep.targets(model) lists all"
            )
        if all(module is not other for other in found.values()):
            found[name] = module
    return found


def require_growable(model: nn.Module, convs: dict[str, nn.Module]) -> None:
    """Raise unless every one of these convolutions can be operated on exactly, and may grow branches with norms."""
    closed = _closed_blocks(model)
    for name in convs:
        if reason := _closed(name, closed):
            raise IneligibleLayerError(f"layer {name!r} cannot be expanded: {reason}")
    require_eligible(model, convs)


def require_eligible(model: nn.Module, convs: dict[str, nn.Module], *, trained: bool = True) -> None:
    """Raise unless every one of these convolutions can be operated on exactly, and is trained if it has to be."""
    holders = _weight_holders(model)
    for name, conv in convs.items():
        reason = _refusal(conv, holders, trained)
        if reason:
            raise IneligibleLayerError(f"layer {name!r} cannot be expanded: {reason}")


def require_foldable(blocks: Mapping[str, nn.Module], branches: Mapping[str, Collection[str]] | None = None) -> None:
    """Raise unless these blocks, by their names, can be folded: weights may have become computed since they grew.

    Args:
        blocks: the blocks; anything else is passed over.
        branches: which of their branches are to be folded (default: all).
    """
    for name, block in blocks.items():
        if isinstance(block, RepConv):
            for part, reason in block.unfoldable(None if branches is None else branches[name]).items():
                layer = ".".join(filter(None, (name, part)))
                raise IneligibleLayerError(f"layer {layer!r} cannot be folded: {reason}")


def refusals(model: nn.Module, *, trained: bool = True) -> dict[str, str]:
    """Convolutions that cannot be operated on exactly, or are not trained if they have to be, and why."""
    holders = _weight_holders(model)
    found = {name: _refusal(module, holders, trained) for name, module in model.named_modules() if _is_conv(module)}
    return {name: reason for name, reason in found.items() if reason}


def is_inside(name: str, block: str, branch: str | None = None) -> bool:
    """Whether a layer is part of a branch (of a given one) of a block, by their names."""
    start = f"{block}.branches." if block else "branches."
    return name.startswith(start if branch is None else f"{start}{branch}.")


def outermost(model: nn.Module, layer: str) -> str | None:
    """The convolution that a layer is or has grown from, by its name: the first one on the way to it, if there is one.

    Example:
        >>> outermost(nn.Sequential(nn.Conv2d(3, 8, 3)), "0.branches.1x1-KxK.conv")
        '0'
    """
    module, path = model, ""
    for part in ["", *layer.split(".")]:
        if part:
            found = module._modules.get(part)
            if found is None:
                return None
            module, path = found, f"{path}.{part}" if path else part
        if _is_conv(module):
            return path
    return None


def _closed_blocks(model: nn.Module) -> dict[str, str]:
    """Blocks of methods that do not grow, and why."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, RepConv):
            if any(isinstance(norm, ChannelScale) for norm in module.scalings()):
                found[name] = "its block is folded at every step, and a branch with a norm cannot be"
            elif any(isinstance(norm, GatedNorm) for norm in module.scalings()):
                found[name] = "its branches are being searched"
            elif module.origin_off:
                found[name] = "its original kernel, which would make up for new branches, has been left out"
    return found


def _closed(name: str, blocks: dict[str, str]) -> str:
    return next((reason for block, reason in blocks.items() if name == block or is_inside(name, block)), "")


def _describe(name: str, conv: nn.Module, depth: int, reason: str, parents: dict[str, str]) -> Target:
    present = tuple(conv.branches) if isinstance(conv, RepConv) else ()
    wanted: tuple[str, ...] = ()
    left_out: dict[str, str] = {}
    if not reason:
        options = branch_options(ConvGeometry.of(conv))
        left_out = {branch: option.reason for branch, option in options.items() if option.reason}
        wanted = tuple(branch for branch, option in options.items() if not option.reason and branch not in present)
        if not wanted:
            reason = COMPLETE if present else next(iter(left_out.values()))
    owner = next((p for p in parents if not p or name.startswith(p + ".")), None)
    note = ""
    if owner is not None and not reason:
        note = (
            f"{owner or 'the model'} ({parents[owner]}) folds itself by reading this weight: "
            "call dyrep.deploy before folding it, or the branches are lost"
        )
    return Target(
        name=name,
        eligible=not reason,
        reason=reason,
        branches=wanted,
        left_out=left_out,
        present=present,
        depth=depth,
        kernel_size=tuple(getattr(conv, "kernel_size", ())),  # a traced one does not know
        note=note,
    )


def _refusal(conv: nn.Module, holders: dict[int, list[nn.Module]], trained: bool = True) -> str:
    """Why a convolution cannot be operated on exactly; empty if it can."""
    kind = type(conv).__name__
    if isinstance(conv, torch.jit.ScriptModule):
        return "it is part of a TorchScript module, whose code is fixed; use the module that one was made from"
    if isinstance(conv, _ConvTransposeNd):
        return f"{kind} is a transposed convolution, which the branches do not fold into"
    if computed := why_computed(conv):
        return computed
    if isinstance(conv.weight, nn.parameter.UninitializedParameter):
        return f"{kind} has no shape yet; run one forward pass in eval mode first"
    if not isinstance(conv, RepConv) and type(conv) not in PLAIN_CONVS:
        return f"{kind} is a subclass of {_kind_of(conv)} and may compute something else, which folding would lose"
    if "forward" in conv.__dict__:
        return "its forward was replaced on the instance, so branches would never run"
    return _weight_refusal(conv, holders) or (_frozen(conv) if trained else "")


def _weight_refusal(conv: nn.Module, holders: dict[int, list[nn.Module]]) -> str:
    weight = conv.weight
    assert isinstance(weight, torch.Tensor)
    if weight.is_meta:
        return "its weight is on the meta device; materialise the model first"
    if type(weight).__name__ == "DTensor" or type(weight.data).__name__ == "DTensor":
        return "its weight is sharded over several processes (DTensor)"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}, not floating point"
    for name, parameter in conv.named_parameters(recurse=False):
        others = [type(m).__name__ for m in holders.get(id(parameter), ()) if m is not conv]
        if others:
            return f"its {name} is shared with another module ({', '.join(others)}), which would change too"
    return ""


def _frozen(conv: nn.Module) -> str:
    """Why branches of a convolution could not be trained as they should."""
    if not conv.weight.requires_grad:
        return "its weight is frozen (requires_grad=False); unfreeze it, or leave the layer out"
    if isinstance(conv.bias, torch.Tensor) and not conv.bias.requires_grad:
        return (
            "its bias is frozen (requires_grad=False) and would take over what branches learn to add; unfreeze it, or "
            "leave the layer out"
        )
    return ""


def _is_conv(module: nn.Module) -> bool:
    """Whether a module is a convolution, or was one before TorchScript compiled it."""
    scripted = isinstance(module, torch.jit.ScriptModule) and module.original_name in _SCRIPTED_CONVS
    return scripted or isinstance(module, _ConvNd)


def _kind_of(conv: nn.Module) -> str:
    """The plain convolution a subclass derives from, by name."""
    bases: Sequence[type] = [base for base in type(conv).__mro__ if base in PLAIN_CONVS]
    return bases[0].__name__ if bases else "a convolution"


def _weight_holders(model: nn.Module) -> dict[int, list[nn.Module]]:
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(module)
    return holders


def _folds_itself(module: nn.Module) -> bool:
    if isinstance(module, RepConv):
        return False
    return any(callable(getattr(module, method, None)) for method in _SELF_FOLDING)
