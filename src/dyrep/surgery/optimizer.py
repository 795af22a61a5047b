"""Keep an optimizer in step with a model whose parameters come and go.

Parameters are inserted into and removed from the lists of the optimizer's own groups, in place: schedulers, which
remember groups by position, never notice, and the state of every surviving parameter stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep.errors import OptimizerError
from dyrep.norm import BranchNorm
from dyrep.passing import PassedNorm
from dyrep.scaling import ChannelScale
from dyrep.surgery.optimizer_state import forget_flat_history_, locate, states_of

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, BranchNorm, PassedNorm)


def check_optimizer(optimizer: object) -> None:
    """Raise unless an optimizer can follow a change of structure.

    Raises:
        OptimizerError: it is not a torch optimizer, or shards its state.
    """
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer; pass the optimizer itself, not a wrapper"
        )
    hooked = hasattr(optimizer, "_optimizer_step_post_hooks")  # one that is none of its own has no place for hooks
    if not hooked and isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise OptimizerError(f"{type(optimizer).__name__} wraps the optimizer that trains: pass its .optimizer instead")
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise OptimizerError("ZeroRedundancyOptimizer splits parameters over ranks once and for all; use a plain one")


def check_holds(optimizer: Optimizer, name: str, weight: Tensor) -> None:
    """Raise unless an optimizer holds a layer's weight."""
    if locate(optimizer, weight) is None:
        raise OptimizerError(
            f"the weight of layer {name!r} is not in the optimizer, so its branches would not be trained: "
            "add it to a parameter group, leave the layer out, or pass optimizer=None"
        )


def insert_(
    optimizer: Optimizer, model: nn.Module, conv: nn.Module, added: Mapping[str, nn.Module], prefix: str
) -> None:
    """Add the parameters of new modules: kernels beside the convolution's weight, γ and β where the model's norms are.

    Args:
        optimizer: the optimizer to extend.
        model: the model, for the order of its modules.
        conv: the convolution that grew.
        added: the new modules, by their name below ``conv``.
        prefix: the convolution's name in the model.
    """
    weight = conv.weight
    assert isinstance(weight, Tensor)
    norm = _nearest_norm_like(optimizer, model, conv, set(map(id, added.values())))
    of_norms: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for path, module in added.items():
        for name, child in module.named_modules(prefix=path):
            for key, parameter in child.named_parameters(prefix=name, recurse=False):
                (of_norms if isinstance(child, (BranchNorm, ChannelScale)) else others).append((key, parameter))
    home = locate(optimizer, weight)
    assert home is not None
    norm_home = None if norm is None else locate(optimizer, norm)
    base = _name_in_group(*home, default=f"{prefix}.weight")[: -len("weight")]
    if norm_home is None or norm_home[0] is home[0]:
        _insert_after_(home, base, [*others, *of_norms])
    else:
        _insert_after_(home, base, others)
        _insert_after_(norm_home, base, of_norms)
    _initialise_state_(optimizer, [p for _, p in (*others, *of_norms)])


def remove_(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Forget parameters and their state."""
    gone = {id(p): p for p in parameters}
    for group in optimizer.param_groups:
        keep = [i for i, p in enumerate(group["params"]) if id(p) not in gone]
        if "param_names" in group:
            group["param_names"][:] = [group["param_names"][i] for i in keep]
        group["params"][:] = [group["params"][i] for i in keep]
    for state in states_of(optimizer):
        for parameter in gone.values():
            state.pop(parameter, None)
    forget_flat_history_(optimizer)


def _nearest_norm_like(optimizer: Optimizer, model: nn.Module, conv: nn.Module, new: set[int]) -> Tensor | None:
    """A parameter that is treated as the norm of a convolution's layer is, as far as the optimizer holds one.

    That is where a user who treats norms apart (no weight decay, say) has put the norm of this very layer: the one
    that shares most of the convolution's name, and of those the next in module order, or else the last before it.
    Without norms of known make it is the nearest vector that is no bias, as hand-written norms have one, and without
    these the convolution's own bias: what is not to decay is usually told from the rest by its shape.
    """
    modules = list(model.named_modules())
    fresh = {id(child) for _, module in modules if id(module) in new for child in module.modules()}
    place = next(i for i, (_, module) in enumerate(modules) if module is conv)
    path = modules[place][0].split(".")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    around = [item for item in (*modules[place + 1 :], *reversed(modules[:place])) if id(item[1]) not in fresh]
    for kind in (_norm_weight, _vector):
        best: Tensor | None = None
        most = -1
        for name, module in around:
            found = kind(module)
            if found is not None and id(found) in held:
                pairs = zip(path, name.split("."), strict=False)
                shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                if shared > most:
                    best, most = found, shared
        if best is not None:
            return best
    bias = conv._parameters.get("bias")
    return bias if bias is not None and id(bias) in held else None


def _norm_weight(module: nn.Module) -> Tensor | None:
    return module.weight if isinstance(module, _NORMS) else None


def _vector(module: nn.Module) -> Tensor | None:
    own = module.named_parameters(recurse=False)
    return next((parameter for name, parameter in own if parameter.dim() == 1 and name != "bias"), None)


def _insert_after_(home: tuple[dict[str, Any], int], base: str, named: Sequence[tuple[str, nn.Parameter]]) -> None:
    group, index = home
    group["params"][index + 1 : index + 1] = [parameter for _, parameter in named]
    if "param_names" in group:
        group["param_names"][index + 1 : index + 1] = [base + name for name, _ in named]


def _name_in_group(group: dict[str, Any], index: int, default: str) -> str:
    return group["param_names"][index] if "param_names" in group else default


def _initialise_state_(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Create the state of new parameters where an optimizer would not do so on their first step."""
    for parameter in parameters:
        group, _ = locate(optimizer, parameter) or ({}, 0)
        if isinstance(optimizer, torch.optim.Adagrad):  # creates state when it is built
            optimizer.state[parameter]["step"] = torch.tensor(0.0)
            optimizer.state[parameter]["sum"] = torch.full_like(parameter, group["initial_accumulator_value"])
        elif isinstance(optimizer, torch.optim.SGD) and group["fused"] and _has_momentum(optimizer, group):
            # its kernel wants a buffer for every parameter or for none; zeros act as an absent one does
            # (but for dampening, which spares the first gradient of an absent one)
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    forget_flat_history_(optimizer)


def _has_momentum(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    held = (optimizer.state[p] for p in group["params"] if p in optimizer.state)
    return any(state.get("momentum_buffer") is not None for state in held)
