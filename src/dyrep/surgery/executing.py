"""Choose how the blocks of a model are run."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from dyrep.block import RepConv
from dyrep.execution import Clock, Execution
from dyrep.execution.settings import ENOUGH_VALUES, MEASURE_EVERY, MEASURED_IMAGES
from dyrep.surgery.wrappers import bare, forget_compiled


def set_execution_(
    model: nn.Module,
    execution: str = "auto",
    *,
    images: int = MEASURED_IMAGES,
    values: int = ENOUGH_VALUES,
    gradient: str = "none",
    every: int = MEASURE_EVERY,
    clock: Clock | None = None,
) -> None:
    """Choose how all blocks of a model, nested ones included, are run from now on. Parameters stay what they are.

    - ``"eager"`` runs every branch with PyTorch's own operations, on any device: the reference.
    - ``"fused"`` computes the same, to rounding, with far fewer passes over activations. It needs a GPU and Triton;
      on the CPU it means eager, and where a block cannot be fused (shared batch statistics, double precision) it says
      so and runs eagerly.
    - ``"folded"`` runs one convolution per block, with a kernel computed from the branches and the running σ, which
      a few images move every few steps. It is not the same function of the batch; in eval mode, and deployed, it is.
    - ``"auto"``, the default, is fused where it can be, else eager.

    Blocks that grow later are ``"auto"``, unless `dyrep.DyRep` is told otherwise.

    Args:
        model: the model.
        execution: one of `dyrep.EXECUTIONS`.
        images: on how many images of each batch folded blocks measure σ at least.
        values: how many values of a channel they look at at least. Where images have few positions this takes more
            images, up to the whole batch.
        gradient: what a folded block's gradient knows about σ. ``"none"``: nothing, and σ is that of the running
            statistics, which measurements only move; ``"weights"`` and ``"full"``: how σ of the images looked at
            depends on the weights, or on weights and input, at the price of a backward pass through all branches.
        every: measure σ in every n-th step; in between, running statistics serve. Code that is compiled, or captured
            in a CUDA graph by other than `dyrep train`, measures in every step.
        clock: what says instead of ``every`` in which steps to measure, see `dyrep.execution.Clock`; for those who
            capture CUDA graphs.

    Raises:
        ConfigError: a value is not valid.

    Example:
        >>> from dyrep import expand_
        >>> model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        >>> _ = expand_(model, "0")
        >>> set_execution_(model, "folded", images=8)
        >>> model[0].execution.name
        'folded'
    """
    model = bare(model)
    chosen = Execution(execution, images, values, gradient, clock or Clock(every))
    for block in model.modules():
        if isinstance(block, RepConv):
            block.execution = chosen if clock else replace(chosen, clock=Clock(every))
    forget_compiled()
