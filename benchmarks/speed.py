"""What branches cost in time and memory of a training step, in every way there is to run them.

``python benchmarks/speed.py --out results/speed.json`` on a machine with a GPU measures five arms: the plain network,
the block as published, and our own block run eagerly, fused and folded. In all but the first, every convolution with a
kernel larger than 1x1 has all branches that fit; in the case ``resnet18-evolved`` only as many as make the training
cost that the paper gives for DyRep on a ResNet-18. An arm is run in one or more modes: eagerly, with the whole step
captured in a CUDA graph, compiled, and compiled and captured.

The images are random; what they show does not matter for speed. Times are medians over blocks of steps. The file is
written after every measurement; ``--add`` goes on with one that is there already.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import profiling
import published
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dyrep
from dyrep import models
from dyrep.engine.precision import computing_in
from dyrep.engine.rundir import hardware, versions
from dyrep.engine.world import pick_device
from dyrep.execution.settings import MEASURE_EVERY, SETTLING_STEPS, Clock
from dyrep.files import replacing
from dyrep.surgery.costs import added_macs

ARMS = ("plain", "published", "eager", "fused", "folded")
MODES = ("eager", "graph", "compiled", "compiled+graph")
FAST = MODES[1:]  # plain training is as fast as the best of these, and it is what all others are compared with
PREPARATION_STEPS = 3  # algorithms are chosen, code is compiled, the optimizer's state is created
OPTIMIZER = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}  # a small rate: random labels must not diverge


@dataclass(frozen=True)
class Case:
    """A network and what it is trained on.

    Attributes:
        model: name of the network, see `dyrep.models.build`.
        batch: images in a batch.
        size: pixels a side.
        classes: classes to tell apart.
        macs: training cost to come near to by expanding only some convolutions (None: all are).
    """

    model: str
    batch: int
    size: int
    classes: int
    macs: float | None = None

    def build(self) -> nn.Module:
        """The plain network, always with the same weights."""
        torch.manual_seed(0)
        return models.build(self.model, num_classes=self.classes, in_channels=3)


CASES = {
    "vgg16": Case("vgg16", 128, 32, 10),
    "resnet18": Case("resnet18", 256, 224, 1000),
    "resnet18-evolved": Case("resnet18", 256, 224, 1000, macs=2.42e9),
    "resnet50": Case("resnet50", 256, 224, 1000),
}


def default_modes(case: str, arm: str, device: torch.device) -> tuple[str, ...]:
    """The modes that tell something about an arm."""
    if device.type == "cpu":
        return ("eager",)
    if arm == "plain":
        return FAST
    if arm in ("fused", "folded"):
        return ("graph", "compiled+graph")
    # eager blocks as fast as they get; the published one as it is used, except where launching takes most of the time
    return ("graph",) if arm == "eager" or case == "vgg16" else ("eager",)


def expanded_layers(case: Case) -> list[str]:
    """The convolutions that get branches.

    Where only some do, they are those whose cost comes nearest to the one wanted; of several choices of equal cost, the
    one whose layers lie farthest apart.
    """
    model = case.build()
    targets = [target for target in dyrep.targets(model) if target.eligible]
    names = [target.name for target in targets]
    if case.macs is None:
        return names
    found = dyrep.costs(model, torch.zeros(1, 3, case.size, case.size))
    added = [added_macs(model.get_submodule(t.name), t.branches, found.positions[t.name]) for t in targets]
    missing = round(case.macs) - found.macs

    def merit(chosen: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        apart = min((after - before for before, after in itertools.pairwise(chosen)), default=len(names))
        return abs(sum(added[i] for i in chosen) - missing), -apart, chosen

    counts = range(len(names) + 1)
    choices = itertools.chain.from_iterable(itertools.combinations(range(len(names)), count) for count in counts)
    return [names[i] for i in min(choices, key=merit)]


def make_model(
    case: Case, arm: str, layers: Sequence[str], device: torch.device, folded_options: dict[str, Any]
) -> tuple[nn.Module, Clock]:
    """The network of an arm on the device, ready to be trained, and what says when folded blocks measure."""
    model = case.build()
    if arm == "published":
        published.publish_(model, layers)
    elif arm != "plain":
        dyrep.expand_(model, layers, gamma=1.0)
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    options = folded_options if arm == "folded" else {}
    clock = Clock(options.get("every", MEASURE_EVERY), managed=True)
    clock.step = SETTLING_STEPS  # the beginning of training is not what is timed
    if arm not in ("plain", "published"):
        dyrep.set_execution_(model, arm, **options, clock=clock)
    return model.train(), clock


class Step:
    """One training step on a batch of random images that stays where it is."""

    def __init__(self, case: Case, model: nn.Module, device: torch.device, compiled: bool) -> None:
        self._model = torch.compile(model) if compiled else model
        self._device = device
        self._precision = torch.float32 if device.type == "cpu" else torch.bfloat16
        random = torch.Generator(device).manual_seed(0)
        images = torch.randn(case.batch, 3, case.size, case.size, device=device, generator=random)
        self._images = images.contiguous(memory_format=torch.channels_last)
        self._labels = torch.randint(case.classes, (case.batch,), device=device, generator=random)
        options: dict[str, Any] = dict(OPTIMIZER)
        if device.type == "cuda":
            options |= {"fused": True, "lr": torch.tensor(OPTIMIZER["lr"], device=device)}
        self._optimizer = torch.optim.SGD(model.parameters(), **options)
        self.loss = torch.zeros((), device=device)

    def __call__(self) -> None:
        """Train once."""
        self.forget_gradients()
        with computing_in(self._precision, self._device):
            logits: Tensor = self._model(self._images)
        loss = F.cross_entropy(logits.float(), self._labels)
        loss.backward()
        self._optimizer.step()
        self.loss.copy_(loss.detach())

    def forget_gradients(self) -> None:
        """Give the gradients' memory back."""
        self._optimizer.zero_grad(set_to_none=True)


