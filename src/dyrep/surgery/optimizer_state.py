"""What an optimizer knows of each parameter: saved by name, and kept in step when a weight is rewritten."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep.errors import OptimizerError
from dyrep.wording import counted

_FORMAT = 1
_COPIES = ("lookahead_slow_buff", "x0", "z", "ax")
"""State that lives where weights do: of timm's Lookahead and MADGRAD, of schedule-free optimizers, and of ASGD.

What equals the weight, whatever it is called, is one too: it may be kept in full precision, and rounded to the weight.
"""

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Options that torch's schedulers add to groups of parameters."""


def states_of(optimizer: Optimizer) -> list[dict[Tensor, Any]]:
    """Where an optimizer keeps the state of its parameters; one that wraps another has that one's first, then its own.

    Wrappers are known by sharing their groups with an optimizer that they hold: timm's Lookahead, or SAM.

    Example:
        >>> [len(state) for state in states_of(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))]
        [0]
    """
    held = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    states = [inner.state for inner in held if inner.param_groups is optimizer.param_groups]
    return [*states, *([] if any(state is optimizer.state for state in states) else [optimizer.state])]


@contextmanager
def copies_moved(optimizer: Optimizer | None, modules: Iterable[nn.Module]) -> Iterator[None]:
    """While the body rewrites the weights of some modules, keep copies of them that an optimizer has in step.

    Lookahead steps back towards a copy that it keeps, and so do others: they would undo what was rewritten.
    """
    copies = weight_copies(optimizer, modules)
    before = [parameter.detach().clone() for parameter, _ in copies]
    yield
    for (parameter, kept), earlier in zip(copies, before, strict=True):
        kept.add_(parameter.detach().to(kept) - earlier.to(kept))


