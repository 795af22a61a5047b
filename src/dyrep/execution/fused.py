"""The exact block, with as few passes over activations as there can be.

The branches fall into two classes. Those that are pointwise (``1x1``, ``residual``, ``1x1-AVG`` behind its pooling, and
the 1x1 inside ``1x1-KxK``) are never run: the second moments of the input give their statistics, see
`dyrep.kernels.moments`, and with these each is a term of the kernel that the origin runs with, or part of the kernel
of ``1x1-KxK``. The others are run by cuDNN, and `normalised_sum` measures, scales and adds their outputs in two passes.

Moments cost a handful of small operations, so they are used where activations are large, see `MOMENTS_FROM`. The first
convolution of a network is a case of its own: it reads few channels, and nothing needs the gradient of the image. There
the moments of whole patches give the statistics of all branches, and none is run.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dyrep import algebra
from dyrep.branches.kinds import AverageBranch, Branch, PointwiseKernelBranch, ResidualBranch, SmallKernelBranch
from dyrep.execution.parts import (
    Block,
    add,
    composed,
    conv_dtype,
    convolve,
    is_plain,
    is_pointwise,
    part_of,
    pooled,
    pools_itself,
    scales_and_shift,
    strided,
    wide,
)
from dyrep.geometry import PLAIN_CONVS
from dyrep.kernels import Part, assemble, cast_all, fan_out, normalised_sum, patches, second_moments
from dyrep.norm import BranchNorm, track_all_

MOMENTS_FROM = 16 << 20
"""Bytes of a block's input from which on pointwise branches are not run. It serves, but has not been tuned."""

PATCH_UP_TO = 256
"""Largest patch, in numbers, whose moments are computed for a first convolution."""


def forward(block: Block, x: Tensor, moments_from: int | None = None) -> Tensor:
    """The sum of all branches over an input as they read it."""
    dtype = conv_dtype(block.weight)
    x = x.to(dtype)
    large = x.numel() * x.element_size() >= (MOMENTS_FROM if moments_from is None else moments_from)
    return _Sum(block, x, dtype, large).result()


