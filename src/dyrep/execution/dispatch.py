"""Which way a block is run here and now."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from dyrep.execution import folded, fused
from dyrep.execution.parts import Block
from dyrep.execution.settings import Execution, only_eager
from dyrep.kernels import unavailable
from dyrep.norm import BranchNorm
from dyrep.scaling import Scaling


def choose(settings: Execution, norms: Iterable[Scaling], x: Tensor, *, ndim: int, replaces_norm: bool) -> str:
    """How to run a block over a batched input: ``"eager"``, ``"fused"``, ``"folded"`` or ``"frozen"``.

    A frozen block, as all are in eval mode, is one convolution whose kernel depends on no batch.

    Args:
        settings: what was asked for.
        norms: what stands at the end of the block's branches.
        x: the input as the branches read it.
        ndim: spatial dimensions.
        replaces_norm: whether the block has taken the place of the batch norm after it.
    """
    if settings.name == "eager" or only_eager():
        return "eager"
    if settings.name != "folded" and not x.is_cuda:
        return "eager"  # what is fused are kernels of a GPU
    norms = list(norms)
    if not any(norm.training for norm in norms):
        return "frozen"
    wanted = "fused" if settings.name == "auto" else settings.name
    if wanted == "folded" and replaces_norm and settings.gradient != "full":
        # nothing would take scale and mean out of the gradient of what the block passes on: training diverges
        _tell(wanted, "it has taken the place of the batch norm after it; that needs gradient='full'", "exactly")
        wanted = "fused" if x.is_cuda else "eager"
    reason = "" if wanted == "eager" else _why_not(norms, x, ndim, wanted)
    if reason:
        if settings.name != "auto":
            _tell(wanted, reason, "eagerly")
        return "eager"
    return wanted


def _why_not(norms: Iterable[Scaling], x: Tensor, ndim: int, wanted: str) -> str:
    """Why a block cannot be run in one of the fast ways; empty if it can."""
    norms = list(norms)
    if not all(isinstance(norm, BranchNorm) for norm in norms):
        return "some of its branches are not normalised"
    alone = [norm for norm in norms if isinstance(norm, BranchNorm)]
    if not all(norm.normalises_alone for norm in alone):
        if any(norm.synchronized for norm in alone):
            return "its statistics are shared between processes"
        return "its norms are being calibrated, or some of them are frozen"
    if len({norm.eps for norm in alone}) > 1:
        return "its norms differ in ε"
    if x.numel() <= x.shape[1]:
        return "there is one value per channel, which has no spread"
    if wanted == "folded":
        return "" if ndim == 2 else "only two-dimensional convolutions are folded"
    if x.dtype == torch.float64:
        return "the kernels compute in float32"
    return unavailable()


def forward(block: Block, x: Tensor, how: str, settings: Execution) -> Tensor:
    """Run a block fused or folded over an input as its branches read it."""
    return fused.forward(block, x) if how == "fused" else folded.forward(block, x, settings)


@functools.cache
def _tell(wanted: str, reason: str, instead: str) -> None:
    warnings.warn(f"a block set to execution={wanted!r} runs {instead}: {reason}", stacklevel=2)
