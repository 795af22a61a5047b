"""Take a change of structure back, exactly."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep.block import RepConv
from dyrep.surgery.wrappers import forget_compiled


class Snapshot:
    """What some convolutions and their optimizer looked like; `restore_` makes them so again.

    What an edit rewrites (the origin's weight, bias and norm) is copied. Branches and optimizer state, which an edit
    drops but never rewrites, are only remembered.

    Example:
        >>> conv = nn.Conv2d(4, 4, 3)
        >>> before = Snapshot([conv], None)
        >>> _ = conv.weight.data.zero_()
        >>> before.restore_()
        >>> bool(conv.weight.any())
        True
    """

    def __init__(self, convs: Iterable[nn.Module], optimizer: Optimizer | None) -> None:
        self._convs = [
            (conv, type(conv), dict(conv.__dict__), dict(conv._modules), _rewritable(conv)) for conv in convs
        ]
        self._optimizer = optimizer
        if optimizer is not None:
            groups = optimizer.param_groups
            self._groups = [(group, list(group["params"]), list(group.get("param_names", ()))) for group in groups]
            self._state = dict(optimizer.state)

    @torch.no_grad()
    def restore_(self) -> None:
        """Put everything back."""
        for conv, kind, attributes, children, values in self._convs:
            conv.__class__ = kind
            conv.__dict__.clear()
            conv.__dict__.update(attributes)
            conv._modules.clear()
            conv._modules.update(children)
            for tensor, value in values:
                tensor.copy_(value)
        if self._optimizer is not None:
            for group, params, names in self._groups:
                group["params"][:] = params
                if "param_names" in group:
                    group["param_names"][:] = names
            self._optimizer.state.clear()
            self._optimizer.state.update(self._state)
        forget_compiled()


def _rewritable(conv: nn.Module) -> list[tuple[Tensor, Tensor]]:
    tensors = list(conv.parameters(recurse=False))
    if isinstance(conv, RepConv) and conv.origin_norm is not None:
        tensors += conv.origin_norm.parameters()
    return [(tensor, tensor.detach().clone()) for tensor in tensors]
