"""What an export came to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyrep.wording import counted


@dataclass(frozen=True)
class ExportReport:
    """What `export` wrote, and how that compares with the model.

    Attributes:
        path: the file.
        format: ``"onnx"`` or ``"pt2"``.
        opset: version of the ONNX operators in the file; None for ``"pt2"``.
        bytes: size of the file.
        blocks: how many blocks with branches the model had.
        folded: whether they were folded.
        batch_sizes: sizes of the random batches that were compared.
        random_error: largest ‖Δ‖∞ / ‖y‖∞ over all outputs and random batches.
        real_examples: how many of the given inputs were compared.
        real_error: the largest error over those; None if none were given.
        tolerance: the largest error that passes.
        timed_batch: size of the batch that was timed.
        ms: milliseconds that the file takes for it (the median of several runs), in onnxruntime or torch.
        plain_ms: milliseconds that the plain network takes in PyTorch.
        threads: CPU threads that both were given.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from dyrep.exporting import export
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export(torch.nn.Conv2d(3, 4, 3), Path(folder) / "model.pt2", torch.randn(1, 3, 8, 8))
        >>> report.as_dict()["format"], report.blocks, report.random_error <= report.tolerance
        ('pt2', 0, True)
    """

    path: Path
    format: str
    opset: int | None
    bytes: int
    blocks: int
    folded: bool
    batch_sizes: tuple[int, ...]
    random_error: float
    real_examples: int
    real_error: float | None
    tolerance: float
    timed_batch: int
    ms: float
    plain_ms: float
    threads: int

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {**dataclasses.asdict(self), "path": str(self.path), "batch_sizes": list(self.batch_sizes)}

    def __str__(self) -> str:
        kind, runner = ("torch.export", "torch") if self.opset is None else (f"ONNX opset {self.opset}", "onnxruntime")
        sizes = ", ".join(map(str, self.batch_sizes))
        real = (
            "" if self.real_error is None else f", {self.real_error:.2e} on {counted(self.real_examples, 'given one')}"
        )
        return (
            f"{self.path}: {kind}, {self.bytes / 1e6:,.3f} MB, {self._structure()}\n"
            f"  same function: relative error {self.random_error:.2e} on random inputs (batches of {sizes}){real}; "
            f"tolerance {self.tolerance:.0e}\n"
            f"  latency for a batch of {self.timed_batch}: {self.ms:.3f} ms in {runner}, {self.plain_ms:.3f} ms as the "
            f"plain network in PyTorch (CPU, {counted(self.threads, 'thread')})"
        )

    def _structure(self) -> str:
        if not self.blocks:
            return "a network without branches"
        return f"{counted(self.blocks, 'block')} {'folded' if self.folded else 'with all branches'}"
