"""How the published blocks start: their kernels and their scales."""

from __future__ import annotations

import math

import torch

from dyrep.block import RepConv
from dyrep.branches import ORIGIN, reset_conv_
from dyrep.branches.kinds import PointwiseKernelBranch
from dyrep.geometry import PLAIN_CONVS
from dyrep.methods.catalogue import Method
from dyrep.surgery.beginning import start_as_identities_

OREPA_SCALES = {ORIGIN: 0.25, "1x1-AVG": 0.25, "1x1-DCT": 0.0, "1x1-KxK": 0.5, "1x1": 1.0, "DW-1x1": 0.5}
"""Initial scales of OREPA's branches, from its published code."""


@torch.no_grad()
def start_(block: RepConv, method: Method, gamma: float, generator: torch.Generator | None) -> None:
    """Give a new block the weights that its method starts from. The original kernel keeps the model's own.

    Args:
        block: the block.
        method: what it belongs to.
        gamma: γ of every norm; OREPA has scales of its own.
        generator: source of random weights.
    """
    start_as_identities_(block)
    if method.name == "orepa":
        _start_orepa_(block, generator)
    elif block.origin_norm is not None:
        block.origin_norm.weight.fill_(gamma)


def _start_orepa_(block: RepConv, generator: torch.Generator | None) -> None:
    if block.origin_norm is not None:
        block.origin_norm.weight.fill_(OREPA_SCALES[ORIGIN])
    for name, branch in block.branch_modules().items():
        branch.norm.weight.fill_(OREPA_SCALES[name])
        for module in branch.modules():
            is_identity = isinstance(branch, PointwiseKernelBranch) and branch.width == 1 and module is branch.point
            if isinstance(module, PLAIN_CONVS) and not is_identity:
                reset_conv_(module.weight, generator, gain=math.sqrt(6))  # type: ignore[arg-type]
