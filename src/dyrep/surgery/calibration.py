"""Measure the statistics of norms that are about to join a model, without the model noticing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from dyrep.errors import CalibrationError, UnreachedLayerError
from dyrep.geometry import ConvGeometry
from dyrep.norm import BranchNorm
from dyrep.surgery import ranks
from dyrep.surgery.preserve import Forward, device_of, iterate, preserved, run_batch

CALIBRATION_BATCHES = 20  # the paper's number


@dataclass
class Probe:
    """What is measured at one convolution.

    Attributes:
        name: the convolution's name.
        conv: the convolution.
        branches: branches to be, which are fed the convolution's input.
        output: a norm that is fed its output; its deviation will multiply the branches' γ.
        rest: a norm that is fed what is left of the output once the branches are taken out of it.
    """

    name: str
    conv: nn.Module
    branches: Sequence[nn.Module]
    output: BranchNorm | None = None
    rest: BranchNorm | None = None
    calls: int = field(default=0, init=False)

    @property
    def norms(self) -> list[BranchNorm]:
        """Every norm that is being calibrated here."""
        modules = [*self.branches, self.output, self.rest]
        return [m for module in modules if module is not None for m in module.modules() if isinstance(m, BranchNorm)]

    def see(self, y: Tensor, added: Sequence[Tensor]) -> None:
        """Measure one call: the convolution's output and what each branch computes."""
        self.calls += 1
        scale: Tensor | int = 1
        if self.output is not None:
            self.output(y)
            scale = self.output.deviation.reshape(1, -1, *(1 for _ in y.shape[2:]))
        if self.rest is not None:
            self.rest(y - sum(added) * scale)


class _SeenEverything(BaseException):
    """Leaves a forward pass after the last convolution of interest."""


@torch.no_grad()
def calibrate_(
    model: nn.Module,
    probes: Sequence[Probe],
    batches: Iterable[Any],
    *,
    max_batches: int = CALIBRATION_BATCHES,
    forward: Forward | None = None,
    distributed: bool | None = None,
) -> int:
    """Set the running statistics of the probes' norms to their cumulative mean over some batches.

    The model runs in training mode without gradient, up to the last convolution being calibrated. Its outputs are
    those it had before; buffers, modes and random numbers are put back.

    Returns:
        How many batches were used.

    Raises:
        CalibrationError: there were no batches, a convolution was never reached, or its input is not finite.
    """
    norms = [norm for probe in probes for norm in probe.norms]
    modes = [norm.training for norm in norms]
    handles = []
    per_batch: int | None = None  # calls of interest in one forward pass, known after the first
    calls = used = 0

    def watch(probe: Probe, geometry: ConvGeometry) -> None:
        added: list[Tensor] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = geometry.branch_input(args[0] if args else kwargs["input"])
            added[:] = [branch(x) for branch in probe.branches]

        def after(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
            nonlocal calls
            probe.see(output if output.dim() == geometry.ndim + 2 else output.unsqueeze(0), added)
            calls += 1
            if calls == per_batch:
                raise _SeenEverything

        handles.append(probe.conv.register_forward_pre_hook(before, with_kwargs=True))
        # before hooks of the user, which may make something else of the output
        handles.append(probe.conv.register_forward_hook(after, prepend=True))

    with preserved(model, batches, training=True):
        for norm in norms:
            norm.train()
            norm.start_calibration()
        try:
            for probe in probes:
                watch(probe, ConvGeometry.of(probe.conv))
            for batch in islice(iterate(batches), max_batches):
                calls = 0
                with contextlib.suppress(_SeenEverything):
                    run_batch(model, batch, forward)
                per_batch = calls if used == 0 else per_batch
                used += 1
        finally:
            for handle in handles:
                handle.remove()
            tracked = [norm.finish_calibration() for norm in norms]
            for norm, mode in zip(norms, modes, strict=True):
                norm.train(mode)
    _check(model, probes, used, min(tracked, default=1), ranks.distributed(distributed))
    for module in (module for probe in probes for branch in probe.branches for module in branch.modules()):
        if isinstance(module, BranchNorm):  # of branches alone: what measures the output has to be true to it
            module.forget_dead_channels_()
    return used


def _check(model: nn.Module, probes: Sequence[Probe], used: int, tracked: int, several: bool) -> None:
    reached = min((probe.calls for probe in probes), default=1)
    if several:
        used, reached, tracked = (ranks.smallest(count, device_of(model)) for count in (used, reached, tracked))
    if used == 0:
        raise CalibrationError(
            "calibration got no batches (an empty or used-up iterable): pass a loader or a list of batches, "
            "or calibration=None to go without"
        )
    if reached == 0:
        lost = [probe.name for probe in probes if probe.calls == 0]
        raise UnreachedLayerError(
            f"calibration never reached {', '.join(map(repr, lost)) or 'a layer on another rank'}: the model's forward "
            "does not call it (it may read its weight directly), so its branches would never run; leave it out"
        )
    if tracked == 0:
        layers = ", ".join(repr(probe.name) for probe in probes)
        raise CalibrationError(
            f"the calibration batches hold too few values to measure {layers}: a channel needs at least two "
            "(batch size times positions)"
        )
    for probe in probes:
        for norm in probe.norms:
            statistics = [norm.running_var] + ([] if norm.running_mean is None else [norm.running_mean])
            if several:
                ranks.average_(statistics)
            if not all(bool(torch.isfinite(s).all()) for s in statistics):
                raise CalibrationError(
                    f"the statistics at layer {probe.name!r} are not finite: its input holds NaN or inf "
                    "(a diverged model, or batches that are not normalised)"
                )
