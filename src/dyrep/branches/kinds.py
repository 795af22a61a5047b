"""What each branch computes, and as which kernel.

Every branch is a linear map followed by a scaling (as a rule a `BranchNorm`), so in eval mode it is one kernel of the
convolution's own shape, plus a bias where the norm has a shift. Each class runs the map (`forward`) and states that
kernel (`kernel`).

Two of them are simpler here than on paper, without a change of function. Average pooling is linear and acts on every
channel alone, so it commutes with the 1x1 before it, and a norm between the two could only rescale what the last norm
normalises anyway: ``1x1-AVG`` is one pool over the input, then a 1x1. In ``1x1-KxK`` a shift of the inner norm would be
one constant per channel after the KxK, which the last norm removes: the inner norm is scale-only, and zero padding is
exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dyrep import algebra
from dyrep.branches.options import pools_by_convolution
from dyrep.geometry import PLAIN_CONVS, ConvGeometry, Pads, pad_or_crop
from dyrep.norm import BranchNorm
from dyrep.scaling import Scaling, make_scaling

_CONV_FUNCTIONS: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
_POOL_FUNCTIONS: tuple[Callable[..., Tensor], ...] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


def folded_conv(conv: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Kernel and bias of a convolution, branches included if it has grown any."""
    if hasattr(conv, "folded"):
        return conv.folded(dtype)
    return conv.weight.to(dtype), None if conv.bias is None else conv.bias.to(dtype)


