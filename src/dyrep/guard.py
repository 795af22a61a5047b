"""Make edits under watch: measure how far each moves the network's output, and take back what moves it too far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep.errors import EditRolledBackWarning, UnmeasuredEditWarning, warn
from dyrep.surgery import ranks
from dyrep.surgery.divergence import find_origin
from dyrep.surgery.edits import Edit
from dyrep.surgery.folding import as_compared, drift, eval_outputs, train_outputs
from dyrep.surgery.preserve import Forward, device_of
from dyrep.surgery.undo import Snapshot


class EditGuard:
    """Compares a model's outputs before and after each edit, on one batch.

    Args:
        model: the model that is edited.
        optimizer: its optimizer, restored along with it.
        batch: what to run the model on; None to accept every edit unmeasured.
        forward: ``forward(model, batch)`` to run it.
        tolerance: largest relative change of the eval outputs (default by dtype); NaN is never tolerated.
        distributed: whether ranks accept or reject together.

    Attributes:
        done: edits that were kept, with ``drift`` (eval mode) and ``train_drift`` in their detail, where measured.
        rejected: edits that were taken back.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch: Any,
        *,
        forward: Forward | None = None,
        tolerance: float | None = None,
        distributed: bool | None = None,
    ) -> None:
        self.done: list[Edit] = []
        self.rejected: list[Edit] = []
        self._snapshots: list[Snapshot] = []
        self._model = model
        self._optimizer = optimizer
        self._batch = batch
        self._forward = forward
        self._tolerance = _default_tolerance(model) if tolerance is None else tolerance
        self._distributed = distributed
        self._before = self._outputs()
        if batch is not None and "drift" not in self._before:
            warn(
                "in eval mode the model's output holds no floating-point tensor (classes or masks perhaps), so edits "
                "are made unmeasured: say with forward=lambda model, batch: ... how to get at what can be compared",
                UnmeasuredEditWarning,
            )

    @property
    def healthy(self) -> bool:
        """Whether the model's outputs were finite to begin with; if not, no edit can be judged."""
        values = [output for outputs in self._before.values() for output in outputs.values()]
        fine = all(bool(torch.isfinite(value).all()) for value in values)
        return self._together(fine)

    def find_origin(self) -> str:
        """Where outputs that are not finite began, in words."""
        for mode, kind in (("eval", "drift"), ("training", "train_drift")):
            if any(not torch.isfinite(output).all() for output in self._before.get(kind, {}).values()):
                if mode == "training" and ranks.distributed(self._distributed):
                    # norms that synchronise would wait there for the other ranks
                    return "on this rank, in training mode alone"
                otherwise = "what is made of the model's output" if self._forward is None else "what forward= returns"
                with as_compared(self._model, training=mode == "training"):
                    origin = find_origin(self._model, self._batch, self._forward, otherwise=otherwise)
                return f"it began, in {mode} mode, with {origin}"
        return "another rank says where it began"

    def attempt(self, layers: Iterable[str], edit: Callable[[], list[Edit]]) -> bool:
        """Make an edit that touches these layers; False if it had to be taken back."""
        snapshot = Snapshot([self._model.get_submodule(layer) for layer in layers], self._optimizer)
        try:
            made = edit()
            after = self._outputs()
        except BaseException:
            snapshot.restore_()
            raise
        measured = {kind: drift(after[kind], self._before[kind]) for kind in after if kind in self._before}
        fine = self._together(all(measured[kind] <= self._tolerance for kind in measured if kind == "drift"))
        made = [replace(one, detail={**one.detail, **measured}) for one in made]
        if fine:
            self.done += made
            self._before = after
            self._snapshots.append(snapshot)
            return True
        snapshot.restore_()
        self.rejected += made
        warn(
            f"{'; '.join(map(str, made))}: changed the network's output by {measured['drift']:.2g} (tolerance "
            f"{self._tolerance:g}) and was undone. Something outside the convolution reads its weight, the model's "
            "output is not deterministic, or it is computed in too low a precision to tell",
            EditRolledBackWarning,
        )
        return False

    def undo_all(self) -> None:
        """Take back every edit that was kept, last one first."""
        while self._snapshots:
            self._snapshots.pop().restore_()
        self.done.clear()

    def _together(self, fine: bool) -> bool:
        if not ranks.distributed(self._distributed):
            return fine
        return bool(ranks.smallest(int(fine), device_of(self._model)))

    def _outputs(self) -> dict[str, dict[str, Tensor]]:
        """What there is to compare; nothing of a mode in which the model puts out no floating-point numbers."""
        if self._batch is None:
            return {}
        found = {
            "drift": eval_outputs(self._model, self._batch, self._forward),
            "train_drift": train_outputs(self._model, self._batch, self._forward),
        }
        return {kind: outputs for kind, outputs in found.items() if outputs}


def _default_tolerance(model: nn.Module) -> float:
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    return 5e-2 if half else 1e-3
