"""The exact block, with as few passes over activations as there can be.

The branches fall into two classes. Those that are pointwise (``1x1``, ``residual``, ``1x1-AVG`` behind its pooling, and
the 1x1 inside ``1x1-KxK``) are never run: the second moments of the input give their statistics, see
`dyrep.kernels.moments`, and with these each is a term of the kernel that the origin runs with, or part of the kernel
of ``1x1-KxK``. The others are run by cuDNN, and `normalised_sum` measures, scales and adds their outputs in two passes.
Moments cost a handful of small operations, so they are used where activations are large, see `MOMENTS_FROM`.
"""

from __future__ import annotations

from typing import cast

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
    is_pointwise,
    pooled,
    pools_itself,
    scale_of,
    shift_of,
    strided,
    wide,
)
from dyrep.kernels import Part, assemble, normalised_sum, second_moments
from dyrep.norm import BranchNorm

MOMENTS_FROM = 16 << 20
"""Bytes of a block's input from which on pointwise branches are not run. Found by measurement on an H200."""


def forward(block: Block, x: Tensor, moments_from: int | None = None) -> Tensor:
    """The sum of all branches over an input as they read it."""
    dtype = conv_dtype(block.weight)
    x = x.to(dtype)
    enough = MOMENTS_FROM if moments_from is None else moments_from
    return _Sum(block, x, dtype, x.numel() * x.element_size() >= enough).result()