class _Moments:
    """Statistics of what is linear in the rows of a matrix: pointwise convolutions, or kernels over patches."""

    def __init__(self, x: Tensor, columns: int | None = None) -> None:
        mean, second = second_moments(x)
        self.mean, second = mean[:columns], second[:columns, :columns]
        self.covariance = torch.addr(second, self.mean, self.mean, alpha=-1)

    def of(self, kernels: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Mean and variance of every kernel's output."""
        rows = torch.cat([wide(kernel).flatten(1) for kernel in kernels])
        var = ((rows @ self.covariance) * rows).sum(1).clamp(min=0)
        sizes = [len(kernel) for kernel in kernels]
        return list(zip((rows @ self.mean).split(sizes), var.split(sizes), strict=True))

    def of_input(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of every column."""
        return self.mean, self.covariance.diagonal().clamp(min=0)


class _Folded(NamedTuple):
    """A branch that needs not be run: its statistics, and where its kernel goes (None: it is the identity)."""

    part: Part | None
    norm: BranchNorm
    mean: Tensor
    var: Tensor


class _Sum:
    """What a block adds up: a kernel that needs no statistics any more, and outputs that do."""

    def __init__(self, block: Block, x: Tensor, dtype: torch.dtype, large: bool) -> None:
        g = block.geometry
        self._block, self._dtype, self._geometry = block, dtype, g
        self._branches = list(block.branch_modules().values())
        self._readers = iter(fan_out(x, 6 + len(self._branches)))
        self._x = x
        plain = g.groups == 1 and g.ndim == 2 and not g.needs_prepadding
        self._first = plain and not x.requires_grad and g.in_channels * g.taps <= PATCH_UP_TO
        self._use_moments = plain and (large or self._first)
        self._linear_origin = block.origin_norm is None and not block.origin_off
        self._input_moments: _Moments | None = None
        self._inner: dict[Branch, Tensor] = {}  # kernels of 1x1-KxK, composed
        self._folded: dict[Branch, _Folded] = {}
        self._weights: dict[object, Tensor] = {}  # of convolutions that are run

    def result(self) -> Tensor:
        """The sum."""
        block, g = self._block, self._geometry
        if self._use_moments:
            with torch.autocast(self._x.device.type, enabled=False):
                self._fold_pointwise()
                if self._first and self._linear_origin:
                    self._fold_patches()
        left = [branch for branch in self._branches if branch not in self._folded]
        self._cast_weights(left)
        terms, norms = [], []
        if block.origin_norm is not None:
            terms.append(convolve(g, self._input(), self._weights[block], block.bias))
            norms.append(cast(BranchNorm, block.origin_norm))
        for branch in left:
            terms.append(self._output(branch))
            norms.append(cast(BranchNorm, branch.norm))
        base = self._base()
        if terms:
            return _normalised(base, terms, norms)
        assert base is not None
        return base

    def _input(self) -> Tensor:
        """The input, for one more reader."""
        return next(self._readers)

    # -- branches that are not run ------------------------------------------------------------------------------

    def _fold_pointwise(self) -> None:
        unit_stride = all(s == 1 for s in self._geometry.stride)
        points = [branch for branch in self._branches if is_pointwise(branch)]
        chains = [
            branch
            for branch in self._branches
            if isinstance(branch, PointwiseKernelBranch) and branch.inner_norm and is_plain(branch.conv)
        ]
        residuals = [branch for branch in self._branches if isinstance(branch, ResidualBranch)]
        kernels = [cast(Tensor, branch.point.weight) for branch in chains]
        if unit_stride:
            kernels += [cast(Part, part_of(branch)).kernel for branch in points]
        if kernels or residuals:
            self._input_moments = _Moments(self._input())
        if self._input_moments is not None and kernels:
            found = self._input_moments.of(kernels)
            for chain, (mean, var) in zip(chains, found[: len(chains)], strict=True):
                self._compose(chain, mean, var)
            if unit_stride:
                for branch, statistics in zip(points, found[len(chains) :], strict=True):
                    self._fold(branch, part_of(branch), *statistics)
        if points and not unit_stride:
            moments = _Moments(strided(self._input(), self._geometry))
            parts = [cast(Part, part_of(branch)) for branch in points]
            found = moments.of([part.kernel for part in parts])
            for branch, part, statistics in zip(points, parts, found, strict=True):
                self._fold(branch, part, *statistics)
        for branch in self._branches:
            # pooling would need a kernel of full size to go into
            if isinstance(branch, AverageBranch) and self._linear_origin and not self._first:
                average = part_of(branch)
                if average is not None:
                    moments = _Moments(pooled(self._input(), self._geometry))
                    self._fold(branch, average, *moments.of([average.kernel])[0])
        if self._input_moments is not None and (self._linear_origin or points):
            for residual in residuals:
                self._fold(residual, None, *self._input_moments.of_input())

    def _compose(self, branch: PointwiseKernelBranch, mean: Tensor, var: Tensor) -> None:
        inner = cast(BranchNorm, branch.inner_norm)
        scale, _ = scales_and_shift([inner], None, [var])
        track_all_([inner], mean[None], var[None], self._x.numel() // self._x.shape[1])
        scaled = scale.reshape(-1, 1, 1, 1) * wide(cast(Tensor, branch.point.weight))
        self._inner[branch] = composed(scaled, branch, cast(Tensor, branch.conv.weight), self._dtype)

    def _fold_patches(self) -> None:
        """Fold what is left by the moments of all patches that the kernel sees."""
        g = self._geometry
        parts: dict[Branch, Part] = {}
        for branch in self._branches:
            part = Part(self._inner[branch]) if branch in self._inner else part_of(branch)
            if part is not None and branch not in self._folded:
                parts[branch] = part
        if not parts:
            return
        pads = tuple(before for before, _ in g.pads)
        seen = patches(self._x, g.kernel_size, g.stride, pads, g.dilation)
        full = [
            part.kernel.expand(*part.kernel.shape[:2], *g.kernel_size) / g.taps
            if part.spread
            else algebra.pad_kernel(part.kernel, g.kernel_size, part.tap)
            for part in parts.values()
        ]
        found = _Moments(seen, g.in_channels * g.taps).of(full)
        for (branch, part), statistics in zip(parts.items(), found, strict=True):
            self._fold(branch, part, *statistics)

    def _fold(self, branch: Branch, part: Part | None, mean: Tensor, var: Tensor) -> None:
        self._folded[branch] = _Folded(part, cast(BranchNorm, branch.norm), mean, var)

    def _base(self) -> Tensor | None:
        """The output of everything that needs no statistics any more, in one convolution."""
        block, g = self._block, self._geometry
        folds = sorted(self._folded.values(), key=lambda fold: fold.part is None)  # the identity comes last
        if not folds:
            return convolve(g, self._input(), self._weights[block], block.bias) if self._linear_origin else None
        norms = [fold.norm for fold in folds]
        scales, shift = scales_and_shift(norms, [f.mean for f in folds], [f.var for f in folds])
        parts = [fold.part for fold in folds if fold.part is not None]
        small = not self._linear_origin  # then all that is folded is pointwise
        tap = (0, 0) if small else cast("tuple[int, int]", g.identity_tap)
        kernel = assemble(
            None if small else block.weight,
            [Part(part.kernel) for part in parts] if small else parts,
            scales,
            size=cast("tuple[int, int]", g.point if small else g.kernel_size),
            identity=tap if len(parts) < len(folds) else None,
            dtype=self._dtype,
        )
        if small:
            shift = None if shift is None else shift.to(self._dtype)
            out = F.conv2d(self._input(), kernel, shift, cast("tuple[int, int]", g.stride))
        else:
            out = convolve(g, self._input(), kernel, add(block.bias, shift))
        count = out.numel() // out.shape[1]
        track_all_(norms, torch.stack([f.mean for f in folds]), torch.stack([f.var for f in folds]), count)
        return out

    # -- branches that are run ----------------------------------------------------------------------------------

    def _cast_weights(self, branches: list[Branch]) -> None:
        """Cast the weights of all convolutions that are run, in one go."""
        convs: list[Any] = [self._block] if self._block.origin_norm is not None or not self._folded else []
        for branch in branches:
            if branch not in self._inner:
                convs += [conv for conv in branch.children() if isinstance(conv, PLAIN_CONVS) and is_plain(conv)]
        self._weights = dict(zip(convs, cast_all([conv.weight for conv in convs], self._dtype), strict=True))

    def _conv(self, conv: Any, x: Tensor) -> Tensor:
        """Run a convolution of a branch."""
        return conv._conv_forward(x, self._weights[conv], None) if conv in self._weights else conv(x)

    def _output(self, branch: Branch) -> Tensor:
        """A branch before its norm."""
        x = self._input()
        if branch in self._inner:
            return convolve(branch.geometry, x, self._inner[branch])
        if isinstance(branch, PointwiseKernelBranch) and branch.inner_norm is not None:
            return self._conv(branch.conv, _normalised(None, [self._conv(branch.point, x)], [branch.inner_norm]))
        if isinstance(branch, AverageBranch) and pools_itself(branch):
            averaged = pooled(x, branch.geometry)
            return averaged if branch.point is None else self._conv(branch.point, averaged)
        if isinstance(branch, SmallKernelBranch):
            return self._conv(branch.conv, branch.padded(x))
        return branch.linear(x)


def _normalised(base: Tensor | None, terms: list[Tensor], norms: list[BranchNorm]) -> Tensor:
    gammas, betas = zip(*(norm.affine() for norm in norms), strict=True)
    gamma = torch.stack([wide(gamma) for gamma in gammas])
    beta = None
    for each in betas:  # not one sum over all: their gradients would be one piece of memory
        beta = add(beta, None if each is None else wide(each))
    out, mean, var = normalised_sum(base, terms, gamma, beta, norms[0].eps)
    track_all_(norms, mean, var, terms[0].numel() // terms[0].shape[1])
    return out
