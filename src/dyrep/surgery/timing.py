"""How long the blocks of a model take in every execution, one by one, beside the convolutions they stand for."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from dyrep.block import RepConv
from dyrep.checking import require_whole
from dyrep.copying import copied
from dyrep.errors import DyRepError, UnreachedLayerError
from dyrep.execution import EXECUTIONS, Clock, Execution, choose, dispatch
from dyrep.execution.settings import SETTLING_STEPS
from dyrep.surgery.preserve import Forward, preserved, run_batch
from dyrep.surgery.targets import is_inside, require_foldable
from dyrep.surgery.wrappers import bare
from dyrep.wording import beginning

_WARMUP = 3  # passes before the first that counts: libraries choose algorithms, kernels are compiled


@dataclass(frozen=True)
class LayerTimes:
    """How long a training pass through one block takes: forward, and backward to its input and parameters.

    Attributes:
        layer: name of the block.
        input_shape: shape of its input.
        branches: its branches.
        plain_ms: milliseconds that the plain convolution it folds into takes.
        ms: milliseconds by execution.
        runs_as: what it really runs as, by execution; ``"frozen"``: as one convolution that depends on no batch.
        auto: what it runs as with ``"auto"``.
        reason: why that is.
    """

    layer: str
    input_shape: tuple[int, ...]
    branches: tuple[str, ...]
    plain_ms: float
    ms: dict[str, float]
    runs_as: dict[str, str]
    auto: str
    reason: str

    @property
    def fastest_exact(self) -> str | None:
        """What the block ran as when it was fastest, folded left out; None if nothing else was timed."""
        exact = {self.runs_as[name]: ms for name, ms in self.ms.items() if self.runs_as[name] != "folded"}
        return min(exact, key=lambda way: exact[way], default=None)


@torch.enable_grad()
def measure_executions(
    model: nn.Module,
    batch: Any,
    *,
    forward: Forward | None = None,
    executions: Sequence[str] = ("eager", "fused", "folded"),
    repeats: int = 10,
) -> list[LayerTimes]:
    """Time every block of a model by itself in every execution, and say which one ``"auto"`` picks and why.

    The model is run once, in training mode and under whatever autocast is in force, to see what its blocks are given.
    What is timed are copies of them, so nothing about the model changes. A block inside a branch is timed with the one
    around it; one that is called several times, on the input of its first call. Small layers on a GPU take as long as
    Python takes to launch them, which a step captured in a CUDA graph is spared.

    Args:
        model: a model with blocks.
        batch: a batch to train it on.
        forward: ``forward(model, batch)`` to run the model, as for `dyrep.expand_`.
        executions: those to time, of `dyrep.EXECUTIONS`. How folded blocks measure σ is set by `dyrep.set_execution_`.
        repeats: how many passes to take the median of.

    Returns:
        One `LayerTimes` per block, in module order.

    Raises:
        DyRepError: the model has no blocks, or does not reach one of them, or a layer does not fit into memory.

    Example:
        >>> from dyrep import expand_
        >>> model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        >>> _ = expand_(model, "0", ["1x1", "1xK"])
        >>> (times,) = measure_executions(model, torch.randn(2, 4, 8, 8), repeats=1)
        >>> times.layer, times.branches, sorted(times.ms), times.auto, times.reason
        ('0', ('1x1', '1xK'), ['eager', 'folded', 'fused'], 'eager', 'not on a GPU: blocks run eagerly')
    """
    for name in executions:
        Execution(name)  # raises unless there is such a one
    require_whole("repeats", repeats, 1)
    model = bare(model)
    require_foldable(dict(model.named_modules()))  # else there is no plain convolution to compare with
    inputs = _inputs(model, batch, forward)
    return [_measure(model, name, inputs.pop(name), executions, repeats) for name in list(inputs)]


def median_ms(run: Callable[[], Any], device: torch.device, repeats: int, calls: int = 1) -> float:
    """Milliseconds of a call, as the median over rounds of several for functions that do not do the same every time.

    Example:
        >>> median_ms(lambda: time.sleep(0.002), torch.device("cpu"), 3) >= 2
        True
    """
    on_gpu = device.type == "cuda"

    def mark() -> Any:
        if not on_gpu:
            return time.perf_counter()
        return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))

    marks = [mark()]
    for _ in range(repeats):
        for _ in range(calls):
            run()
        marks.append(mark())
    if on_gpu:
        marks[-1].synchronize()
    spans = [a.elapsed_time(b) if on_gpu else (b - a) * 1000 for a, b in itertools.pairwise(marks)]
    return statistics.median(spans) / calls


def _inputs(model: nn.Module, batch: Any, forward: Forward | None) -> dict[str, Tensor]:
    """What the model gives to each of its blocks that are not part of another one, and wants gradients for."""
    grown = {name: m for name, m in model.named_modules() if isinstance(m, RepConv) and (m.branches or m.origin_norm)}
    if not grown:
        raise DyRepError("the model has no blocks to time: expand some of its convolutions first, see dyrep.expand_")
    outer = {name: block for name, block in grown.items() if not any(is_inside(name, other) for other in grown)}
    seen: dict[str, Tensor] = {}

    def see(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        seen.setdefault(name, x.detach().requires_grad_(x.requires_grad))

    handles = [
        block.register_forward_pre_hook(functools.partial(see, name), with_kwargs=True) for name, block in outer.items()
    ]
    # of the graph no more is needed than what wants gradients: it need not keep activations
    forgetting = torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda nothing: nothing)
    try:
        with preserved(model, training=True), forgetting:
            run_batch(model, batch, forward)
    finally:
        for handle in handles:
            handle.remove()
    lost = [name for name in outer if name not in seen]
    if lost:
        raise UnreachedLayerError(
            f"the model's forward never calls {', '.join(map(repr, lost))} on this batch, so it cannot be timed: cut "
            "its branches with dyrep.cut_, or say how to run the model with forward=lambda model, batch: ..."
        )
    return {name: seen[name] for name in outer}


def _measure(model: nn.Module, name: str, x: Tensor, executions: Sequence[str], repeats: int) -> LayerTimes:
    original = cast(RepConv, model.get_submodule(name))
    block = _copy(original)
    if not model.training:  # else some of its norms may be frozen, and stay so
        block.train()
    read = block.geometry.branch_input(x.detach())
    runs_as = {execution: _way(block, read, execution) for execution in EXECUTIONS}
    running, times = "plain", dict[str, float]()
    try:
        plain_ms = _time(block.fuse(), x, repeats)
        for running in executions:
            if runs_as[running] not in times:
                calls = _run_as_(block, original.execution, running, runs_as[running])
                times[runs_as[running]] = _time(block, x, repeats, calls)
    except RuntimeError as error:  # memory that does not suffice is one, too
        remedy = "use a smaller batch" if isinstance(error, torch.OutOfMemoryError) else "time other executions"
        why = beginning(error)
        raise DyRepError(f"layer {name!r} cannot be run {running} on this batch ({why}): {remedy}") from error
    ms = {execution: times[runs_as[execution]] for execution in executions}
    reason = _reason(block, read, runs_as["auto"], times)
    return LayerTimes(name, tuple(x.shape), tuple(block.branches), plain_ms, ms, runs_as, runs_as["auto"], reason)


def _copy(block: RepConv) -> RepConv:
    """A block with the same values, without the hooks of others."""
    memo: dict[int, Any] = {}
    for module in block.modules():
        memo.update((id(hooks), OrderedDict()) for key, hooks in vars(module).items() if "_hooks" in key)
        group = getattr(module, "process_group", None)
        memo[id(group)] = group  # which cannot be copied
    return copied(block, memo)


def _way(block: RepConv, x: Tensor, execution: str) -> str:
    """What a block runs as when it is asked to run in some way."""
    if block.is_linear:
        return "frozen"
    settings = replace(block.execution, name=execution)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # here it is an answer, not something unexpected
            return choose(block, settings, x)
    finally:
        dispatch._tell.cache_clear()  # what was kept quiet now is still told in training


def _reason(block: RepConv, x: Tensor, auto: str, times: dict[str, float]) -> str:
    if auto == "frozen":
        return "it does not look at the batch: one convolution"
    if not x.is_cuda:
        return "not on a GPU: blocks run eagerly"
    if auto == "eager":
        return dispatch.why_not(block, "fused", x) or "blocks are kept eager for now"
    if not {"eager", "fused"} <= times.keys():
        return "exact"
    gain = times["eager"] / times["fused"]
    faster = f"and {gain:.2g} x faster than" if gain > 1 else f"but {1 / gain:.2g} x slower than"
    return f"exact, {'and as fast as' if abs(gain - 1) < 0.05 else faster} eager here"


def _run_as_(block: RepConv, settings: Execution, execution: str, way: str) -> int:
    """Let a copy of a block run in this way, as in the middle of training; says how many passes a round has."""
    every = settings.clock.every if way == "folded" else 1
    for module in block.modules():
        if isinstance(module, RepConv):
            clock = Clock(every)
            clock.step = SETTLING_STEPS
            module.execution = replace(settings, name=execution if way == "frozen" else way, clock=clock)
    return every


def _time(module: nn.Module, x: Tensor, repeats: int, calls: int = 1) -> float:
    """Milliseconds of a pass forward and backward."""
    wanted = [p for p in (x, *module.parameters()) if p.requires_grad]
    gradient = torch.ones_like(module(x))

    def run() -> None:
        torch.clear_autocast_cache()  # a training step casts its weights, so every pass does
        y = module(x)
        if y.requires_grad:
            with torch.autocast(x.device.type, enabled=False):
                torch.autograd.grad(y, wanted, gradient, allow_unused=True)

    for _ in range(_WARMUP * calls):
        run()
    return median_ms(run, x.device, repeats, calls)