class _Moments:
    """Statistics of pointwise convolutions over one input."""

    def __init__(self, x: Tensor) -> None:
        self.mean, second = second_moments(x)
        self.covariance = second - torch.outer(self.mean, self.mean)
        self.count = x.numel() // x.shape[1]

    def of(self, kernel: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of a pointwise kernel's output."""
        rows = wide(kernel).flatten(1)
        return rows @ self.mean, ((rows @ self.covariance) * rows).sum(1).clamp(min=0)

    def of_input(self) -> tuple[Tensor, Tensor]:
        return self.mean, self.covariance.diagonal().clamp(min=0)


class _Sum:
    """What a block adds up: a kernel that needs no statistics any more, and outputs that do."""

    def __init__(self, block: Block, x: Tensor, dtype: torch.dtype, use_moments: bool) -> None:
        self._block, self._x, self._dtype, self._geometry = block, x, dtype, block.geometry
        g = self._geometry
        self._use_moments = use_moments and g.groups == 1 and g.ndim == 2 and not g.needs_prepadding
        self._moments: dict[bool, _Moments] = {}
        self._terms: list[Tensor] = []
        self._norms: list[BranchNorm] = []
        self._parts: list[Part] = []
        self._scales: list[Tensor] = []
        self._identity: Tensor | None = None
        self._shift: Tensor | None = None
        self._linear_origin = block.origin_norm is None and not block.origin_off

    def result(self) -> Tensor:
        block, g = self._block, self._geometry
        branches = list(block.branch_modules().values())
        with torch.autocast(self._x.device.type, enabled=False):
            folded = self._fold_pointwise(branches) if self._use_moments else set()
        if block.origin_norm is not None:
            self._run(convolve(g, self._x, block.weight.to(self._dtype), block.bias), block.origin_norm)
        for branch in branches:
            if branch not in folded:
                self._run(self._output(branch), branch.norm)
        return self._added()

    def _run(self, output: Tensor, norm: object) -> None:
        self._terms.append(output)
        self._norms.append(cast(BranchNorm, norm))

    def _fold_pointwise(self, branches: list[Branch]) -> set[Branch]:
        """Make what is pointwise a part of the kernel that runs anyway; says which branches that was done to."""
        folded: set[Branch] = set()
        for branch in branches:
            norm = cast(BranchNorm, branch.norm)
            if is_pointwise(branch):
                kernel = cast(SmallKernelBranch, branch).conv.weight
                moments = self._moments_of(strided_input=True)
                self._fold(Part(kernel, tap=cast("tuple[int, int]", self._geometry.center)), norm, *moments.of(kernel), moments.count)
                folded.add(branch)
            elif self._linear_origin and isinstance(branch, AverageBranch) and branch.point and pools_itself(branch):
                moments = _Moments(pooled(self._x, self._geometry))
                kernel = branch.point.weight
                self._fold(Part(kernel, spread=True), norm, *moments.of(kernel), moments.count)
                folded.add(branch)
        for branch in branches:
            if isinstance(branch, ResidualBranch) and (self._linear_origin or folded):
                norm = cast(BranchNorm, branch.norm)
                moments = self._moments_of(strided_input=True)
                mean, var = moments.of_input()
                self._identity = scale_of(norm, var)
                self._shift = add(self._shift, shift_of(norm, mean, self._identity))
                norm.track_(mean, var, moments.count)
                folded.add(branch)
        return folded

    def _fold(self, part: Part, norm: BranchNorm, mean: Tensor, var: Tensor, count: int) -> None:
        scale = scale_of(norm, var)
        self._parts.append(part)
        self._scales.append(scale)
        self._shift = add(self._shift, shift_of(norm, mean, scale))
        norm.track_(mean, var, count)

    def _moments_of(self, *, strided_input: bool) -> _Moments:
        strided_input = strided_input and any(s > 1 for s in self._geometry.stride)
        if strided_input not in self._moments:
            self._moments[strided_input] = _Moments(strided(self._x, self._geometry) if strided_input else self._x)
        return self._moments[strided_input]

    def _output(self, branch: Branch) -> Tensor:
        """A branch before its norm."""
        if isinstance(branch, PointwiseKernelBranch) and branch.inner_norm is not None:
            return self._pointwise_kernel(branch, branch.inner_norm)
        if isinstance(branch, AverageBranch) and pools_itself(branch):
            averaged = pooled(self._x, branch.geometry)
            return averaged if branch.point is None else branch.point(averaged)
        return branch.linear(self._x)

    def _pointwise_kernel(self, branch: PointwiseKernelBranch, inner: BranchNorm) -> Tensor:
        if self._use_moments and is_plain(branch.conv):
            with torch.autocast(self._x.device.type, enabled=False):
                point = branch.point.weight
                moments = self._moments_of(strided_input=False)
                mean, var = moments.of(point)
                inner.track_(mean, var, moments.count)
                scaled = scale_of(inner, var)[:, None, None, None] * wide(point)
                kernel = composed(scaled, branch, branch.conv.weight, self._dtype)
            return convolve(branch.geometry, self._x, kernel)
        mixed = branch.point(self._x)
        return branch.conv(self._normalised(None, [mixed], [inner]))

    def _added(self) -> Tensor:
        block, g = self._block, self._geometry
        base = None
        if self._linear_origin or self._parts:
            kernel: Tensor = block.weight
            size = g.kernel_size if self._linear_origin else g.point
            if self._parts or self._identity is not None:
                kernel = assemble(
                    block.weight if self._linear_origin else None,
                    self._parts if self._linear_origin else [Part(part.kernel) for part in self._parts],
                    torch.stack(self._scales) if self._scales else wide(block.weight).new_empty(0, g.out_channels),
                    size=cast("tuple[int, int]", size),
                    identity=self._identity,
                    identity_tap=cast("tuple[int, int]", g.identity_tap or (0, 0)) if self._linear_origin else (0, 0),
                    dtype=self._dtype,
                )
            bias = add(block.bias if self._linear_origin else None, self._shift)
            if self._linear_origin:
                base = convolve(g, self._x, kernel.to(self._dtype), bias)
            else:
                bias = None if bias is None else bias.to(self._dtype)
                base = torch.nn.functional.conv2d(self._x, kernel, bias, cast("tuple[int, int]", g.stride))
        if not self._terms:
            assert base is not None
            return base
        return self._normalised(base, self._terms, self._norms)

    def _normalised(self, base: Tensor | None, terms: list[Tensor], norms: list[BranchNorm]) -> Tensor:
        gammas, betas = zip(*(norm.affine() for norm in norms), strict=True)
        shifts = [wide(beta) for beta in betas if beta is not None]
        gamma = torch.stack([wide(gamma) for gamma in gammas])
        beta = torch.stack(shifts).sum(0) if shifts else None
        out, mean, var = normalised_sum(base, terms, gamma, beta, norms[0].eps)
        count = terms[0].numel() // terms[0].shape[1]
        for norm, m, v in zip(norms, mean.unbind(), var.unbind(), strict=True):
            norm.track_(m, v, count)
        return out
