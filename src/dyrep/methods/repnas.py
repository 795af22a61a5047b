"""RepNAS: search for the branches of every block while the network trains, in one run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dyrep.checking import read_settings, require, require_types
from dyrep.errors import CheckpointError, DyRepError, StructureError
from dyrep.events import EventLog
from dyrep.methods.conversion import convert_
from dyrep.methods.gates import Gates, settle_
from dyrep.surgery import ranks
from dyrep.surgery.copies import inside
from dyrep.surgery.costs import count_parameters
from dyrep.surgery.edits import Edit
from dyrep.surgery.folding import deploy
from dyrep.surgery.optimizer import check_optimizer, remove_
from dyrep.surgery.optimizer_state import load_state_by_name_, state_by_name
from dyrep.surgery.structure import structure
from dyrep.surgery.wrappers import bare, find_ddp, forget_compiled, rewrap_ddp_

FORMAT = 1
_REACH = 17.5  # how far a strength can move in a search: 1e-4 x 175,000 steps of Adam, as published for ImageNet
_FASTEST = 0.1  # however few steps there are
_BETAS = (0.5, 0.999)
_DECAY = 5e-4


@dataclass(frozen=True)
class RepNASConfig:
    """How `RepNAS` searches. The defaults are those of its published code, as shares of the training.

    Attributes:
        total: epochs of the whole training.
        keep: share of all branches of the network that are open at a time, and kept in the end.
        random_share: share of the epochs in which gates are drawn without preference, before any is learned.
        search_share: share of the epochs after which the search is over and the structure fixed.
        strength_lr: learning rate of the gates' strengths (default: such that a strength can move as far as in the
            published search, however long this one is, but at most 0.1).

    Example:
        >>> RepNASConfig(total=150).ends
        (15, 50)
    """

    total: int = 150
    keep: float = 0.34
    random_share: float = 0.1
    search_share: float = 1 / 3
    strength_lr: float | None = None

    def __post_init__(self) -> None:
        require_types(self)
        valid = {
            "total": (self.total >= 3, "at least 3: epochs to warm up, to search, and to train what was found"),
            "keep": (0 < self.keep <= 1, "above 0 and at most 1"),
            "random_share": (0 <= self.random_share < self.search_share, f"from 0 to below {self.search_share:.3g}"),
            "search_share": (self.search_share < 1, "below 1"),
            "strength_lr": (self.strength_lr is None or self.strength_lr > 0, "None or above 0"),
        }
        for name, (holds, words) in valid.items():
            require(name, getattr(self, name), words, holds)

    @property
    def ends(self) -> tuple[int, int]:
        """After how many epochs the random part ends, and the search."""
        first = min(max(round(self.random_share * self.total), 1), self.total - 2)
        return first, min(max(round(self.search_share * self.total), first + 1), self.total - 1)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-able data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RepNASConfig:
        """Read what `to_dict` wrote; unknown settings are refused."""
        return read_settings(cls, data)


class RepNAS:
    """Searches the branches of every block of a model that somebody else trains.

    Every branch, the original kernel included, has a gate. In each training step the gates with the highest strength
    plus noise are open, as many as the network may keep; strengths learn from the same loss as the weights. After the
    search, the branches that are not among the strongest are dropped and training goes on with the others, which is
    what is deployed.

    Args:
        model: the model, changed in place unless it has gated blocks already; wrappers are looked through.
        optimizer: the optimizer that trains it. Strengths are trained whenever it steps.
        config: settings.
        example_input: a batch, to see which norm follows which convolution (see `dyrep.convert_`).
        ema: copies of the model, such as moving averages, that have to follow; made after the model was converted.
        scaler: the gradient scaler, if the loss is scaled.
        log: file to append events to, or a log.
        distributed: whether ranks share gradients (default: if torch.distributed is initialised).
        options: passed on to `dyrep.convert_`.

    Attributes:
        gates: the gates; None after the search.
        strengths: one number per gate.
        kept: the branches of every layer that the search has decided for; None before.
        epoch: epochs completed.
        updates: how often the search has changed what a training step does.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> x = torch.randn(8, 4, 6, 6)
        >>> search = RepNAS(model, optimizer, RepNASConfig(total=3), example_input=x)
        >>> for epoch in range(3):
        ...     model(x).square().mean().backward()
        ...     optimizer.step()
        ...     edits = search.epoch_end()
        >>> len(structure(model)["blocks"]["0"]["branches"]) <= 2
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: RepNASConfig,
        *,
        example_input: Any = None,
        ema: nn.Module | Iterable[nn.Module] = (),
        scaler: torch.amp.GradScaler | None = None,
        log: str | os.PathLike[str] | EventLog | None = None,
        distributed: bool | None = None,
        **options: Any,
    ) -> None:
        check_optimizer(optimizer)
        self.config, self.model, self.optimizer = config, model, optimizer
        self.epoch = self.updates = 0
        self._averages = [ema] if isinstance(ema, nn.Module) else list(ema)
        self._scaler, self._distributed = scaler, distributed
        inner = bare(model)
        self.gates: Gates | None = Gates(inner, config.keep)
        if not self.gates.names:
            convert_(inner, "repnas", example_input=example_input, optimizer=optimizer, **options)
            self.gates = Gates(inner, config.keep)
            self._refresh_wrappers()
        first = next(inner.parameters())
        self.strengths = torch.zeros(len(self.gates.names), device=first.device, requires_grad=True)
        self._names = list(self.gates.names)
        self._average_gates = [Gates(inside(average, inner), config.keep) for average in self._averages]
        if any(gates.names != self._names for gates in self._average_gates):
            raise StructureError(
                "a moving average was made before the model was converted, and cannot follow: dyrep.convert_(model, "
                "'repnas', ...) first, then make the average, then RepNAS"
            )
        self._steps = torch.zeros((), dtype=torch.int64, device=first.device)  # replayed graphs count on the device
        self._unit = torch.ones((), device=first.device)
        self._saw_gradient = False
        self.kept: dict[str, list[str]] | None = None
        self._learner: torch.optim.Adam | None = None
        self._handles: list[Any] = [
            inner.register_forward_pre_hook(_Hook(self, "_before_forward")),
            inner.register_forward_hook(_Hook(self, "_after_forward"), always_call=True),
            optimizer.register_step_post_hook(_Hook(self, "_after_step")),
        ]
        self.refresh()
        self._log = log if isinstance(log, EventLog) else EventLog(log)
        self._log.write("started", config=config.to_dict(), gates=len(self._names), kept=self.gates.kept)

    @property
    def events(self) -> list[dict[str, Any]]:
        """What has happened so far, as logged."""
        return self._log.events

    # -- every step ---------------------------------------------------------------------------------------------

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        if self.gates is not None and model.training and torch.is_grad_enabled():
            gradient = self.strengths.grad
            if gradient is not None:  # of batches before in the same step, or of a step that overflowed and was skipped
                gradient.mul_(gradient.isfinite().all()).nan_to_num_(0.0, 0.0, 0.0)
            self.gates.set_drawn(self.gates.draw(self.strengths))

    def _after_forward(self, model: nn.Module, _: Any, __: Any) -> None:
        if self.gates is not None:
            self.gates.set_drawn(None)

    def _after_step(self, *_: Any) -> None:
        """Let the strengths take a step; runs inside a captured graph too, so nothing here waits for the device."""
        self._steps += 1
        gradient = self.strengths.grad
        if gradient is None:
            return
        self._saw_gradient = True
        if self._learner is not None and self.gates is not None:
            if self._scaler is not None:
                gradient.div_(self._scaler.scale(self._unit))
            if ranks.distributed(self._distributed):
                ranks.average_([gradient])
            gradient.nan_to_num_(0.0, 0.0, 0.0)  # of a step that overflowed in float16
            self._learner.step()
            self.refresh()
        self.strengths.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Open the strongest gates for eval mode and folding, in the model and in copies that follow it.

        This happens by itself whenever strengths have learned; call it if you have set them yourself.
        """
        if self.gates is not None:
            strongest = self.gates.ranked(self.strengths)
            for gates in (self.gates, *self._average_gates):
                gates.set_open(strongest)

    # -- every epoch --------------------------------------------------------------------------------------------

    def epoch_end(self, batches: Iterable[Any] | None = None) -> list[Edit]:
        """Call after every epoch; ends the search when it is time.

        Args:
            batches: not needed; here so that a loop can treat every method alike.

        Returns:
            What was changed; empty when nothing was.
        """
        self.epoch += 1
        if self.gates is None:
            return []
        if not self._saw_gradient:
            raise DyRepError(
                "no gradient has reached the gates, so nothing can be searched: call the model itself in training, not "
                "parts of it, without activation checkpointing, and step the optimizer that RepNAS was given"
            )
        random_end, search_end = self.config.ends
        if self.epoch == random_end:
            self._start_learning(int(self._steps) / self.epoch * (search_end - random_end))
        if self.epoch >= search_end:
            return self.finish()
        self._log.write("search", epoch=self.epoch, strengths=self._readable(self.strengths.tolist()))
        return []

    def _start_learning(self, steps: float) -> None:
        rate = min(_REACH / max(steps, 1), _FASTEST) if self.config.strength_lr is None else self.config.strength_lr
        self._learner = torch.optim.Adam(
            [self.strengths],
            lr=rate,
            betas=_BETAS,
            weight_decay=_DECAY,
            capturable=self.strengths.device.type == "cuda",
        )
        self.updates += 1

    def finish(self) -> list[Edit]:
        """End the search now: keep the strongest branches, drop the others. Does nothing if it has ended."""
        if self.gates is None:
            return []
        began = time.perf_counter()
        if ranks.distributed(self._distributed):
            ranks.broadcast_([self.strengths])
        chosen = self.gates.ranked(self.strengths.detach()).bool().tolist()
        keep: dict[str, list[str]] = {}
        for (layer, branch), is_open in zip(self._names, chosen, strict=True):
            keep.setdefault(layer, []).extend([branch] if is_open else [])
        self._settle(keep)
        self.updates += 1
        dropped = {
            layer: tuple(b for where, b in self._names if where == layer and b not in keep[layer]) for layer in keep
        }
        edits = [Edit("cut", layer, branches) for layer, branches in dropped.items() if branches]
        model = bare(self.model)
        self._log.write(
            "update",
            update=self.updates,
            epoch=self.epoch,
            step=int(self._steps),
            edits=[edit.as_dict() for edit in edits],
            kept=keep,
            strengths=self._readable(self.strengths.tolist()),
            structure=structure(model),
            parameters=count_parameters(model),
            seconds=round(time.perf_counter() - began, 3),
        )
        return edits

    def _settle(self, keep: dict[str, list[str]]) -> None:
        """Keep these branches for good, in the model and in copies that follow it, and stop searching."""
        gone = settle_(bare(self.model), keep)
        remove_(self.optimizer, [p for parameters in gone.values() for p in parameters])
        for average in self._averages:
            settle_(inside(average, self.model), keep)
        self.close()
        self.kept, self.gates, self._learner = keep, None, None
        self.strengths = self.strengths.detach()
        self._refresh_wrappers()

    def _refresh_wrappers(self) -> None:
        ddp = find_ddp(self.model)
        if ddp is not None:
            rewrap_ddp_(ddp)
        forget_compiled()

    def _readable(self, strengths: list[float]) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for (layer, branch), strength in zip(self._names, strengths, strict=True):
            found.setdefault(layer, {})[branch] = round(strength, 4)
        return found

    # -- the end, and beginning again ---------------------------------------------------------------------------

    def deploy(self) -> nn.Module:
        """A plain copy of the model with the same function; during the search, that of its strongest branches."""
        return deploy(self.model)

    def close(self) -> None:
        """Stop watching the model and its optimizer."""
        while self._handles:
            self._handles.pop().remove()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, except the model's own state dict: tensors and plain data."""
        model = bare(self.model)
        return {
            "format": FORMAT,
            "config": self.config.to_dict(),
            "structure": structure(model),
            "optimizer": state_by_name(self.optimizer, model),
            "strengths": self.strengths.detach().cpu().clone(),
            "learner": None if self._learner is None else self._learner.state_dict(),
            "kept": self.kept,
            "counters": {"epoch": self.epoch, "step": int(self._steps), "updates": self.updates},
            "next_event": self._log.next_seq,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Call this before ``model.load_state_dict``, which needs the structure.

        Raises:
            DyRepError: the state does not fit; the message says where.
        """
        if not isinstance(state, Mapping) or state.get("format") != FORMAT or "strengths" not in state:
            raise CheckpointError(f"not a RepNAS state of format {FORMAT}; pass what RepNAS.state_dict() returned")
        layers = {layer for layer, _ in self._names}
        if len(state["strengths"]) != len(self.strengths) or set(state["kept"] or layers) != layers:
            raise CheckpointError(
                f"the saved search has {len(state['strengths'])} gates, this one {len(self.strengths)}: it is not the "
                "same network"
            )
        model = bare(self.model)
        searching = state["kept"] is None
        if searching and self.gates is None:
            raise CheckpointError("the saved search was not over yet, and this one is: build the model and RepNAS anew")
        if searching and structure(model) != state["structure"]:
            raise CheckpointError(
                "the saved search was made of other blocks, so these cannot continue it: convert the model as it was "
                "converted then"
            )
        if not searching and self.gates is not None:
            self._settle(state["kept"])
        load_state_by_name_(self.optimizer, model, state["optimizer"])
        with torch.no_grad():
            self.strengths.copy_(state["strengths"])
        self.refresh()
        self._learner = None
        if state["learner"] is not None:
            self._start_learning(1)
            assert self._learner is not None
            self._learner.load_state_dict(state["learner"])
        counters = state["counters"]
        self.epoch, self.updates = counters["epoch"], counters["updates"]
        self._steps.fill_(counters["step"])
        self._log.resume(state["next_event"], epoch=self.epoch, step=counters["step"])


class _Hook:
    """Calls a method of a search; in a copy of the model, which is not being searched, it does nothing."""

    only_for_training = True  # `dyrep.deploy` takes it off

    def __init__(self, search: RepNAS | None, name: str) -> None:
        self._search, self._name = search, name

    def __call__(self, *arguments: Any) -> None:
        if self._search is not None:
            getattr(self._search, self._name)(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(None, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, self._name)
