"""How long the blocks of a model take in every execution, one by one, beside the convolutions they stand for."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dyrep.block import RepConv
from dyrep.errors import ConfigError, DyRepError, UnreachedLayerError
from dyrep.execution import EXECUTIONS, Clock, Execution, choose, dispatch
from dyrep.execution.settings import SETTLING_STEPS
from dyrep.surgery.preserve import Forward, preserved, run_batch
from dyrep.surgery.targets import is_inside
from dyrep.surgery.wrappers import bare

WARMUP_PASSES = 3
"""Passes before the first that counts: libraries choose algorithms, kernels are compiled."""

_SAME = 0.05  # times that differ by less than this share are taken for the same


@dataclass(frozen=True)
class LayerTimes:
    """How long a training pass through one block takes: forward, and backward to its input and parameters.

    Attributes:
        layer: name of the block.
        input_shape: shape of its input.
        branches: its branches.
        plain_ms: milliseconds that the plain convolution it folds into takes.
        ms: milliseconds by execution.
        runs_as: what it really runs as if eager, fused or folded is asked for. ``"frozen"`` is a block that does not
            look at the batch, and is one convolution anyway.
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
    around it; one that is called several times is timed on the input of its first call. Passes are launched one by one
    from Python, which small layers on a GPU feel, unless a whole step is captured in a CUDA graph.

    Args:
        model: a model with blocks.
        batch: a batch to train it on.
        forward: ``forward(model, batch)`` to run the model, as for `dyrep.expand_`.
        executions: those to time, of `dyrep.EXECUTIONS`. Folded blocks measure σ on as many images, and in as many
            steps, as they are set to, see `dyrep.set_execution_`.
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
        >>> times.layer, times.branches, sorted(times.ms)
        ('0', ('1x1', '1xK'), ['eager', 'folded', 'fused'])
        >>> times.auto, times.reason
        ('eager', 'not on a GPU: blocks run eagerly')
    """
    for name in executions:
        Execution(name)  # raises unless there is such a one
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ConfigError(f"repeats={repeats!r}: must be a whole number of at least 1")
    model = bare(model)
    seen = _inputs(model, batch, forward)
    return [_measure(name, seen.pop(name), model.training, executions, repeats) for name in list(seen)]


def median_ms(run: Callable[[], Any], device: torch.device, repeats: int, calls: int = 1) -> float:
    """Milliseconds that a function takes, as the median over some rounds of calls.

    Args:
        run: the function.
        device: where it works; a GPU is asked for its own times.
        repeats: rounds.
        calls: how often it is called in a round, for functions that do not do the same every time.

    Example:
        >>> median_ms(lambda: time.sleep(0.002), torch.device("cpu"), 3) >= 2
        True
    """
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else nullcontext():
        marks = [_mark(on_gpu)]
        for _ in range(repeats):
            for _ in range(calls):
                run()
            marks.append(_mark(on_gpu))
        if on_gpu:
            marks[-1].synchronize()
    spans = itertools.pairwise(marks)
    times = [start.elapsed_time(end) if on_gpu else (end - start) * 1000 for start, end in spans]
    return statistics.median(times) / calls


def _mark(on_gpu: bool) -> Any:
    """A point in time: of this process, or between the work that a GPU has been given before and after."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Seen(NamedTuple):
    """A block, and what the model gives it."""

    block: RepConv
    input: Tensor
    needs_gradient: bool


def _inputs(model: nn.Module, batch: Any, forward: Forward | None) -> dict[str, _Seen]:
    """What the model gives to each of its blocks that are not part of another one, by name."""
    blocks = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, RepConv) and (module.branches or module.origin_norm is not None)
    }
    if not blocks:
        raise DyRepError("the model has no blocks to time: expand some of its convolutions first, see dyrep.expand_")
    outer = {name: block for name, block in blocks.items() if not any(is_inside(name, other) for other in blocks)}
    seen: dict[str, _Seen] = {}

    def watch(name: str, block: RepConv) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else kwargs["input"]
            seen.setdefault(name, _Seen(block, x.detach(), x.requires_grad))

        return block.register_forward_pre_hook(hook, with_kwargs=True)

    handles = [watch(name, block) for name, block in outer.items()]
    # whether an input needs a gradient is all that is wanted of the graph: it need not keep a single activation
    nothing = torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda nothing: nothing)
    try:
        with preserved(model, training=True), nothing:
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


