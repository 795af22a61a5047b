"""Algorithm 1 of the paper, for any training loop."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dyrep import policy
from dyrep.block import RepConv
from dyrep.branches import ORIGIN
from dyrep.candidates import Candidates
from dyrep.checking import is_whole
from dyrep.config import DyRepConfig
from dyrep.errors import (
    CheckpointError,
    ConfigError,
    EditRolledBackWarning,
    NoUpdateWarning,
    SettingsChangedWarning,
    UnreachedLayerError,
)
from dyrep.events import EventLog
from dyrep.following import Followers
from dyrep.guard import EditGuard
from dyrep.norm import BranchNorm
from dyrep.scorekeeper import ScoreKeeper
from dyrep.scoring import Loss
from dyrep.surgery import ranks
from dyrep.surgery.costs import Costs, Positions, added_macs, costs, count_parameters
from dyrep.surgery.edits import Edit, cut_, expand_
from dyrep.surgery.folding import deploy
from dyrep.surgery.optimizer_state import load_state_by_name_, locate, state_by_name
from dyrep.surgery.preserve import Forward, device_of, iterate, preserved_randomness
from dyrep.surgery.structure import importances, restructure_, structure, touched
from dyrep.surgery.targets import Target
from dyrep.surgery.undo import Snapshot
from dyrep.surgery.wrappers import bare

FORMAT = 1
_STATE: dict[str, tuple[str, ...] | None] = {
    "config": (),
    "structure": ("format", "blocks"),
    "optimizer": ("format", "groups", "state"),
    "scorer": ("metrics", "names", "sums", "counts", "step"),
    "counters": ("epoch", "step", "updates"),
    "rejected": (),
    "plain_macs": None,
    "next_event": None,
}
"""Parts of a state, and what has to be in them where they are dicts."""


class DyRep:
    """Evolves a model while a loop of your own trains it.

    It watches the optimizer's steps to score operations. When an update is due it expands the one that matters most
    and absorbs branches that stayed weak, in the model, the optimizer and the DistributedDataParallel wrapper alike.

    Args:
        model: the model, plain, compiled or in DistributedDataParallel; it is changed in place.
        optimizer: the optimizer that trains it.
        config: settings (default: the paper's).
        forward: ``forward(model, batch)`` to run the model where a batch is not a tensor, a tuple that begins with the
            input, or a dict of arguments.
        loss: ``loss(model, batch)``, for the scores ``"grasp"`` and ``"vote"``.
        ema: a moving average of the model (`torch.optim.swa_utils.AveragedModel`, timm's, or a plain copy), or several;
            every change of structure is made to it too, see `dyrep.follow_`.
        wrap: called with the bare model after every change of structure; returns the model to train, which is then
            `model`. Without it a DistributedDataParallel wrapper is initialised again in place.
        log: file for the event log (JSON lines), or an `EventLog`.
        execution: how blocks are run, those that grow later too: a name, or a dict of arguments of
            `dyrep.set_execution_` (default: as they are; new ones are ``"auto"``).
        distributed: whether ranks decide together (default: if torch.distributed is initialised).

    Attributes:
        model: the model to train; the same object as given unless ``wrap`` is used.
        events: what has happened so far.
        ignored: convolutions that cannot be expanded as things are, and why.
        scorer: what sums scores at every step of the optimizer.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> controller = DyRep(model, optimizer, DyRepConfig(interval=1, score="invariant"))
        >>> loader = [torch.randn(4, 3, 8, 8)]
        >>> for epoch in range(2):
        ...     for x in loader:
        ...         optimizer.zero_grad()
        ...         model(x).square().mean().backward()
        ...         optimizer.step()
        ...     edits = controller.epoch_end(loader)
        >>> plain = controller.deploy()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: DyRepConfig | None = None,
        *,
        forward: Forward | None = None,
        loss: Loss | None = None,
        ema: nn.Module | Iterable[nn.Module] = (),
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        log: str | os.PathLike[str] | EventLog | None = None,
        execution: str | Mapping[str, Any] | None = None,
        distributed: bool | None = None,
    ) -> None:
        self.config = _checked_config(config)
        self.model = model
        self.optimizer = optimizer
        self.epoch = 0
        self.step = 0
        self.updates = 0
        self._warned = False
        self._forward = forward
        self._followers = Followers(bare(model), ema=ema, wrap=wrap, execution=execution)
        self._distributed = distributed
        self._plain_macs: int | None = None
        self._candidates = Candidates(bare(model), optimizer, self.config)
        self.scorer = ScoreKeeper(optimizer, self.config, loss, distributed)
        self.scorer.watch(self._candidates.operations())
        self._log = log if isinstance(log, EventLog) else EventLog(log)
        self._log.write("started", config=self.config.to_dict(), ignored=self.ignored)

    @property
    def ignored(self) -> dict[str, str]:
        """Convolutions that cannot be expanded as things are, and why."""
        return self._candidates.ignored()

    @property
    def events(self) -> list[dict[str, Any]]:
        """What has happened so far, as logged."""
        return self._log.events

    def epoch_end(self, batches: Iterable[Any] | None = None) -> list[Edit]:
        """Call after every epoch; updates the structure if that is due.

        With ``unit="step"`` that is for `step_end` to do; if that was never called, this warns once.

        Args:
            batches: training batches for calibration, the training loader as a rule. A loader's position and random
                numbers are not disturbed. Edits are measured on the first of them; without any, they are made
                unmeasured.

        Returns:
            What was changed; empty when nothing was.
        """
        self.epoch += 1
        if self.config.unit == "step" and not self.step and not self._warned:
            self._warned = True
            warnings.warn(
                "the settings count steps (unit='step') and an epoch has ended without a step counted, so no update "
                "will ever be due: call step_end(loader) after every optimizer step, or set unit='epoch'",
                NoUpdateWarning,
                stacklevel=2,
            )
        due = self.config.unit == "epoch" and self.config.is_due(self.epoch)
        return self.update(batches) if due else []

    def step_end(self, batches: Iterable[Any] | None = None) -> list[Edit]:
        """Call after every optimizer step with ``unit="step"``; updates the structure if that is due."""
        self.step += 1
        due = self.config.unit == "step" and self.config.is_due(self.step)
        return self.update(batches) if due else []

    def update(self, batches: Iterable[Any] | None = None) -> list[Edit]:
        """Expand and cut now, whatever the schedule says.

        Up to ``calibration_batches`` batches are held in memory meanwhile.

        Raises:
            DyRepError: nothing can be expanded because no optimizer step was seen, the data does not serve, or ranks
                disagree. After any error the model and its optimizer are as they were, unless it came from writing the
                log of an update that was made.
        """
        began = time.perf_counter()
        model = bare(self.model)
        if ranks.distributed(self._distributed):  # what is folded must be the same everywhere
            ranks.broadcast_(b for m in model.modules() if isinstance(m, BranchNorm) for b in m.buffers())
        with preserved_randomness(model, batches):
            data = None if batches is None else self._read(batches)
            if self._plain_macs is None:
                self._costs(model, data)  # while it is plain, there is nothing to fold for that
            scores, seen = self.scorer.scores(model, data, self._seed(stream=1))
            guard = EditGuard(
                model,
                self.optimizer,
                data[0] if data else None,
                forward=self._forward,
                tolerance=self.config.drift_tolerance,
                distributed=self._distributed,
            )
            strengths: dict[str, Mapping[str, float]] = {}
            try:
                if guard.healthy:
                    self._grow(model, guard, scores, data)
                    blocks = {name: state for name, state in _block_states(model).items() if self._trains(model, name)}
                    strengths = {name: block.importances for name, block in blocks.items()}
                    self._cut(model, guard, blocks)
                else:
                    warnings.warn("the model's output is not finite, so its structure stays as it is", stacklevel=3)
                after = self._costs(model, data)
            except BaseException:
                guard.undo_all()
                raise
        done = [_explained(edit, scores, strengths) for edit in guard.done]
        if done:
            try:
                self.model = self._followers.follow_(self.model)
            except BaseException:
                guard.undo_all()
                raise
        self.scorer.watch(self._candidates.operations())
        self.updates += 1
        self._log.write(
            "update",
            update=self.updates,
            epoch=self.epoch,
            step=self.step,
            edits=[edit.as_dict() for edit in done],
            rolled_back=[edit.as_dict() for edit in guard.rejected],
            rejected=self._candidates.rejected,
            scores=scores,
            scored_steps=seen.steps,
            skipped_steps=seen.skipped,
            importances=strengths,
            structure=structure(model),
            parameters=count_parameters(model),
            macs=None if after is None else after.macs,
            plain_macs=self._plain_macs,
            batches=len(data or ()),
            seconds=round(time.perf_counter() - began, 3),
        )
        return done

    def deploy(self) -> nn.Module:
        """A plain copy of the model with the same function, see `dyrep.deploy`."""
        return deploy(self.model)

    def close(self) -> None:
        """Stop watching the optimizer."""
        self.scorer.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, except the model's own state dict: tensors and plain data.

        The optimizer's state is in it, by parameter name; there is no need to save it separately.
        """
        model = bare(self.model)
        return {
            "format": FORMAT,
            "config": self.config.to_dict(),
            "structure": structure(model),
            "optimizer": state_by_name(self.optimizer, model),
            "scorer": self.scorer.state_dict(),
            "counters": {"epoch": self.epoch, "step": self.step, "updates": self.updates},
            "rejected": dict(self._candidates.rejected),
            "clocks": {name: block.execution.clock.step for name, block in _own_clocks(model)},
            "plain_macs": self._plain_macs,
            "next_event": self._log.next_seq,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned: structure, optimizer, scores and counters.

        Call this before ``model.load_state_dict``, which needs the structure to be there.

        Raises:
            DyRepError: the state does not fit; message says where. Nothing has been changed then.
        """
        _check_state(state)
        model = bare(self.model)
        wanted = self._wanted_structure(model, state["structure"])
        before = Snapshot(touched(model, wanted), self.optimizer)
        options = [_options(group) for group in self.optimizer.param_groups]
        try:
            restructure_(model, wanted, optimizer=self.optimizer, generator=torch.Generator())
            load_state_by_name_(self.optimizer, model, state["optimizer"])
            self.model = self._followers.follow_(self.model)
        except BaseException:
            before.restore_()
            for group, earlier in zip(self.optimizer.param_groups, options, strict=True):
                group.update(earlier)
            raise
        for name, block in _own_clocks(model):
            block.execution.clock.step = state.get("clocks", {}).get(name, 0)
        self._candidates.rejected = dict(state["rejected"])
        self.scorer.watch(self._candidates.operations())
        self.scorer.load_state_dict(state["scorer"])
        counters = state["counters"]
        self.epoch, self.step, self.updates = counters["epoch"], counters["step"], counters["updates"]
        self._plain_macs = state["plain_macs"]
        self._warn_about_settings(state["config"])
        self._log.resume(state["next_event"], epoch=self.epoch, step=self.step, update=self.updates)

    # -- decisions ----------------------------------------------------------------------------------------------

    def _choose_growth(
        self, model: nn.Module, scores: Mapping[str, float], data: list[Any] | None, top_k: int
    ) -> list[str]:
        config = self.config
        needs_costs = config.per_mac or config.macs_limit is not None
        now = self._costs(model, data) if needs_costs else None
        if needs_costs and now is None:
            raise ConfigError("per_mac and macs_limit have to run the model to count multiply-adds: pass batches")
        spare = float("inf")
        if config.macs_limit is not None and now is not None and self._plain_macs is not None:
            spare = config.macs_limit * self._plain_macs - now.macs
        chosen = policy.choose_growth(
            [self._candidate(model, target, scores, now) for target in self._candidates.targets()],
            top_k=top_k,
            max_depth=config.max_depth,
            square_only=config.square_only,
            per_mac=config.per_mac,
            spare_macs=spare,
        )
        return self._agreed(chosen, "what to expand")

    def _candidate(
        self, model: nn.Module, target: Target, scores: Mapping[str, float], now: Costs | None
    ) -> policy.Candidate:
        cost = 0
        if now is not None:
            conv, positions = model.get_submodule(target.name), now.positions.get(target.name, Positions())
            cost = added_macs(conv, self._candidates.wanted(target), positions, self.config.width)
        score = scores.get(target.name, float("nan"))
        return policy.Candidate(target.name, score, target.depth, target.kernel_size, cost)

    def _agreed(self, plan: Any, what: str) -> Any:
        if ranks.distributed(self._distributed):
            ranks.check_agreement(plan, what, device_of(self.model))
        return plan

    def _warn_about_settings(self, saved: Mapping[str, Any]) -> None:
        ours = self.config.to_dict()
        changed = [f"{key}={saved.get(key)!r} is now {ours[key]!r}" for key in ours if saved.get(key) != ours[key]]
        if changed:
            text = "the run goes on with other settings than it was saved with: " + ", ".join(changed)
            warnings.warn(text, SettingsChangedWarning, stacklevel=3)

    # -- edits --------------------------------------------------------------------------------------------------

    def _read(self, batches: Iterable[Any]) -> list[Any]:
        wanted = max(self.config.calibration_batches, self.config.grasp_batches)
        return list(islice(iterate(batches), wanted))

    def _grow(self, model: nn.Module, guard: EditGuard, scores: Mapping[str, float], data: list[Any] | None) -> None:
        """Expand the best operations; where one cannot be, say so, pass it over from now on, and take the next."""
        generator = torch.Generator().manual_seed(self._seed(stream=0))
        missing = self.config.top_k
        while missing and (chosen := self._choose_growth(model, scores, data, missing)):
            for layer in chosen:
                try:
                    grown = guard.attempt([layer], lambda: self._expand(model, layer, data, generator))  # noqa: B023
                    reason = "expanding it changed the network's output"
                except UnreachedLayerError as error:
                    grown, reason = False, str(error)
                    warnings.warn(reason, EditRolledBackWarning, stacklevel=4)
                if grown:
                    missing -= 1
                else:
                    self._candidates.rejected[layer] = reason

    def _expand(self, model: nn.Module, layer: str, data: list[Any] | None, generator: torch.Generator) -> list[Edit]:
        config = self.config
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
            optimizer=self.optimizer,
            origin_norm=config.origin_norm,
            width=config.width,
            generator=generator,
            distributed=self._distributed,
        )

    def _cut(self, model: nn.Module, guard: EditGuard, blocks: Mapping[str, policy.BlockState]) -> None:
        cuts = policy.choose_cuts(blocks, rule=self.config.cut, threshold=self.config.cut_threshold)
        for layer, branches in self._agreed(cuts, "what to cut").items():
            guard.attempt([layer], lambda: cut_(model, layer, branches, optimizer=self.optimizer))  # noqa: B023

    def _costs(self, model: nn.Module, data: list[Any] | None) -> Costs | None:
        if not data:
            return None
        now = costs(model, data[0], forward=self._forward)
        if self._plain_macs is None:
            grown = bool(structure(model)["blocks"])
            self._plain_macs = costs(deploy(model), data[0], forward=self._forward).macs if grown else now.macs
        return now

    def _trains(self, model: nn.Module, layer: str) -> bool:
        """Whether the optimizer holds a layer, or the one that its block has grown from."""
        outermost = layer.partition(".branches.")[0]
        return locate(self.optimizer, model.get_submodule(outermost).weight) is not None  # type: ignore[arg-type]

    def _wanted_structure(self, model: nn.Module, saved: Any) -> Any:
        """A saved structure; layers that another optimizer trains are for its controller, and stay as they are."""
        if not isinstance(saved, Mapping) or not isinstance(saved.get("blocks"), Mapping):
            return saved  # which is refused for what it is
        here = structure(model)["blocks"]
        others = {name: block for name, block in here.items() if not self._trains(model, name)}
        known = {name for name, _ in model.named_modules()}
        own = {
            name: block
            for name, block in saved["blocks"].items()
            if name.partition(".branches.")[0] not in known or self._trains(model, name)
        }
        return {**saved, "blocks": {**own, **others}}

    def _seed(self, stream: int) -> int:
        """A seed of its own for every update and use, so that updates never disturb each other or the user."""
        return (self.config.seed * 1_000_003 + self.updates) * 2 + stream


