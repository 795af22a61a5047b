"""The score of every candidate, under whichever metric a configuration asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep import scoring
from dyrep.block import RepConv
from dyrep.branches.kinds import Branch
from dyrep.config import DyRepConfig
from dyrep.errors import ConfigError, DyRepError, ScoreNoiseWarning, warn
from dyrep.surgery import ranks
from dyrep.surgery.followers import reading_norms
from dyrep.surgery.preserve import Forward, device_of


class ScoreKeeper(scoring.StepScorer):
    """Sums what a metric needs while the optimizer steps, and adds what is computed at update time.

    Args:
        optimizer: the optimizer whose steps count.
        config: settings.
        loss: ``loss(model, batch)``, for ``"grasp"`` and ``"vote"``.
        forward: ``forward(model, batch)`` to run the model, for ``"synflow"`` and ``"vote"``.
        distributed: whether to average over ranks (default: if torch.distributed is initialised).

    Raises:
        ConfigError: the metric needs a loss and there is none, or another controller watches the optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        config: DyRepConfig,
        loss: scoring.Loss | None,
        forward: Forward | None,
        distributed: bool | None,
    ) -> None:
        if config.score in ("grasp", "vote") and loss is None:
            raise ConfigError(f"score={config.score!r} differentiates the loss: pass loss=fn(model, batch)")
        hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
        if any(isinstance(getattr(hook, "__self__", None), ScoreKeeper) for hook in hooks):
            raise ConfigError(
                "another controller watches this optimizer already, and both would change the model: call close() on "
                "that one first, or give each an optimizer of its own"
            )
        super().__init__(optimizer, _step_metrics(config.score), every=config.score_every)
        self._config, self._loss, self._forward, self._distributed = config, loss, forward, distributed
        self._watched: dict[str, list[Tensor]] = {}
        self._told = False

    def watch(self, operations: Mapping[str, Iterable[Tensor]], norms: Mapping[str, nn.Module] | None = None) -> None:
        """Start over with these operations, and with the norms that may follow them, if the score needs to know."""
        self._watched = {name: list(parameters) for name, parameters in operations.items()}
        flowing = self._watched and self._config.score in ("synflow", "vote")
        super().watch(self._watched, norms if flowing else None)

    def scores(
        self, model: nn.Module, data: Sequence[Any] | None, seed: int
    ) -> tuple[dict[str, float], scoring.StepScores]:
        """The score of every operation, and what the steps since the last update gave.

        Args:
            model: the bare model.
            data: batches, for the second-order score, and to see which norm follows a convolution.
            seed: of random scores.

        Raises:
            DyRepError: the metric is taken from optimizer steps and there were none.
        """
        if not self._watched:  # nor is there anything for ranks to exchange
            return {}, scoring.StepScores({}, steps=0, skipped=0)
        seen = self.read(self._distributed)
        metric = self._config.score
        if metric == "random":
            return scoring.random_scores(self._watched, torch.Generator().manual_seed(seed)), seen
        if seen.steps == 0 and metric != "grasp":
            if seen.skipped:
                warn("every step since the last update had gradients that are not finite")
                return {}, seen
            if self.step:  # but none of them had gradients of what is watched, which may have been frozen meanwhile
                if any(p.requires_grad for parameters in self._watched.values() for p in parameters):
                    warn(
                        "no convolution that could grow had a gradient in any step since the last update, so nothing "
                        "grows: does the loss depend on them?",
                    )
                return {}, seen
            raise DyRepError(
                "no optimizer step was seen since the last update, so there is nothing to score by: is the optimizer "
                "given to DyRep the one that steps, and was it stepped?"
            )
        if metric in scoring.STEP_METRICS:
            if metric == "synflow_summed":
                self._warn_about_noise(seen)
            return seen.means[metric], seen
        if metric == "grasp":
            return self._grasp(model, data or ()), seen
        flows = self._from_norms(model, data, seen)
        synflow = {**seen.means["synflow_summed"], **flows}
        if metric == "synflow":
            self._warn_about_noise(seen, but=flows, batches=bool(data))
            return synflow, seen
        known = {**seen.means, "synflow": synflow, "grasp": self._grasp(model, data or ())}
        return scoring.vote({voter: known[voter] for voter in scoring.VOTERS}), seen

    def _from_norms(self, model: nn.Module, data: Sequence[Any] | None, seen: scoring.StepScores) -> dict[str, float]:
        """What synflow is of the convolutions that a norm follows, which only batches can tell of the model's own."""
        found = _norms_after(model, self._watched, data, self._forward)
        found = {name: norm for name, norm in found.items() if norm in seen.flows}
        if ranks.distributed(self._distributed):  # a batch may have shown another rank something else
            lacking = torch.tensor([float(name not in found) for name in self._watched], device=device_of(model))
            ranks.largest_(lacking)
            common = [name for name, lacks in zip(self._watched, lacking.tolist(), strict=True) if not lacks]
            found = {name: found[name] for name in common}
        return {name: seen.flows[norm] for name, norm in found.items()}

    def _warn_about_noise(
        self, seen: scoring.StepScores, but: Collection[str] = (), batches: bool | None = None
    ) -> None:
        """Warn, once, if most scores are sums over weights that are rounding; some have been found in another way."""
        means = seen.means["synflow_summed"]
        noise = scoring.noisy({name: mean for name, mean in means.items() if name not in but}, seen.means["snip"])
        if len(noise) * 2 <= len(means) or self._told:
            return
        self._told = True
        remedy = {
            None: "With score='synflow' it is taken from that norm, if it is a batch norm that learns",
            False: "With batches, epoch_end(loader), it is taken from that norm, if it is a batch norm that learns",
            True: "It is exact only where a batch norm that learns, and nothing else, reads the convolution",
        }
        warn(
            f"{self._config.score} is below numerical noise for {len(noise)} of {len(means)} convolutions (its "
            f"terms cancel to less than {scoring.NOISE_RATIO:g} of their size): a norm follows them, so the loss "
            f"does not depend on the scale of their weights and the ranking is close to arbitrary. {remedy[batches]}; "
            "score='invariant' and 'snip' are meaningful in any case",
            ScoreNoiseWarning,
        )

    def _grasp(self, model: nn.Module, data: Sequence[Any]) -> dict[str, float]:
        assert self._loss is not None
        trained = {name: [p for p in ps if p.requires_grad] for name, ps in self._watched.items()}
        return scoring.grasp_scores(
            model,
            {name: ps for name, ps in trained.items() if ps},  # a layer may have been frozen meanwhile
            data,
            self._loss,
            max_batches=self._config.grasp_batches,
            distributed=self._distributed,
        )


