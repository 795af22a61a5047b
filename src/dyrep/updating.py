"""One update of a structure: what grows, what is cut, and what came of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dyrep import policy
from dyrep.branches import ORIGIN
from dyrep.candidates import Candidates
from dyrep.config import DyRepConfig
from dyrep.errors import ConfigError, EditRolledBackWarning, UnreachedLayerError
from dyrep.guard import EditGuard
from dyrep.surgery import ranks
from dyrep.surgery.costs import Costs, Positions, added_macs, costs
from dyrep.surgery.edits import Edit, cut_, expand_
from dyrep.surgery.folding import deploy
from dyrep.surgery.preserve import Forward, device_of
from dyrep.surgery.structure import importances, structure
from dyrep.surgery.targets import Target


@dataclass(frozen=True)
class Update:
    """What an update has done.

    Attributes:
        edits: the changes made, with the reason for each.
        undone: changes that moved the network's output too far.
        importances: of all branches that could be cut, layer by layer.
        macs: multiply-adds of the network afterwards; None if there was no batch to count them on.
        guard: takes all of it back.
    """

    edits: list[Edit]
    undone: list[Edit]
    importances: dict[str, Mapping[str, float]]
    macs: int | None
    guard: EditGuard


class Updater:
    """Decides by scores and importances, and makes the edits under watch.

    Args:
        config: settings.
        optimizer: the optimizer that trains the model.
        candidates: convolutions that may grow; those that turn out not to bear it are noted there.
        forward: ``forward(model, batch)`` to run the model.
        distributed: whether ranks decide together.

    Attributes:
        plain_macs: multiply-adds of the plain network, once they have been counted.
    """

    def __init__(
        self,
        config: DyRepConfig,
        optimizer: Optimizer,
        candidates: Candidates,
        forward: Forward | None,
        distributed: bool | None,
    ) -> None:
        self._config, self._optimizer, self._candidates = config, optimizer, candidates
        self._forward, self._distributed = forward, distributed
        self.plain_macs: int | None = None

    def update(self, model: nn.Module, scores: Mapping[str, float], data: list[Any] | None, seed: int) -> Update:
        """Expand the best operations of a bare model and absorb its weak branches.

        Args:
            model: the model, changed in place; after an error it is as it was.
            scores: of every candidate.
            data: batches to measure on, if there are any.
            seed: of the new branches' weights.
        """
        guard = EditGuard(
            model,
            self._optimizer,
            data[0] if data else None,
            forward=self._forward,
            tolerance=self._config.drift_tolerance,
            distributed=self._distributed,
        )
        strengths: dict[str, Mapping[str, float]] = {}
        try:
            if guard.healthy:
                self._grow(model, guard, scores, data, torch.Generator().manual_seed(seed))
                blocks = self._blocks(model)
                strengths = {name: block.importances for name, block in blocks.items()}
                self._cut(model, guard, blocks)
            else:
                warnings.warn("the model's output is not finite, so its structure stays as it is", stacklevel=4)
            after = self.costs(model, data)
        except BaseException:
            guard.undo_all()
            raise
        edits = [_explained(edit, scores, strengths) for edit in guard.done]
        return Update(edits, guard.rejected, strengths, None if after is None else after.macs, guard)

    def costs(self, model: nn.Module, data: list[Any] | None) -> Costs | None:
        """What a model costs now, if there is a batch to count on.

        The first time the plain network's cost is counted too; while the model is plain, there is nothing to fold for
        that.
        """
        if not data:
            return None
        now = costs(model, data[0], forward=self._forward)
        if self.plain_macs is None:
            grown = bool(structure(model)["blocks"])
            self.plain_macs = costs(deploy(model), data[0], forward=self._forward).macs if grown else now.macs
        return now

    # -- decisions ----------------------------------------------------------------------------------------------

    def _choose_growth(
        self, model: nn.Module, scores: Mapping[str, float], data: list[Any] | None, top_k: int
    ) -> list[str]:
        config = self._config
        needs_costs = config.per_mac or config.macs_limit is not None
        now = self.costs(model, data) if needs_costs else None
        if needs_costs and now is None:
            raise ConfigError("per_mac and macs_limit have to run the model to count multiply-adds: pass batches")
        spare = float("inf")
        if config.macs_limit is not None and now is not None and self.plain_macs is not None:
            spare = config.macs_limit * self.plain_macs - now.macs
        chosen = policy.choose_growth(
            [self._candidate(model, target, scores, now) for target in self._candidates.targets()],
            top_k=top_k,
            max_depth=config.max_depth,
            square_only=config.square_only,
            per_mac=config.per_mac,
            spare_macs=spare,
        )
        return self._agreed(model, chosen, "what to expand")

    def _candidate(
        self, model: nn.Module, target: Target, scores: Mapping[str, float], now: Costs | None
    ) -> policy.Candidate:
        cost = 0
        if now is not None:
            conv, positions = model.get_submodule(target.name), now.positions.get(target.name, Positions())
            cost = added_macs(conv, self._candidates.wanted(target), positions, self._config.width)
        score = scores.get(target.name, float("nan"))
        return policy.Candidate(target.name, score, target.depth, target.kernel_size, cost)

    def _blocks(self, model: nn.Module) -> dict[str, policy.BlockState]:
        """What the cut rule looks at, of every block that this optimizer trains."""
        states = {}
        for layer, found in importances(model).items():
            origin = found.pop(ORIGIN, None)
            if self._candidates.trains(layer):
                states[layer] = policy.BlockState(found, origin)
        return states

    def _agreed(self, model: nn.Module, plan: Any, what: str) -> Any:
        if ranks.distributed(self._distributed):
            ranks.check_agreement(plan, what, device_of(model))
        return plan

    # -- edits --------------------------------------------------------------------------------------------------

    def _grow(
        self,
        model: nn.Module,
        guard: EditGuard,
        scores: Mapping[str, float],
        data: list[Any] | None,
        generator: torch.Generator,
    ) -> None:
        """Expand the best operations; where one cannot be, say so, pass it over from now on, and take the next."""
        missing = self._config.top_k
        while missing and (chosen := self._choose_growth(model, scores, data, missing)):
            for layer in chosen:
                try:
                    grown = guard.attempt([layer], lambda: self._expand(model, layer, data, generator))  # noqa: B023
                    reason = "expanding it changed the network's output"
                except UnreachedLayerError as error:
                    grown, reason = False, str(error)
                    warnings.warn(reason, EditRolledBackWarning, stacklevel=5)
                if grown:
                    missing -= 1
                else:
                    self._candidates.rejected[layer] = reason

    def _expand(self, model: nn.Module, layer: str, data: list[Any] | None, generator: torch.Generator) -> list[Edit]:
        config = self._config
        target = next(target for target in self._candidates.targets() if target.name == layer)
        return expand_(
            model,
            layer,
            self._candidates.wanted(target),
            gamma=config.gamma,
            relative_gamma=config.relative_gamma,
            calibration=data,
            calibration_batches=config.calibration_batches,
            forward=self._forward,
            optimizer=self._optimizer,
            origin_norm=config.origin_norm,
            width=config.width,
            generator=generator,
            distributed=self._distributed,
        )

    def _cut(self, model: nn.Module, guard: EditGuard, blocks: Mapping[str, policy.BlockState]) -> None:
        cuts = policy.choose_cuts(blocks, rule=self._config.cut, threshold=self._config.cut_threshold)
        for layer, branches in self._agreed(model, cuts, "what to cut").items():
            guard.attempt([layer], lambda: cut_(model, layer, branches, optimizer=self._optimizer))  # noqa: B023


def _explained(edit: Edit, scores: Mapping[str, float], strengths: Mapping[str, Mapping[str, float]]) -> Edit:
    """An edit with the reason it was made for."""
    if edit.kind == "expand":
        return replace(edit, detail={"score": scores.get(edit.layer), **edit.detail})
    cut = {branch: strengths[edit.layer][branch] for branch in edit.branches}
    return replace(edit, detail={"importances": cut, **edit.detail})
