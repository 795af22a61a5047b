"""`RepConv1d/2d/3d`: a convolution that can grow branches and shed them again.

A block *is* the convolution it came from: `as_block_` swaps the class of the live module and adds ``.branches``, so
its name, parameters, hooks and every reference to it stay. Swapping back, `as_plain_`, is all that is left to do once
the last branch has been absorbed.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dyrep import algebra, execution
from dyrep.branches import GAMMA, Branch, is_branch, make_branch
from dyrep.errors import BranchError, IneligibleLayerError, StructureError
from dyrep.execution import Execution
from dyrep.geometry import ConvGeometry, ConvNd
from dyrep.norm import BranchNorm, sync_norms_
from dyrep.passing import PassedNorm, step_aside_, step_back_
from dyrep.scaling import ChannelScale, GatedNorm, Scaling, make_scaling

if TYPE_CHECKING:
    _Base = nn.Conv2d
else:
    _Base = object

REPLACES = "replaces_norm"
_UNDOABLE_SCALE = 1e-4  # below this, an origin norm is reset rather than divided by


class RepConv(_Base):
    """What `RepConv1d`, `RepConv2d` and `RepConv3d` have in common.

    Attributes:
        branches: the branches grown so far, by name.
        origin_norm: a norm (or a scale) on the original kernel, or None.
        origin_off: whether the original kernel is left out, as a search may decide; it is zero then.
        geometry: the convolution's hyper-parameters, resolved.
        execution: how it is run, see `dyrep.set_execution_`.
        prepared: whether loading a state dict grows and sheds branches as the file says, see `dyrep.prepare_`.
        norm_group: process group, in a tuple, that norms of branches grown that way synchronise in.
    """

    branches: nn.ModuleDict
    origin_norm: Scaling | None
    geometry: ConvGeometry
    execution: Execution = Execution()
    origin_off: bool = False
    prepared: bool = False
    norm_group: tuple[Any] | None = None
    _passed: tuple[PassedNorm] | None = None  # in a tuple, so that it is not a child of two modules

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._become_block_()

    def _become_block_(self) -> None:
        self.geometry = ConvGeometry.of(self)
        self.set_branches_({})
        self.register_module("origin_norm", None)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution plus all branches."""
        if not self.branches and self.origin_norm is None:
            return super().forward(input)
        if self.is_linear:
            return self._conv_forward(input, *self.folded())
        x = self.geometry.branch_input(input)
        how = execution.choose(self, self.execution, x)
        if how == "frozen":
            return self._conv_forward(input, *self.folded())
        y = self._added(x) if how == "eager" else execution.forward(self, x, how, self.execution)
        return y.squeeze(0) if input.dim() < x.dim() else y

    def _added(self, x: Tensor) -> Tensor:
        """Run the convolution and all branches one after another, and add them up."""
        y = None if self.origin_off else self._origin(x)
        for branch in self.branches.values():
            added = branch(x)
            y = added if y is None else y + added.to(y.dtype)  # under autocast a residual is wider than a convolution
        assert y is not None
        return y

    def _origin(self, x: Tensor) -> Tensor:
        if self.geometry.needs_prepadding:
            conv = (F.conv1d, F.conv2d, F.conv3d)[self.geometry.ndim - 1]
            y = conv(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)
        else:
            y = self._conv_forward(x, self.weight, self.bias)
        return y if self.origin_norm is None else self.origin_norm(y)

    def scalings(self) -> Iterator[Scaling]:
        """What stands at the end of the origin, if anything does, and of every branch."""
        if self.origin_norm is not None:
            yield self.origin_norm
        for branch in self.branches.values():
            yield cast(Branch, branch).norm

    @property
    def is_linear(self) -> bool:
        """Whether no branch normalises, so that the whole block is one convolution in training too."""
        return not any(norm.normalises for norm in self.scalings())

    @property
    def passed_norm(self) -> PassedNorm | None:
        """The batch norm after this block that it has taken the place of, if it has."""
        return None if self._passed is None else self._passed[0]

    @property
    def has_shift(self) -> bool:
        """Whether norms in this block have a mean and a β: there has to be something that can take them over."""
        return self.bias is not None or self._passed is not None

    def replace_norm_(self, norm: nn.Module) -> None:
        """Take the place of the batch norm that follows; its running statistics stay with it."""
        self._passed = (step_aside_(norm),)
        # in a state dict this says that a norm is to be replaced, though not which one
        self.register_buffer(REPLACES, torch.ones((), dtype=torch.uint8, device=self.weight.device))

    @torch.no_grad()
    def switch_origin_off_(self) -> None:
        """Leave the original kernel out from now on; only the branches are left."""
        for parameter in self.parameters(recurse=False):
            parameter.zero_()
            parameter.requires_grad_(False)
            parameter.grad = None  # an optimizer goes on stepping where there is one
        self.origin_norm = None
        self.origin_off = True

    def _switch_origin_on_(self) -> None:
        if self.origin_off:
            for parameter in self.parameters(recurse=False):
                parameter.requires_grad_(True)
            self.origin_off = False

    def origin_folded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Kernel and bias of the origin alone, its norm included, as in eval mode."""
        kernel = self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.origin_norm is None:
            return kernel, bias
        return algebra.fuse_norm(kernel, bias, **self.origin_norm.fold_arguments(dtype))

    def folded(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Kernel and bias of the whole block as one convolution, as in eval mode; differentiable.

        Args:
            dtype: what to compute and answer in (default: the weight's own).
        """
        dtype = self.weight.dtype if dtype is None else dtype
        return algebra.add(
            self.origin_folded(dtype), *(branch.folded(dtype) for branch in self.branch_modules().values())
        )

    @torch.no_grad()
    def set_origin_(self, kernel: Tensor, bias: Tensor | None) -> None:
        """Rewrite weight and bias so that the origin, its norm included, computes this kernel and bias."""
        if self.origin_norm is not None:
            norm = self.origin_norm.fold_arguments(kernel.dtype)
            scale = norm["gamma"] * torch.rsqrt(norm["var"] + norm["eps"])
            self.origin_norm.make_identity_(scale.abs() < _UNDOABLE_SCALE)
            norm = self.origin_norm.fold_arguments(kernel.dtype)
            if self.bias is None and bias is not None:  # then β takes what the convolution cannot
                scale = norm["gamma"] * torch.rsqrt(norm["var"] + norm["eps"])
                cast(Tensor, self.origin_norm.bias).copy_(bias + scale * norm["mean"])
                bias = norm["beta"] = norm["mean"] = None
            kernel, bias = algebra.unfuse_norm(kernel, bias, **norm)
        elif self.bias is None and bias is not None:
            raise BranchError(
                "the convolution has neither a bias nor a norm that could absorb a branch's shift: cut all its "
                "branches at once, or none"
            )
        self._switch_origin_on_()
        self.weight.copy_(kernel)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def branch_modules(self) -> dict[str, Branch]:
        """The branches by name, typed."""
        return {name: cast(Branch, branch) for name, branch in self.branches.items()}

    def set_branches_(self, branches: Mapping[str, Branch]) -> None:
        """Replace the branches, in this order. The dict is a new one: whoever remembers the old one can go back."""
        self.branches = nn.ModuleDict(dict(branches))
        self.branches.training = self.training

    def importances(self) -> dict[str, Tensor]:
        """Mean absolute γ of every branch's last norm (the paper's s_j), on the device."""
        return {name: branch.norm.importance for name, branch in self.branch_modules().items()}

    def unfoldable(self, branches: Collection[str] | None = None) -> dict[str, str]:
        """Parts of the block that cannot be folded, by their names in it (its own is empty), and why.

        Args:
            branches: those that are to be folded (default: all). The others may be whatever they are.
        """
        kept = () if branches is None else tuple(f"branches.{name}." for name in self.branches if name not in branches)
        parts = {name: part for name, part in self.named_modules() if not f"{name}.".startswith(kept)}
        found = {name: why_computed(part) for name, part in parts.items() if isinstance(part, _FOLDED)}
        if not found[""] and self.passed_norm is not None and (reason := why_computed(self.passed_norm)):
            found[""] = f"of the norm that it replaces: {reason}"
        return {name: reason for name, reason in found.items() if reason}

    def fuse(self) -> ConvNd:
        """The plain convolution with the same function, as a new module; this one stays as it is.

        Where the block has taken the place of a norm too, the new convolution has a bias.

        Raises:
            IneligibleLayerError: some of its weights are computed from others.

        Example:
            >>> block = as_block_(nn.Conv2d(4, 4, 3, padding=1))
            >>> type(block.fuse())
            <class 'torch.nn.modules.conv.Conv2d'>
        """
        for part, reason in self.unfoldable().items():
            raise IneligibleLayerError(f"the block cannot be folded{f', {part!r}' if part else ''}: {reason}")
        plain = copy.copy(self)
        for key, value in vars(self).items():  # the copy has the same hooks, but in dicts of its own
            if isinstance(value, dict):
                plain.__dict__[key] = copy.copy(value)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                fresh = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                plain._parameters[name] = fresh
        kernel, bias = self.folded(algebra.exact_dtype(self.weight))
        plain._passed = None
        if self.bias is None and bias is not None:
            plain.register_parameter("bias", nn.Parameter(self.weight.new_empty(bias.shape)))
        return _write_plain_(plain, kernel, bias)

    def prepare_(self, norm_group: tuple[Any] | None = None) -> RepConv:
        """From now on, take on the structure of any state dict that holds this layer."""
        self.prepared = True
        self.norm_group = norm_group
        for branch in self.branches.values():
            self._prepare_below_(branch)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Take on the file's structure, if that was asked for, before torch loads the children."""
        if prefix + "weight" in state_dict:
            if self.prepared:
                self._take_on_structure_(state_dict, prefix)
            elif self.branches:
                self._refuse_other_branches(state_dict, prefix, args[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _refuse_other_branches(self, state_dict: Mapping[str, Any], prefix: str, errors: list[str]) -> None:
        """Add to what torch raises with all other errors, also if the load is not strict."""
        start = prefix + "branches."
        saved = dict.fromkeys(key[len(start) :].split(".")[0] for key in state_dict if key.startswith(start))
        if saved.keys() != set(self.branches):
            which = "only" if saved.keys() < set(self.branches) else "others:"
            theirs = f"{which} {', '.join(saved)}" if saved else "none"
            errors.append(
                f"layer {prefix.removesuffix('.')!r} has branches ({', '.join(self.branches)}) and this state dict has "
                f"{theirs} for it, so the two would not compute the same: load plain weights before branches grow "
                "(before dyrep.DyRep is made), a controller's state before the model's, or let dyrep.prepare_(model) "
                "take on what is loaded"
            )

    def _take_on_structure_(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        start = prefix + "branches."
        if prefix + REPLACES in state_dict and self.passed_norm is None:
            raise StructureError(
                f"layer {prefix.removesuffix('.')!r}: in this state dict the block replaces the norm after the "
                "convolution too, and a state dict does not say which one that is: load it with dyrep.load, or give "
                "the model its structure with dyrep.restructure_ first"
            )
        found = dict.fromkeys(key[len(start) :].split(".")[0] for key in state_dict if key.startswith(start))
        kept = {name: branch for name, branch in self.branch_modules().items() if name in found}
        scaling = _scaling_in(state_dict, prefix)
        for name in found:
            point = state_dict.get(f"{start}{name}.point.weight")
            width = 1 if name != "1x1-KxK" or point is None else max(point.shape[0] // self.in_channels, 1)
            if is_branch(name):  # anything else is left for torch to report as unexpected
                if name not in kept or (kept[name].width, kept[name].norm.kind) != (width, scaling):
                    kept[name] = branch_for(self, name, width=width, scaling=scaling, generator=torch.Generator())
                self._prepare_below_(kept[name])
        order = self.branches if self.branches.keys() == kept.keys() else found  # a file may be sorted by name
        self.set_branches_({name: kept[name] for name in order if name in kept})
        if not any(key.startswith(prefix + "origin_norm.") for key in state_dict):
            self.origin_norm = None
        elif self.origin_norm is None or self.origin_norm.kind != scaling:
            self.origin_norm = origin_scaling_for(self, scaling)
            self._prepare_below_(self.origin_norm)
        if not self.weight.requires_grad and not self.origin_off:
            self.requires_grad_(False)

    def _prepare_below_(self, module: nn.Module) -> None:
        """Make the convolutions inside a branch able to grow by loading in turn."""
        for child in list(module.modules()):
            if type(child) in _BLOCK_OF and ConvGeometry.of(child).taps > 1:
                as_block_(child)
            if isinstance(child, RepConv):
                child.prepare_(self.norm_group)
        if self.norm_group is not None:
            sync_norms_(module, *self.norm_group)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{super().extra_repr()}, branches=[{', '.join(self.branches)}]"


class RepConv1d(RepConv, nn.Conv1d):
    """A `torch.nn.Conv1d` that can grow branches.

    Example:
        >>> isinstance(as_block_(nn.Conv1d(4, 4, 3, padding=1)), RepConv1d)
        True
    """


class RepConv2d(RepConv, nn.Conv2d):
    """A `torch.nn.Conv2d` that can grow branches.

    Example:
        >>> conv = nn.Conv2d(4, 4, 3, padding=1)
        >>> block = as_block_(conv)
        >>> block is conv, isinstance(block, nn.Conv2d)
        (True, True)
    """


class RepConv3d(RepConv, nn.Conv3d):
    """A `torch.nn.Conv3d` that can grow branches.

    Example:
        >>> isinstance(as_block_(nn.Conv3d(4, 4, 3, padding=1)), RepConv3d)
        True
    """


_BLOCK_OF: dict[type, type] = {nn.Conv1d: RepConv1d, nn.Conv2d: RepConv2d, nn.Conv3d: RepConv3d}
_PLAIN_OF: dict[type, type] = {block: plain for plain, block in _BLOCK_OF.items()}
_FOLDED = (_ConvNd, BranchNorm, ChannelScale)  # the parts of a block that have weights


def why_computed(module: nn.Module) -> str:
    """Why weights of a convolution or a norm cannot be rewritten: they are computed anew all the time; else empty.

    Example:
        >>> why_computed(nn.Conv2d(4, 4, 3))
        ''
        >>> print(why_computed(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)))[:22])
        its weight is computed
    """
    names = ("factor",) if isinstance(module, ChannelScale) else ("weight", "bias")
    computed = [name for name in names if name not in module._parameters]
    if not computed:
        return ""
    return (
        f"its {' and '.join(computed)} is computed (parametrization, weight norm, spectral norm or pruning), so it "
        "cannot be rewritten; make it permanent first"
    )


def branch_for(
    conv: nn.Module,
    name: str,
    *,
    gamma: float = GAMMA,
    width: int = 1,
    scaling: str = "norm",
    generator: torch.Generator | None = None,
) -> Branch:
    """Create a branch with random weights that fits a convolution's dtype, device, memory format and mode."""
    weight = cast(Tensor, conv.weight)
    branch = make_branch(
        name,
        ConvGeometry.of(conv),
        shift=_has_shift(conv),
        gamma=gamma,
        width=width,
        scaling=scaling,
        device=weight.device,
        dtype=weight.dtype,
        generator=generator,
    )
    channels_last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    if channels_last and not weight.is_contiguous():  # some shapes are both
        branch.to(memory_format=torch.channels_last)
    _take_after_(branch, conv)
    return branch.train(conv.training)


def origin_norm_for(conv: nn.Module) -> BranchNorm:
    """Create a norm that fits a convolution's own output."""
    return cast(BranchNorm, origin_scaling_for(conv, "norm"))


def origin_scaling_for(conv: nn.Module, kind: str) -> Scaling:
    """Create a norm, or a scale, that fits a convolution's own output."""
    weight = cast(Tensor, conv.weight)
    channels, shift = weight.shape[0], _has_shift(conv)
    scaling = make_scaling(kind, channels, shift=shift, device=weight.device, dtype=weight.dtype)
    _take_after_(scaling, conv)
    return scaling.train(conv.training)


def _take_after_(module: nn.Module, conv: nn.Module) -> None:
    """Give norms the ε and momentum of the batch norm whose place their block takes."""
    replaced = conv.passed_norm if isinstance(conv, RepConv) else None
    for norm in module.modules():
        if replaced is not None and isinstance(norm, BranchNorm):
            norm.eps = replaced.eps
            norm.momentum = norm.momentum if replaced.momentum is None else replaced.momentum


def _has_shift(conv: nn.Module) -> bool:
    return conv.has_shift if isinstance(conv, RepConv) else conv.bias is not None


def _scaling_in(state_dict: Mapping[str, Any], prefix: str) -> str:
    """What stands at the end of a block's branches, as far as a state dict tells."""
    parts = (prefix + "branches.", prefix + "origin_norm.")
    found = {key.rpartition(".")[2] for key in state_dict if key.startswith(parts)}
    if "gate" in found:
        return GatedNorm.kind
    return "linear" if "factor" in found else "norm"


def as_block_(conv: nn.Module) -> RepConv:
    """Turn a plain convolution into a block without branches, in place: same object, same keys, same function."""
    if isinstance(conv, RepConv):
        return conv
    if type(conv) not in _BLOCK_OF:
        raise IneligibleLayerError(f"{type(conv).__name__} is not one of torch's plain convolutions")
    conv.__class__ = _BLOCK_OF[type(conv)]
    block = cast(RepConv, conv)
    block._become_block_()
    return block


def as_plain_(block: RepConv) -> ConvNd:
    """Fold everything into weight and bias and turn a block back into the plain convolution, in place."""
    with torch.no_grad():
        kernel, bias = block.folded(algebra.exact_dtype(block.weight))
    return _write_plain_(block, kernel, bias)


@torch.no_grad()
def _write_plain_(block: RepConv, kernel: Tensor, bias: Tensor | None) -> ConvNd:
    block._switch_origin_on_()
    if block.passed_norm is not None:
        # the shift goes to the convolution if it has a bias, and to the norm if it has none
        step_back_(block.passed_norm, bias if block.bias is None else None)
    block._buffers.pop(REPLACES, None)
    block.__class__ = _PLAIN_OF[type(block)]
    del block._modules["branches"], block._modules["origin_norm"]
    for attribute in ("geometry", "execution", "origin_off", "prepared", "norm_group", "_passed"):
        block.__dict__.pop(attribute, None)
    block.weight.copy_(kernel)
    if block.bias is not None and bias is not None:
        block.bias.copy_(bias)
    return cast(ConvNd, block)
