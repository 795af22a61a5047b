r"""Which operations matter: saliency scores, accumulated while the model trains.

For an operation with parameters θ and gradient g, averaged over all optimizer steps since the last update:

==================  ==================================================  ==============================================
``synflow``         :math:`\sum_i g_i \theta_i`                         the paper's choice (Eq. 4)
``synflow_summed``  the same, added up term by term                     as published; rounding where a norm follows
``snip``            :math:`\sum_i |g_i \theta_i|`
``grad_norm``       :math:`\lVert g \rVert_2`
``invariant``       :math:`\lVert g \rVert_2 \lVert \theta \rVert_2`    ours; does not change when a norm follows and
                                                                        the weights are rescaled
``grasp``           :math:`-\sum_i \theta_i (Hg)_i`                     second order, on a few batches at update time
``random``          uniform                                             a baseline
``vote``            one vote per metric for its largest                 ties go to the better mean rank
==================  ==================================================  ==============================================

Where a batch norm follows a convolution the loss does not depend on the scale of its weights, so the exact value of
``synflow`` is zero up to the norm's ε, and what is summed term by term is mostly rounding: `noisy` finds such scores.
What ε leaves is known from the norm itself, see `dyrep.normflow`, and ``synflow`` takes it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep.errors import DyRepError
from dyrep.normflow import NormFlows
from dyrep.surgery import ranks
from dyrep.surgery.preserve import device_of, preserved, to_device

STEP_METRICS = ("synflow_summed", "snip", "grad_norm", "invariant")
VOTERS = ("synflow", "snip", "grad_norm", "grasp")
SCORES = ("synflow", *STEP_METRICS, "grasp", "random", "vote")
NOISE_RATIO = 1e-4
_FORMERLY = {"synflow": "synflow_summed"}
"""What metrics are called in states that were saved by earlier versions."""

Loss = Callable[[nn.Module, Any], Tensor]
"""The training loss of a batch: ``loss(model, batch)``."""


@dataclass(frozen=True)
class StepScores:
    """What a `StepScorer` has gathered.

    Attributes:
        means: mean score per metric and operation.
        steps: optimizer steps that counted.
        skipped: steps left out because a gradient was not finite.
        flows: what `NormFlows` has gathered, by norm.
    """

    means: dict[str, dict[str, float]]
    steps: int
    skipped: int
    flows: dict[str, float] = field(default_factory=dict)


class StepScorer:
    """Sums scores of operations at every step of an optimizer, on the device, without waiting for it.

    It sees gradients as the optimizer does: accumulated over micro-batches, averaged by DistributedDataParallel, and
    unscaled, also with a `GradScaler` and a fused optimizer, which unscales inside its own kernel. All sums and the
    step count live in preallocated float32 tensors, so a captured CUDA graph replays them.

    Args:
        optimizer: the optimizer whose steps count.
        metrics: which of `STEP_METRICS` to sum.
        every: sum at every n-th step.

    Attributes:
        step: steps of the optimizer seen since the operations were given. A captured CUDA graph replays sums, not
            Python: whoever replays a step has to count it here, and to capture it with and without scoring.
        beginnings: how often it was given other operations or norms than before. Graphs captured before that are stale.

    Example:
        >>> conv = nn.Conv2d(1, 1, 3)
        >>> optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
        >>> scorer = StepScorer(optimizer, ["snip"])
        >>> scorer.watch({"conv": list(conv.parameters())})
        >>> conv(torch.randn(1, 1, 5, 5)).sum().backward()
        >>> optimizer.step()
        >>> scorer.read().steps
        1
    """

    def __init__(self, optimizer: Optimizer, metrics: Sequence[str], every: int = 1) -> None:
        self.metrics = tuple(metrics)
        self.every = every
        self.step = 0
        self.beginnings = 0
        self._names: list[str] = []
        self._operations: list[list[Tensor]] = []
        self._sums = torch.zeros(0, len(self.metrics))
        self._counts = torch.zeros(2)  # steps that counted, steps skipped
        self._flows = NormFlows({})
        self._constants: dict[tuple[Any, ...], Tensor] = {}
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    @property
    def due(self) -> bool:
        """Whether the next step is scored."""
        return bool(self._operations and self.metrics) and self.step % self.every == 0

    def close(self) -> None:
        """Stop watching the optimizer."""
        self._handle.remove()

    def watch(self, operations: Mapping[str, Iterable[Tensor]], norms: Mapping[str, nn.Module] | None = None) -> None:
        """Start over with these operations, given by name with their parameters, and with the flow of these norms."""
        self.step = 0
        wanted = {name: list(parameters) for name, parameters in operations.items()}
        if self._watches(wanted, norms or {}):
            self.reset_()
            return
        self.beginnings += 1
        self._names = list(wanted)
        self._operations = list(wanted.values())
        self._flows = NormFlows(norms or {})
        device = self._operations[0][0].device if self._operations else self._counts.device
        self._constants = {}
        self._sums = torch.zeros(len(self._names), len(self.metrics), device=device)
        self._counts = torch.zeros(2, device=device)

    def _watches(self, operations: Mapping[str, list[Tensor]], norms: Mapping[str, nn.Module]) -> bool:
        """Whether these are the operations and norms that are watched already."""
        same = self._names == list(operations) and self._flows.watches(norms)
        pairs = zip(self._operations, operations.values(), strict=False)
        same = same and all([id(p) for p in ours] == [id(p) for p in theirs] for ours, theirs in pairs)
        return same and all(p.device == self._sums.device for parameters in operations.values() for p in parameters)

    def reset_(self) -> None:
        """Set all sums to zero, in place."""
        self._sums.zero_()
        self._counts.zero_()
        self._flows.reset_()

    def read(self, distributed: bool | None = None) -> StepScores:
        """Mean scores so far, averaged over ranks; waits for the device, once."""
        sums, counts, flows = self._sums.clone(), self._counts.clone(), self._flows.sums.clone()
        if ranks.distributed(distributed):
            ranks.average_([sums, counts, flows] if self._flows else [sums, counts])
        table = (sums / counts[0].clamp(min=1)).tolist()
        means = {
            metric: {name: row[column] for name, row in zip(self._names, table, strict=True)}
            for column, metric in enumerate(self.metrics)
        }
        steps, skipped = counts.tolist()
        return StepScores(means, round(steps), round(skipped), self._flows.means(flows, steps))

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, by name."""
        return {
            "names": list(self._names),
            "metrics": list(self.metrics),
            "step": self.step,
            "sums": self._sums.clone(),
            "counts": self._counts.clone(),
            "flows": self._flows.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved sums, those of operations that are still watched; with other metrics, start over."""
        self.reset_()
        metrics = [_FORMERLY.get(metric, metric) for metric in state["metrics"]]
        if not set(self.metrics) <= set(metrics):
            return
        for row, name in enumerate(self._names):
            if name in state["names"]:
                for column, metric in enumerate(self.metrics):
                    saved = state["sums"][state["names"].index(name), metrics.index(metric)]
                    self._sums[row, column] = saved
        self._counts.copy_(state["counts"])
        self._flows.load_state_dict(state.get("flows", {}))
        self.step = state["step"]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Score now, or, if the step is given a closure, when that has computed the gradients."""
        due = self.due
        self.step += 1
        if not due:
            return None
        closure = kwargs.get("closure") or next((a for a in args if callable(a) and a is not optimizer), None)
        if closure is None:
            self._score_step(optimizer)
            return None
        scored = False

        def scoring_closure() -> Any:
            nonlocal scored
            loss = closure()
            if not scored:
                scored = True
                self._score_step(optimizer)
            return loss

        replaced = tuple(scoring_closure if argument is closure else argument for argument in args)
        return replaced, {k: scoring_closure if v is closure else v for k, v in kwargs.items()}

    @torch.no_grad()
    def _score_step(self, optimizer: Optimizer) -> None:
        held = [(row, p) for row, operation in enumerate(self._operations) for p in operation if p.grad is not None]
        if not held or not self.metrics:
            return
        scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler when a fused optimizer unscales by itself
        values = self._values([row for row, _ in held], [p for _, p in held])
        if scale is not None:
            values = values / scale
        flows = self._flows.values(scale) if self._flows else values.new_zeros(0)
        # one kernel fewer than testing each, and inf or NaN survive a sum
        good = torch.isfinite(values.sum() + flows.sum())
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            good = good & (found_inf.to(good.device) == 0).all()
        self._sums += values.masked_fill_(~good, 0.0)
        if self._flows:
            self._flows.sums += flows.masked_fill_(~good, 0.0)
        self._counts[0] += good
        self._counts[1] += ~good

    def _values(self, rows: list[int], parameters: list[Tensor]) -> Tensor:
        """Scores of every operation at this step; all are linear in the gradient's scale."""
        thetas = [p.detach().float() for p in parameters]
        gradients = [p.grad.float() for p in parameters]  # type: ignore[union-attr]
        per_parameter: dict[str, Tensor] = {}
        if "synflow_summed" in self.metrics or "snip" in self.metrics:
            products = torch._foreach_mul(thetas, gradients)
            if "synflow_summed" in self.metrics:
                per_parameter["synflow_summed"] = torch.stack([product.sum() for product in products])
            if "snip" in self.metrics:
                per_parameter["snip"] = torch.stack(torch._foreach_norm(products, 1))
        if "invariant" in self.metrics:
            sizes = torch.stack(torch._foreach_norm([*gradients, *thetas])).view(2, -1)
            # of the kernel alone: a bias does not share its scale
            kernel = [1.0 if theta.dim() > 1 else 0.0 for theta in thetas]
            per_parameter["invariant"] = sizes.prod(0) * self._constant(kernel)
        if "grad_norm" in self.metrics:
            per_parameter["grad_norm"] = torch.stack(torch._foreach_norm(gradients)).square()
        table = torch.stack([per_parameter[metric] for metric in self.metrics], dim=1)
        if rows == list(range(len(self._names))):  # one parameter each: nothing to add up
            values = table
        else:
            values = torch.zeros_like(self._sums).index_add_(0, self._constant(rows), table)
        if "grad_norm" in self.metrics:
            column = self.metrics.index("grad_norm")
            values[:, column] = values[:, column].sqrt()
        return values

    def _constant(self, values: list[Any]) -> Tensor:
        """A tensor that is made once per set of operations: making one waits for the device."""
        key = tuple(values)
        if key not in self._constants:
            self._constants[key] = torch.tensor(values, device=self._sums.device)
        return self._constants[key]


def grasp_scores(
    model: nn.Module,
    operations: Mapping[str, Sequence[Tensor]],
    batches: Iterable[Any],
    loss: Loss,
    *,
    max_batches: int = 1,
    distributed: bool | None = None,
) -> dict[str, float]:
    r"""GraSP: :math:`-\sum_i \theta_i (Hg)_i` per operation, by double backward on a few batches.

    Args:
        model: the uncompiled model; it is left as it was.
        operations: parameters by operation.
        batches: data for ``loss``.
        loss: ``loss(model, batch)``.
        max_batches: how many batches to average over.
        distributed: whether to average over ranks (default: if torch.distributed is initialised).

    Example:
        >>> conv = nn.Conv2d(1, 1, 1, bias=False)
        >>> _ = conv.weight.data.fill_(2.0)
        >>> square = lambda model, batch: model(batch).pow(2).sum() / 2  # g = θ, H = 1, so θ·Hg = 4
        >>> grasp_scores(conv, {"conv": [conv.weight]}, [torch.ones(1, 1, 1, 1)], square)
        {'conv': -4.0}
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    watched = [p for parameters in operations.values() for p in parameters]
    sums = {name: torch.zeros((), device=device_of(model)) for name in operations}
    used = 0
    with preserved(model, training=True), torch.enable_grad():
        for batch in islice(iter(batches), max_batches):
            value = loss(model, to_device(batch, device_of(model)))
            gradients = torch.autograd.grad(value, trained, create_graph=True, allow_unused=True)
            flow = sum((g * g.detach()).sum() for g in gradients if g is not None)
            products = torch.autograd.grad(flow, watched, allow_unused=True)  # type: ignore[arg-type]
            by_parameter = {id(p): product for p, product in zip(watched, products, strict=True)}
            for name, parameters in operations.items():
                for p in parameters:
                    product = by_parameter[id(p)]
                    if product is not None:
                        sums[name] -= (p.detach().float() * product.float()).sum()
            used += 1
    if used == 0:
        raise DyRepError("grasp needs data at update time: pass batches")
    if ranks.distributed(distributed):
        ranks.average_(sums.values())
    return {name: float(total) / used for name, total in sums.items()}


def random_scores(names: Iterable[str], generator: torch.Generator) -> dict[str, float]:
    """A uniform score for every name."""
    return {name: float(torch.rand((), generator=generator)) for name in names}


def vote(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Votes per operation: each metric votes for its largest; the fraction breaks ties by mean rank.

    Example:
        >>> votes = vote({"a": {"x": 1, "y": 2}, "b": {"x": 5, "y": 9}})
        >>> max(votes, key=votes.get), int(votes["y"])
        ('y', 2)
    """
    names = [name for name in next(iter(metrics.values())) if all(name in scores for scores in metrics.values())]
    result = dict.fromkeys(names, 0.0)
    for scores in metrics.values():
        ranking = sorted(names, key=lambda name: scores[name], reverse=True)
        result.update({name: result[name] + 1 for name in ranking[:1]})
        for rank, name in enumerate(ranking):  # a mean rank of 0 is worth just under one vote
            result[name] += (1 - (rank + 1) / (len(names) + 1)) / len(metrics)
    return result


def noisy(scores: Mapping[str, float], sizes: Mapping[str, float], ratio: float = NOISE_RATIO) -> list[str]:
    """Names whose score is below ``ratio`` of the sum of its terms' sizes: cancellation, not signal.

    Args:
        scores: sums of signed terms (synflow_summed).
        sizes: sums of the same terms' absolute values (snip).
        ratio: what counts as noise.

    Example:
        >>> noisy({"a": 1e-7, "b": 0.5}, {"a": 1.0, "b": 1.0})
        ['a']
    """
    return [name for name, score in scores.items() if abs(score) <= ratio * sizes[name]]
