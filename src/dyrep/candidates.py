"""Which convolutions a configuration allows to grow in a model that an optimizer trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep.block import RepConv
from dyrep.checking import LayerPatterns
from dyrep.config import USUAL_START, DyRepConfig
from dyrep.errors import ConfigError, IneligibleLayerError, OptimizerError
from dyrep.normflow import has_flow
from dyrep.surgery.beginning import MAX_KERNEL, fitting, normed, trained_norm
from dyrep.surgery.optimizer import check_optimizer
from dyrep.surgery.optimizer_state import locate
from dyrep.surgery.preserve import device_of
from dyrep.surgery.structure import structure
from dyrep.surgery.targets import COMPLETE, Target, is_inside, outermost, targets


class Candidates:
    """Looks the model over anew at every question: layers are frozen and unfrozen, grown and cut meanwhile.

    Args:
        model: the bare model.
        optimizer: the optimizer that trains it.
        config: settings.

    Attributes:
        rejected: layers that turned out not to bear expansion, and why; never considered again.

    Raises:
        IneligibleLayerError: nothing can ever grow.
        OptimizerError: the optimizer cannot follow, or lacks parameters of branches that are there already.
        ConfigError: blocks that are there already do not fit the settings.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1))
        >>> found = Candidates(model, torch.optim.SGD(model.parameters(), lr=0.1), DyRepConfig())
        >>> [target.name for target in found.targets()], found.ignored()
        (['0'], {'1': 'the kernel is 1x1: a branch could only repeat it'})
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: DyRepConfig) -> None:
        check_optimizer(optimizer)
        self._model, self._optimizer, self._config = model, optimizer, config
        self.rejected: dict[str, str] = {}
        self._check_patterns()
        self.check_existing_blocks()
        if not self.targets() and not any(target.present for target in targets(model)):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self.ignored().items())[:5])
            raise IneligibleLayerError(f"no convolution of this model can be expanded ({reasons or 'it has none'})")

    def targets(self) -> list[Target]:
        """Convolutions that may grow now, in module order."""
        config = self._config
        return [
            target
            for target, reason in self._judged()
            if not reason
            and (config.regrow or not target.present)
            and not self._too_deep(target)
            and self.wanted(target)
        ]

    def _too_deep(self, target: Target) -> bool:
        return self._config.max_depth is not None and target.depth >= self._config.max_depth

    def ignored(self) -> dict[str, str]:
        """Convolutions that cannot grow as things are, and why.

        Those that have all their branches are not listed, and neither is what lies too deep inside of branches.
        """
        return {
            target.name: reason
            for target, reason in self._judged()
            if reason and reason != COMPLETE and not self._too_deep(target)
        }

    def wanted(self, target: Target) -> tuple[str, ...]:
        """The branches a convolution would grow."""
        chosen = self._config.branches
        return target.branches if chosen is None else tuple(b for b in chosen if b in target.branches)

    def beginning(self) -> tuple[dict[str, tuple[str, ...]], str]:
        """The branches to begin with, by layer; and if there are none, why, unless the settings say so.

        Raises:
            ConfigError: branches to begin with are asked for by name, and the network has been trained.
            IneligibleLayerError: they are asked for by name, and fit nowhere.
        """
        branches = self._config.start_with
        if branches == ():
            return {}, ""
        grown = next((name for name in structure(self._model)["blocks"] if self.trains(name)), None)
        if grown is not None:
            return {}, f"layer {grown!r} has branches already"
        signs = self._signs_of_training()
        if branches is None and signs:
            return {}, f"{signs} that the network has been trained, or run in training mode"
        if branches is None:
            known, allowed = normed(self._model), self._config.branches or USUAL_START
            usual = [branch for branch in USUAL_START if branch in allowed]
            plan = fitting((target for target in self.targets() if target.name in known), usual)
            kernels = f"square convolution up to {MAX_KERNEL}x{MAX_KERNEL} right before a batch norm"
            return plan, "" if plan else f"no {kernels} can have any of {', '.join(usual) or 'the branches allowed'}"
        if signs:
            raise ConfigError(
                f"start_with={branches} changes what a network computes, and {signs} that this one has been trained, "
                "or run in training mode: leave start_with out, and branches grow without changing it"
            )
        plan = fitting(self.targets(), branches)
        if not plan:
            raise IneligibleLayerError(
                f"start_with={branches}: no square convolution up to {MAX_KERNEL}x{MAX_KERNEL} can begin with any of "
                "these; dyrep.targets(model) tells what fits, start_with=() starts plain"
            )
        return plan, ""

    def _signs_of_training(self) -> str:
        norm = trained_norm(self._model)
        if norm is not None:
            return f"norm {norm!r} shows"
        kept = (self._optimizer.state.get(p) or {} for p in self._model.parameters())
        # some optimizers have state before their first step, and count from 0
        return "the optimizer's state shows" if any(state and state.get("step", 1) for state in kept) else ""

    def trains(self, layer: str) -> bool:
        """Whether the optimizer holds a layer, or the one that its block has grown from."""
        root = outermost(self._model, layer)
        return root is not None and self._holds(root)

    def _holds(self, conv: str) -> bool:
        return locate(self._optimizer, cast(Tensor, self._model.get_submodule(conv).weight)) is not None

    def own_structure(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """A saved structure, but for layers that another optimizer trains: these stay as they are."""
        if not isinstance(saved["blocks"], Mapping):
            return dict(saved)  # which is refused for what it is
        here = structure(self._model)["blocks"]
        own = {
            name: block
            for name, block in saved["blocks"].items()
            if (root := outermost(self._model, name)) is None or self._holds(root)  # what is unknown is refused later
        }
        return {**saved, "blocks": {**own, **{name: block for name, block in here.items() if not self.trains(name)}}}

    def operations(self) -> dict[str, list[Tensor]]:
        """Parameters of every candidate, to score it by."""
        return {t.name: list(self._model.get_submodule(t.name).parameters(recurse=False)) for t in self.targets()}

    def norms(self) -> dict[str, nn.Module]:
        """The norms of the model that the optimizer trains, some of which follow a candidate; all on one device."""
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        flowing = {name: module for name, module in self._model.named_modules() if has_flow(module)}
        device = device_of(self._model)
        return {name: n for name, n in flowing.items() if id(n.weight) in held and n.weight.device == device}

    def _judged(self) -> list[tuple[Target, str]]:
        """Every convolution with the reason against it, if there is one."""
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        found = targets(self._model)
        outermost = [target.name for target in found if target.depth == 0]
        patterns, judged = self._config.patterns, []
        for target in found:
            root = next((name for name in outermost if is_inside(target.name, name)), target.name)
            reason = "" if target.eligible else target.reason
            if target.name in self.rejected:
                reason = self.rejected[target.name]
            elif not patterns.includes(root) or patterns.excludes(target.name):
                reason = reason or "excluded by the configuration's include and exclude patterns"
            elif id(self._model.get_submodule(target.name).weight) not in held:
                reason = reason or "its weight is not in the optimizer"
            elif self._config.square_only and len(set(target.kernel_size)) > 1:
                sides = "x".join(map(str, target.kernel_size))
                reason = reason or f"the kernel is {sides}: square_only=False lets it grow"
            judged.append((target, reason))
        return judged

    def _check_patterns(self) -> None:
        names = [target.name for target in targets(self._model) if target.depth == 0]
        unused = [p for p in self._config.include if not any(LayerPatterns((p,)).includes(name) for name in names)]
        if unused and names:
            raise ConfigError(
                f"include={self._config.include}: {unused[0]!r} matches no convolution of this model, whose are "
                f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}; dyrep.targets(model) lists them"
            )

    def check_existing_blocks(self) -> None:
        """Raise if there are branches that do not fit the settings, or that the optimizer should train and does not.

        Raises:
            OptimizerError: it holds a convolution and not all of its branches.
            ConfigError: the rule to cut by compares branches with a norm that is not there.
        """
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        for name, module in self._model.named_modules():
            if not isinstance(module, RepConv) or not module.branches:
                continue
            lost = [key for key, p in module.branches.named_parameters() if p.requires_grad and id(p) not in held]
            if lost and id(module.weight) in held:
                raise OptimizerError(
                    f"layer {name!r} has branches that the optimizer does not train ({lost[0]} and {len(lost) - 1} "
                    "more parameters): expand and load with optimizer=, or build the optimizer afterwards"
                )
            if self._config.cut == "reference" and module.origin_norm is None:
                raise ConfigError(
                    f"layer {name!r} has branches but no norm on its origin, which cut='reference' compares them with: "
                    "use cut='paper', or expand it with origin_norm='reference' or 'calibrated'"
                )
