"""Fold an evolved model back into the plain one, and check that both compute the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dyrep.block import REPLACES, RepConv, as_plain_
from dyrep.copying import copied
from dyrep.errors import DyRepError
from dyrep.surgery.preserve import Forward, device_of, preserved, run_batch
from dyrep.surgery.targets import require_foldable
from dyrep.surgery.wrappers import bare, forget_compiled

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_SHOWN = 6


def deploy(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """Fold every block into its convolution: the original architecture, key for key, with the same function.

    Args:
        model: the evolved model; compiled and DistributedDataParallel models are unwrapped.
        inplace: change the model itself rather than a copy. An optimizer that still holds the branches' parameters
            is of no further use then.

    Returns:
        The plain model, in the modes it had.

    Raises:
        DyRepError: a block cannot be folded, because its weight has become a computed one (by pruning, weight norm
            or a parametrization), or belongs to a larger model, or the model cannot be copied; nothing has been
            changed then.

    Example:
        >>> from dyrep.surgery.edits import expand_
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
        >>> keys = list(model.state_dict())
        >>> _ = expand_(model, "0")
        >>> list(deploy(model).state_dict()) == keys
        True
    """
    _check_whole(bare(model))
    require_foldable(dict(bare(model).named_modules()))
    try:
        plain = bare(model) if inplace else copied(bare(model))
    except TypeError as error:  # something in it is no data, such as a lock or an open file
        raise DyRepError(f"the model cannot be copied ({error}): give inplace=True to fold it as it is") from error
    for block in [module for module in plain.modules() if isinstance(module, RepConv)]:
        if isinstance(block, RepConv):  # a block inside a branch is gone with its parent
            as_plain_(block)
    for module in plain.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "only_for_training", False)]:
                del hooks[key]
    if inplace:
        forget_compiled()
    return plain


def _check_whole(model: nn.Module) -> None:
    """Raise if a block has taken the place of a norm that is not part of this model."""
    parts = set(map(id, model.modules()))
    for name, module in model.named_modules():
        if isinstance(module, RepConv) and module.passed_norm is not None and id(module.passed_norm) not in parts:
            raise DyRepError(
                f"layer {name!r} has taken the place of a norm outside this part of the model, where its shift would "
                "have to go: deploy the whole model"
            )


@dataclass(frozen=True)
class FoldReport:
    """What `verify` found.

    Attributes:
        errors: ‖Δ‖∞ / ‖y‖∞ per output, by the output's name.
        tolerance: the largest error that passes.
        compared: what was compared, in words.
        missing: keys of the first model's plain form that the second lacks, and the other way round.

    Example:
        >>> report = FoldReport({"output": 3e-7}, tolerance=1e-4, compared="1 output(s) in eval mode")
        >>> bool(report), print(report)
        passed: 1 output(s) in eval mode; relative error per output: output 3.00e-07 (tolerance 1e-04)
        (True, None)
    """

    errors: dict[str, float]
    tolerance: float
    compared: str
    missing: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """The largest error over all outputs."""
        return _largest(self.errors.values())

    @property
    def passed(self) -> bool:
        """Whether every output agrees within the tolerance and both have the same keys; NaN never passes."""
        return not self.missing and all(error <= self.tolerance for error in self.errors.values())

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        worst = sorted(self.errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1], reverse=True)
        shown = dict(worst[:_SHOWN])
        listed = self.errors if len(self.errors) <= _SHOWN else shown
        outputs = ", ".join(f"{name} {error:.2e}" for name, error in listed.items())
        if len(self.errors) > _SHOWN:
            outputs += f" and {len(self.errors) - _SHOWN} smaller ones"
        keys = f"; keys differ: {', '.join(self.missing[:5])}" if self.missing else ""
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"{verdict}: {self.compared}; relative error per output: {outputs} (tolerance {self.tolerance:.0e}){keys}"
        )


@torch.no_grad()
def verify(
    model: nn.Module,
    plain: nn.Module,
    example_input: Any,
    *,
    tolerance: float | None = None,
    forward: Forward | None = None,
) -> FoldReport:
    """Compare an evolved model with its deployed form on given inputs, both in eval mode.

    Args:
        model: the evolved model.
        plain: what `deploy` returned.
        example_input: a batch: a tensor, a tuple that begins with the input, a dict, or anything ``forward`` takes.
        tolerance: the largest relative error that passes (default by dtype: 1e-4 for float32, where rounding
            accumulates over the layers; 1e-10 for float64).
        forward: ``forward(model, batch)`` to run the models.

    Returns:
        A `FoldReport`, true if all outputs agree.

    Example:
        >>> from dyrep.surgery.edits import expand_
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
        >>> _ = expand_(model, "0")
        >>> verify(model, deploy(model), torch.randn(2, 8, 8, 8)).passed
        True
    """
    model, plain = bare(model), bare(plain)
    was_training = model.training or plain.training
    ours, theirs = eval_outputs(model, example_input, forward), eval_outputs(plain, example_input, forward)
    if ours.keys() != theirs.keys():
        raise DyRepError(f"the models do not have the same outputs: {', '.join(ours)} against {', '.join(theirs)}")
    if not ours:
        raise DyRepError("the models have no floating-point output to compare; return one with forward=")
    dtype = next(iter(model.parameters())).dtype
    keys = set(plain.state_dict()) ^ _plain_keys(model)
    compared = f"{len(ours)} output(s) in eval mode"
    if was_training:
        compared += " (given in training mode, where branches normalise by batch and outputs are not comparable)"
    return FoldReport(
        errors={name: relative_error(ours[name], theirs[name]) for name in ours},
        tolerance=_TOLERANCES.get(dtype, 1e-4) if tolerance is None else tolerance,
        compared=compared,
        missing=tuple(sorted(keys)),
    )


@torch.no_grad()
def eval_outputs(model: nn.Module, batch: Any, forward: Forward | None = None) -> dict[str, Tensor]:
    """A model's outputs in eval mode, by name, in its own precision; the model is left as it was."""
    with as_compared(model, training=False):
        return floating(run_batch(model, batch, forward))


