"""Branches by name, with random weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dyrep.branches.kinds import (
    AverageBranch,
    Branch,
    CosineBranch,
    DepthwiseBranch,
    PointwiseKernelBranch,
    ResidualBranch,
    SmallKernelBranch,
)
from dyrep.branches.options import GAMMA, branch_list, branch_option, collapsed_kernel, is_branch, is_copy
from dyrep.errors import BranchError
from dyrep.geometry import PLAIN_CONVS, ConvGeometry


def make_branch(
    name: str,
    geometry: ConvGeometry,
    *,
    shift: bool,
    gamma: float = GAMMA,
    width: int = 1,
    scaling: str = "norm",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Branch:
    """Create a branch with random weights.

    Args:
        name: a branch, see `is_branch`.
        geometry: the convolution it stands beside.
        shift: whether its last norm has a shift; true exactly when something can take it over, as a rule the
            convolution's bias.
        gamma: initial γ of its last norm.
        width: inner channels of ``1x1-KxK`` per input channel.
        scaling: what is at its end, one of `dyrep.scaling.SCALINGS`.
        device: where its tensors live.
        dtype: their dtype.
        generator: source of the random weights (a CPU generator; default: torch's global one).

    Raises:
        BranchError: there is no such branch, or this convolution cannot have it.
    """
    if torch.is_inference_mode_enabled():
        raise BranchError("branches that are made inside torch.inference_mode() cannot be trained: leave it first")
    if not is_branch(name):
        raise BranchError(f"unknown branch {name!r}; valid are {branch_list()}")
    option = branch_option(name, geometry)
    if not option.possible:
        raise BranchError(f"branch {name!r} is not possible: {option.reason}")
    kinds: dict[str, Callable[..., Branch]] = {
        "1x1-KxK": PointwiseKernelBranch,
        "1x1-AVG": AverageBranch,
        "1x1-DCT": CosineBranch,
        "DW-1x1": DepthwiseBranch,
        "residual": ResidualBranch,
    }
    arguments: dict[str, Any] = {"shift": shift, "gamma": gamma, "scaling": scaling, "device": device, "dtype": dtype}
    if name == "1x1-KxK":
        arguments["width"] = width
    if name not in kinds:
        arguments["kernel"] = geometry.kernel_size if is_copy(name) else collapsed_kernel(name, geometry)
    branch = kinds.get(name, SmallKernelBranch)(geometry, **arguments)
    for module in branch.modules():
        if isinstance(module, PLAIN_CONVS):
            reset_conv_(module.weight, generator)  # type: ignore[arg-type]
    return branch


def reset_conv_(weight: Tensor, generator: torch.Generator | None, gain: float = 1.0) -> None:
    """Torch's own initialisation (or ``gain`` times it), drawn on the CPU: a seed means the same on every device."""
    bound = gain / math.sqrt(math.prod(weight.shape[1:]))
    drawn = torch.empty(weight.shape, dtype=torch.float32, device="cpu").uniform_(-bound, bound, generator=generator)
    with torch.no_grad():
        weight.copy_(drawn)
