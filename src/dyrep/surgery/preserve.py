"""Run a model for its statistics and leave everything else as it was: random numbers, modes, buffers."""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dyrep.errors import CalibrationError
from dyrep.execution import eagerly
from dyrep.surgery.detectors import detector_outputs, is_detection

Forward = Callable[[nn.Module, Any], Any]
"""How to run a model on one batch of the user's: ``forward(model, batch)``."""


_WRAPPED = ("loader", "dataloader", "data_loader", "base_dataloader", "iterable")
"""What prefetchers, progress bars and the like call the loader that they wrap."""


@contextmanager
def preserved(model: nn.Module, batches: Any = None, *, training: bool | None = None) -> Iterator[None]:
    """Restore modes, buffers and random number generators of a model and a loader on leaving.

    Args:
        model: the model that is going to run.
        batches: the loader that is going to be read; its own generators are restored too.
        training: mode to run in. True keeps the modules' own modes if the model is training already, so that norms
            a user has frozen stay frozen.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with preserved_randomness(model, batches), uncompiled():
        try:
            if training is not None and training != model.training:
                model.train(training)
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    buffer.copy_(value)
                    module._buffers[name] = buffer
            for module, mode in modes:
                module.training = mode


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run everything eagerly: compiled code and fused blocks see no hooks, and cannot be differentiated twice."""
    compiles = "torch._dynamo" in sys.modules  # importing it only to switch it off would take seconds
    with eagerly(), torch.compiler.set_stance("force_eager") if compiles else nullcontext():
        yield


def iterate(batches: Iterable[Any]) -> Iterator[Any]:
    """Iterate over batches without disturbing whoever is iterating over them already.

    A loader with persistent workers has a single iterator, which starting another one would reset.

    Raises:
        CalibrationError: these are no batches, but a single one, or a data set of single examples.
    """
    _refuse_what_holds_no_batches(batches)
    if getattr(batches, "persistent_workers", False) and getattr(batches, "_iterator", None) is not None:
        batches = copy.copy(batches)
        batches._iterator = None  # type: ignore[attr-defined]
    return iter(batches)


@contextmanager
def preserved_randomness(model: nn.Module, batches: Any = None) -> Iterator[None]:
    """Restore every random number generator that running a model or reading a loader could advance."""
    generators = [(generator, generator.get_state()) for generator in _generators_of(batches)]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for generator, state in generators:
                generator.set_state(state)
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def run_batch(model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """Run a model on one batch: through ``forward``, as a detector, or on its inputs as found by `model_inputs`."""
    batch = to_device(batch, device_of(model))
    if forward is not None:
        return forward(model, batch)
    if is_detection(model, batch):
        return detector_outputs(model, batch)
    args, kwargs = model_inputs(model, batch)
    return model(*args, **kwargs)


def model_inputs(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model's inputs in a batch: a tensor, the first of a tuple or list, or the matching keys of a dict."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        parameters = inspect.signature(model.forward).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return (), dict(batch)
        known = {key: value for key, value in batch.items() if key in parameters}
        if known:
            return (), known
        raise CalibrationError(
            f"none of the batch's keys ({', '.join(map(str, batch))}) is an argument of {type(model).__name__}.forward "
            f"({', '.join(parameters)}); say how to run the model with forward=lambda model, batch: ..."
        )
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], (Tensor, Mapping, tuple, list)):
        if isinstance(batch[0], Mapping):
            return model_inputs(model, batch[0])
        return (batch[0],), {}
    holds = f" that begins with a {type(batch[0]).__name__}" if isinstance(batch, (tuple, list)) and batch else ""
    raise CalibrationError(
        f"cannot find the model's input in a batch of type {type(batch).__name__}{holds}; "
        "say how to run the model with forward=lambda model, batch: ..."
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a nested batch; one that is there already stays the object that it is."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device) for key, value in batch.items()}
        if all(moved[key] is batch[key] for key in moved):
            return batch
        return batch.to(device) if hasattr(batch, "to") else moved
    if isinstance(batch, (tuple, list)):
        values = [to_device(value, device) for value in batch]
        if all(ours is theirs for ours, theirs in zip(values, batch, strict=True)):
            return batch
        if hasattr(batch, "_fields"):
            return type(batch)(*values)
        return tuple(values) if isinstance(batch, tuple) else values
    return batch


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first parameter lives."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _refuse_what_holds_no_batches(batches: Any) -> None:
    """Raise if something is one batch, or holds single examples, where a loader of batches is asked for."""
    kind = type(batches).__name__
    parts = batches if isinstance(batches, (tuple, list)) else ()
    differ = all(isinstance(part, Tensor) for part in parts) and len({part.dim() for part in parts}) > 1
    if isinstance(batches, (Tensor, Mapping)) or differ:
        raise CalibrationError(f"these batches are a single one (a {kind}): give the loader, or a list, [batch]")
    if isinstance(batches, Dataset) and not isinstance(batches, Iterable):
        raise CalibrationError(
            f"these batches are a data set (a {kind}), which holds single examples: give a DataLoader of it, with "
            "batch_size=None if its items are batches"
        )


def _generators_of(batches: Any) -> Iterable[torch.Generator]:
    """Generators of a loader and its samplers, also of one that a prefetcher or a progress bar keeps."""
    generators: dict[int, torch.Generator] = {}
    waiting, seen = [batches], set()
    while waiting:
        owner = waiting.pop()
        if owner is None or id(owner) in seen:
            continue
        seen.add(id(owner))
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            generators[id(generator)] = generator
        waiting += [getattr(owner, name, None) for name in ("sampler", "batch_sampler", *_WRAPPED)]
    return generators.values()
