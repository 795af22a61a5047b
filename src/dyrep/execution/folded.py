"""The block as one convolution: its kernel is computed from the branches at every step.

What is missing to do that are the branches' σ. Every few steps all branches are run on the first few images of the
batch, and what is measured there moves the running statistics, which the kernel is computed with. Only a gradient
through σ needs the measured σ itself: where one is asked for, it takes the place of the running one in these steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dyrep.branches.kinds import AverageBranch, Branch, PointwiseKernelBranch, ResidualBranch, SmallKernelBranch
from dyrep.execution.parts import (
    Block,
    add,
    composed,
    conv_dtype,
    convolve,
    is_plain,
    part_of,
    pooled,
    scales_and_shift,
    wide,
)
from dyrep.execution.settings import Execution
from dyrep.kernels import Part, assemble, cast_all, statistics
from dyrep.norm import BranchNorm, track_all_


def forward(block: Block, x: Tensor, settings: Execution) -> Tensor:
    """The whole block over an input as its branches read it, in one convolution."""
    dtype = conv_dtype(block.weight)
    x = x.to(dtype)
    again = _runs_again()
    folding = _Folding(settings, dtype, again)
    if not (again or settings.clock.managed or torch.compiler.is_compiling()):
        settings.clock.step += 1
    images = settings.images_for(len(x), block.geometry.output_positions(x.shape[2:]))
    seen = x[:images] if settings.gradient == "full" else x[:images].detach()
    with torch.autocast(x.device.type, enabled=False):
        kernel, bias = folding.fold(block, seen)
        return convolve(block.geometry, x, kernel, bias)


def _runs_again() -> bool:
    """Whether this is a backward pass, in which activation checkpointing runs blocks once more."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class _Fold(NamedTuple):
    """A branch on its way into the kernel: where it goes, and its output on the images that σ is measured on."""

    part: Part | None  # None: the identity
    output: Tensor | None
    norm: BranchNorm


class _Folding:
    """Computes the kernel of a block, and of blocks inside it; once more as it was, if that has been done before."""

    def __init__(self, settings: Execution, dtype: torch.dtype, again: bool) -> None:
        self._dtype, self._again, self._span = dtype, again, settings.clock.span
        self._differentiates = settings.gradient in ("weights", "full")
        # without a gradient, what was measured is in the running statistics by now
        self._measure = (settings.clock.was_due and self._differentiates) if again else settings.clock.due
        self._weights: dict[object, Tensor] = {}

    def fold(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Kernel and bias of a block whose input on the images looked at is ``x``."""
        g = block.geometry
        folds: list[_Fold] = []
        self._cast_weights(block)
        if block.origin_norm is not None:
            part = Part(block.weight)
            output = self._seen(lambda: convolve(g, x, self._weights[block], block.bias))
            folds.append(_Fold(part, output, cast(BranchNorm, block.origin_norm)))
        folds += [self._branch(branch, x) for branch in block.branch_modules().values()]
        folds.sort(key=lambda fold: fold.part is None)  # the identity comes last
        scales, shift = self._scales(folds)
        if block.bias is not None:
            # the mean of a normalised origin contains the bias, so the shift has taken it off already
            shift = add(wide(block.bias) * (1 if block.origin_norm is None else scales[0]), shift)
        parts = [fold.part for fold in folds if fold.part is not None]
        kernel = assemble(
            None if block.origin_norm is not None else block.weight,  # zero where the origin is left out
            parts,
            scales,
            size=cast("tuple[int, int]", g.kernel_size),
            identity=cast("tuple[int, int]", g.identity_tap) if len(parts) < len(folds) else None,
            dtype=self._dtype,
        )
        return kernel, shift

    def _branch(self, branch: Branch, x: Tensor) -> _Fold:
        norm = cast(BranchNorm, branch.norm)
        part = part_of(branch)
        if isinstance(branch, ResidualBranch):
            return _Fold(None, self._seen(lambda: branch.linear(x)), norm)
        g = branch.geometry
        if part is not None:
            return _Fold(part, self._seen(lambda: self._run(branch, x)), norm)
        if isinstance(branch, PointwiseKernelBranch) and branch.inner_norm is not None:
            kernel = self._pointwise_kernel(branch, branch.inner_norm, x)
        else:
            kernel = branch.kernel(self._dtype)
        return _Fold(Part(kernel), self._seen(lambda: convolve(g, x, kernel)), norm)

    def _cast_weights(self, block: Block) -> None:
        """Cast the weights of what is run to be measured, in one go."""
        if not self._measure:
            return
        convs: list[Any] = [] if block.origin_norm is None else [block]
        for branch in block.branch_modules().values():
            names = ("conv", "point") if part_of(branch) is not None else ("point",)
            convs += [child for name, child in branch.named_children() if name in names]
        with nullcontext() if self._differentiates else torch.no_grad():
            casts = cast_all([conv.weight for conv in convs], self._dtype)
        self._weights.update(zip(convs, casts, strict=True))

    def _run(self, branch: Branch, x: Tensor) -> Tensor:
        """A branch that consists of one convolution, on the images looked at."""
        if isinstance(branch, SmallKernelBranch):
            conv: Any = branch.conv
            return cast(Tensor, conv._conv_forward(branch.padded(x), self._weights[conv], None))
        point = cast(AverageBranch, branch).point
        return F.conv2d(pooled(x, branch.geometry), self._weights[point], groups=branch.geometry.groups)

    def _pointwise_kernel(self, branch: PointwiseKernelBranch, inner: BranchNorm, x: Tensor) -> Tensor:
        weight = cast(Tensor, branch.point.weight)
        groups = branch.geometry.groups
        mixed = self._seen(lambda: F.conv2d(x, self._weights[branch.point], groups=groups))
        scale, _ = self._scales([_Fold(None, mixed, inner)])
        point = assemble(None, [Part(weight)], scale, size=(1, 1), dtype=self._dtype)
        if is_plain(branch.conv):
            second = cast(Tensor, branch.conv.weight)
        else:
            scaled = None if mixed is None else self._seen(lambda: mixed * scale.reshape(-1, 1, 1).to(mixed.dtype))
            second, _ = self.fold(cast(Block, branch.conv), x if scaled is None else scaled)
        return composed(point, branch, second, self._dtype)

    def _seen(self, run: Callable[[], Tensor]) -> Tensor | None:
        """An output to measure, if this is a step to measure in."""
        if not self._measure:
            return None
        with nullcontext() if self._differentiates else torch.no_grad():
            return run()

    def _scales(self, folds: list[_Fold]) -> tuple[Tensor, Tensor | None]:
        """γ / σ of every branch, a row for each, and what their shifts add up to."""
        norms = [fold.norm for fold in folds]
        outputs = [fold.output for fold in folds if fold.output is not None]
        if outputs:
            mean, var = statistics(outputs)
            if not self._again:
                track_all_(norms, mean, var, outputs[0].numel() // outputs[0].shape[1], self._span)
            if self._differentiates:
                return scales_and_shift(norms, mean.unbind(), var.unbind())
        running = [norm.running_mean for norm in norms if norm.running_mean is not None]
        # copies: a block that is run again before the backward pass moves its statistics on
        means = torch.stack([wide(mean) for mean in running]).unbind() if running else None
        return scales_and_shift(norms, means, [wide(norm.running_var) for norm in norms])
