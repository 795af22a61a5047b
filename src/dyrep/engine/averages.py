"""A moving average of the weights that costs two kernels a step and can be captured in a CUDA graph."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """Keeps a copy of a model whose weights follow the model's slowly.

    Parameters are averaged exponentially, starting from the model's own; buffers (the norms' statistics) are copied.

    Args:
        model: the bare model.
        decay: share of the old average at every step.

    Attributes:
        module: the average, a model of its own.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> average = WeightAverage(model, decay=0.75)
        >>> start = model.weight.item()
        >>> _ = model.weight.data.add_(1.0)
        >>> average.update()
        >>> round(average.module.weight.item() - start, 5)
        0.25
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self.module = copy.deepcopy(model).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self) -> None:
        """Follow the model by one step."""
        floating: list[tuple[Tensor, Tensor]] = list(
            zip(self.module.parameters(), self._model.parameters(), strict=True)
        )
        torch._foreach_lerp_([ours for ours, _ in floating], [theirs for _, theirs in floating], 1 - self._decay)
        for ours, theirs in zip(self.module.buffers(), self._model.buffers(), strict=True):
            ours.copy_(theirs)

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights."""
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore averaged weights; the module needs to have their structure already."""
        self.module.load_state_dict(state)
