"""One update of a structure: what grows, what is cut, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep import policy
from dyrep.block import RepConv
from dyrep.branches import ORIGIN
from dyrep.candidates import Candidates
from dyrep.config import DyRepConfig
from dyrep.errors import ConfigError, DyRepError, EditRolledBackWarning, NoUpdateWarning, UnreachedLayerError, warn
from dyrep.guard import EditGuard
from dyrep.surgery import ranks
from dyrep.surgery.absorbing import absorb_, norms_behind
from dyrep.surgery.beginning import begin_
from dyrep.surgery.costs import Costs, Positions, added_macs, costs
from dyrep.surgery.edits import Edit, cut_, expand_
from dyrep.surgery.preserve import Forward, device_of
from dyrep.surgery.structure import importances, structure
from dyrep.surgery.targets import Target, outermost


@dataclass(frozen=True)
class Update:
    """What an update has done.

    Attributes:
        edits: the changes made, with the reason for each.
        undone: changes that moved the network's output too far.
        importances: of all branches that could be cut, layer by layer.
        costs: of the network afterwards; None if there was no batch to count them on.
        guard: takes all of it back.
        rescaled: convolutions whose output channels were multiplied: by what, and the norm that makes up for it.
    """

    edits: list[Edit]
    undone: list[Edit]
    importances: dict[str, Mapping[str, float]]
    costs: Costs | None
    guard: EditGuard
    rescaled: dict[str, tuple[str, Tensor]] = field(default_factory=dict)


class Updater:
    """Decides by scores and importances, and makes the edits under watch.

    Args:
        config: settings.
        optimizer: the optimizer that trains the model.
        candidates: convolutions that may grow; those that turn out not to bear it are noted there.
        forward: ``forward(model, batch)`` to run the model.
        distributed: whether ranks decide together.

    Attributes:
        grown_out: whether nothing that could grow fits into the limit any more, and nothing will be cut to make room.
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
        self.grown_out = False
        self._stuck: set[str] = set()

    def beginning(self, model: nn.Module) -> tuple[dict[str, tuple[str, ...]], str]:
        """The branches that a bare model is to begin with, by layer; if there are none, why, unless settings say so.

        Raises:
            DyRepError: what is asked for does not serve, or ranks disagree. Ranks raise together.
        """
        plan: dict[str, tuple[str, ...]] = {}
        reason, refused = "", None
        try:
            plan, reason = self._candidates.beginning()
        except DyRepError as error:
            refused = error
        if ranks.distributed(self._distributed):  # a rank that gave up on its own would leave the others waiting for it
            about = "what to begin with" + (f" ({reason}, here)" if reason else "")
            ranks.check_agreement([plan, str(refused or "")], about, device_of(model))
        if refused is not None:
            raise refused
        return plan, reason

    def begin(self, model: nn.Module, plan: Mapping[str, Sequence[str]]) -> list[Edit]:
        """Give a bare model its first branches; after an error it is for the caller to put back."""
        # no update has this seed
        generator = torch.Generator().manual_seed((self._config.seed * 1_000_003 - 1) * 2)
        edits = begin_(model, plan, self._optimizer, generator)
        if ranks.distributed(self._distributed):
            ranks.broadcast_(p for name in plan for p in model.get_submodule(name).parameters())
        return edits

    def update(self, model: nn.Module, scores: Mapping[str, float], data: list[Any] | None, seed: int) -> Update:
        """Expand the best operations of a bare model and absorb its weak branches.

        Args:
            model: the model, changed in place; after an error it is as it was.
            scores: of every candidate.
            data: batches to measure on, if there are any.
            seed: of the new branches' weights.
        """

        def change(guard: EditGuard) -> dict[str, policy.BlockState]:
            self._grow(model, guard, scores, data, torch.Generator().manual_seed(seed))
            blocks, grown = self._blocks(model), {edit.layer for edit in guard.done}
            # what has just grown has not learnt anything yet that it could be judged by
            judged = {layer: block for layer, block in blocks.items() if layer not in grown}
            cuts = policy.choose_cuts(judged, rule=self._config.cut, threshold=self._config.cut_threshold)
            self._cut(model, guard, cuts)
            return blocks

        before = self.grown_out
        made = self._watched(model, data, scores, change)
        if self.grown_out and not before and made.costs is not None:
            self._warn_if_nothing_fitted(model, made.costs)
        return made

    def absorb(self, model: nn.Module, data: list[Any] | None) -> Update:
        """Absorb all branches of a bare model, as far as this optimizer trains them.

        Where a batch norm reads the output, the kernel that is left turns as fast as the block did, see `absorb_`. What
        would change the network's output is undone, and passed over from now on.

        Args:
            model: the model, changed in place; after an error it is as it was.
            data: batches to measure on and to find those norms by, if there are any.
        """
        rescaled: dict[str, tuple[str, Tensor]] = {}

        def change(guard: EditGuard) -> dict[str, policy.BlockState]:
            states, blocks = self._blocks(model), self.absorbable(model)
            norms = norms_behind(model, blocks, data[0] if data else None, self._forward)
            plan = {layer: norms.get(layer) for layer in blocks}  # ranks have to scale the same ones, together
            for layer, norm in self._agreed(model, plan, "what to absorb").items():
                changed = [layer] if norm is None else [layer, norm]
                if not guard.attempt(changed, lambda: self._absorb(model, layer, norm, rescaled)):  # noqa: B023
                    rescaled.pop(layer, None)
                    self._stuck.add(layer)
            return states

        return replace(self._watched(model, data, {}, change), rescaled=rescaled)

    def absorbable(self, model: nn.Module) -> dict[str, RepConv]:
        """Blocks of this optimizer that are no part of another one, but for those that turned out not to bear it."""
        blocks = [name for name in structure(model)["blocks"] if outermost(model, name) == name]
        own = [name for name in blocks if self._candidates.trains(name) and name not in self._stuck]
        return {name: cast(RepConv, model.get_submodule(name)) for name in own}

    def _absorb(
        self, model: nn.Module, layer: str, norm: str | None, rescaled: dict[str, tuple[str, Tensor]]
    ) -> list[Edit]:
        edits, factors = absorb_(model, layer, norm, optimizer=self._optimizer, distributed=self._distributed)
        if norm is not None and factors is not None:
            rescaled[layer] = norm, factors
        return [replace(edit, detail={**edit.detail, "why": "as were all others"}) for edit in edits]

    def _watched(
        self,
        model: nn.Module,
        data: list[Any] | None,
        scores: Mapping[str, float],
        change: Callable[[EditGuard], dict[str, policy.BlockState]],
    ) -> Update:
        """Make a change under watch, and say what came of it and why."""
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
                strengths = {name: block.importances for name, block in change(guard).items()}
            else:
                warn(f"the structure stays as it is, as the model's output is not finite: {guard.find_origin()}")
            after = self.costs(model, data)
        except BaseException:
            guard.undo_all()
            raise
        self.grown_out = self._is_grown_out(model, after)
        edits = [_explained(edit, scores, strengths) for edit in guard.done]
        return Update(edits, guard.rejected, strengths, after, guard)

    def costs(self, model: nn.Module, data: list[Any] | None) -> Costs | None:
        """What a model costs now, if there is a batch to count on.

        Ranks may have batches of other shapes: what is decided by costs goes by those of the first one.
        """
        now = costs(model, data[0], forward=self._forward) if data else None
        return ranks.of_first(now, device_of(model)) if ranks.distributed(self._distributed) else now

    # -- decisions ----------------------------------------------------------------------------------------------

    def _choose_growth(
        self, model: nn.Module, scores: Mapping[str, float], data: list[Any] | None, top_k: int
    ) -> list[str]:
        config = self._config
        needs_costs = config.per_mac or config.macs_limit is not None
        now = self.costs(model, data) if needs_costs else None
        if needs_costs and now is None:
            asked = f"macs_limit={config.macs_limit}" if config.macs_limit is not None else "per_mac=True"
            raise ConfigError(
                f"{asked} needs batches, as the model has to be run to count multiply-adds: pass the training loader, "
                "epoch_end(loader), or set macs_limit=None and per_mac=False"
            )
        spare = math.inf if now is None else self._spare_macs(now)
        chosen = policy.choose_growth(
            [self._candidate(model, target, scores, now) for target in self._candidates.targets()],
            top_k=top_k,
            per_mac=config.per_mac,
            spare_macs=spare,
        )
        return self._agreed(model, chosen, "what to expand")

    def _is_grown_out(self, model: nn.Module, now: Costs | None) -> bool:
        if self._config.cut != "none" or now is None or (spare := self._spare_macs(now)) == math.inf:
            return False
        return all(candidate.added_macs > spare for candidate in self._unscored(model, now))

    def _warn_if_nothing_fitted(self, model: nn.Module, now: Costs) -> None:
        """Once growth is over: tell that it never began, where something could have grown with a larger limit."""
        found = self._unscored(model, now)
        if structure(model)["blocks"] or not found:
            return
        least = min(found, key=lambda candidate: candidate.added_macs)
        share = (now.macs + least.added_macs) / now.plain_macs
        warn(
            f"nothing will ever grow: no layer's branches fit into macs_limit={self._config.macs_limit}; those of "
            f"layer {least.name!r}, the cheapest, would make the network {share:.2f} times as costly. Give a "
            "larger macs_limit, None for no limit, or fewer branches=",
            NoUpdateWarning,
        )

    def _unscored(self, model: nn.Module, now: Costs) -> list[policy.Candidate]:
        return [self._candidate(model, target, {}, now) for target in self._candidates.targets()]

    def _spare_macs(self, now: Costs) -> float:
        """How many multiply-adds may be added."""
        limit = self._config.macs_limit
        return math.inf if limit is None else limit * now.plain_macs - now.macs

    def _candidate(
        self, model: nn.Module, target: Target, scores: Mapping[str, float], now: Costs | None
    ) -> policy.Candidate:
        cost = 0
        if now is not None:
            conv, positions = model.get_submodule(target.name), now.positions.get(target.name, Positions())
            cost = added_macs(conv, self._candidates.wanted(target), positions, self._config.width)
        score = scores.get(target.name, float("nan"))
        return policy.Candidate(target.name, score, cost)

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
                    warn(reason, EditRolledBackWarning)
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

    def _cut(self, model: nn.Module, guard: EditGuard, cuts: Mapping[str, list[str]]) -> None:
        for layer, branches in self._agreed(model, cuts, "what to cut").items():
            guard.attempt([layer], lambda: cut_(model, layer, branches, optimizer=self._optimizer))  # noqa: B023


def _explained(edit: Edit, scores: Mapping[str, float], strengths: Mapping[str, Mapping[str, float]]) -> Edit:
    """An edit with the reason it was made for."""
    if edit.kind == "expand":
        return replace(edit, detail={"score": scores.get(edit.layer), **edit.detail})
    known = strengths.get(edit.layer, {})  # a block may be a norm alone
    cut = {branch: known[branch] for branch in edit.branches}
    return replace(edit, detail={"importances": cut, **edit.detail})
