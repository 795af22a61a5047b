"""Which way a block is run here and now."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from dyrep.execution import folded, fused
from dyrep.execution.parts import Block
from dyrep.execution.settings import Execution, only_eager
from dyrep.kernels import unavailable
from dyrep.norm import BranchNorm


def choose(block: Block, settings: Execution, x: Tensor) -> str:
    """How to run a block over a batched input: ``"eager"``, ``"fused"``, ``"folded"`` or ``"frozen"``.

    A frozen block, as all are in eval mode, is one convolution whose kernel depends on no batch.

    Args:
        block: the block.
        settings: what was asked for.
        x: the input as the branches read it.
    """
    if settings.name == "eager" or only_eager():
        return "eager"
    if settings.name != "folded" and not x.is_cuda:
        return "eager"  # what is fused are kernels of a GPU
    if not (any(norm.training for norm in block.scalings()) or any(norm.training for norm in _norms(block))):
        return "frozen"
    wanted = "fused" if settings.name == "auto" else settings.name
    if wanted == "folded" and block.passed_norm is not None and settings.gradient != "full":
        # nothing would take scale and mean out of the gradient of what the block passes on: training diverges
        _tell(wanted, "it has taken the place of the batch norm after it; that needs gradient='full'", "exactly")
        wanted = "fused" if x.is_cuda else "eager"
    reason = "" if wanted == "eager" else why_not(block, wanted, x)
    if reason:
        if settings.name != "auto":
            _tell(settings.name, reason, "eagerly")
        return "eager"
    return wanted


def why_not(block: Block, wanted: str, x: Tensor) -> str:
    """Why a block cannot be run in one of the fast ways; empty if it can."""
    if not all(isinstance(norm, BranchNorm) for norm in block.scalings()):
        return "some of its branches are not normalised"
    norms = _norms(block)
    if not all(norm.normalises_alone for norm in norms):
        if any(norm.synchronized for norm in norms):
            return "its statistics are shared between processes"
        return "its norms are being calibrated, or some of them are frozen"
    if len({norm.eps for norm in norms}) > 1:
        return "its norms differ in ε"
    if x.shape[0] * block.geometry.output_positions(x.shape[2:]) <= 1:
        return "there is one value per channel, which has no spread"
    if wanted == "folded":
        return "" if block.geometry.ndim == 2 else "only two-dimensional convolutions are folded"
    if x.dtype == torch.float64:
        return "the kernels compute in float32"
    return unavailable()


def _norms(block: Block) -> list[BranchNorm]:
    """All of them, those inside branches too."""
    return [module for module in block.modules() if isinstance(module, BranchNorm)]


def forward(block: Block, x: Tensor, how: str, settings: Execution) -> Tensor:
    """Run a block fused or folded over an input as its branches read it."""
    return fused.forward(block, x) if how == "fused" else folded.forward(block, x, settings)


@functools.cache
def _tell(wanted: str, reason: str, instead: str) -> None:
    warnings.warn(f"a block set to execution={wanted!r} runs {instead}: {reason}", stacklevel=2)
