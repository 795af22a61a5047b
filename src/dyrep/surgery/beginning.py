"""Branches that a network has from its first step, at full strength, because there is nothing yet to preserve."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dyrep import algebra
from dyrep.block import RepConv
from dyrep.branches.kinds import PointwiseKernelBranch
from dyrep.surgery.assembly import Blueprint, assemble_
from dyrep.surgery.edits import Edit
from dyrep.surgery.targets import Target
from dyrep.surgery.wrappers import forget_compiled

MAX_KERNEL = 5  # DBB and ACNet leave kernels of 7x7 and more, as in the stem of a ResNet, as they are


def trained_norm(model: nn.Module) -> str | None:
    """A norm whose statistics are not those of a network that has learnt nothing yet; None if there is no such norm.

    Norms of any make count that keep ``running_mean`` and ``running_var``, frozen ones among them.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> before = trained_norm(model)
        >>> _ = model(torch.randn(2, 3, 8, 8))
        >>> before, trained_norm(model)
        (None, '1')
    """
    return next((name for name, module in model.named_modules() if _has_moved(module)), None)


def _has_moved(norm: nn.Module) -> bool:
    mean, var = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    if not isinstance(mean, Tensor) or not isinstance(var, Tensor) or is_lazy(mean):
        return False
    return bool(getattr(norm, "num_batches_tracked", None) or mean.any() or (var != 1).any())


def normed(model: nn.Module) -> set[str]:
    """Convolutions that stand right before a batch norm of their channels, as far as the order of modules tells.

    Both have to be parts of the same module, as the order of modules is not always that in which they run. A network's
    outputs have no norm behind them, and their kernels and biases often start at values with a meaning.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> normed(model)
        {'0'}
    """
    holding = [(name, m) for name, m in model.named_modules() if m._parameters or m._buffers]
    return {
        name
        for (name, conv), (next_name, norm) in itertools.pairwise(holding)
        if isinstance(norm, nn.modules.batchnorm._BatchNorm)
        and next_name.rpartition(".")[0] == name.rpartition(".")[0]
        and norm.running_mean is not None
        and norm.num_features == getattr(conv, "out_channels", None)
    }


def fitting(targets: Iterable[Target], branches: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Which of some branches each convolution can begin with, as published blocks do: square kernels up to 5x5."""
    plain = (t for t in targets if t.depth == 0 and not t.present)
    found = {t.name: tuple(b for b in branches if b in t.branches) for t in plain if _usual(t.kernel_size)}
    return {name: fit for name, fit in found.items() if fit}


def _usual(kernel: tuple[int, ...]) -> bool:
    return len(set(kernel)) == 1 and max(kernel) <= MAX_KERNEL


def begin_(
    model: nn.Module, plan: Mapping[str, Sequence[str]], optimizer: Optimizer, generator: torch.Generator
) -> list[Edit]:
    """Give convolutions branches with γ = 1, and their own kernels a norm beside them. The function changes.

    Args:
        model: the bare model, changed in place; after an error it is for the caller to put back.
        plan: branches by layer.
        optimizer: the optimizer that trains the model; new parameters join it.
        generator: source of the random weights.
    """
    for name, branches in plan.items():
        blueprint = Blueprint(tuple(branches), origin_norm=True)
        block = assemble_(model, name, blueprint, gamma=1.0, preserve=False, optimizer=optimizer, generator=generator)
        start_as_identities_(block)
    forget_compiled()
    return [Edit("expand", name, tuple(branches)) for name, branches in plan.items()]


@torch.no_grad()
def start_as_identities_(block: RepConv) -> None:
    """Let the 1x1 convolutions inside a block's ``1x1-KxK`` begin by passing every channel on, if they are as wide."""
    for branch in block.branch_modules().values():
        if isinstance(branch, PointwiseKernelBranch) and branch.width == 1:
            weight = branch.point.weight
            assert isinstance(weight, Tensor)
            weight.copy_(
                algebra.identity_kernel(weight.shape[0], weight.shape[2:], block.geometry.groups, dtype=weight.dtype)
            )
