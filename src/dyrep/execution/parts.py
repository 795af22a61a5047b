"""What fused and folded execution have in common: reading a block's branches, and arithmetic with their kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dyrep import algebra
from dyrep.branches.kinds import AverageBranch, Branch, PointwiseKernelBranch, SmallKernelBranch
from dyrep.branches.options import pools_by_convolution
from dyrep.geometry import ConvGeometry
from dyrep.kernels import Part, average_pool, scales
from dyrep.norm import BranchNorm
from dyrep.scaling import Scaling


class Block(Protocol):
    """What execution needs to know of a block."""

    geometry: ConvGeometry
    origin_norm: Scaling | None
    origin_off: bool

    @property
    def weight(self) -> Tensor:
        """The original kernel."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """The original bias."""
        ...

    @property
    def passed_norm(self) -> object:
        """The batch norm after the block that it has taken the place of, if it has."""
        ...

    def branch_modules(self) -> dict[str, Branch]:
        """The branches by name."""
        ...

    def scalings(self) -> Iterator[Scaling]:
        """What stands at the end of the origin, if anything does, and of every branch."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """All modules of it."""
        ...


def conv_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a convolution with this weight runs here."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def wide(tensor: Tensor) -> Tensor:
    """In float32 or wider, where statistics and scales are computed."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def convolve(geometry: ConvGeometry, x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run a kernel of a convolution's own size over an input as its branches read it."""
    conv: Any = (F.conv1d, F.conv2d, F.conv3d)[geometry.ndim - 1]
    pads = (0,) * geometry.ndim if geometry.needs_prepadding else tuple(before for before, _ in geometry.pads)
    bias = None if bias is None else bias.to(kernel.dtype)
    return conv(x, kernel, bias, geometry.stride, pads, geometry.dilation, geometry.groups)


def is_plain(conv: Any) -> bool:
    """Whether a convolution inside a branch has grown none of its own."""
    return not getattr(conv, "branches", None) and getattr(conv, "origin_norm", None) is None


def is_pointwise(branch: Branch) -> bool:
    """Whether a branch is a 1x1 that reads the input as it is, every stride-th position of it."""
    if not isinstance(branch, SmallKernelBranch) or branch.kernel_size != branch.geometry.point:
        return False
    return all(pair == (0, 0) for pair in branch.geometry.pads_for(branch.kernel_size))


def strided(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """The positions of the input that a pointwise branch reads."""
    if all(s == 1 for s in geometry.stride):
        return x
    chosen = (slice(None), slice(None), *(slice(None, None, s) for s in geometry.stride))
    return x[chosen]


def pools_itself(branch: Branch) -> bool:
    """Whether a branch is an average pooling that `average_pool` can do."""
    g = branch.geometry
    return isinstance(branch, AverageBranch) and g.ndim == 2 and not pools_by_convolution(g)


def pooled(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """The input, averaged over the windows of a convolution."""
    (height, width), (down, across) = geometry.kernel_size, geometry.stride
    return average_pool(x, (height, width), (down, across), (geometry.pads[0][0], geometry.pads[1][0]))


def composed(point: Tensor, branch: PointwiseKernelBranch, second: Tensor, dtype: torch.dtype) -> Tensor:
    """The kernel of the branch ``1x1-KxK``: ``point`` is its 1x1, scaled, ``second`` its KxK."""
    groups = branch.geometry.groups
    if groups > 1 or branch.geometry.ndim != 2:
        return algebra.compose(point, second, groups).to(dtype)
    # one product without copies where channels are innermost; left in four dimensions, torch would choose between one
    # and many by whether there are gradients, and round differently when a checkpointed step is run again
    rows = second.permute(0, 2, 3, 1)
    mixed = rows.flatten(0, 2).to(dtype) @ point.flatten(1).to(dtype)
    return mixed.unflatten(0, rows.shape[:3]).permute(0, 3, 1, 2)


def scales_and_shift(
    norms: Sequence[BranchNorm], means: Sequence[Tensor] | None, variances: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """γ / σ of several norms, a row for each, and what β - γ μ / σ adds up to where they have a shift."""
    gammas, betas = zip(*(norm.affine() for norm in norms), strict=True)
    rows = scales(list(gammas), list(variances), norms[0].eps)
    if betas[0] is None or means is None:
        return rows, None
    shift = None
    for beta, scale, mean in zip(betas, rows, means, strict=True):  # not one sum: the gradients of all β would be one
        shift = add(shift, wide(beta) - scale * mean)
    return rows, shift


def part_of(branch: Branch) -> Part | None:
    """The kernel of a branch that consists of one convolution, and where it goes; None for any other branch."""
    g = branch.geometry
    if isinstance(branch, SmallKernelBranch) and is_plain(branch.conv):
        weight = cast(Tensor, branch.conv.weight)
        tap = (0 if n == k else c for n, k, c in zip(weight.shape[2:], g.kernel_size, g.center, strict=True))
        return Part(weight, tap=cast("tuple[int, int]", tuple(tap)))
    if isinstance(branch, AverageBranch) and branch.point is not None and pools_itself(branch):
        return Part(cast(Tensor, branch.point.weight), spread=True)
    return None


def add(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Sum of two tensors, each of which may be missing."""
    if total is None or more is None:
        return more if total is None else total
    return total + more