class Branch(nn.Module):
    """A linear map that fits beside a convolution, and its scaling.

    Attributes:
        norm: the scaling at its end.
        geometry: the convolution it stands beside. Where that pads in a way of its own (reflect, asymmetric …) the
            block pads the input once and every branch reads the padded one.
        width: inner channels per input channel; 1 unless the branch is ``1x1-KxK``.
    """

    norm: Scaling
    width = 1

    def __init__(
        self,
        geometry: ConvGeometry,
        *,
        shift: bool,
        gamma: float,
        scaling: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.geometry = geometry.prepadded() if geometry.needs_prepadding else geometry
        self._like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm = make_scaling(scaling, geometry.out_channels, shift=shift, gamma=gamma, **self._like)

    def linear(self, x: Tensor) -> Tensor:
        """The map before the norm."""
        raise NotImplementedError

    def kernel(self, dtype: torch.dtype) -> Tensor:
        """The map before the norm, as a kernel of the origin's shape."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Run the branch."""
        return self.norm(self.linear(x))

    def folded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The branch in eval mode, as a kernel and a bias (None without shift)."""
        return algebra.fuse_norm(self.kernel(dtype), None, **self.norm.fold_arguments(dtype))

    def _pointwise(self, in_channels: int, out_channels: int) -> nn.Module:
        conv = PLAIN_CONVS[self.geometry.ndim - 1]
        return empty_conv(conv, in_channels, out_channels, 1, groups=self.geometry.groups, **self._like)


class SmallKernelBranch(Branch):
    """``1x1``, ``1xK``, ``Kx1``: a kernel with collapsed dimensions; ``KxK-2``: one with all of them."""

    def __init__(self, geometry: ConvGeometry, *, kernel: tuple[int, ...], **arguments: Any) -> None:
        super().__init__(geometry, **arguments)
        self.kernel_size = kernel
        pads = self.geometry.pads_for(kernel)
        by_conv = all(before == after >= 0 for before, after in pads)
        self._pads: Pads | None = None if by_conv else pads
        self.conv = empty_conv(
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

    def linear(self, x: Tensor) -> Tensor:
        """See `Branch.linear`."""
        return self.conv(self.padded(x))

    def padded(self, x: Tensor) -> Tensor:
        """What its convolution reads: the input, padded or cropped where the convolution cannot do it."""
        return x if self._pads is None else pad_or_crop(x, self._pads)


class PointwiseKernelBranch(Branch):
    """``1x1-KxK``: mix the channels, scale, then a KxK of its own, which can grow branches in turn."""

    def __init__(self, geometry: ConvGeometry, *, width: int = 1, **arguments: Any) -> None:
        super().__init__(geometry, **arguments)
        self.width = width
        middle = geometry.in_channels * width
        self.point = self._pointwise(geometry.in_channels, middle)
        # without statistics at its end there are none inside, and another scale would be one too many
        self.inner_norm = BranchNorm(middle, shift=False, **self._like) if self.norm.normalises else None
        self.conv = empty_conv(
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
        point, _ = folded_conv(self.point, dtype)
        if self.inner_norm is not None:
            point, _ = algebra.fuse_norm(point, None, **self.inner_norm.fold_arguments(dtype))
        return algebra.compose(point, folded_conv(self.conv, dtype)[0], self.geometry.groups)

    def linear(self, x: Tensor) -> Tensor:
        """See `Branch.linear`."""
        mixed = self.point(x)
        return self.conv(mixed if self.inner_norm is None else self.inner_norm(mixed))


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

    def linear(self, x: Tensor) -> Tensor:
        """See `Branch.linear`."""
        pooled = self._pool(x)
        return pooled if self.point is None else self.point(pooled)

    def _pool(self, x: Tensor) -> Tensor:
        g = self.geometry
        pads = tuple(before for before, _ in g.pads)  # symmetric: anything else has been padded before
        if pools_by_convolution(g):
            kernel = x.new_full((g.in_channels, 1, *g.kernel_size), 1 / g.taps)
            conv = _CONV_FUNCTIONS[g.ndim - 1]
            return conv(x, kernel, None, g.stride, pads, g.dilation, g.in_channels)
        too_wide = any(2 * p > k for p, k in zip(pads, g.kernel_size, strict=True))  # more than pooling accepts
        # With channels innermost, padding makes the gradient wrong on a GPU in many versions of torch (issue 188344).
        if too_wide or (x.is_cuda and any(pads) and not x.is_contiguous()):
            x, pads = pad_or_crop(x, g.pads), (0,) * g.ndim
        return _POOL_FUNCTIONS[g.ndim - 1](x, g.kernel_size, g.stride, pads, count_include_pad=True)


class CosineBranch(Branch):
    """``1x1-DCT``: mix the channels, then filter each with a fixed cosine wave along one dimension (OREPA's prior)."""

    filters: Tensor

    def __init__(self, geometry: ConvGeometry, **arguments: Any) -> None:
        super().__init__(geometry, **arguments)
        self.point = self._pointwise(geometry.in_channels, geometry.out_channels)
        filters = algebra.cosine_filters(geometry.out_channels, geometry.kernel_size, **self._like)
        self.register_buffer("filters", filters, persistent=False)

    def kernel(self, dtype: torch.dtype) -> Tensor:
        """See `Branch.kernel`."""
        return folded_conv(self.point, dtype)[0] * self.filters.to(dtype).unsqueeze(1)

    def linear(self, x: Tensor) -> Tensor:
        """See `Branch.linear`."""
        g = self.geometry
        pads = tuple(before for before, _ in g.pads)
        mixed = self.point(x)
        conv = _CONV_FUNCTIONS[g.ndim - 1]
        filters = self.filters.unsqueeze(1).to(mixed.dtype)
        return conv(mixed, filters, None, g.stride, pads, g.dilation, g.out_channels)


class DepthwiseBranch(Branch):
    """``DW-1x1``: filter every channel several times, then mix (OREPA's depthwise separable branch)."""

    EXPANSION = 8

    def __init__(self, geometry: ConvGeometry, **arguments: Any) -> None:
        super().__init__(geometry, **arguments)
        middle = self.EXPANSION * geometry.in_channels
        self.depthwise = empty_conv(
            PLAIN_CONVS[geometry.ndim - 1],
            geometry.in_channels,
            middle,
            geometry.kernel_size,
            stride=geometry.stride,
            padding=tuple(before for before, _ in self.geometry.pads),
            dilation=geometry.dilation,
            groups=geometry.in_channels,
            **self._like,
        )
        self.point = self._pointwise(middle, geometry.out_channels)

    def kernel(self, dtype: torch.dtype) -> Tensor:
        """See `Branch.kernel`."""
        g = self.geometry
        filters, _ = folded_conv(self.depthwise, dtype)
        point, _ = folded_conv(self.point, dtype)
        filters = filters.reshape(g.groups, g.in_channels // g.groups, self.EXPANSION, -1)
        point = point.reshape(g.groups, g.out_channels // g.groups, g.in_channels // g.groups, self.EXPANSION)
        return torch.einsum("giek,goie->goik", filters, point).reshape(g.out_channels, -1, *g.kernel_size)

    def linear(self, x: Tensor) -> Tensor:
        """See `Branch.linear`."""
        return self.point(self.depthwise(x))


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

    def linear(self, x: Tensor) -> Tensor:
        """See `Branch.linear`."""
        return pad_or_crop(x, self._pads)


def empty_conv(
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