def _checked_config(config: Any) -> DyRepConfig:
    if config is None:
        return DyRepConfig()
    if isinstance(config, Mapping):
        raise ConfigError(
            "config is a dict: pass DyRepConfig(**settings), or DyRepConfig.from_dict(settings) for what was read "
            "from a file"
        )
    if not isinstance(config, DyRepConfig):
        raise ConfigError(f"config is a {type(config).__name__}: pass a DyRepConfig")
    return config


def _check_state(state: Any) -> None:
    """Raise unless everything that loading reads is there."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise CheckpointError(f"not a DyRep state of format {FORMAT}; pass what DyRep.state_dict() returned")
    for part, keys in _STATE.items():
        if part not in state:
            raise CheckpointError(f"the DyRep state lacks {part!r}; pass what DyRep.state_dict() returned")
        if keys is None:
            continue
        if not isinstance(state[part], Mapping):
            raise CheckpointError(f"{part!r} of the DyRep state must be a dict, got {type(state[part]).__name__}")
        lost = [key for key in keys if key not in state[part]]
        if lost:
            raise CheckpointError(f"{part!r} of the DyRep state lacks {lost[0]!r}: is the file damaged?")
    whole = {**{name: state["counters"][name] for name in _STATE["counters"] or ()}, "next_event": state["next_event"]}
    for name, value in whole.items():
        if not is_whole(value, 0):
            raise CheckpointError(f"{name!r} of the DyRep state must be a whole number of at least 0, got {value!r}")


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group of parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _block_states(model: nn.Module) -> dict[str, policy.BlockState]:
    """What the cut rule looks at, of every block."""
    states = {}
    for layer, found in importances(model).items():
        origin = found.pop(ORIGIN, None)
        states[layer] = policy.BlockState(found, origin)
    return states


def _own_clocks(model: nn.Module) -> list[tuple[str, RepConv]]:
    """Blocks that count their training steps themselves, by name."""
    blocks = ((name, module) for name, module in model.named_modules() if isinstance(module, RepConv))
    return [(name, block) for name, block in blocks if not block.execution.clock.managed]


def _explained(edit: Edit, scores: Mapping[str, float], strengths: Mapping[str, Mapping[str, float]]) -> Edit:
    """An edit with the reason it was made for."""
    if edit.kind == "expand":
        return replace(edit, detail={"score": scores.get(edit.layer), **edit.detail})
    cut = {branch: strengths[edit.layer][branch] for branch in edit.branches}
    return replace(edit, detail={"importances": cut, **edit.detail})
