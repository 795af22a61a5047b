"""Copies of models, also of those that keep something of the last training step."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def copied(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """Like `copy.deepcopy`, which refuses tensors that autograd computed: of these, the copy has detached ones.

    A model has such tensors where it keeps an activation as an attribute, or where a hook computes a weight (pruning,
    and the older weight norm and spectral norm of torch).

    Args:
        module: what to copy.
        memo: what is not to be copied but replaced, by its id, as for `copy.deepcopy`.

    Example:
        >>> model = nn.Conv2d(3, 8, 3)
        >>> model.kept = [model.weight.abs()]
        >>> copied(model).kept[0].requires_grad
        False
    """
    memo = {} if memo is None else memo
    for tensor in _tensors_of(module):
        if not tensor.is_leaf and id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone()
    twin = copy.deepcopy(module, memo)
    modes = {name: child.training for name, child in module.named_modules()}
    for name, child in twin.named_modules():  # a traced module is made anew, in training mode
        child.training = modes.get(name, child.training)
    return twin


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Every tensor that copying a module comes across."""
    waiting: list[Any] = [module]
    seen: dict[int, Any] = {}  # the objects too, so that no id is used again
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        if isinstance(found, Tensor):
            yield found
        else:
            waiting.extend(_parts(found))


def _parts(value: Any) -> Iterable[Any]:
    """What is copied together with a value."""
    if isinstance(value, (str, bytes, type, FunctionType, ModuleType)):
        return ()
    own = [] if not hasattr(value, "__dict__") else [vars(value)]
    if isinstance(value, nn.Module):
        return own
    if hasattr(value, "__deepcopy__"):
        return ()  # which knows by itself what to copy
    if isinstance(value, Mapping):
        return [*own, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [*own, *value]
    return own
