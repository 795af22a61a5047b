"""Models in files: safetensors for the tensors, JSON for the structure, never pickle."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save as serialized
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep.copying import copied
from dyrep.errors import CheckpointError, DyRepError
from dyrep.files import replacing
from dyrep.surgery.structure import restructure_, structure
from dyrep.surgery.wrappers import bare

FORMAT = 1


def save(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write a model with its structure to one safetensors file, atomically; equal models give equal files.

    Args:
        model: an evolved or plain model; wrappers are looked through.
        path: the file, replaced if it exists.

    Example:
        >>> import tempfile
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = save(model, Path(folder) / "model.safetensors")
        ...     twin = load(saved, nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)))
        >>> torch.equal(twin[0].weight, model[0].weight)
        True
    """
    path = Path(path)
    model = bare(model)
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"state dict entry {key!r} is a {type(value).__name__}, not a tensor; cannot be saved"
            )
        identity = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if value.numel() and identity in seen:
            aliases[key] = seen[identity]
        else:
            seen[identity] = key
            tensors[key] = value.detach().contiguous().clone()
    about = {"format": FORMAT, "structure": structure(model), "aliases": aliases}
    with replacing(path) as temporary:
        # Not by safetensors' save_file: that has a temporary file of its own, which a kill would leave behind under a
        # name nobody looks for, and which only its owner may read. One key of metadata: several would be written in any
        # order, and equal models would give files that differ.
        temporary.write_bytes(serialized(tensors, metadata={"dyrep": json.dumps(about)}))
    return path


def load(path: str | os.PathLike[str], model: nn.Module, *, optimizer: Optimizer | None = None) -> nn.Module:
    """Give a model the structure and weights of a file, strictly: every key must match.

    Args:
        path: what `save` wrote.
        model: the same architecture, plain or with any structure; changed in place.
        optimizer: an optimizer that trains the model already; parameters join and leave it.

    Returns:
        The model.

    Raises:
        CheckpointError: the file is missing, damaged or not one of ours, or does not fit the model.

    Example:
        >>> import tempfile
        >>> from dyrep.surgery.edits import expand_
        >>> grown, plain = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2))
        >>> edits = expand_(grown, "0", calibration=[torch.randn(2, 8, 6, 6)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     twin = load(save(grown, Path(folder) / "model.safetensors"), plain)
        >>> twin is plain, structure(twin) == structure(grown)
        (True, True)
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no model file at {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    about = _about(metadata)
    if about.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} was not written by dyrep.save (format {about.get('format')!r}, this version reads {FORMAT!r}); "
            "load a plain state dict with load_state_dict, and one with branches after dyrep.prepare_(model)"
        )
    wanted, aliases = about.get("structure"), about.get("aliases")
    if not isinstance(wanted, dict) or not isinstance(aliases, dict) or not set(aliases.values()) <= set(tensors):
        raise CheckpointError(f"{path} is damaged: what it says about the model's structure is not complete")
    tensors |= {alias: tensors[key] for alias, key in aliases.items()}
    try:  # on a copy first: a model that the file does not fit must not be left half changed
        _apply_(copied(bare(model)), wanted, tensors, None)
    except (DyRepError, RuntimeError) as error:
        reasons = [line.strip() for line in str(error).splitlines()]
        raise CheckpointError(f"{path} does not fit this model: {' '.join(reasons[:4])}") from error
    _apply_(bare(model), wanted, tensors, optimizer)
    return model


def _about(metadata: dict[str, str]) -> dict[str, Any]:
    """What a file says about the model in it; nothing if another program wrote it."""
    try:
        about = json.loads(metadata.get("dyrep", "null"))
    except json.JSONDecodeError:
        return {}
    return about if isinstance(about, dict) else {}


def _apply_(model: nn.Module, wanted: dict[str, Any], tensors: dict[str, Tensor], optimizer: Optimizer | None) -> None:
    # weights drawn here are overwritten at once
    restructure_(model, wanted, optimizer=optimizer, generator=torch.Generator())
    model.load_state_dict(with_versions(tensors, model))


def with_versions(tensors: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """A state dict with versions of modules, which some of these look for; those of safetensors files have none.

    Example:
        >>> model = nn.BatchNorm2d(2)
        >>> model.load_state_dict(with_versions(dict(model.state_dict()), model))
        <All keys matched successfully>
    """
    if hasattr(tensors, "_metadata"):
        return tensors
    state = OrderedDict(tensors)
    state._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]
    return state
