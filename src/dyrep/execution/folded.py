"""The block as one convolution: its kernel is computed from the branches at every step.

What is missing to do that are the branches' σ. They are measured on the first few images of the batch, where all
branches are run, or taken from the running statistics in the steps between two measurements. With the gradient
``"length"`` nothing is differentiated there: a kernel's gradient is only made orthogonal to it, output channel by output
channel. That is what a norm does to it too, for what is divided by σ does not depend on the kernel's length, and keeps
weight decay and learning rate meaning what they mean in a normalised network.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dyrep.branches.kinds import AverageBranch, Branch, PointwiseKernelBranch, ResidualBranch, SmallKernelBranch
from dyrep.execution.parts import (
    Block,
    add,
    composed,
    conv_dtype,
    convolve,
    is_plain,
    pooled,
    pools_itself,
    scale_of,
    shift_of,
    wide,
)
from dyrep.execution.settings import Execution
from dyrep.kernels import Part, assemble, statistics
from dyrep.norm import BranchNorm


def forward(block: Block, x: Tensor, settings: Execution) -> Tensor:
    """The whole block over an input as its branches read it, in one convolution."""
    dtype = conv_dtype(block.weight)
    x = x.to(dtype)
    measure = settings.clock.due
    if settings.leads:
        settings.clock.step += 1
    seen = x[: settings.images] if settings.gradient == "full" else x[: settings.images].detach()
    with torch.autocast(x.device.type, enabled=False):
        kernel, bias = _Folding(settings.gradient, dtype, measure).fold(block, seen)
        return convolve(block.geometry, x, kernel, bias)


class _Fold(NamedTuple):
    """A branch on its way into the kernel: where it goes, and its output on the images that σ is measured on."""

    part: Part | None  # None: the identity
    output: Tensor | None
    norm: BranchNorm


class _Folding:
    """Computes the kernel of a block, and of blocks inside it."""

    def __init__(self, gradient: str, dtype: torch.dtype, measure: bool) -> None:
        self._dtype, self._measure = dtype, measure
        self._invariant = gradient == "length"
        self._differentiates = gradient in ("weights", "full")

    def fold(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Kernel and bias of a block whose input on the images looked at is ``x``."""
        folds: list[_Fold] = []
        g = block.geometry
        if block.origin_norm is not None:
            part = Part(block.weight, invariant=self._invariant)
            output = self._seen(lambda: convolve(g, x, block.weight.to(self._dtype), block.bias))
            folds.append(_Fold(part, output, cast(BranchNorm, block.origin_norm)))
        folds += [self._branch(branch, x) for branch in block.branch_modules().values()]
        scales, shift = self._scales(folds)
        if block.origin_norm is None and block.bias is not None:
            shift = add(wide(block.bias), shift)
        elif block.origin_norm is not None and block.bias is not None:
            shift = add(shift, scales[0] * wide(block.bias))  # the mean that is subtracted contains it
        parts = [fold.part for fold in folds if fold.part is not None]
        identity = [scale for scale, fold in zip(scales, folds, strict=True) if fold.part is None]
        scaled = [scale for scale, fold in zip(scales, folds, strict=True) if fold.part is not None]
        kernel = assemble(
            None if block.origin_norm is not None else block.weight,  # zero where the origin is left out
            parts,
            torch.stack(scaled) if scaled else wide(block.weight).new_empty(0, g.out_channels),
            size=cast("tuple[int, int]", g.kernel_size),
            identity=identity[0] if identity else None,
            identity_tap=cast("tuple[int, int]", g.identity_tap or (0, 0)),
            dtype=self._dtype,
        )
        return kernel, shift

    def _branch(self, branch: Branch, x: Tensor) -> _Fold:
        norm = cast(BranchNorm, branch.norm)
        g = branch.geometry
        part: Part | None
        if isinstance(branch, ResidualBranch):
            return _Fold(None, self._seen(lambda: branch.linear(x)), norm)
        if isinstance(branch, SmallKernelBranch) and is_plain(branch.conv):
            center, weight = g.center, branch.conv.weight
            tap = tuple(0 if n == k else c for n, k, c in zip(weight.shape[2:], g.kernel_size, center, strict=True))
            part = Part(weight, tap=cast("tuple[int, int]", tap), invariant=self._invariant)
            return _Fold(part, self._seen(lambda: self._run_small(branch, x)), norm)
        if isinstance(branch, AverageBranch) and branch.point is not None and pools_itself(branch):
            point: Any = branch.point
            part = Part(point.weight, spread=True, invariant=self._invariant)
            run = lambda: torch.nn.functional.conv2d(  # noqa: E731
                pooled(x, g), point.weight.to(self._dtype), groups=g.groups
            )
            return _Fold(part, self._seen(run), norm)
        if isinstance(branch, PointwiseKernelBranch) and branch.inner_norm is not None:
            kernel = self._pointwise_kernel(branch, branch.inner_norm, x)
        else:
            kernel = branch.kernel(self._dtype)
        part = Part(kernel, invariant=self._invariant)
        return _Fold(part, self._seen(lambda: convolve(g, x, kernel)), norm)

    def _run_small(self, branch: SmallKernelBranch, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=self._dtype, enabled=self._dtype != branch.conv.weight.dtype):
            return branch.linear(x)

    def _pointwise_kernel(self, branch: PointwiseKernelBranch, inner: BranchNorm, x: Tensor) -> Tensor:
        g = branch.geometry
        weight: Any = branch.point.weight
        conv: Any = torch.nn.functional.conv2d
        mixed = self._seen(lambda: conv(x, weight.to(self._dtype), groups=g.groups))
        (scale,), _ = self._scales([_Fold(None, mixed, inner)])
        part = Part(weight, invariant=self._invariant)
        point = assemble(None, [part], scale[None], size=(1, 1), dtype=self._dtype)
        if is_plain(branch.conv):
            second: Tensor = branch.conv.weight
        else:
            scaled = None if mixed is None else mixed * scale.to(mixed.dtype)[:, None, None]
            second, _ = self.fold(cast(Block, branch.conv), x if scaled is None else scaled)
        return composed(point, branch, second, self._dtype)

    def _seen(self, run: Any) -> Tensor | None:
        """An output to measure, if this is a step to measure in."""
        if not self._measure:
            return None
        with nullcontext() if self._differentiates else torch.no_grad():
            return cast(Tensor, run())

    def _scales(self, folds: list[_Fold]) -> tuple[list[Tensor], Tensor | None]:
        """γ / σ of every branch, and what their shifts add up to."""
        outputs = [fold.output for fold in folds if fold.output is not None]
        if not folds:
            return [], None
        if outputs:
            mean, var = statistics(outputs)
            count = outputs[0].numel() // outputs[0].shape[1]
            for fold, m, v in zip(folds, mean.detach().unbind(), var.detach().unbind(), strict=True):
                fold.norm.track_(m, v, count)
            means, variances = mean.unbind(), var.unbind()
        else:
            means = tuple(torch.zeros_like(f.norm.running_var) if f.norm.running_mean is None else f.norm.running_mean for f in folds)
            variances = tuple(wide(fold.norm.running_var) for fold in folds)
        scales = [scale_of(fold.norm, var) for fold, var in zip(folds, variances, strict=True)]
        shift = None
        for fold, m, scale in zip(folds, means, scales, strict=True):
            shift = add(shift, shift_of(fold.norm, m, scale))
        return scales, shift