def _measure(name: str, seen: _Seen, was_training: bool, executions: Sequence[str], repeats: int) -> LayerTimes:
    block = _copy(seen.block)
    if not was_training:  # else some of its norms may be frozen, and stay so
        block.train()
    x = block.geometry.branch_input(seen.input)
    ways = {each: _way(block, x, each) for each in dict.fromkeys((*EXECUTIONS, *executions))}
    auto, runs_as = ways["auto"], {each: way for each, way in ways.items() if each != "auto" or each in executions}
    times: dict[str, float] = {}
    running = "plain"
    try:
        plain_ms = _time(block.fuse(), seen, repeats)
        for running in executions:
            if runs_as[running] not in times:
                calls = _run_as_(block, seen.block.execution, running, runs_as[running])
                times[runs_as[running]] = _time(block, seen, repeats, calls)
    except torch.OutOfMemoryError as error:
        text = f"layer {name!r} does not fit into memory when it is run {running}: use a smaller batch"
        raise DyRepError(text) from error
    shape, branches = tuple(seen.input.shape), tuple(block.branches)
    found, reason = {each: times[runs_as[each]] for each in executions}, _reason(block, x, auto, times)
    return LayerTimes(name, shape, branches, plain_ms, found, runs_as, auto, reason)


def _copy(block: RepConv) -> RepConv:
    """A block of its own with the same values: no hooks of others, but the same process group."""
    memo: dict[int, Any] = {}
    for module in block.modules():
        memo.update((id(hooks), OrderedDict()) for key, hooks in vars(module).items() if "_hooks" in key)
        group = getattr(module, "process_group", None)
        memo[id(group)] = group
    return copy.deepcopy(block, memo)


def _way(block: RepConv, x: Tensor, execution: str) -> str:
    """What a block runs as when it is asked to run in some way."""
    if block.is_linear:
        return "frozen"
    settings, replaces = replace(block.execution, name=execution), block.passed_norm is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # here it is an answer, not something unexpected
            return choose(settings, block.scalings(), x, ndim=block.geometry.ndim, replaces_norm=replaces)
    finally:
        dispatch._tell.cache_clear()  # what was kept quiet now is still told in training


def _reason(block: RepConv, x: Tensor, auto: str, times: dict[str, float]) -> str:
    if auto == "frozen":
        return "it does not look at the batch: one convolution"
    if not x.is_cuda:
        return "not on a GPU: blocks run eagerly"
    if auto == "eager":
        return dispatch._why_not(block.scalings(), x, block.geometry.ndim, "fused") or "blocks are kept eager for now"
    if not {"eager", "fused"} <= times.keys():
        return "exact"
    gain = times["eager"] / times["fused"]
    if abs(gain - 1) < _SAME:
        return "exact, and as fast as eager here"
    return f"exact, and {gain:.1f} x faster than eager here" if gain > 1 else f"exact, but {1 / gain:.1f} x slower here"


def _run_as_(block: RepConv, settings: Execution, execution: str, way: str) -> int:
    """Let a copy of a block run in this way, as in the middle of training; says how many passes a round has."""
    clock = Clock(settings.clock.every if way == "folded" else 1)
    clock.step = SETTLING_STEPS
    settings = replace(settings, name=execution if way == "frozen" else way, clock=clock)
    for module in block.modules():
        if isinstance(module, RepConv):
            module.execution = replace(settings, leads=module is block)
    return clock.every


def _time(module: nn.Module, seen: _Seen, repeats: int, calls: int = 1) -> float:
    """Milliseconds of a pass forward and backward."""
    x = seen.input.detach().requires_grad_(seen.needs_gradient)
    wanted = [p for p in (x, *module.parameters()) if p.requires_grad]
    gradient = torch.ones_like(module(x))

    def run() -> None:
        torch.clear_autocast_cache()  # a training step casts its weights, so every pass does
        y = module(x)
        if y.requires_grad:
            with torch.autocast(x.device.type, enabled=False):
                torch.autograd.grad(y, wanted, gradient, allow_unused=True)

    for _ in range(WARMUP_PASSES * calls):
        run()
    return median_ms(run, x.device, repeats, calls)
