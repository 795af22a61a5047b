"""Take a change of structure back, exactly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep.block import RepConv
from dyrep.surgery.optimizer_state import states_of, weight_copies
from dyrep.surgery.wrappers import forget_compiled


class Snapshot:
    """What some convolutions and their optimizer looked like; `restore_` makes them so again.

    What an edit rewrites (the origin's weight, bias and norm, a norm whose place the block takes, and copies of them in
    the optimizer) is copied. Branches and other optimizer state, which an edit drops but never rewrites, are only
    remembered.

    Example:
        >>> conv = nn.Conv2d(4, 4, 3)
        >>> before = Snapshot([conv], None)
        >>> _ = conv.weight.data.zero_()
        >>> before.restore_()
        >>> bool(conv.weight.any())
        True
    """

    def __init__(self, layers: Iterable[nn.Module], optimizer: Optimizer | None) -> None:
        modules = list(layers)
        modules += [m.passed_norm for m in modules if isinstance(m, RepConv) and m.passed_norm is not None]
        self._modules = [(m, type(m), dict(m.__dict__), _registered(m), _rewritable(m)) for m in modules]
        self._optimizer = optimizer
        if optimizer is not None:
            groups = optimizer.param_groups
            self._groups = [(group, list(group["params"]), list(group.get("param_names", ()))) for group in groups]
            self._states = [dict(state) for state in states_of(optimizer)]
            self._copies = [(kept, kept.clone()) for _, kept in weight_copies(optimizer, modules)]

    @torch.no_grad()
    def restore_(self) -> None:
        """Put everything back."""
        for module, kind, attributes, registered, values in self._modules:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for registry, content in registered:
                registry.clear()
                registry.update(content)
            for tensor, value, trained in values:
                tensor.copy_(value)
                tensor.requires_grad_(trained)
        if self._optimizer is not None:
            for group, params, names in self._groups:
                group["params"][:] = params
                if "param_names" in group:
                    group["param_names"][:] = names
            for state, earlier in zip(states_of(self._optimizer), self._states, strict=True):
                state.clear()
                state.update(earlier)
            for kept, value in self._copies:
                kept.copy_(value)
        forget_compiled()


def _registered(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Where a module keeps its children and buffers, and what is there now."""
    return [(registry, dict(registry)) for registry in (module._modules, module._buffers)]


def _rewritable(module: nn.Module) -> list[tuple[Tensor, Tensor, bool]]:
    tensors: list[Tensor] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if isinstance(module, RepConv) and module.origin_norm is not None:
        tensors += module.origin_norm.parameters()
    return [(tensor, tensor.detach().clone(), tensor.requires_grad) for tensor in tensors]
