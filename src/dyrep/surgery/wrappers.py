"""Models inside wrappers: what can be operated on, what has to be unwrapped first, what has to be wrapped anew."""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dyrep.errors import WrappedModelError
from dyrep.passing import PassedNorm


def unwrap(model: nn.Module) -> nn.Module:
    """The module to operate on: a compiled model's original. Other wrappers are refused with the reason.

    Raises:
        WrappedModelError: the model is wrapped in something that does not survive a change of structure, or is none.
    """
    if not isinstance(model, nn.Module):
        raise WrappedModelError(f"{type(model).__name__} is not a torch.nn.Module: pass the model itself")
    if isinstance(model, DistributedDataParallel):
        raise WrappedModelError(
            "the model is wrapped in DistributedDataParallel, which would not synchronise new parameters: "
            "pass model.module and wrap it again afterwards, or let dyrep.DyRep do both"
        )
    if isinstance(model, DataParallel):
        raise WrappedModelError(
            "the model is wrapped in DataParallel: use DistributedDataParallel, or pass model.module"
        )
    if type(model).__name__ == "FullyShardedDataParallel":
        raise WrappedModelError(
            "the model is wrapped in FullyShardedDataParallel, which flattens the weights that would be edited: "
            "use DistributedDataParallel"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise WrappedModelError(
            "the model is a TorchScript module, whose code is fixed: pass the module it was made from"
        )
    original = getattr(model, "_orig_mod", None)
    return unwrap(original) if isinstance(original, nn.Module) else model


def bare(model: nn.Module) -> nn.Module:
    """Like `unwrap`, but looks through DistributedDataParallel too (in either order with `torch.compile`)."""
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        return bare(original)
    return bare(model.module) if isinstance(model, DistributedDataParallel) else unwrap(model)


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel wrapper around a model, if there is one."""
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        return find_ddp(original)
    return model if isinstance(model, DistributedDataParallel) else None


def forget_compiled() -> None:
    """Make compiled code see a new structure: torch.compile would otherwise give up after a few recompilations."""
    torch.clear_autocast_cache()  # autocast keeps cast copies of weights that an edit has just rewritten
    if "torch._dynamo" in sys.modules:  # importing it only to clear it would take seconds
        torch.compiler.reset()


def rewrap_ddp_(wrapper: DistributedDataParallel) -> None:
    """Initialise a DistributedDataParallel wrapper again, in place, after its module's parameters changed.

    The user's variable keeps pointing to it. Its settings and hooks are carried over, and so is what the user, or a
    subclass, has stored on it. Whether it synchronised when it was built (``init_sync``) is not written down anywhere,
    so parameters are synchronised again. After an error it is as it was.
    """
    module, before = wrapper.module, dict(wrapper.__dict__)
    settings = {**_ddp_settings(wrapper), **_take_delayed_(wrapper)}
    wrapper.__dict__.clear()
    try:
        with warnings.catch_warnings():
            # of the ways to keep buffers as they are, the one that is in every version is deprecated in the latest
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            # a subclass may have arguments of its own, and what it made of them is carried over below
            DistributedDataParallel.__init__(wrapper, module, **settings)
        for hook, state in before.get("_comm_hooks", ()):
            wrapper.register_comm_hook(state, hook)
        if before.get("_require_manual_backward_finalization"):
            wrapper.require_manual_backward_finalization = True  # type: ignore[misc]
    except BaseException:
        wrapper.__dict__.clear()
        wrapper.__dict__.update(before)
        if "param_to_hook_all_reduce" in settings:
            settings["param_to_hook_all_reduce"].register_hook(wrapper._delayed_all_reduce_hook)
        raise
    _carry_over_(wrapper, before)


def _ddp_settings(wrapper: DistributedDataParallel) -> dict[str, Any]:
    """The arguments a wrapper was made with, as far as they can be read from it and are not the usual ones."""
    accepted = inspect.signature(DistributedDataParallel.__init__).parameters
    # most are stored under their own name; these are not, or not as they were given
    apart = {"self", "module", "device_mesh", "broadcast_buffers", "forward_sync_buffers"}
    known = {name: getattr(wrapper, name, None) for name in accepted if name not in apart}
    if not wrapper.bucket_bytes_cap_default:
        known["bucket_cap_mb"] = _mebibytes(wrapper.bucket_bytes_cap)
    if caps := getattr(wrapper, "bucket_bytes_cap_list", None):
        known |= {"bucket_cap_mb": None, "bucket_cap_mb_list": [_mebibytes(cap) for cap in caps]}
    if not getattr(wrapper, "forward_sync_buffers", getattr(wrapper, "broadcast_buffers", True)):
        # forward_sync_buffers=False would still overwrite every rank's own buffers, now, in the midst of training
        known["broadcast_buffers" if "broadcast_buffers" in accepted else "forward_sync_buffers"] = False
    # torch warns about some that are given at all, so those at their default are not
    return {name: value for name, value in known.items() if value is not None and value != accepted[name].default}


def _take_delayed_(wrapper: DistributedDataParallel) -> dict[str, Any]:
    """The arguments for parameters whose gradients are reduced later, as far as they are still there.

    The hook that reduces them is removed: a new wrapper registers its own.
    """
    delayed = {id(parameter) for parameter in wrapper._delay_all_reduce_params}
    if delayed:  # nobody waits for what that hook has begun, and gradients are about to be copied
        device = wrapper._delay_all_reduce_params[0].device
        dist.barrier(wrapper.process_group, device_ids=[device.index] if device.type == "cuda" else None)
    named = [(name, p) for name, p in wrapper.module.named_parameters() if id(p) in delayed]
    for parameter in wrapper.module.parameters() if delayed else ():
        hooks = parameter._backward_hooks or {}
        for key in [key for key, hook in hooks.items() if hook == wrapper._delayed_all_reduce_hook]:
            del hooks[key]
            if named:
                return {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": parameter}
    return {}


def _carry_over_(wrapper: DistributedDataParallel, before: dict[str, Any]) -> None:
    """Give a wrapper that was initialised again what it held besides its settings."""
    current = wrapper.__dict__
    for name, value in before.items():
        if name not in current:
            current[name] = value
        elif name in ("_parameters", "_buffers", "_modules"):
            current[name].update({key: held for key, held in value.items() if key not in current[name]})
        elif isinstance(value, dict) and "_hooks" in name:  # the same dict, which handles to remove them point to
            current[name] = value
    for name in (
        "training",
        "_is_full_backward_hook",
        "_non_persistent_buffers_set",
        "require_backward_grad_sync",
        "require_forward_param_sync",
    ):
        current[name] = before[name]
    for parameter, view in zip(wrapper._delay_all_reduce_params, wrapper._delay_grad_views, strict=True):
        if parameter.grad is not None:  # what is reduced is the view
            parameter.grad = view.copy_(parameter.grad)


def _mebibytes(count: int) -> float:
    whole, rest = divmod(count, 2**20)
    return whole if rest == 0 else count / 2**20


def sync_group(model: nn.Module) -> tuple[Any] | None:
    """The process group of a model's SyncBatchNorm layers, in a tuple (None is one too), or None without any."""
    for module in model.modules():
        aside = isinstance(module, PassedNorm) and module.kind is nn.SyncBatchNorm
        if aside or isinstance(module, nn.SyncBatchNorm):
            return (module.process_group,)
    return None
