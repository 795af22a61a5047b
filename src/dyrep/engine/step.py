"""One training step: batch, forward, loss, backward, optimizer, moving average; eager, or replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dyrep.engine.averages import WeightAverage
from dyrep.engine.data.loader import Loader, Raw
from dyrep.engine.precision import computing_in
from dyrep.engine.tasks.classification import learn_labels
from dyrep.engine.tasks.task import Learn
from dyrep.engine.world import World
from dyrep.execution import Clock
from dyrep.scoring import StepScorer
from dyrep.wording import beginning

WARMUP_STEPS = 3
"""Steps that are run eagerly before a graph is captured: libraries choose algorithms, lazy state is created."""


@dataclass(frozen=True)
class Totals:
    """What the steps of an epoch add up to.

    Attributes:
        loss: sum of the losses of all examples.
        correct: examples that were right, see `Learnt`.
        examples: examples seen.
        steps: steps taken before a loss was not finite; all of them, as a rule.
        diverged: whether a loss was not finite. No step has changed the weights since.
    """

    loss: float
    correct: float
    examples: float
    steps: int
    diverged: bool


class _Kind(NamedTuple):
    """What tells captured steps apart: whether they score, measure σ, and how many steps a measurement stands for."""

    scored: bool
    measured: bool
    span: int


class TrainStep:
    """Trains on one batch at a time and keeps sums on the device, without waiting for it.

    Args:
        model: the model to train, as it is to be called (it may be a DistributedDataParallel wrapper).
        optimizer: its optimizer. On a GPU it has to be fused, with a tensor as learning rate.
        loader: turns raw batches into what is learnt from.
        precision: dtype of convolutions and products.
        average: moving average of the weights, if there is one.
        scaler: of the loss, for float16.
        graph: replay a captured CUDA graph.
        message: told in words when a graph cannot be captured.
        clock: says in which steps folded blocks measure σ (default: in all); every step moves it on.
        learn: the loss of a batch, and what was right (default: cross entropy of labels of images).
        scorer: sums scores at the optimizer's steps, if something does; replayed steps are counted for it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.SGD,
        loader: Loader,
        *,
        precision: torch.dtype,
        average: WeightAverage | None,
        scaler: torch.amp.GradScaler,
        graph: bool,
        message: Callable[[str], None],
        clock: Clock | None = None,
        learn: Learn = learn_labels,
        scorer: StepScorer | None = None,
    ) -> None:
        self._model, self._optimizer, self._loader = model, optimizer, loader
        self._precision, self._learn = precision, learn
        self._average, self._scaler, self._message = average, scaler, message
        self.clock = Clock(managed=True) if clock is None else clock
        self.scorer = scorer
        device = next(model.parameters()).device
        self._device = device
        self._totals = torch.zeros(4, dtype=torch.float64, device=device)  # loss, correct, examples, steps
        self._diverged = torch.zeros((), device=device)
        if device.type == "cuda" and not scaler.is_enabled():
            optimizer.found_inf = self._diverged  # type: ignore[attr-defined]  # fused: no step after divergence
        self._graph_wanted = graph
        self._warmup = WARMUP_STEPS
        self._graphs: dict[_Kind, torch.cuda.CUDAGraph] = {}
        self._inputs: Raw = ()

    def __call__(self, raw: Raw) -> None:
        """Train on one raw batch."""
        if not self._graph_wanted:
            self._run(raw)
        elif self._warmup:
            self._warmup -= 1
            self._run_aside(raw)
        else:
            self._replay(raw)
        self.clock.step += 1

    def recapture(self) -> None:
        """Forget captured graphs: the model's structure has changed."""
        self._graphs.clear()
        self._inputs = ()
        self._warmup = WARMUP_STEPS
        self._optimizer.zero_grad(set_to_none=True)  # gradients live in the memory of the graph

    def read(self) -> Totals:
        """The sums so far; waits for the device."""
        loss, correct, examples, steps, diverged = [*self._totals.tolist(), float(self._diverged)]
        return Totals(loss, correct, examples, round(steps), bool(diverged))

    def reset(self) -> None:
        """Start the sums over."""
        self._totals.zero_()

    def gathered(self, world: World) -> list[dict[str, Tensor]]:
        """The sums so far of every rank, in order of rank; all ranks have to call this together."""
        return [{"totals": own} for own in world.gather(self._totals.clone())]

    def take_over(self, saved: list[dict[str, Tensor]], world: World) -> None:
        """Continue from what `gathered` returned; if there were more or fewer ranks, the main one takes over all."""
        if len(saved) == world.size:
            own = saved[world.rank]["totals"]
        else:
            totals = torch.stack([sums["totals"] for sums in saved])
            own = totals.sum(0) if world.is_main else torch.zeros_like(totals[0])
            own[3] = totals[0, 3]  # steps are counted by every rank
        self._totals.copy_(own)

    def _run(self, raw: Raw) -> None:
        batch = self._loader.prepare(raw)
        self._optimizer.zero_grad(set_to_none=True)
        loss, hits = self._learn(self._model, batch, computing_in(self._precision, self._device))
        examples = len(batch[1])
        self._diverged.copy_(torch.maximum(self._diverged, (~torch.isfinite(loss)).float()))
        if isinstance(self._model, DistributedDataParallel):  # all ranks stop at the same step, or some wait for ever
            dist.all_reduce(self._diverged, op=dist.ReduceOp.MAX)
        if self._device.type == "cpu" and self._diverged:
            return  # a step would carry it into all weights
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._average is not None:
            self._average.update()
        with torch.no_grad():
            self._totals[0] += loss.detach() * examples
            self._totals[1] += hits
            self._totals[2] += examples
            self._totals[3] += 1 - self._diverged

    def _run_aside(self, raw: Raw) -> None:
        """Run eagerly on another stream than the default one, as capturing afterwards requires."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run(raw)
        torch.cuda.current_stream().wait_stream(side)

    def _replay(self, raw: Raw) -> None:
        kind = _Kind(self.scorer is not None and self.scorer.due, self.clock.due, self.clock.span)
        if not self._inputs:
            self._inputs = tuple(part.to(self._device, copy=True) for part in raw)
        for static, part in zip(self._inputs, raw, strict=True):
            static.copy_(part, non_blocking=True)
        if kind not in self._graphs and not self._capture(kind):
            self._run(raw)
            return
        if self.scorer is not None:
            self.scorer.step += 1  # replaying runs no Python, which would have counted
        self._graphs[kind].replay()

    def _capture(self, kind: _Kind) -> bool:
        """Capture a step, which does not carry it out; whether that worked."""
        step = 0 if self.scorer is None else self.scorer.step
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self._graphs.values()), None)
        try:
            with torch.cuda.graph(graph, pool=pool):
                self._run(self._inputs)
        except RuntimeError as error:
            self._graph_wanted = False
            self._graphs.clear()
            self._optimizer.zero_grad(set_to_none=True)
            _end_capture_mode(self._device)
            reason = beginning(error)
            self._message(f"the training step cannot be captured in a CUDA graph and runs eagerly: {reason}")
            return False
        finally:
            if self.scorer is not None:
                self.scorer.step = step
        self._graphs[kind] = graph
        return True


def _end_capture_mode(device: torch.device) -> None:
    """Capture nothing, successfully: a capture that failed leaves the random generator believing it goes on."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)
