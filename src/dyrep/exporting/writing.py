"""Fold, export, compare, and only then give the file its name."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dyrep.block import RepConv
from dyrep.copying import copied
from dyrep.errors import ConfigError, DyRepError
from dyrep.execution import eagerly
from dyrep.exporting.formats import NEEDED, OPEN, Runner, Traced, check_weights, format_of, reason_of
from dyrep.exporting.inputs import Inputs, checked_batches, checked_example, random_like
from dyrep.exporting.report import ExportReport
from dyrep.extras import needed
from dyrep.files import replacing
from dyrep.surgery.folding import deploy, eval_outputs, relative_error
from dyrep.surgery.preserve import preserved_randomness
from dyrep.surgery.wrappers import bare

_TRACED_BATCH = 2  # torch takes a size of 1 for one that never changes
_CHECKED_BATCHES = (1, 2, 3, 5)
_WARMUP, _ROUNDS, _CALLS = 3, 5, 4


@torch.no_grad()
def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_input: Tensor | tuple[Tensor, ...],
    *,
    fold: bool = True,
    inputs: Tensor | Iterable[Any] | None = None,
    tolerance: float = 1e-4,
    opset: int | None = None,
    dynamic_batch: bool = True,
) -> ExportReport:
    """Write a model to a file that runs without dyrep, after comparing the file with the model.

    The file holds the model in eval mode and float32, its blocks folded, for batches of any size. It gets its name
    only once it has been loaded, run on the CPU, and found to compute what the model does with its branches. The
    model itself stays as it is.

    Args:
        model: the model, evolved or plain; compiled and DistributedDataParallel models are unwrapped.
        path: file to write: ``.onnx`` for `torch.onnx`, ``.pt2`` for `torch.export`.
        example_input: the model's input, or a tuple of its inputs. The first dimension of each is the batch; values
            count only where they are whole numbers, which random inputs are drawn from.
        fold: fold the blocks. If not, the file holds all branches.
        inputs: real inputs to compare on, too: a batch (a tensor, or a tuple of them), or a list or other iterable of
            batches; what follows the inputs in a batch (labels) is left out. All batches are run.
        tolerance: the largest relative error that passes.
        opset: version of the ONNX operators (default: torch's choice).
        dynamic_batch: let the size of the batch vary. If not, it is that of ``example_input``.

    Returns:
        An `ExportReport`.

    Raises:
        ConfigError: an ending, input or setting that cannot serve.
        MissingPackageError: something that the format needs is not installed.
        DyRepError: the model cannot be exported, or the file computes something else. Nothing has been written then.

    Example:
        >>> import tempfile
        >>> from dyrep.surgery.edits import expand_
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
        >>> _ = expand_(model, "0")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export(model, Path(folder) / "model.pt2", torch.randn(1, 8, 8, 8))
        >>> report.format, report.blocks, report.random_error < 1e-4
        ('pt2', 1, True)
    """
    path = Path(path)
    kind = format_of(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file")
    if opset is not None and kind != "onnx":
        raise ConfigError(f"opset={opset}: {path} is not to be an ONNX file; leave it out")
    model = bare(model)
    example = checked_example(example_input)
    real = [] if inputs is None else checked_batches(inputs, len(example))
    check_weights(model, kind)
    for module in NEEDED[kind]:
        needed(module, "an ONNX file", "a .pt2 file takes torch alone")
    traced_batch = _TRACED_BATCH if dynamic_batch else len(example[0])
    sizes = _CHECKED_BATCHES if dynamic_batch else (traced_batch,)
    with preserved_randomness(model), eagerly(), torch.autocast("cpu", enabled=False):
        evolved = copied(model).to("cpu", torch.float32).eval()
        plain = deploy(evolved)
        random = torch.Generator().manual_seed(0)
        # what is traced with is kept in the file: not the user's data, and not much of it
        traced = Traced(plain if fold else evolved, random_like(example, traced_batch, random), dynamic_batch)
        try:
            with replacing(path) as temporary:
                found_opset = traced.save(temporary, kind, opset)
                run = _opened(temporary, path, kind, traced)
                compare = _Comparison(evolved, run, path, tolerance)
                errors = [compare(random_like(example, n, random), f"a random batch of {n}") for n in sizes]
                real_errors = [compare(batch, f"batch {place} of inputs") for place, batch in enumerate(real)]
                one = random_like(example, sizes[0], random)
                ms, plain_ms = _medians(lambda: run(one), lambda: plain(*one))
                report = ExportReport(
                    path=path,
                    format=kind,
                    opset=found_opset,
                    bytes=temporary.stat().st_size,
                    blocks=_blocks(evolved),
                    folded=fold,
                    batch_sizes=sizes,
                    random_error=max(errors),
                    real_examples=sum(len(batch[0]) for batch in real),
                    real_error=max(real_errors, default=None),
                    tolerance=tolerance,
                    timed_batch=sizes[0],
                    ms=ms,
                    plain_ms=plain_ms,
                    threads=torch.get_num_threads(),
                )
        except OSError as error:
            raise DyRepError(f"{path} cannot be written: {error}") from error
    return report


def _blocks(model: nn.Module) -> int:
    """How many blocks have something to fold; one that was only prepared has not."""
    blocks = [module for module in model.modules() if isinstance(module, RepConv)]
    return sum(bool(block.branches) or block.origin_norm is not None for block in blocks)


def _opened(file: Path, path: Path, kind: str, traced: Traced) -> Runner:
    try:
        return OPEN[kind](file, traced.outputs)
    except Exception as error:
        raise DyRepError(f"{path} was not written, because it could not be read back: {reason_of(error)}") from error


@dataclass(frozen=True)
class _Comparison:
    """Compares a file with the model it was made from.

    Attributes:
        model: the model with its branches.
        run: runs the file.
        path: name that the file is to get.
        tolerance: the largest error that passes.
    """

    model: nn.Module
    run: Runner
    path: Path
    tolerance: float

    def __call__(self, inputs: Inputs, what: str) -> float:
        """The largest relative error over all outputs; raise if it is too large."""
        try:
            expected = eval_outputs(self.model, inputs, lambda model, batch: model(*batch))
        except Exception as error:
            raise DyRepError(f"the model itself fails on {what}: {reason_of(error)}") from error
        if not expected:
            raise DyRepError("the model has no floating-point output to compare, so nothing was written")
        try:
            found = self.run(inputs)
        except Exception as error:
            raise DyRepError(f"{self.path} was not written, because on {what} it fails: {reason_of(error)}") from error
        if found.keys() != expected.keys():
            names = f"{', '.join(found)} instead of {', '.join(expected)}"
            raise DyRepError(f"{self.path} was not written, because it has other outputs than the model: {names}")
        for name, reference in expected.items():
            if not reference.isfinite().all():
                raise DyRepError(
                    f"{self.path} was not written, because it cannot be checked: the model's own {name!r} is not "
                    f"finite on {what}"
                )
        errors = {name: relative_error(found[name], reference) for name, reference in expected.items()}
        for name, deviation in errors.items():
            if not deviation <= self.tolerance:  # NaN never passes
                raise DyRepError(
                    f"{self.path} was not written, because it does not compute the same: on {what}, {name!r} has a "
                    f"relative error of {deviation:.2e} (tolerance {self.tolerance:.0e})"
                )
        return max(errors.values())


def _medians(*runs: Callable[[], Any]) -> list[float]:
    """Milliseconds of each, taking turns: whatever else the machine does in the meantime slows all of them down."""
    spans: list[list[float]] = [[] for _ in runs]
    for turn in range(_ROUNDS):
        for run, found in zip(runs, spans, strict=True):
            for _ in range(1 if turn else _WARMUP):  # threads of the one before go on spinning for a while
                run()
            for _ in range(_CALLS):
                start = time.perf_counter()
                run()
                found.append((time.perf_counter() - start) * 1000)
    return [statistics.median(found) for found in spans]
