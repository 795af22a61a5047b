"""Algorithm 1 of the paper, for any training loop."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep import policy, scoring
from dyrep.block import RepConv
from dyrep.config import DyRepConfig
from dyrep.errors import CheckpointError, ConfigError, DyRepError, IneligibleLayerError, ScoreNoiseWarning
from dyrep.events import EventLog
from dyrep.guard import EditGuard, UpdateData
from dyrep.norm import BranchNorm
from dyrep.surgery import ranks
from dyrep.surgery.costs import Costs, added_macs, costs
from dyrep.surgery.edits import Edit, cut_, expand_
from dyrep.surgery.folding import deploy
from dyrep.surgery.optimizer import check_optimizer, load_state_by_name_, locate, state_by_name
from dyrep.surgery.preserve import Forward, device_of, preserved_randomness
from dyrep.surgery.structure import follow_, restructure_, structure
from dyrep.surgery.targets import Target, targets
from dyrep.surgery.wrappers import bare, find_ddp, rewrap_ddp_

FORMAT = 1


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
        log: file for the event log (JSON lines).
        distributed: whether ranks decide together (default: if torch.distributed is initialised).

    Attributes:
        model: the model to train; the same object as given unless ``wrap`` is used.
        events: what has happened so far.
        ignored: convolutions that will never be expanded, and why.

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
        loss: scoring.Loss | None = None,
        ema: nn.Module | Iterable[nn.Module] = (),
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        log: str | os.PathLike[str] | None = None,
        distributed: bool | None = None,
    ) -> None:
        self.config = DyRepConfig() if config is None else config
        if self.config.score in ("grasp", "vote") and loss is None:
            raise ConfigError(f"score={self.config.score!r} differentiates the loss: pass loss=fn(model, batch)")
        self.model = model
        self.optimizer = optimizer
        self.epoch = 0
        self.step = 0
        self.updates = 0
        self._forward = forward
        self._loss = loss
        self._averages = [ema] if isinstance(ema, nn.Module) else list(ema)
        self._wrap = wrap
        self._distributed = distributed
        self._plain_macs: int | None = None
        self.ignored = self._find_ignored()
        self._scorer = scoring.StepScorer(optimizer, _step_metrics(self.config.score))
        self._scorer.watch(self._operations())
        self._log = EventLog(log)
        self._log.write("started", config=self.config.to_dict(), ignored=self.ignored)

    @property
    def events(self) -> list[dict[str, Any]]:
        """What has happened so far, as logged."""
        return self._log.events

    def epoch_end(self, batches: Iterable[Any] | None = None) -> list[Edit]:
        """Call after every epoch; updates the structure if that is due.

        Args:
            batches: training batches for calibration, the training loader as a rule. A loader's position and random
                numbers are not disturbed.

        Returns:
            What was changed; empty when nothing was.
        """
        self.epoch += 1
        due = self.config.unit == "epoch" and self.config.is_due(self.epoch)
        return self.update(batches) if due else []

    def step_end(self, batches: Iterable[Any] | None = None) -> list[Edit]:
        """Call after every optimizer step with ``unit="step"``; updates the structure if that is due."""
        self.step += 1
        due = self.config.unit == "step" and self.config.is_due(self.step)
        return self.update(batches) if due else []

    def update(self, batches: Iterable[Any] | None = None) -> list[Edit]:
        """Expand and cut now, whatever the schedule says.

        Raises:
            DyRepError: nothing can be expanded because no optimizer step was seen, the data does not serve, or ranks
                disagree. The model is then as it was.
        """
        began = time.perf_counter()
        model = bare(self.model)
        if ranks.distributed(self._distributed):  # what is folded must be the same everywhere
            ranks.broadcast_(b for m in model.modules() if isinstance(m, BranchNorm) for b in m.buffers())
        with preserved_randomness(model, batches):
            data = UpdateData(batches, self.config.grasp_batches)
            before = self._costs(model, data)
            scores, seen = self._scores(model, data)
            growth = self._choose_growth(model, scores, before)
            guard = EditGuard(
                model,
                self.optimizer,
                data.first,
                forward=self._forward,
                tolerance=self.config.drift_tolerance,
                distributed=self._distributed,
            )
            if growth:
                guard.attempt(growth, lambda: self._expand(model, growth, data))
            importances = {name: block.importances for name, block in _block_states(model).items()}
            for layer, branches in self._choose_cuts(model).items():
                guard.attempt([layer], lambda: cut_(model, layer, branches, optimizer=self.optimizer))  # noqa: B023
            after = self._costs(model, data)
        done = [_explained(edit, scores, importances) for edit in guard.done]
        if done:
            self._spread(model)
        self._scorer.watch(self._operations())
        self.updates += 1
        self._log.write(
            "update",
            update=self.updates,
            epoch=self.epoch,
            step=self.step,
            edits=[edit.as_dict() for edit in done],
            rolled_back=[edit.as_dict() for edit in guard.rejected],
            scores=scores,
            scored_steps=seen.steps,
            skipped_steps=seen.skipped,
            importances=importances,
            parameters=sum(p.numel() for p in model.parameters()),
            macs=None if after is None else after.macs,
            plain_macs=self._plain_macs,
            calibration_batches=data.drawn,
            seconds=round(time.perf_counter() - began, 3),
        )
        return done

    def deploy(self) -> nn.Module:
        """A plain copy of the model with the same function, see `dyrep.deploy`."""
        return deploy(self.model)

    def close(self) -> None:
        """Stop watching the optimizer."""
        self._scorer.close()

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
            "scorer": self._scorer.state_dict(),
            "counters": {"epoch": self.epoch, "step": self.step, "updates": self.updates},
            "plain_macs": self._plain_macs,
            "next_event": self._log.next_seq,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned: structure, optimizer, scores and counters.

        Call this before ``model.load_state_dict``, which needs the structure to be there.

        Raises:
            DyRepError: the state does not fit; message says where.
        """
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise CheckpointError(f"not a DyRep state of format {FORMAT}; pass what DyRep.state_dict() returned")
        model = bare(self.model)
        restructure_(model, state["structure"], optimizer=self.optimizer, generator=torch.Generator())
        load_state_by_name_(self.optimizer, model, state["optimizer"])
        self._spread(model)
        self._scorer.watch(self._operations())
        self._scorer.load_state_dict(state["scorer"])
        counters = state["counters"]
        self.epoch, self.step, self.updates = counters["epoch"], counters["step"], counters["updates"]
        self._plain_macs = state["plain_macs"]
        self._log.resume(state["next_event"], epoch=self.epoch, step=self.step, update=self.updates)

    # -- what can grow ------------------------------------------------------------------------------------------

    def _candidates(self) -> list[Target]:
        """Convolutions that could be expanded now, in module order."""
        config = self.config
        return [
            target
            for target in targets(bare(self.model))
            if target.eligible
            and target.name not in self.ignored
            and not config.excludes(target.name)
            and (config.regrow or not target.present)
            and (config.max_depth is None or target.depth < config.max_depth)
            and (not config.square_only or len(set(target.kernel_size)) == 1)
            and self._wanted(target)
        ]

    def _wanted(self, target: Target) -> tuple[str, ...]:
        """The branches a convolution would grow under this configuration."""
        chosen = self.config.branches
        return target.branches if chosen is None else tuple(b for b in chosen if b in target.branches)

    def _find_ignored(self) -> dict[str, str]:
        check_optimizer(self.optimizer)
        model = bare(self.model)
        found = targets(model)
        ignored = {}
        for target in found:
            if not target.eligible and not target.present:
                ignored[target.name] = target.reason
            elif not self.config.includes(target.name):
                ignored[target.name] = "excluded by the configuration's include and exclude patterns"
            elif locate(self.optimizer, model.get_submodule(target.name).weight) is None:  # type: ignore[arg-type]
                ignored[target.name] = "its weight is not in the optimizer"
        if len(ignored) == len(found):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(ignored.items())[:5])
            raise IneligibleLayerError(f"no convolution of this model can be expanded ({reasons or 'it has none'})")
        return ignored

    def _operations(self) -> dict[str, list[Tensor]]:
        model = bare(self.model)
        return {
            target.name: list(model.get_submodule(target.name).parameters(recurse=False))
            for target in self._candidates()
        }

    # -- decisions ----------------------------------------------------------------------------------------------

    def _scores(self, model: nn.Module, data: UpdateData) -> tuple[dict[str, float], scoring.StepScores]:
        """The score of every candidate under the configured metric."""
        seen = self._scorer.read(self._distributed)
        operations = self._operations()
        metric = self.config.score
        if metric == "random":
            generator = torch.Generator().manual_seed(self._seed(stream=1))
            return scoring.random_scores(operations, generator), seen
        if not operations:
            return {}, seen
        if seen.steps == 0 and metric != "grasp":
            if seen.skipped:
                warnings.warn("every step since the last update had gradients that are not finite", stacklevel=3)
                return {}, seen
            raise DyRepError(
                "no optimizer step was seen since the last update, so there is nothing to score by: is the optimizer "
                "given to DyRep the one that steps, and was it stepped?"
            )
        if metric == "synflow":
            self._warn_about_noise(seen)
        if metric in scoring.STEP_METRICS:
            return seen.means[metric], seen
        assert self._loss is not None
        grasp = scoring.grasp_scores(
            model,
            operations,
            data.head,
            self._loss,
            max_batches=self.config.grasp_batches,
            distributed=self._distributed,
        )
        if metric == "grasp":
            return grasp, seen
        return scoring.vote({**{m: seen.means[m] for m in scoring.VOTERS if m != "grasp"}, "grasp": grasp}), seen

    def _choose_growth(self, model: nn.Module, scores: Mapping[str, float], now: Costs | None) -> list[str]:
        config = self.config
        needs_costs = config.per_mac or config.macs_limit is not None
        if needs_costs and now is None:
            raise ConfigError("per_mac and macs_limit have to run the model to count multiply-adds: pass batches")
        candidates = []
        for target in self._candidates():
            cost = 0
            if needs_costs and now is not None:
                conv = model.get_submodule(target.name)
                cost = added_macs(conv, self._wanted(target), now.positions.get(target.name, 0), config.width)
            score = scores.get(target.name, float("nan"))
            candidates.append(policy.Candidate(target.name, score, target.depth, target.kernel_size, cost))
        spare = float("inf")
        if config.macs_limit is not None and now is not None and self._plain_macs is not None:
            spare = config.macs_limit * self._plain_macs - now.macs
        chosen = policy.choose_growth(
            candidates,
            top_k=config.top_k,
            max_depth=config.max_depth,
            square_only=config.square_only,
            per_mac=config.per_mac,
            spare_macs=spare,
        )
        return self._agreed(chosen, "what to expand")

    def _choose_cuts(self, model: nn.Module) -> dict[str, list[str]]:
        config = self.config
        cuts = policy.choose_cuts(_block_states(model), rule=config.cut, threshold=config.cut_threshold)
        return self._agreed(cuts, "what to cut")

    def _agreed(self, plan: Any, what: str) -> Any:
        if ranks.distributed(self._distributed):
            ranks.check_agreement(plan, what, device_of(self.model))
        return plan

    def _warn_about_noise(self, seen: scoring.StepScores) -> None:
        noise = scoring.noisy(seen.means["synflow"], seen.means["snip"])
        if len(noise) * 2 > len(seen.means["synflow"]):
            warnings.warn(
                f"synflow is below numerical noise for {len(noise)} of {len(seen.means['synflow'])} convolutions (its "
                f"terms cancel to less than {scoring.NOISE_RATIO:g} of their size): a norm follows them, so the loss "
                "does not depend on the scale of their weights and the ranking is close to arbitrary. "
                "score='invariant' or 'snip' is meaningful there",
                ScoreNoiseWarning,
                stacklevel=4,
            )

    # -- edits --------------------------------------------------------------------------------------------------

    def _expand(self, model: nn.Module, layers: list[str], data: UpdateData) -> list[Edit]:
        config = self.config
        return expand_(
            model,
            layers,
            {target.name: self._wanted(target) for target in targets(model) if target.name in layers},
            gamma=config.gamma,
            relative_gamma=config.relative_gamma,
            calibration=data.stream(),
            calibration_batches=config.calibration_batches,
            forward=self._forward,
            optimizer=self.optimizer,
            origin_norm=config.origin_norm,
            width=config.width,
            generator=torch.Generator().manual_seed(self._seed(stream=0)),
            distributed=self._distributed,
        )

    def _spread(self, model: nn.Module) -> None:
        """Let everything that depends on the set of parameters follow a change of structure."""
        for average in self._averages:
            follow_(average, model)
        if self._wrap is not None:
            self.model = self._wrap(model)
            return
        ddp = find_ddp(self.model)
        if ddp is not None:
            rewrap_ddp_(ddp)

    def _costs(self, model: nn.Module, data: UpdateData) -> Costs | None:
        if data.first is None:
            return None
        if self._plain_macs is None:
            self._plain_macs = costs(deploy(model), data.first, forward=self._forward).macs
        return costs(model, data.first, forward=self._forward)

    def _seed(self, stream: int) -> int:
        """A seed of its own for every update and use, so that updates never disturb each other or the user."""
        return (self.config.seed * 1_000_003 + self.updates) * 2 + stream


def _step_metrics(score: str) -> tuple[str, ...]:
    """What has to be summed at every step for a score: synflow is judged against snip, votes need all voters."""
    needed = {"synflow": ("synflow", "snip"), "vote": tuple(m for m in scoring.VOTERS if m != "grasp")}
    return needed.get(score, (score,) if score in scoring.STEP_METRICS else ())


def _block_states(model: nn.Module) -> dict[str, policy.BlockState]:
    states = {}
    for name, module in model.named_modules():
        if isinstance(module, RepConv) and module.branches:
            origin = None if module.origin_norm is None else float(module.origin_norm.importance)
            importances = {branch: float(value) for branch, value in module.importances().items()}
            states[name] = policy.BlockState(importances, origin)
    return states


def _explained(edit: Edit, scores: Mapping[str, float], importances: Mapping[str, Mapping[str, float]]) -> Edit:
    """An edit with the reason it was made for."""
    if edit.kind == "expand":
        return replace(edit, detail={"score": scores.get(edit.layer), **edit.detail})
    strengths = {branch: importances[edit.layer][branch] for branch in edit.branches}
    return replace(edit, detail={"importances": strengths, **edit.detail})
