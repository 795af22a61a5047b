"""The branches a convolution can grow (Table 1 of the paper), and which of them fit a given convolution.

The seventh, ``KxK``, is the convolution itself. Every branch is a linear map followed by a `BranchNorm`, so in eval
mode it is one kernel of the convolution's own shape, plus a bias where the norm has a shift. Each class runs the map
(`forward`) and states that kernel (`kernel`).

Two of them are simpler here than on paper, without a change of function. Average pooling is linear and acts on every
channel alone, so it commutes with the 1x1 before it, and a norm between the two could only rescale what the last norm
normalises anyway: ``1x1-AVG`` is one pool over the input, then a 1x1. In ``1x1-KxK`` a shift of the inner norm would be
one constant per channel after the KxK, which the last norm removes: the inner norm is scale-only, and zero padding is
exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dyrep import algebra
from dyrep.errors import BranchError
from dyrep.geometry import PLAIN_CONVS, ConvGeometry, Pads, pad_or_crop
from dyrep.norm import BranchNorm

ORIGIN = "KxK"
BRANCHES = ("1x1", "1x1-KxK", "1x1-AVG", "1xK", "Kx1", "residual")
"""Names of the branches that can be added beside the origin, in the order they are created."""

_CONV_FUNCTIONS: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
_POOL_FUNCTIONS: tuple[Callable[..., Tensor], ...] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


@dataclass(frozen=True)
class BranchOption:
    """Whether a branch fits a convolution.

    Attributes:
        possible: the branch can be added and folded exactly.
        duplicate: it is possible, but computes nothing that another branch does not; left out unless asked for.
        reason: why it is impossible or a duplicate; empty otherwise.
    """

    possible: bool = True
    duplicate: bool = False
    reason: str = ""


def branch_options(geometry: ConvGeometry) -> dict[str, BranchOption]:
    """Say for every branch whether it fits a convolution, and if not, why.

    Example:
        >>> options = branch_options(ConvGeometry.of(nn.Conv2d(8, 16, 3, stride=2, padding=1)))
        >>> [name for name, option in options.items() if option.possible]
        ['1x1', '1x1-KxK', '1x1-AVG', '1xK', 'Kx1']
        >>> options["residual"].reason
        'the residual needs as many output as input channels (8 in, 16 out)'
    """
    if geometry.taps == 1:
        reason = f"the kernel is {_times(geometry.kernel_size)}: a branch could only repeat it"
        return {name: BranchOption(possible=False, reason=reason) for name in BRANCHES}
    options = {name: BranchOption() for name in BRANCHES}
    options["residual"] = _residual_option(geometry)
    if geometry.depthwise and options["residual"].possible:
        reason = "with one channel per group the 1x1 is the residual branch up to scale"
        options["1x1"] = BranchOption(duplicate=True, reason=reason)
    if geometry.groups == geometry.in_channels and geometry.groups > 1:
        reason = "with one channel per group it is the origin up to scale"
        options["1x1-KxK"] = BranchOption(duplicate=True, reason=reason)
    for name in ("1xK", "Kx1"):
        kernel = collapsed_kernel(name, geometry)
        if kernel in (geometry.kernel_size, geometry.point):
            twin = ORIGIN if kernel == geometry.kernel_size else "1x1"
            reason = f"for a {_times(geometry.kernel_size)} kernel it is the {twin} branch"
            options[name] = BranchOption(duplicate=True, reason=reason)
    return options


def collapsed_kernel(name: str, geometry: ConvGeometry) -> tuple[int, ...]:
    """Kernel size of ``1x1``, ``1xK`` (first spatial dimension collapsed) or ``Kx1`` (last one collapsed)."""
    kernel = geometry.kernel_size
    return {"1x1": geometry.point, "1xK": (1, *kernel[1:]), "Kx1": (*kernel[:-1], 1)}[name]


def _residual_option(geometry: ConvGeometry) -> BranchOption:
    channels = f"{geometry.in_channels} in, {geometry.out_channels} out"
    if geometry.in_channels != geometry.out_channels:
        return BranchOption(False, reason=f"the residual needs as many output as input channels ({channels})")
    if any(s != 1 for s in geometry.stride):
        return BranchOption(False, reason=f"the residual needs stride 1, not {_times(geometry.stride)}")
    if geometry.identity_tap is None:
        return BranchOption(
            False,
            reason="the residual needs a kernel tap that reads the position it writes: "
            f"padding {geometry.pads} does not give one for a {_times(geometry.kernel_size)} kernel",
        )
    return BranchOption()


def pools_by_convolution(geometry: ConvGeometry) -> bool:
    """Whether average pooling has to run as a convolution with a constant kernel.

    It can do what torch's pooling cannot: dilation, and in 3-d small images and half precision on a CPU.
    """
    return geometry.ndim == 3 or any(d != 1 for d in geometry.dilation)


def make_branch(
    name: str,
    geometry: ConvGeometry,
    *,
    shift: bool,
    gamma: float = 0.01,
    width: int = 1,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Branch:
    """Create a branch with random weights.

    Args:
        name: one of `BRANCHES`.
        geometry: the convolution it stands beside.
        shift: whether its last norm has a shift; true exactly when the convolution has a bias.
        gamma: initial γ of its last norm.
        width: inner channels of ``1x1-KxK`` per input channel.
        device: where its tensors live.
        dtype: their dtype.
        generator: source of the random weights (a CPU generator; default: torch's global one).

    Raises:
        BranchError: there is no such branch, or this convolution cannot have it.
    """
    if name not in BRANCHES:
        raise BranchError(f"unknown branch {name!r}; valid are {', '.join(BRANCHES)}")
    option = branch_options(geometry)[name]
    if not option.possible:
        raise BranchError(f"branch {name!r} is not possible: {option.reason}")
    kinds: dict[str, Callable[..., Branch]] = {
        "1x1-KxK": PointwiseKernelBranch,
        "1x1-AVG": AverageBranch,
        "residual": ResidualBranch,
    }
    arguments: dict[str, Any] = {"shift": shift, "gamma": gamma, "device": device, "dtype": dtype}
    if name == "1x1-KxK":
        arguments["width"] = width
    if name not in kinds:
        arguments["kernel"] = collapsed_kernel(name, geometry)
    branch = kinds.get(name, SmallKernelBranch)(geometry, **arguments)
    for module in branch.modules():
        if isinstance(module, PLAIN_CONVS):
            _reset_conv_(module.weight, generator)  # type: ignore[arg-type]
    return branch


def folded_conv(conv: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Kernel and bias of a convolution, branches included if it has grown any."""
    if hasattr(conv, "folded"):
        return conv.folded(dtype)
    return conv.weight.to(dtype), None if conv.bias is None else conv.bias.to(dtype)


class Branch(nn.Module):
    """A linear map that fits beside a convolution, and its norm.

    Attributes:
        geometry: the convolution it stands beside. Where that pads in a way of its own (reflect, asymmetric …) the
            block pads the input once and every branch reads the padded one.
        width: inner channels per input channel; 1 unless the branch is ``1x1-KxK``.
    """

    norm: BranchNorm
    width = 1

    def __init__(
        self,
        geometry: ConvGeometry,
        *,
        shift: bool,
        gamma: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.geometry = geometry.prepadded() if geometry.needs_prepadding else geometry
        self._like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm = BranchNorm(geometry.out_channels, shift=shift, gamma=gamma, **self._like)

    def kernel(self, dtype: torch.dtype) -> Tensor:
        """The map before the norm, as a kernel of the origin's shape."""
        raise NotImplementedError

    def folded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The branch in eval mode, as a kernel and a bias (None without shift)."""
        return algebra.fuse_norm(self.kernel(dtype), None, **self.norm.fold_arguments(dtype))

    def _pointwise(self, in_channels: int, out_channels: int) -> nn.Module:
        conv = PLAIN_CONVS[self.geometry.ndim - 1]
        return _empty_conv(conv, in_channels, out_channels, 1, groups=self.geometry.groups, **self._like)


class SmallKernelBranch(Branch):
    """``1x1``, ``1xK``, ``Kx1``: a kernel with collapsed dimensions."""

    def __init__(self, geometry: ConvGeometry, *, kernel: tuple[int, ...], **arguments: Any) -> None:
        super().__init__(geometry, **arguments)
        pads = self.geometry.pads_for(kernel)
        by_conv = all(before == after >= 0 for before, after in pads)
        self._pads: Pads | None = None if by_conv else pads
        self.conv = _empty_conv(
            PLAIN_CONVS[geometry.ndim - 1],
            geometry.in_channels,
            geometry.out_channels,
            kernel,
            stride=geometry.stride,
            padding=tuple(before for before, _ in pads) if by_conv else 0,
            dilation=geometry.dilation,
            groups=geometry.groups,
            **self._like,
        )

    def kernel(self, dtype: torch.dtype) -> Tensor:
        """See `Branch.kernel`."""
        return algebra.pad_kernel(folded_conv(self.conv, dtype)[0], self.geometry.kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        """Run the branch."""
        return self.norm(self.conv(x if self._pads is None else pad_or_crop(x, self._pads)))


class PointwiseKernelBranch(Branch):
    """``1x1-KxK``: mix the channels, scale, then a KxK of its own, which can grow branches in turn."""

    def __init__(self, geometry: ConvGeometry, *, width: int = 1, **arguments: Any) -> None:
        super().__init__(geometry, **arguments)
        self.width = width
        middle = geometry.in_channels * width
        self.point = self._pointwise(geometry.in_channels, middle)
        self.inner_norm = BranchNorm(middle, shift=False, **self._like)
        self.conv = _empty_conv(
            PLAIN_CONVS[geometry.ndim - 1],
            middle,
            geometry.out_channels,
            geometry.kernel_size,
            stride=geometry.stride,
            padding=tuple(before for before, _ in self.geometry.pads),
            dilation=geometry.dilation,
            groups=geometry.groups,
            **self._like,
        )

    def kernel(self, dtype: torch.dtype) -> Tensor:
        """See `Branch.kernel`."""
        point, _ = algebra.fuse_norm(folded_conv(self.point, dtype)[0], None, **self.inner_norm.fold_arguments(dtype))
        return algebra.compose(point, folded_conv(self.conv, dtype)[0], self.geometry.groups)

    def forward(self, x: Tensor) -> Tensor:
        """Run the branch."""
        return self.norm(self.conv(self.inner_norm(self.point(x))))


class AverageBranch(Branch):
    """``1x1-AVG``: pool the input, mix the channels. A depthwise convolution has nothing to mix."""

    def __init__(self, geometry: ConvGeometry, **arguments: Any) -> None:
        super().__init__(geometry, **arguments)
        mixes = not geometry.depthwise
        self.point = self._pointwise(geometry.in_channels, geometry.out_channels) if mixes else None

    def kernel(self, dtype: torch.dtype) -> Tensor:
        """See `Branch.kernel`."""
        g = self.geometry
        if self.point is None:
            like = self.norm.weight
            return algebra.average_kernel(g.out_channels, g.kernel_size, g.groups, dtype=dtype, device=like.device)
        point, _ = folded_conv(self.point, dtype)
        return point.expand(*point.shape[:2], *g.kernel_size) / g.taps

    def forward(self, x: Tensor) -> Tensor:
        """Run the branch."""
        pooled = self._pool(x)
        return self.norm(pooled if self.point is None else self.point(pooled))

    def _pool(self, x: Tensor) -> Tensor:
        g = self.geometry
        pads = tuple(before for before, _ in g.pads)  # symmetric: anything else has been padded before
        if pools_by_convolution(g):
            kernel = x.new_full((g.in_channels, 1, *g.kernel_size), 1 / g.taps)
            conv = _CONV_FUNCTIONS[g.ndim - 1]
            return conv(x, kernel, None, g.stride, pads, g.dilation, g.in_channels)
        if any(2 * p > k for p, k in zip(pads, g.kernel_size, strict=True)):  # more than pooling accepts
            x, pads = pad_or_crop(x, g.pads), (0,) * g.ndim
        return _POOL_FUNCTIONS[g.ndim - 1](x, g.kernel_size, g.stride, pads, count_include_pad=True)


class ResidualBranch(Branch):
    """``residual``: the input itself."""

    def __init__(self, geometry: ConvGeometry, **arguments: Any) -> None:
        super().__init__(geometry, **arguments)
        assert geometry.identity_tap is not None
        self._tap = geometry.identity_tap
        self._pads = self.geometry.pads_for(geometry.point, self._tap)

    def kernel(self, dtype: torch.dtype) -> Tensor:
        """See `Branch.kernel`."""
        g, device = self.geometry, self.norm.weight.device
        return algebra.identity_kernel(g.out_channels, g.kernel_size, g.groups, self._tap, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Run the branch."""
        return self.norm(pad_or_crop(x, self._pads))


def _empty_conv(
    conv: type[nn.Module],
    *args: Any,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    **kwargs: Any,
) -> nn.Module:
    """A bias-free convolution with uninitialised weights: creating it must not draw from anyone's random numbers."""
    made = conv(*args, bias=False, device="meta", **kwargs)
    made.weight = nn.Parameter(torch.empty(made.weight.shape, device=device, dtype=dtype))  # type: ignore[arg-type]
    return made


def _reset_conv_(weight: Tensor, generator: torch.Generator | None) -> None:
    """Torch's own initialisation, drawn on the CPU so that a seed means the same on every device."""
    bound = 1 / math.sqrt(math.prod(weight.shape[1:]))
    drawn = torch.empty(weight.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
    with torch.no_grad():
        weight.copy_(drawn)


def _times(sizes: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in sizes)
