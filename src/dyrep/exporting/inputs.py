"""The inputs that a file is traced with and checked on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dyrep.errors import ConfigError

Inputs = tuple[Tensor, ...]
"""All inputs of a model; the first dimension of each is the batch."""


def checked_example(example: Any) -> Inputs:
    """The inputs in ``example_input``, on the CPU and in float32.

    Raises:
        ConfigError: it is none, or holds no examples.
    """
    tensors = (example,) if isinstance(example, Tensor) else example
    if not isinstance(tensors, tuple) or not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ConfigError(f"example_input is a {type(example).__name__}: must be a tensor or a tuple of tensors")
    for place, tensor in enumerate(tensors):
        which = "example_input" if len(tensors) == 1 else f"example_input[{place}]"
        if tensor.is_meta:
            raise ConfigError(f"{which} is on the meta device, where it has no values: give one on the CPU")
        if tensor.dim() == 0 or len(tensor) == 0:
            raise ConfigError(
                f"{which} has shape {tuple(tensor.shape)}: its first dimension is the batch, which must hold at least "
                "one example"
            )
    if len({len(tensor) for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError(f"the tensors in example_input must agree in their first dimension, the batch: {shapes}")
    return tuple(map(_ready, tensors))


def checked_batches(inputs: Any, count: int) -> list[Inputs]:
    """The batches in ``inputs``, each as ``count`` tensors.

    Raises:
        ConfigError: there are none, or one of them does not hold a model's inputs.
    """
    batches = []
    one = isinstance(inputs, Tensor) or (isinstance(inputs, tuple) and all(isinstance(part, Tensor) for part in inputs))
    for place, batch in enumerate([inputs] if one else inputs):
        found = batch if isinstance(batch, (tuple, list)) else (batch,)
        tensors = tuple(found[:count])
        if len(tensors) < count or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise ConfigError(
                f"inputs: batch {place} must be {'a tensor' if count == 1 else f'a tuple of {count} tensors'}, as "
                "example_input is"
            )
        if any(tensor.is_meta or tensor.dim() == 0 or len(tensor) == 0 for tensor in tensors):
            raise ConfigError(f"inputs: batch {place} holds no examples")
        batches.append(tuple(map(_ready, tensors)))
    if not batches:
        raise ConfigError("inputs holds no batch; leave it out to compare on random inputs alone")
    return batches


def random_like(example: Inputs, batch: int, generator: torch.Generator) -> Inputs:
    """Random inputs of the same kind: normal, or drawn from the example's values where those are whole numbers.

    Whole numbers are often limited (an index into a table); those in the example are known to be valid.

    Example:
        >>> images, marks = random_like((torch.zeros(1, 3, 8, 8), torch.tensor([7])), 5, torch.Generator())
        >>> images.shape, marks
        (torch.Size([5, 3, 8, 8]), tensor([7, 7, 7, 7, 7]))
    """

    def draw(tensor: Tensor) -> Tensor:
        shape = (batch, *tensor.shape[1:])
        if tensor.is_floating_point():
            return torch.randn(shape, generator=generator)
        return tensor.flatten()[torch.randint(tensor.numel(), shape, generator=generator)]

    return tuple(map(draw, example))


def _ready(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.is_floating_point() else tensor