def prepared(step: Step, clock: Clock, graph: bool) -> Callable[[], None]:
    """What to call for one more step, once everything that is done only once has been done; starts peak memory over.

    Trying algorithms takes memory that training does not, so it must not count. Capturing is what takes the memory of
    all replays, so it must.
    """
    side = torch.cuda.Stream() if graph else torch.cuda.current_stream()  # what is captured has to have run aside
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(PREPARATION_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    step.forget_gradients()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    graphs: list[torch.cuda.CUDAGraph] = []
    first = clock.step + -clock.step % clock.every
    for kind in range(min(clock.every, 2) if graph else 0):  # a step that measures, and one that does not
        clock.step = first + kind
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=graphs[0].pool() if kind else None):
            step()
    clock.step = first

    def run() -> None:
        if graphs:
            graphs[min(clock.step % clock.every, 1)].replay()
        else:
            step()
        clock.step += 1

    return run


def block_times(run: Callable[[], None], device: torch.device, warmup: int, steps: int, blocks: int) -> list[float]:
    """Milliseconds per step of every block of steps."""
    for _ in range(warmup):
        run()
    found = []
    for _ in range(blocks):
        if device.type == "cuda":
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(steps):
                run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / steps)
        else:
            began = time.perf_counter()
            for _ in range(steps):
                run()
            found.append((time.perf_counter() - began) * 1000 / steps)
    return found


def measure(
    case: Case, arm: str, mode: str, layers: Sequence[str], device: torch.device, profile: bool, arguments: Any
) -> dict[str, Any]:
    """Time and memory of one arm in one mode."""
    model, clock = make_model(case, arm, layers, device, arguments.folded_options)
    step = Step(case, model, device, mode.startswith("compiled"))
    run = prepared(step, clock, mode.endswith("graph")) if device.type == "cuda" else step
    times = block_times(run, device, arguments.warmup, arguments.steps, arguments.blocks)
    loss = step.loss.item()
    found: dict[str, Any] = {
        "ms": round(statistics.median(times), 4),
        "peak_gib": None,
        "reserved_gib": None,
        "blocks_ms": [round(each, 4) for each in times],
        "loss": round(loss, 4) if math.isfinite(loss) else None,
    }
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 4)
        found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 4)
        if profile:
            found["profile"] = profiling.profiled(run)
    return found


def attempt(*what: Any) -> dict[str, Any]:
    """`measure`, or why it failed."""
    try:
        return measure(*what)
    except Exception as error:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        return {"ms": None, "peak_gib": None, "reserved_gib": None, "error": f"{type(error).__name__}: {reason}"}


