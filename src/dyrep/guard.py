"""Make edits under watch: measure how far each moves the network's output, and take back what moves it too far."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep.errors import EditRolledBackWarning
from dyrep.surgery import ranks
from dyrep.surgery.edits import Edit
from dyrep.surgery.folding import drift, eval_outputs, train_outputs
from dyrep.surgery.preserve import Forward, device_of
from dyrep.surgery.undo import Snapshot


class EditGuard:
    """Compares a model's outputs before and after each edit, on one batch.

    Args:
        model: the model that is edited.
        optimizer: its optimizer, restored along with it.
        batch: what to run the model on; None to accept every edit unmeasured.
        forward: ``forward(model, batch)`` to run it.
        tolerance: largest relative change of the eval outputs; NaN is never tolerated.
        distributed: whether ranks accept or reject together.

    Attributes:
        done: edits that were kept, with ``drift`` (eval mode) and ``train_drift`` in their detail.
        rejected: edits that were taken back.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch: Any,
        *,
        forward: Forward | None = None,
        tolerance: float = 1e-3,
        distributed: bool | None = None,
    ) -> None:
        self.done: list[Edit] = []
        self.rejected: list[Edit] = []
        self._model = model
        self._optimizer = optimizer
        self._batch = batch
        self._forward = forward
        self._tolerance = tolerance
        self._distributed = distributed
        self._before = self._outputs()

    def attempt(self, layers: Iterable[str], edit: Callable[[], list[Edit]]) -> bool:
        """Make an edit that touches these layers; False if it had to be taken back."""
        snapshot = Snapshot([self._model.get_submodule(layer) for layer in layers], self._optimizer)
        made = edit()
        after = self._outputs()
        measured = {kind: drift(after[kind], self._before[kind]) for kind in after}
        fine = all(measured[kind] <= self._tolerance for kind in measured if kind == "drift")
        if ranks.distributed(self._distributed):
            fine = bool(ranks.smallest(int(fine), device_of(self._model)))
        made = [replace(one, detail={**one.detail, **measured}) for one in made]
        if fine:
            self.done += made
            self._before = after
            return True
        snapshot.restore_()
        self.rejected += made
        warnings.warn(
            f"{'; '.join(map(str, made))}: changed the network's output by {measured['drift']:.2g} (tolerance "
            f"{self._tolerance:g}) and was undone: something outside the convolution reads its weight, or the model's "
            "output is not deterministic",
            EditRolledBackWarning,
            stacklevel=4,
        )
        return False

    def _outputs(self) -> dict[str, dict[str, Tensor]]:
        if self._batch is None:
            return {}
        return {
            "drift": eval_outputs(self._model, self._batch, self._forward),
            "train_drift": train_outputs(self._model, self._batch, self._forward),
        }


class UpdateData:
    """The batches of one update: read once, the first few kept for measurements.

    Args:
        batches: any iterable, or None.
        keep: how many batches to keep.
    """

    def __init__(self, batches: Iterable[Any] | None, keep: int) -> None:
        self._rest = None if batches is None else iter(batches)
        self.head = [] if self._rest is None else list(itertools.islice(self._rest, max(keep, 1)))
        self.drawn = len(self.head)

    @property
    def first(self) -> Any:
        """The first batch; None if there is none."""
        return self.head[0] if self.head else None

    def stream(self) -> Iterator[Any] | None:
        """Every batch, those kept first; None if there was no data to begin with. To be read once."""
        return None if self._rest is None else self._chain(self._rest)

    def _chain(self, rest: Iterator[Any]) -> Iterator[Any]:
        yield from self.head
        for batch in rest:
            self.drawn += 1
            yield batch