def weight_copies(optimizer: Optimizer | None, modules: Iterable[nn.Module]) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters of modules themselves, not of their children, of which an optimizer keeps copies, and these."""
    found: list[tuple[nn.Parameter, Tensor]] = []
    states = [] if optimizer is None else states_of(optimizer)
    for parameter in (p for module in modules for p in module.parameters(recurse=False)):
        for state in states:
            values = state.get(parameter, {})
            for key, kept in values.items() if isinstance(values, Mapping) else ():
                if not isinstance(kept, Tensor) or kept.shape != parameter.shape or kept is parameter:
                    continue
                if key in _COPIES or _is_copy(kept, parameter):
                    found.append((parameter, kept))
    return found


def _is_copy(kept: Tensor, parameter: Tensor) -> bool:
    """Whether state is the weight in another precision; zeros are not, as momentum begins with them too."""
    if not kept.is_floating_point() or not bool(kept.any()):
        return False
    return torch.equal(kept.to(parameter.dtype), parameter.detach())


def locate(optimizer: Optimizer, parameter: Tensor) -> tuple[dict[str, Any], int] | None:
    """The group that holds a parameter, and its place there."""
    for group in optimizer.param_groups:
        for index, held in enumerate(group["params"]):
            if held is parameter:
                return group, index
    return None


def state_by_name(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """An optimizer's state with parameters called by name, so that it fits however the groups were built.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> state_by_name(torch.optim.SGD(model.parameters(), lr=0.1), model)["groups"][0]["params"]
        ['weight', 'bias']
    """
    names = _names(optimizer, model)
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"params": [names[id(p)] for p in group["params"]], "options": options})
    state, *outer = [
        {names[id(p)]: dict(values) for p, values in kept.items() if id(p) in names} for kept in states_of(optimizer)
    ]
    dtypes = {names[id(p)]: str(p.dtype) for group in optimizer.param_groups for p in group["params"]}
    kind = type(optimizer).__name__
    saved = {"format": _FORMAT, "kind": kind, "groups": groups, "state": state, "dtypes": dtypes}
    return {**saved, "outer": outer} if any(outer) else saved


def load_state_by_name_(optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Restore what `state_by_name` returned: which parameter is in which group, options and state.

    Raises:
        OptimizerError: the groups or parameter names differ; nothing has been changed then.
    """
    if saved.get("format") != _FORMAT:
        raise OptimizerError(f"optimizer state of format {saved.get('format')!r}; this version reads {_FORMAT}")
    names = _names(optimizer, model)
    by_name = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    wanted = [name for group in saved["groups"] for name in group["params"]]
    missing = [name for name in wanted if name not in by_name]
    extra = [name for name in by_name if name not in set(wanted)]
    if missing or extra or len(saved["groups"]) != len(optimizer.param_groups):
        lists = {"not in this optimizer": missing, "not in the file": extra}
        told = "".join(f"; {what}: {found[:5]}" for what, found in lists.items() if found)
        raise OptimizerError(
            f"the saved optimizer state does not fit: {counted(len(saved['groups']), 'group')} saved, "
            f"{len(optimizer.param_groups)} here{told}. Build model and optimizer as in the saved run"
        )
    kind, ours = saved.get("kind"), type(optimizer).__name__  # earlier versions did not save it
    for group, stored in zip(optimizer.param_groups, saved["groups"], strict=True):
        # later versions of the same optimizer have more options, and schedulers keep some of their own among them
        lacking = set(optimizer.defaults) - set(stored["options"])
        unknown = set(stored["options"]) - set(group) - _OF_SCHEDULERS
        renamed = lacking and unknown
        if renamed or ((lacking or unknown) and kind not in (None, ours)):
            differing = ((kind or "it", unknown), (f"{ours} here", lacking))
            told = ", and ".join(f"{name} has {', '.join(sorted(has)[:3])}" for name, has in differing if has)
            raise OptimizerError(
                f"the saved state is that of another kind or version of optimizer: {told} among its options. Build "
                "the optimizer as in the saved run"
            )
    given = {
        name: group["param_names"][i]
        for group in optimizer.param_groups
        if "param_names" in group
        for i, name in enumerate(names[id(p)] for p in group["params"])
    }
    for group, stored in zip(optimizer.param_groups, saved["groups"], strict=True):
        group["params"][:] = [by_name[name] for name in stored["params"]]
        if "param_names" in group:
            group["param_names"][:] = [given[name] for name in stored["params"]]
        group.update(copy.deepcopy(stored["options"]))
    states = states_of(optimizer)
    for state in states:
        for parameter in by_name.values():
            state.pop(parameter, None)
    dtypes = saved.get("dtypes", {})
    for state, kept in zip(states, [saved["state"], *saved.get("outer", ())], strict=False):
        for name, values in kept.items():
            parameter = by_name[name]
            group, _ = locate(optimizer, parameter) or ({}, 0)
            state[parameter] = {
                key: _placed(key, value, parameter, group, dtypes.get(name)) for key, value in values.items()
            }
    forget_flat_history_(optimizer, keep_state=True)


def _placed(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any], saved_dtype: str | None) -> Any:
    """A saved value where and in the dtype the optimizer wants it: that of the parameter, if it was so before."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" or (value.dim() == 0 and parameter.dim() > 0):  # a counter or coefficient: its own precision
        on_device = group.get("capturable") or group.get("fused")
        return value.detach().to(device=parameter.device if on_device else value.device, copy=True)
    follows = value.is_floating_point() and (saved_dtype is None or str(value.dtype) == saved_dtype)
    dtype = parameter.dtype if follows else value.dtype
    return value.detach().to(device=parameter.device, dtype=dtype, copy=True)


def _names(optimizer: Optimizer, model: nn.Module) -> dict[int, str]:
    names = {id(p): name for name, p in model.named_parameters()}
    outside = 0  # parameters of a loss, say, have no name in the model
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                names[id(parameter)] = f"(outside the model) {outside}"
                outside += 1
    return names


def forget_flat_history_(optimizer: Optimizer, keep_state: bool = False) -> None:
    """L-BFGS keeps one flat history of all parameters, which means nothing for another set of them."""
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer._numel_cache = None
        if not keep_state:
            optimizer.state.clear()
