"""Measure the running statistics of a whole model anew, those of branches too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dyrep.errors import CalibrationError
from dyrep.norm import BranchNorm
from dyrep.surgery.preserve import Forward, iterate, run_batch
from dyrep.surgery.wrappers import bare

_BatchNorm = nn.modules.batchnorm._BatchNorm


@torch.no_grad()
def update_norms_(model: nn.Module, batches: Iterable[Any], *, forward: Forward | None = None) -> int:
    """Set running statistics to their mean over some batches: `torch.optim.swa_utils.update_bn` for evolved models.

    Averaged weights have other statistics than those they are the average of. torch's function knows batch norms
    alone, and would leave the norms of branches as they are.

    Args:
        model: an evolved or plain model; wrappers such as `AveragedModel` are looked through.
        batches: what to run it on, in training mode. Norms that are in eval mode while the model is in training mode
            are taken to be frozen, and stay as they are.
        forward: ``forward(model, batch)``, where a batch is not the model's input or a tuple that begins with it.

    Returns:
        How many batches were used.

    Raises:
        CalibrationError: there were none. After any error everything is as it was.

    Example:
        >>> from dyrep.surgery.edits import expand_
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
        >>> _ = expand_(model, "0", ["1x1"])
        >>> update_norms_(model, [torch.randn(8, 3, 6, 6) for _ in range(3)])
        3
        >>> model[0].branches["1x1"].norm.running_var[0] == 1
        tensor(False)
    """
    model = bare(model)
    modes = [(module, module.training) for module in model.modules()]
    norms = [module for module, training in modes if _has_statistics(module) and (training or not model.training)]
    frozen = [module for module, training in modes if model.training and not training]
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    momenta = [(norm, norm.momentum) for norm in norms if isinstance(norm, _BatchNorm)]
    used, completed = 0, False
    model.train()
    for module in frozen:
        module.training = False
    for norm in norms:
        if isinstance(norm, BranchNorm):
            norm.start_calibration()
        else:
            norm.reset_running_stats()  # type: ignore[operator]
            norm.momentum = None  # type: ignore[assignment]
    try:
        for batch in iterate(batches):
            run_batch(model, batch, forward)
            used += 1
        completed = used > 0
    finally:
        unseen = {id(buffer) for norm in norms if not _batches_seen(norm) for buffer in norm.buffers()}
        for buffer, saved in before:
            if not completed or id(buffer) in unseen:  # a part of the model that no batch reached keeps what it had
                buffer.copy_(saved)
        for norm, momentum in momenta:
            norm.momentum = momentum
        for module, training in modes:
            module.training = training
    if not used:
        raise CalibrationError(
            "there were no batches to measure statistics on (an empty or used-up iterable): pass a loader or a list"
        )
    return used


def _has_statistics(module: nn.Module) -> bool:
    batch_norm = isinstance(module, _BatchNorm) and module.track_running_stats
    return batch_norm or isinstance(module, BranchNorm)


def _batches_seen(norm: nn.Module) -> int:
    return norm.finish_calibration() if isinstance(norm, BranchNorm) else int(norm.num_batches_tracked)  # type: ignore[arg-type]
