"""Models inside wrappers: what can be operated on, what has to be unwrapped first, what has to be wrapped anew."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
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

    The user's variable keeps pointing to it. Its settings and hooks are carried over.
    """
    known: dict[str, Any] = {
        "device_ids": wrapper.device_ids,
        "output_device": wrapper.output_device,
        "dim": wrapper.dim,
        "broadcast_buffers": wrapper.broadcast_buffers,
        "process_group": wrapper.process_group,
        "bucket_cap_mb": wrapper.bucket_bytes_cap / 2**20,
        "find_unused_parameters": wrapper.find_unused_parameters,
        "gradient_as_bucket_view": wrapper.gradient_as_bucket_view,
        "static_graph": wrapper.static_graph,
        "mixed_precision": getattr(wrapper, "mixed_precision", None),
    }
    accepted = inspect.signature(DistributedDataParallel.__init__).parameters
    # torch warns about some that are given at all, so those at their default are not
    settings = {name: value for name, value in known.items() if name in accepted and value != accepted[name].default}
    module, before = wrapper.module, dict(wrapper.__dict__)
    wrapper.__dict__.clear()
    wrapper.__init__(module, **settings)  # type: ignore[misc]
    wrapper.training = before["training"]
    for name, hooks in before.items():
        if isinstance(hooks, dict) and "_hooks" in name:  # those of nn.Module, the user's
            wrapper.__dict__[name].update(hooks)
    for hook, state in before.get("_comm_hooks", ()):
        wrapper.register_comm_hook(state, hook)


def sync_group(model: nn.Module) -> tuple[Any] | None:
    """The process group of a model's SyncBatchNorm layers, in a tuple (None is one too), or None without any."""
    for module in model.modules():
        aside = isinstance(module, PassedNorm) and module.kind is nn.SyncBatchNorm
        if aside or isinstance(module, nn.SyncBatchNorm):
            return (module.process_group,)
    return None
