"""The score of every candidate, under whichever metric a configuration asks for."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep import scoring
from dyrep.config import DyRepConfig
from dyrep.errors import ConfigError, DyRepError, ScoreNoiseWarning


class ScoreKeeper(scoring.StepScorer):
    """Sums what a metric needs while the optimizer steps, and adds what is computed at update time.

    Args:
        optimizer: the optimizer whose steps count.
        config: settings.
        loss: ``loss(model, batch)``, for ``"grasp"`` and ``"vote"``.
        distributed: whether to average over ranks (default: if torch.distributed is initialised).

    Raises:
        ConfigError: the metric needs a loss and there is none.
    """

    def __init__(
        self, optimizer: Optimizer, config: DyRepConfig, loss: scoring.Loss | None, distributed: bool | None
    ) -> None:
        if config.score in ("grasp", "vote") and loss is None:
            raise ConfigError(f"score={config.score!r} differentiates the loss: pass loss=fn(model, batch)")
        super().__init__(optimizer, _step_metrics(config.score), every=config.score_every)
        self._config, self._loss, self._distributed = config, loss, distributed
        self._watched: dict[str, list[Tensor]] = {}

    def watch(self, operations: Mapping[str, Iterable[Tensor]]) -> None:
        """Start over with these operations."""
        self._watched = {name: list(parameters) for name, parameters in operations.items()}
        super().watch(self._watched)

    def scores(
        self, model: nn.Module, data: Sequence[Any] | None, seed: int
    ) -> tuple[dict[str, float], scoring.StepScores]:
        """The score of every operation, and what the steps since the last update gave.

        Args:
            model: the bare model.
            data: batches, for the second-order score.
            seed: of random scores.

        Raises:
            DyRepError: the metric is taken from optimizer steps and there were none.
        """
        seen = self.read(self._distributed)
        metric = self._config.score
        if metric == "random":
            return scoring.random_scores(self._watched, torch.Generator().manual_seed(seed)), seen
        if not self._watched:
            return {}, seen
        if seen.steps == 0 and metric != "grasp":
            if seen.skipped:
                warnings.warn("every step since the last update had gradients that are not finite", stacklevel=4)
                return {}, seen
            if self.step:  # but none of them had gradients of what is watched, which may have been frozen meanwhile
                if any(p.requires_grad for parameters in self._watched.values() for p in parameters):
                    warnings.warn(
                        "no convolution that could grow had a gradient in any step since the last update, so nothing "
                        "grows: does the loss depend on them?",
                        stacklevel=4,
                    )
                return {}, seen
            raise DyRepError(
                "no optimizer step was seen since the last update, so there is nothing to score by: is the optimizer "
                "given to DyRep the one that steps, and was it stepped?"
            )
        if metric == "synflow":
            _warn_about_noise(seen)
        if metric in scoring.STEP_METRICS:
            return seen.means[metric], seen
        grasp = self._grasp(model, data or ())
        if metric == "grasp":
            return grasp, seen
        return scoring.vote({**{m: seen.means[m] for m in scoring.VOTERS if m != "grasp"}, "grasp": grasp}), seen

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
    needed = {"synflow": ("synflow", "snip"), "vote": tuple(m for m in scoring.VOTERS if m != "grasp")}
    return needed.get(score, (score,) if score in scoring.STEP_METRICS else ())


def _warn_about_noise(seen: scoring.StepScores) -> None:
    noise = scoring.noisy(seen.means["synflow"], seen.means["snip"])
    if len(noise) * 2 > len(seen.means["synflow"]):
        warnings.warn(
            f"synflow is below numerical noise for {len(noise)} of {len(seen.means['synflow'])} convolutions (its "
            f"terms cancel to less than {scoring.NOISE_RATIO:g} of their size): a norm follows them, so the loss "
            "does not depend on the scale of their weights and the ranking is close to arbitrary. "
            "score='invariant' or 'snip' is meaningful there",
            ScoreNoiseWarning,
            stacklevel=5,
        )
