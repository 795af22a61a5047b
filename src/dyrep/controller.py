"""Algorithm 1 of the paper, for any training loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep.candidates import Candidates
from dyrep.config import DyRepConfig
from dyrep.controller_state import FORMAT, check_state, clocks, set_clocks_
from dyrep.errors import (
    ConfigError,
    DyRepError,
    NoUpdateWarning,
    SettingsChangedWarning,
    UnsynchronisedWarning,
    warn,
)
from dyrep.events import EventLog
from dyrep.following import Followers
from dyrep.norm import BranchNorm
from dyrep.scorekeeper import ScoreKeeper
from dyrep.scoring import Loss
from dyrep.surgery import ranks
from dyrep.surgery.batches import read_batches
from dyrep.surgery.costs import count_parameters
from dyrep.surgery.edits import Edit
from dyrep.surgery.folding import deploy
from dyrep.surgery.optimizer_state import load_state_by_name_, state_by_name
from dyrep.surgery.preserve import Forward, device_of, preserved_randomness
from dyrep.surgery.structure import restructure_, structure, touched
from dyrep.surgery.undo import Snapshot
from dyrep.surgery.wrappers import bare
from dyrep.updating import Update, Updater


class DyRep:
    """Evolves a model while a loop of your own trains it.

    It watches the optimizer's steps to score operations. When an update is due it expands the one that matters most
    and absorbs branches that stayed weak, in the model, the optimizer and the DistributedDataParallel wrapper alike.

    Args:
        model: the model, plain, compiled or in DistributedDataParallel; it is changed in place.
        optimizer: the optimizer that trains it.
        config: settings (default: those of `DyRepConfig`). By them a network that has learnt nothing yet gets its first
            branches here, see ``start_with``; one that was trained before is left as it is.
        forward: ``forward(model, batch)`` to run the model where a batch is not a tensor, a tuple that begins with the
            input, or a dict of arguments.
        loss: ``loss(model, batch)``, for the scores ``"grasp"`` and ``"vote"``.
        ema: a moving average of the model (`torch.optim.swa_utils.AveragedModel`, timm's, or a plain copy), or several;
            every change of structure is made to it too, see `dyrep.follow_`.
        wrap: called with the bare model after every change of structure, for a network that begins with branches when
            the controller is made; returns the model to train, which is then `model`. Without it a
            DistributedDataParallel wrapper is initialised again in place.
        log: file for the event log (JSON lines), or an `EventLog`.
        execution: how blocks are run, those that grow later too: a name, or a dict of arguments of
            `dyrep.set_execution_` (default: as they are; new ones are ``"auto"``).
        distributed: whether ranks decide together (default: if torch.distributed is initialised).
        begins: whether training begins here; otherwise a new network is left as it is too, because a saved state will
            be loaded (which takes back what was begun, so this only spares the work).

    Attributes:
        model: the model to train; the same object as given unless ``wrap`` is used.
        begun: branches that the network was given to begin with; none of these once a state has been loaded.
        events: what has happened so far.
        ignored: convolutions that cannot be expanded as things are, and why.
        scorer: what sums scores at every step of the optimizer.
        attempts: edits so far, those that were undone among them; what was captured before one is stale.

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
        begins: bool = True,
    ) -> None:
        self.config = _checked_config(config)
        self.model = model
        self.optimizer = optimizer
        self.epoch = 0
        self.step = 0
        self.updates = self.attempts = 0
        self._told: set[str] = set()
        self._closed = False
        self._followers = Followers(bare(model), ema=ema, wrap=wrap, execution=execution)
        self._distributed = distributed
        self._candidates = Candidates(bare(model), optimizer, self.config)
        self._updater = Updater(self.config, optimizer, self._candidates, forward, distributed)
        self._warn_if_nothing_synchronises()
        self._log = log if isinstance(log, EventLog) else EventLog(log)
        self.scorer = ScoreKeeper(optimizer, self.config, loss, forward, distributed)
        self.begun: list[Edit] = []
        try:  # a controller that could not be made leaves model and optimizer as they were
            plan, reason = self._updater.beginning(bare(model)) if begins else ({}, "")
            self._warn_if_nothing_grows(reason, begins=bool(plan))
            why = {"not_begun": reason} if reason else {}
            self._log.write("started", config=self.config.to_dict(), ignored=self.ignored, **why)
            if plan:
                self.begun = self._begin(plan)
            self._watch()
        except BaseException:
            self.scorer.close()
            raise

    @property
    def ignored(self) -> dict[str, str]:
        """Convolutions that cannot be expanded as things are, and why."""
        return self._candidates.ignored()

    @property
    def events(self) -> list[dict[str, Any]]:
        """What has happened so far, as logged."""
        return self._log.events

    def _begin(self, plan: Mapping[str, Sequence[str]]) -> list[Edit]:
        """Give a network that has learnt nothing yet the branches that it shall begin with, and let all follow."""
        model = bare(self.model)
        before = Snapshot([model.get_submodule(name) for name in plan], self.optimizer)
        try:
            edits = self._updater.begin(model, plan)
            made = [edit.as_dict() for edit in edits]
            self._log.write("converted", method="dyrep", edits=made, structure=structure(model))
            self.model = self._followers.follow_(self.model, begun=plan)
        except BaseException:
            before.restore_()
            raise
        return edits

    def epoch_end(self, batches: Iterable[Any] | None = None) -> list[Edit]:
        """Call after every epoch; updates the structure if that is due.

        With ``unit="step"`` that is for `step_end` to do; if that was never called, this warns once.

        Args:
            batches: training batches for calibration, the training loader as a rule. A loader's position and random
                numbers are not disturbed. Edits are measured on the first of them; with None, they are made
                unmeasured.

        Returns:
            What was changed; empty when nothing was.
        """
        self.epoch += 1
        if self.config.unit == "step" and not self.step:
            self._warn_once(
                "the settings count steps (unit='step') and an epoch has ended without a step counted, so no update "
                "will ever be due: call step_end(loader) after every optimizer step, or set unit='epoch'"
            )
        return self._change_if_due("epoch", self.epoch, batches)

    def step_end(self, batches: Iterable[Any] | None = None) -> list[Edit]:
        """Call after every optimizer step with ``unit="step"``; updates the structure if that is due."""
        self.step += 1
        return self._change_if_due("step", self.step, batches)

    def _change_if_due(self, unit: str, count: int, batches: Iterable[Any] | None) -> list[Edit]:
        if self.config.unit != unit:
            return []
        if count == self.config.absorb_after:
            self._overdue = True
            if not self.updates and not structure(self.model)["blocks"]:
                warn(
                    f"there are no branches to absorb after {count} {unit}s (absorb_after): nothing has grown so far, "
                    "and nothing will from now on. Let the first update come before, with start and interval, or "
                    "begin with branches, start_with",
                    NoUpdateWarning,
                )
        if self._overdue:
            return self.absorb(batches)
        if self.config.is_due(count):
            return self.update(batches)
        if unit == "epoch" and self.config.grows and not self.updates:
            self._warn_of_what_will_be_missing(batches)
        return []

    def update(self, batches: Iterable[Any] | None = None) -> list[Edit]:
        """Expand and cut now, whatever the schedule says; past ``absorb_after`` nothing is scored that could grow.

        Up to ``calibration_batches`` batches are held in memory meanwhile; one, where nothing more fits into the limit.

        Raises:
            DyRepError: nothing can be expanded because no optimizer step was seen, the data does not serve, or ranks
                disagree. After any error the model and its optimizer are as they were, unless it came from writing the
                log of an update that was made.
        """

        def change(model: nn.Module, data: list[Any] | None) -> tuple[Update, dict[str, Any]]:
            scores, seen = self.scorer.scores(model, data, self._seed(stream=1))
            made = self._updater.update(model, scores, data, self._seed(stream=0))
            return made, {"scores": scores, "scored_steps": seen.steps, "skipped_steps": seen.skipped}

        config = self.config
        # where nothing more can grow, the network is only looked after: is it sound, and does it still fill its limit
        wanted = 1 if self._updater.grown_out else max(config.calibration_batches, config.grasp_batches)
        return self._change(batches, wanted, change)

    def absorb(self, batches: Iterable[Any] | None = None) -> list[Edit]:
        """Absorb all branches now, whatever the schedule says; what is left is the plain network, which goes on.

        Where a batch norm reads what a block puts out, the kernel is scaled so that it goes on learning as fast as the
        block did, and that norm's statistics follow: folded as it is, it would turn several times slower. Kernels go on
        with the momentum of their blocks.

        Returns:
            What was changed; empty when there are no branches.

        Raises:
            DyRepError: the data does not serve, or ranks disagree; the model and its optimizer are as they were.
        """
        none = {"scores": {}, "scored_steps": 0, "skipped_steps": 0}
        return self._change(batches, 1, lambda model, data: (self._updater.absorb(model, data), none))

    def _change(
        self,
        batches: Iterable[Any] | None,
        wanted: int,
        change: Callable[[nn.Module, list[Any] | None], tuple[Update, dict[str, Any]]],
    ) -> list[Edit]:
        """Change the structure by that many batches, let everything that belongs to the model follow, and log it."""
        if self._closed:
            raise DyRepError("this controller was closed, so it has seen no steps since: make another one")
        began = time.perf_counter()
        model = bare(self.model)
        self._candidates.check_existing_blocks()  # a state dict with another structure may have been loaded meanwhile
        if ranks.distributed(self._distributed):  # what is folded must be the same everywhere
            ranks.broadcast_(_statistics(model))
            kept = [tensor for average in self._followers.averages for tensor in _statistics(average)]
            if ranks.agree(len(kept), device_of(model)):  # an average may be kept by one of the ranks alone
                ranks.broadcast_(kept, device_of(model))
        with preserved_randomness(model, batches):
            data = read_batches(batches, wanted, device_of(model), self._distributed)
            first = None if self.updates else self._updater.costs(model, data)
            made, grounds = change(model, data)
        if made.edits:
            try:
                self.model = self._followers.follow_(self.model, made.rescaled)
            except BaseException:
                made.guard.undo_all()
                raise
        self._watch()
        self.updates += 1
        self.attempts += len(made.edits) + len(made.undone)
        self._log.write(
            "update",
            update=self.updates,
            epoch=self.epoch,
            step=self.step,
            **({} if first is None else {"macs_before": first.macs}),  # of what training began with
            edits=[edit.as_dict() for edit in made.edits],
            rolled_back=[edit.as_dict() for edit in made.undone],
            rejected=self._candidates.rejected,
            **grounds,
            importances=made.importances,
            structure=structure(model),
            parameters=count_parameters(model),
            macs=None if made.costs is None else made.costs.macs,
            plain_macs=None if made.costs is None else made.costs.plain_macs,
            grown_out=self._updater.grown_out,
            batches=len(data or ()),
            seconds=round(time.perf_counter() - began, 3),
        )
        return made.edits

    def deploy(self) -> nn.Module:
        """A plain copy of the model with the same function, see `dyrep.deploy`."""
        return deploy(self.model)

    def close(self) -> None:
        """Stop watching the optimizer, for good; the model keeps its structure and can be deployed."""
        self._closed = True
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
            "clocks": clocks(model),
            "grown_out": self._updater.grown_out,
            "next_event": self._log.next_seq,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned: structure, optimizer, scores and counters.

        Call this before ``model.load_state_dict``, which needs the structure to be there.

        Raises:
            DyRepError: the state does not fit; message says where. Nothing has been changed then.
        """
        check_state(state)
        model = bare(self.model)
        wanted = self._candidates.own_structure(state["structure"])
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
        self.begun = []
        set_clocks_(model, state.get("clocks", {}))
        self._candidates.rejected = dict(state["rejected"])
        counters = state["counters"]
        self.epoch, self.step, self.updates = counters["epoch"], counters["step"], counters["updates"]
        same = state["config"] == self.config.to_dict()  # with another limit something may fit again
        self._updater.grown_out = same and state.get("grown_out", False)
        self._watch()
        self.scorer.load_state_dict(state["scorer"])
        self._warn_about_settings(state["config"])
        self._log.resume(state["next_event"], epoch=self.epoch, step=self.step, update=self.updates)

    def _watch(self) -> None:
        """Score what could grow from now on, and nothing if there is no such thing for good, as scoring costs time.

        Branches that should be gone by then, but were left by an update that failed, or in a run that is resumed with
        other settings, are absorbed at the next occasion.
        """
        count = self.epoch if self.config.unit == "epoch" else self.step
        over = self.config.absorb_after is not None and count >= self.config.absorb_after
        self._overdue = over and bool(self._updater.absorbable(bare(self.model)))
        idle = over or self._updater.grown_out
        self.scorer.watch({} if idle else self._candidates.operations(), self._candidates.norms())

    def _warn_about_settings(self, saved: Mapping[str, Any]) -> None:
        ours = self.config.to_dict()
        changed = [
            f"{key}={saved.get(key)!r} is now {ours[key]!r}"
            for key in ours
            if saved.get(key) != ours[key] and key != "start_with"  # which is over
        ]
        if changed:
            text = "the run goes on with other settings than it was saved with: " + ", ".join(changed)
            warn(text, SettingsChangedWarning)

    def _warn_if_nothing_grows(self, reason: str, begins: bool) -> None:
        if self.config.grows or self.config.absorb_after is not None or not (reason or begins):
            return
        has = "keeps the branches that it begins with" if begins else f"stays as it is, as {reason}"
        first = f"{self.config.start + self.config.interval} {self.config.unit}s"
        self._warn_once(
            f"nothing will ever grow: the network {has}, and the first update would come after {first}, which is too "
            "late: give a smaller interval or start"
        )

    def _warn_if_nothing_synchronises(self) -> None:
        if ranks.distributed() and self._distributed is None and self._followers.syncs_nothing(self.model):
            warn(
                "several processes train this model and it is not in DistributedDataParallel, so new branches will "
                "differ between them: give DyRep the wrapped model, or wrap=; distributed=True says that you "
                "synchronise gradients yourself, distributed=False that each process trains a model of its own",
                UnsynchronisedWarning,
            )

    def _warn_of_what_will_be_missing(self, batches: Iterable[Any] | None) -> None:
        """Say at the end of an epoch what would only be refused when the first update is due."""
        due = self.config.start + self.config.interval
        if batches is None and (self.config.macs_limit is not None or self.config.per_mac):
            asked = f"macs_limit={self.config.macs_limit}" if self.config.macs_limit is not None else "per_mac=True"
            self._warn_once(
                f"the update after epoch {due} will need batches to keep to {asked}, and epoch_end was called without: "
                "pass the training loader, epoch_end(loader), at least then"
            )
        if not self.scorer.step:
            self._warn_once(
                "no step of the optimizer given to DyRep was seen in this epoch, so there is nothing to score by: is "
                "it the one that steps? Branches are trained by this one alone"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            warn(message, NoUpdateWarning)

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


def _statistics(model: nn.Module) -> list[Tensor]:
    """The running statistics of all branches, which branches are folded by."""
    return [b for module in model.modules() if isinstance(module, BranchNorm) for b in module.buffers()]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group of parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
