"""``dyrep bench``: what branches cost a network on this machine, in every way to run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from dyrep.engine.bench import ARMS, Bench, BenchSettings, StepTime
from dyrep.engine.rundir import hardware
from dyrep.errors import ConfigError, DyRepError
from dyrep.records import write_json
from dyrep.surgery.timing import LayerTimes
from dyrep.wording import beginning, counted

_LITTLE = 0.02  # a share of time that is not worth speaking of


def bench_model(
    settings: Annotated[BenchSettings, tyro.conf.OmitArgPrefixes],
    layers: bool = True,
    file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
) -> None:
    """Time training steps of a network: plain, and with branches on every convolution that can grow.

    The images are random. A step is that of dyrep train, without the reading of data.

    Args:
        settings: what to time.
        layers: time every layer by itself, too.
        file: write everything that was found to this file, too.
    """
    if file is not None and file.is_dir():
        raise ConfigError(f"--json {file} is a folder; name a file")
    bench = Bench(settings)
    settings = bench.settings
    images = f"{counted(settings.batch, 'image')} of {settings.size}x{settings.size}"
    print(f"{settings.model}, {images}, {settings.precision} on {settings.device}: {hardware()}")
    count = sum(map(len, bench.branches.values()))
    print(f"{counted(len(bench.branches), 'block')} with {counted(count, 'branch', 'es')}\n", flush=True)
    rows: list[StepTime] = []
    for row in bench.steps():  # each is shown as soon as it is there: on a CPU they take their time
        if not rows:
            memory = f"{'GiB':>9}{'x plain':>9}" if bench.on_gpu else ""
            print(f"{'training step':14}{'ms':>9}{'x plain':>9}{memory}")
        rows.append(row)
        print(_step(row), flush=True)
    found, failed = _layers(bench, layers)
    if layers or failed:
        print(f"\n{failed or _table(found)}")
    words = verdict(rows, found, settings)
    print(f"\n{words}")
    if file is not None:
        write_json(file, {**bench.report(rows, found if layers else ()), "verdict": words})


def verdict(rows: Sequence[StepTime], layers: Sequence[LayerTimes], settings: BenchSettings) -> str:
    """In two sentences, what ``auto`` does here, and what folding would save."""
    step = {row.arm: row for row in rows}
    on_gpu = settings.device != "cpu"
    auto, folded = step["fused" if on_gpu else "eager"], step["folded"]
    text = _choice(layers) if on_gpu else "On this CPU auto runs blocks eagerly: what is fused are kernels of a GPU"
    if auto.ms is None:
        text += ". How long a step then takes could not be measured"
    else:
        eager = f", run eagerly {_times(step['eager'])}" if on_gpu and step["eager"].ms is not None else ""
        text += f". A training step then takes {_times(auto)}{eager}"
    if folded.ms is None:
        return f"{text}. What folding would save could not be measured."
    saved = 0 if auto.ms is None else 1 - folded.ms / auto.ms
    gain = (
        f"would save {saved:.0%} of that ({_times(folded)}), but" if saved > _LITTLE else f"takes {_times(folded)}, and"
    )
    seen = f"at least {min(settings.images, settings.batch)} of {counted(settings.batch, 'image')}"
    return f"{text}. Folded {gain} is not exact: it estimates σ, here from {seen}."


def _choice(layers: Sequence[LayerTimes]) -> str:
    """What ``auto`` chooses for these layers, and why."""
    if not layers:
        return "auto runs blocks fused where they can be, and else eagerly"
    ways = Counter(layer.auto for layer in layers)
    reasons = "; ".join(sorted({layer.reason for layer in layers if layer.auto == "eager"}))
    if not ways["eager"]:
        return "auto runs all blocks fused, which computes what running them eagerly does"
    if not ways["fused"]:
        return f"auto runs all blocks eagerly ({reasons})"
    return f"auto runs {ways['fused']} of {len(layers)} blocks fused, and the others eagerly ({reasons})"


def _times(row: StepTime) -> str:
    return f"{row.ms:.2f} ms" if row.ratio is None else f"{row.ratio:.2f} x as long as a plain one"


def _layers(bench: Bench, timed: bool) -> tuple[list[LayerTimes], str]:
    """The layers, or why there are none."""
    try:
        return bench.layers(timed), ""
    except (DyRepError, RuntimeError) as error:  # a step that does not fit has been told of already
        return [], f"layers could not be timed: {beginning(error)}"


def _step(row: StepTime) -> str:
    if row.error is not None:
        return f"{row.arm:14}  {row.error}"
    figures = [row.ms, row.ratio, *([] if row.peak_gib is None else [row.peak_gib, row.memory_ratio])]
    text = "".join(f"{'-':>9}" if value is None else f"{value:9.2f}" for value in figures)
    graph = "in a CUDA graph" if row.graph else "without a graph, which is no faster"
    how = f"the same as {row.same_as} on a CPU" if row.same_as else "" if row.peak_gib is None else graph
    return f"{row.arm:14}{text}  {how}".rstrip()


def _table(layers: Sequence[LayerTimes]) -> str:
    """One line per layer, in columns."""
    names = ARMS[1:]
    lines = [["layer", "input", "branches", "plain ms", *(f"{name} ms" for name in names), "auto"]]
    for layer in layers:
        shape, branches = "x".join(map(str, layer.input_shape)), " ".join(layer.branches)
        times = [
            f"{layer.ms[name]:.3f}" if layer.runs_as[name] == name else f"= {layer.runs_as[name]}" for name in names
        ]
        lines.append([layer.layer, shape, branches, f"{layer.plain_ms:.3f}", *times, layer.auto])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = {0, 1, 2, len(widths) - 1}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
