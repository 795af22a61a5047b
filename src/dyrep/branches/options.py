"""Names of the branches, and which of them fit a given convolution."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dyrep.geometry import ConvGeometry

ORIGIN = "KxK"
GAMMA = 0.01
"""The paper's initial γ of new branches: at first they hardly disturb."""
BRANCHES = ("1x1", "1x1-KxK", "1x1-AVG", "1xK", "Kx1", "residual")
"""Names of the branches of the paper that can be added beside the origin, in the order they are created."""

RELATIVES = ("1x1-DCT", "DW-1x1")
"""Branches of OREPA: a 1x1 and a fixed cosine filter; a depthwise KxK and a 1x1."""

_COPY = re.compile(r"KxK-([2-9]|[1-9][0-9])")


def is_branch(name: str) -> bool:
    """Whether there is a branch of this name: one of `BRANCHES` or `RELATIVES`, or a copy of the origin.

    Copies are called ``KxK-2``, ``KxK-3`` and so on.

    Example:
        >>> is_branch("1x1-AVG"), is_branch("KxK-4"), is_branch("KxK")
        (True, True, False)
    """
    return name in BRANCHES or name in RELATIVES or is_copy(name)


def is_copy(name: str) -> bool:
    """Whether a branch has a kernel of the origin's own size."""
    return _COPY.fullmatch(name) is not None


def branch_list() -> str:
    """The valid names, for messages."""
    return f"{', '.join((*BRANCHES, *RELATIVES))}, and KxK-2, KxK-3 ... for copies of the origin"


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
    """Say for every branch of the paper whether it fits a convolution, and if not, why.

    Example:
        >>> from torch import nn
        >>> options = branch_options(ConvGeometry.of(nn.Conv2d(8, 16, 3, stride=2, padding=1)))
        >>> [name for name, option in options.items() if option.possible]
        ['1x1', '1x1-KxK', '1x1-AVG', '1xK', 'Kx1']
        >>> options["residual"].reason
        'the residual needs as many output as input channels (8 in, 16 out)'
    """
    if geometry.taps == 1:
        reason = f"the kernel is {_times(geometry.kernel_size)}: a branch could only repeat it"
        options = {name: BranchOption(possible=False, reason=reason) for name in BRANCHES}
        if _residual_option(geometry).possible:
            options["residual"] = BranchOption(duplicate=True, reason=reason)
        return options
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


def branch_option(name: str, geometry: ConvGeometry) -> BranchOption:
    """Say whether any one branch fits a convolution; those that are not the paper's are only ever added on demand."""
    if is_copy(name):
        return BranchOption(duplicate=True, reason="it is another kernel of the origin's size")
    if name in RELATIVES:
        reason = f"the kernel is {_times(geometry.kernel_size)}: there is nothing to filter"
        return BranchOption(
            geometry.taps > 1, geometry.taps > 1, "it is not a branch of the paper" if geometry.taps > 1 else reason
        )
    return branch_options(geometry)[name]


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


def _times(sizes: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in sizes)
