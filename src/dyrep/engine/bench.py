"""What branches cost a network in training, in every execution: whole steps as `dyrep train` takes them, and layers."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from dyrep import models
from dyrep.branches import branch_list, branch_option, is_branch
from dyrep.engine.data.loader import Batch, Loader
from dyrep.engine.precision import DTYPES, Precision, computing_in, make_precision
from dyrep.engine.recipe import Recipe
from dyrep.engine.rundir import hardware, versions
from dyrep.engine.setup import make_optimizer
from dyrep.engine.step import WARMUP_STEPS, TrainStep
from dyrep.engine.world import pick_device
from dyrep.errors import ConfigError, DyRepError
from dyrep.execution import Clock
from dyrep.execution.settings import MEASURE_EVERY, MEASURED_IMAGES, SETTLING_STEPS
from dyrep.geometry import ConvGeometry
from dyrep.surgery.edits import expand_
from dyrep.surgery.executing import set_execution_
from dyrep.surgery.targets import targets
from dyrep.surgery.timing import LayerTimes, measure_executions, median_ms

ARMS = ("plain", "eager", "fused", "folded")
CLASSES = 1000
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class BenchSettings:
    """What to time.

    Attributes:
        model: a network of dyrep.models, "timm:NAME", "torchvision:NAME", or "package.module:function" of your own.
        size: pixels a side.
        batch: images in a batch.
        device: "cpu", "cuda", "cuda:1", ... (default: a GPU if there is one).
        precision: of convolutions and matrix products.
        channels_last: memory layout of images and weights (default: on a GPU).
        branches: those to grow wherever they can (default: all of the paper's that are no duplicates).
        steps: how many steps, and passes through a layer, to take the median of.
        images: on how many images of the batch folded blocks measure σ at least.
    """

    model: str
    size: int = 224
    batch: int = 64
    device: str | None = None
    precision: Precision = "auto"
    channels_last: bool | None = None
    branches: Sequence[str] = ()
    steps: int = 10
    images: int = MEASURED_IMAGES


@dataclass(frozen=True)
class StepTime:
    """What a whole training step costs.

    Attributes:
        arm: ``"plain"``, or the execution of the blocks.
        ms: milliseconds.
        ratio: the same against the plain network.
        peak_gib: memory at its peak, on a GPU.
        memory_ratio: the same against the plain network.
        graph: whether that is the step captured in a CUDA graph, because it is faster than one launched from Python.
        same_as: the arm that this one is here, so that it was not timed again.
        error: why there are no figures.
    """

    arm: str
    ms: float | None = None
    ratio: float | None = None
    peak_gib: float | None = None
    memory_ratio: float | None = None
    graph: bool = False
    same_as: str | None = None
    error: str | None = None


class Bench:
    """Times a network, and the same one with branches on every convolution that can grow.

    Args:
        settings: what to time.

    Attributes:
        settings: what to time, with nothing left to be decided.
        on_gpu: whether that is on a GPU.
        branches: the branches of every convolution that gets some.

    Raises:
        ConfigError: a value is not valid, the model cannot be trained like this, or nothing in it can grow.

    Example:
        >>> bench = Bench(BenchSettings("small_vgg", size=8, batch=2, device="cpu", steps=1))
        >>> [row.arm for row in bench.steps()], len(bench.layers())
        (['plain', 'eager', 'fused', 'folded'], 6)
    """

    def __init__(self, settings: BenchSettings) -> None:
        for name in ("size", "batch", "steps", "images"):
            if getattr(settings, name) < 1:
                raise ConfigError(f"{name}={getattr(settings, name)!r}: must be at least 1")
        unknown = [branch for branch in settings.branches if not is_branch(branch)]
        if unknown:
            raise ConfigError(f"unknown branch {unknown[0]!r}; valid are {branch_list()}")
        self._device = pick_device(settings.device)
        self.on_gpu = self._device.type == "cuda"
        self._recipe = Recipe(method="origin", model=settings.model, lr=1e-3, precision=settings.precision)
        self._precision = make_precision(settings.precision, self._device)
        last = self.on_gpu if settings.channels_last is None else settings.channels_last
        self._layout = torch.channels_last if last else torch.contiguous_format
        self.settings = replace(
            settings, device=str(self._device), channels_last=last, precision=_NAMES[self._precision]
        )
        if self.on_gpu:
            torch.cuda.set_device(self._device)
            torch.backends.cudnn.benchmark = True  # as in training
        self._plain = models.build(settings.model, num_classes=CLASSES, in_channels=3)
        self._classes = self._try()
        self.branches = self._fitting()

    def steps(self) -> Iterator[StepTime]:
        """Time whole training steps, arm by arm. One that fails says why, and the next one is tried."""
        rows: dict[str, StepTime] = {}
        for arm in ARMS:
            if arm == "fused" and not self.on_gpu:
                rows[arm] = replace(rows["eager"], arm=arm, same_as="eager")
            else:
                rows[arm] = _against(self._attempt(arm), rows.get("plain"))
            yield rows[arm]

    def layers(self, timed: bool = True) -> list[LayerTimes]:
        """Time every block by itself; or, which is quick, only say what it runs as and why."""
        model, arms, repeats = self._model("auto"), ARMS[1:] if timed else (), self.settings.steps if timed else 1
        set_execution_(model, "auto", images=self.settings.images)
        with computing_in(self._precision, self._device):
            return measure_executions(model, self._batch(), executions=arms, repeats=repeats)

    def report(self, rows: Sequence[StepTime], layers: Sequence[LayerTimes]) -> dict[str, Any]:
        """What was found as JSON-able data, with what it was found on."""
        return {
            "versions": versions(),
            "hardware": hardware(),
            "settings": asdict(self.settings) | {"classes": self._classes},
            "branches": self.branches,
            "steps": [asdict(row) for row in rows],
            "layers": [asdict(layer) | {"fastest_exact": layer.fastest_exact} for layer in layers],
        }

    def _try(self) -> int:
        """Run the plain network on two images, so that what cannot be run is said once; gives its classes."""
        name, size, count = self.settings.model, self.settings.size, self.settings.batch
        try:
            logits: Any = self._plain.train()(torch.randn(min(count, 2), 3, size, size))
        except Exception as error:
            about = f"{count} image{'s' * (count > 1)} of {size}x{size} at a time ({_first_line(error)})"
            raise ConfigError(f"model {name!r} cannot be trained on {about}: give another --size or --batch") from error
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            raise ConfigError(f"model {name!r} does not give a row of logits per image, as a classifier does")
        return logits.shape[1]

    def _fitting(self) -> dict[str, list[str]]:
        found, only = targets(self._plain), self.settings.branches
        fitting = {target.name: list(target.branches) for target in found if target.eligible}
        for name in fitting if only else ():
            geometry = ConvGeometry.of(self._plain.get_submodule(name))
            fitting[name] = [branch for branch in dict.fromkeys(only) if branch_option(branch, geometry).possible]
        if not any(fitting.values()):
            reasons = sorted({target.reason for target in found if not target.eligible})
            why = f"none can have {' or '.join(only)}" if fitting else "; ".join(reasons) or "it has none at all"
            raise ConfigError(f"model {self.settings.model!r} has no convolution that can grow: {why}")
        return {name: branches for name, branches in fitting.items() if branches}

    def _model(self, arm: str) -> nn.Module:
        model = copy.deepcopy(self._plain)
        if arm != "plain":
            expand_(model, list(self.branches), self.branches, gamma=1.0)
        return model.train().to(self._device).to(memory_format=self._layout)

    def _batch(self) -> Batch:
        settings, random = self.settings, torch.Generator().manual_seed(0)
        images = torch.randn(settings.batch, 3, settings.size, settings.size, generator=random)
        labels = torch.randint(self._classes, (settings.batch,), generator=random)
        return images.to(self._device).contiguous(memory_format=self._layout), labels.to(self._device)

    def _attempt(self, arm: str) -> StepTime:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "a block set to execution")  # the layers tell which, and why
                return self._time(arm)
        except torch.OutOfMemoryError:
            return StepTime(arm, error="it does not fit into memory: use a smaller --batch")
        except Exception as error:
            return StepTime(arm, error=_first_line(error))
        finally:
            _free(self._device)

    def _time(self, arm: str) -> StepTime:
        before = torch.cuda.memory_allocated(self._device) if self.on_gpu else 0
        model, batch = self._model(arm), self._batch()
        clock = Clock(MEASURE_EVERY, managed=True)
        clock.step = SETTLING_STEPS  # as in the middle of training
        if arm != "plain":
            set_execution_(model, arm, images=self.settings.images, clock=clock)
        optimizer = make_optimizer(model, self._recipe, self._device)
        rows = [StepTime(arm, self._median(model, optimizer, clock, batch, graph=False), peak_gib=self._peak(before))]
        if self.on_gpu:
            with contextlib.suppress(DyRepError, torch.OutOfMemoryError):  # what ran without a graph is there already
                ms = self._median(model, optimizer, clock, batch, graph=True)
                rows.append(StepTime(arm, ms, peak_gib=self._peak(before), graph=True))
        return min(rows, key=lambda row: cast(float, row.ms))

    def _peak(self, before: int) -> float | None:
        return (torch.cuda.max_memory_allocated(self._device) - before) / 2**30 if self.on_gpu else None

    def _median(self, model: nn.Module, optimizer: torch.optim.SGD, clock: Clock, batch: Batch, graph: bool) -> float:
        """Milliseconds of a step of `dyrep train`, once everything that is done only once has been done."""
        step = TrainStep(
            model,
            optimizer,
            cast(Loader, SimpleNamespace(prepare=lambda raw: raw)),  # the batch is on the device already
            precision=self._precision,
            average=None,
            scaler=torch.amp.GradScaler(self._device.type, enabled=self._precision == torch.float16),
            graph=graph,
            message=_not_captured,
            clock=clock,
        )
        for _ in range(WARMUP_STEPS):
            step(batch)
        optimizer.zero_grad(set_to_none=True)
        _free(self._device)  # algorithms have been tried, which takes memory that training does not
        for _ in range(clock.every):  # with a graph, each kind of step is captured
            step(batch)
        ms = median_ms(lambda: step(batch), self._device, -(-self.settings.steps // clock.every), clock.every)
        if step.read().diverged:
            raise DyRepError("its loss is not finite")
        return ms


def _not_captured(reason: str) -> None:
    raise DyRepError(reason)


def _against(row: StepTime, plain: StepTime | None) -> StepTime:
    """A row with its ratios to that of the plain network, which is the first one."""
    base = row if plain is None else plain
    pairs = (row.ms, base.ms), (row.peak_gib, base.peak_gib)
    time, memory = (ours / theirs if ours and theirs else None for ours, theirs in pairs)
    return replace(row, ratio=time, memory_ratio=memory)


def _free(device: torch.device) -> None:
    """Leave nothing of what has been run to what is run next, and count memory from here on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # there is one per stream
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