def free(device: torch.device, failed: bool) -> None:
    """Leave nothing of a measurement to the next one."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type != "cuda":
        return
    if failed:  # a capture that broke off leaves the random generator believing that it goes on
        with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=device)
    torch._C._cuda_clearCublasWorkspaces()  # there is one per stream, and it would count as the next arm's memory
    torch.cuda.empty_cache()


def ratios(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Time and memory of every measurement against plain training at its fastest.

    That is the fastest of its compiled and captured modes, or the eager one where there are no others.

    Returns:
        One row per measurement that worked: case, arm, mode, time and memory (None where it cannot be told).
    """
    worked = [row for row in result["measurements"] if row["ms"] is not None]
    rows = []
    for row in worked:
        plain = [other for other in worked if (other["case"], other["arm"]) == (row["case"], "plain")]
        base = min(plain, key=lambda other: (other["mode"] not in FAST, other["ms"]), default=None)
        against = {
            name: round(row[key] / base[key], 4) if base is not None and row[key] and base[key] else None
            for name, key in (("time", "ms"), ("memory", "peak_gib"))
        }
        rows.append({key: row[key] for key in ("case", "arm", "mode")} | against)
    return rows


def show(row: dict[str, Any], figures: Sequence[tuple[str, str, str]]) -> None:
    texts = [f"{row[key]:{form}} {unit}" for key, form, unit in figures if row[key] is not None]
    texts += [row["error"]] if "error" in row else []
    print(f"{row['case']:17s} {row['arm']:10s} {row['mode']:15s}", *texts, flush=True)


def parse(command: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--modes", nargs="+", choices=MODES, help="for every arm (default: see default_modes)")
    parser.add_argument("--batch", type=int, help="images in a batch (default: the case's)")
    parser.add_argument("--size", type=int, help="pixels a side (default: the case's)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the first block")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--folded-options", type=json.loads, default={}, help="of dyrep.set_execution_, as JSON")
    parser.add_argument("--profile", action="store_true", help="say where time goes, for one mode of every arm")
    parser.add_argument("--add", action="store_true", help="keep what the file holds of the same setup")
    arguments = parser.parse_args(command)
    arguments.device = pick_device(arguments.device)
    if arguments.device.type == "cpu" and set(arguments.modes or ()) - {"eager"}:
        parser.error("on a CPU the only mode is eager")
    return arguments


def begin(arguments: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The result before anything is measured, or the earlier one to go on with."""
    shown = ["results/" + arguments.out.name if part == str(arguments.out) else part for part in command]
    config = {key: getattr(arguments, key) for key in ("warmup", "steps", "blocks", "folded_options")}
    config |= {"precision": "fp32" if arguments.device.type == "cpu" else "bf16", "optimizer": OPTIMIZER, "cases": {}}
    result: dict[str, Any] = {
        "command": f"python benchmarks/speed.py {shlex.join(shown)}",
        "versions": versions(),
        "hardware": hardware(),
        "config": config,
        "measurements": [],
    }
    if arguments.add and arguments.out.exists():
        old = json.loads(arguments.out.read_text())
        config["cases"] = old["config"]["cases"]
        if any(old[key] != result[key] for key in ("versions", "hardware", "config")):
            sys.exit(f"{arguments.out} was measured with another setup: write to another file")
        result |= {"command": f"{old['command']} && {result['command']}", "measurements": old["measurements"]}
    return result


def main(command: Sequence[str] | None = None) -> None:
    command = sys.argv[1:] if command is None else command
    arguments = parse(command)
    result = begin(arguments, command)
    device: torch.device = arguments.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    for name in arguments.cases:
        layers = expanded_layers(CASES[name])
        changes = {key: getattr(arguments, key) for key in ("batch", "size") if getattr(arguments, key)}
        case = replace(CASES[name], **changes)
        facts = asdict(case) | {"layers": layers}
        if result["config"]["cases"].setdefault(name, facts) != facts:
            sys.exit(f"{arguments.out} holds {name} with another batch or size: write to another file")
        for arm in arguments.arms:
            modes = arguments.modes or default_modes(name, arm, device)
            looked_at = next((mode for mode in ("graph", "eager") if mode in modes), modes[0])
            for mode in modes:
                found = attempt(case, arm, mode, layers, device, arguments.profile and mode == looked_at, arguments)
                free(device, failed="error" in found)
                row = {"case": name, "arm": arm, "mode": mode, **found}
                known = [r for r in result["measurements"] if (r["case"], r["arm"], r["mode"]) != (name, arm, mode)]
                result["measurements"] = [*known, row]
                with replacing(arguments.out) as temporary:
                    temporary.write_text(json.dumps(result, indent=2) + "\n")
                show(row, (("ms", "9.3f", "ms"), ("peak_gib", "7.2f", "GiB"), ("reserved_gib", "7.2f", "GiB reserved")))
    print("\nagainst plain at its fastest:")
    for row in ratios(result):
        show(row, (("time", "7.2f", "x time"), ("memory", "7.2f", "x memory")))


if __name__ == "__main__":
    main()