@torch.no_grad()
def train_outputs(model: nn.Module, batch: Any, forward: Forward | None = None) -> dict[str, Tensor]:
    """A model's outputs in training mode, by name, in its own precision; the model is left as it was."""
    with as_compared(model, training=True):
        return floating(run_batch(model, batch, forward))


@contextmanager
def as_compared(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run a model as its outputs are compared, which leaves it as it was.

    Autocast and TF32 are off: their rounding is larger than any difference worth finding.

    Args:
        model: the model that is going to run.
        training: mode to run it in.

    Example:
        >>> layer, x = nn.Linear(2, 2), torch.ones(1, 2)
        >>> with torch.autocast("cpu", torch.bfloat16), as_compared(layer, training=False):
        ...     layer(x).dtype, layer.training
        (torch.float32, False)
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    with (
        preserved(model, training=training),
        _without_tf32(cudnn, getattr(cudnn, "conv", None)),
        _without_tf32(matmul, matmul),
        torch.autocast(device_of(model).type, enabled=False),
    ):
        yield


@contextmanager
def _without_tf32(switch: Any, newer: Any) -> Iterator[None]:
    """Switch TF32 off if it is on, through whichever of torch's two interfaces the user has not ruled out."""
    off: bool | str = False
    try:
        name, before = "allow_tf32", switch.allow_tf32
    except RuntimeError:  # the newer interface was used, and the older one refuses to answer since
        switch, name, before, off = newer, "fp32_precision", newer.fp32_precision, "ieee"
    if before != off:
        setattr(switch, name, off)
    try:
        yield
    finally:
        if before != off:
            setattr(switch, name, before)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value - reference‖∞ / ‖reference‖∞; infinite where the shapes differ, NaN where a value is not finite."""
    if value.shape != reference.shape:
        return float("inf")
    if value.numel() == 0:
        return 0.0
    value, reference = value.detach().double(), reference.detach().double()
    scale = reference.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((value - reference).abs().max() / scale)


def drift(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float:
    """The largest relative error over all outputs."""
    return _largest(relative_error(after[name], before[name]) for name in before)


def _largest(errors: Iterable[float]) -> float:
    """The largest error; NaN if any is, which `max` would hide."""
    found = list(errors)
    return math.nan if any(math.isnan(error) for error in found) else max(found, default=0.0)


def _plain_keys(model: nn.Module) -> set[str]:
    blocks = [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, RepConv)]
    parts = ("branches.", "origin_norm.", REPLACES)
    extras = tuple(f"{name}.{part}" if name else part for name in blocks for part in parts)
    return {key for key in model.state_dict() if not key.startswith(extras)}


def floating(output: Any) -> dict[str, Tensor]:
    """The floating-point tensors in what a model returned, by name: those that can be compared."""
    return {name: tensor for name, tensor in named_tensors(output) if tensor.is_floating_point()}


def named_tensors(output: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in what a model returned, with a name that says where.

    Example:
        >>> [name for name, _ in named_tensors({"logits": torch.ones(1), "aux": [torch.ones(1), None]})]
        ['logits', 'aux[0]']
    """
    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from named_tensors(value, f"{name}.{key}" if name != "output" else str(key))
    elif isinstance(output, (tuple, list)):
        for index, value in enumerate(output):
            yield from named_tensors(value, f"{name}[{index}]")
    elif hasattr(output, "__dict__") and not isinstance(output, nn.Module):
        yield from named_tensors(vars(output), name)