def _step_metrics(score: str) -> tuple[str, ...]:
    """What has to be summed at every step for a score: synflow is judged against snip, votes need all voters."""
    summed = ("synflow_summed", "snip")
    needed = {"synflow": summed, "synflow_summed": summed, "vote": (*summed, "grad_norm")}
    return needed.get(score, (score,) if score in scoring.STEP_METRICS else ())


def _norms_after(
    model: nn.Module, names: Iterable[str], data: Sequence[Any] | None, forward: Forward | None
) -> dict[str, str]:
    """The norm that scales what a convolution puts out by the batch's own deviation, by the convolution's name."""
    folded = any(isinstance(module, RepConv) and module.execution.name == "folded" for module in model.modules())
    found, own = {}, {}
    for name in names:
        conv, parent = model.get_submodule(name), name.rpartition(".")[0]
        block = conv if isinstance(conv, RepConv) else None
        if block is not None and block.origin_norm is not None:
            inner = f"{name}.origin_norm"
        elif block is not None and block.branches:
            continue  # its kernel is one part of what is normalised
        elif isinstance(model.get_submodule(parent), Branch):
            inner = f"{parent}.norm"
        else:
            own[name] = conv
            continue
        if not folded:  # in a folded block σ is a constant, and the sum does not cancel
            found[name] = inner
    return found | (reading_norms(model, own, data[0], forward) if data and own else {})
