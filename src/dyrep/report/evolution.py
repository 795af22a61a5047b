"""The structure of a run over time: a bar per branch, from the update that grew it to the one that absorbed it.

``python -m dyrep.report.evolution RUN -o picture.png``
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyrep.branches import BRANCHES
from dyrep.events import read_events

COLOURS = dict(zip(BRANCHES, ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"), strict=True))
OTHERS = "#999999"  # branches of other methods


@dataclass
class Life:
    """When a branch lived.

    Attributes:
        layer: the convolution it belonged to.
        branch: its name.
        born: epoch (or step) of the update that grew it.
        died: that of the update that absorbed it; None if it lived to the end.
    """

    layer: str
    branch: str
    born: int
    died: int | None = None


def lives(events: list[dict[str, Any]]) -> list[Life]:
    """Every branch that ever lived, in order of birth; those inside a cut branch die with it."""
    found: list[Life] = []
    for event in events:
        if event["type"] not in ("converted", "update"):
            continue
        now = 0 if event["type"] == "converted" else event["epoch"] or event["step"]
        for edit in event["edits"]:
            layer = edit["layer"]
            for branch in edit["branches"]:
                if edit["kind"] == "expand":
                    found.append(Life(layer, branch, now))
                    continue
                inside = f"{layer}.branches.{branch}."
                for life in found:
                    if life.died is None and (
                        (life.layer, life.branch) == (layer, branch) or life.layer.startswith(inside)
                    ):
                        life.died = now
    return found


def draw_evolution(events: list[dict[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Draw the structure over time and write it as a picture.

    Args:
        events: what `dyrep.read_events` returned.
        path: the picture; its ending decides the format (.png, .svg, .pdf).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    updates = [event for event in events if event["type"] == "update"]
    unit = "step" if updates and not any(event["epoch"] for event in updates) else "epoch"
    born = lives(events)
    layers = sorted({life.layer for life in born}, key=_natural)
    told = [event["config"]["total"] for event in events if event["type"] == "started"]
    told += [event["epochs"] for event in events if event["type"] == "converted"]
    total = next(iter(told), None)
    end = total or max((event[unit] for event in updates), default=0) + 1
    height = 1 + 0.12 * len(born) + 0.1 * len(layers)
    counted = [event for event in updates if event.get("macs") is not None]
    heights = (height, 1.2) if counted else (height,)
    figure, axes = plt.subplots(
        len(heights),
        1,
        figsize=(8.5, sum(heights)),
        sharex=True,
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    top, last = axes[0, 0], axes[-1, 0]
    y, ticks = 0.0, []
    for layer in layers:
        first = y
        for life in (life for life in born if life.layer == layer):
            gone = end if life.died is None else life.died
            top.barh(y, gone - life.born, left=life.born, height=0.8, color=_colour(life.branch), linewidth=0)
            if life.died is not None:
                top.plot(life.died, y, marker="x", color="#333333", markersize=4)
            y += 1
        ticks.append(((first + y - 1) / 2, layer))
        y += 0.7
    top.set_yticks([place for place, _ in ticks], [_short(layer) for _, layer in ticks], fontsize=8)
    top.set_ylim(y - 0.2, -1)
    top.set_title("Branches over time (× absorbed again)", loc="left", fontsize=10)
    used = sorted({life.branch for life in born}, key=[*BRANCHES, *(life.branch for life in born)].index)
    handles = [Patch(color=_colour(branch), label=branch) for branch in used]
    figure.legend(handles=handles, loc="outside upper right", ncols=max(len(handles), 1), fontsize=8, frameon=False)
    if counted:
        plain = counted[0]["plain_macs"]
        times = [0, *(event[unit] for event in counted), end]
        values = [1.0, *(event["macs"] / plain for event in counted), counted[-1]["macs"] / plain]
        last.step(times, values, where="post", color="#333333")
        last.axhline(1, color="#999999", linewidth=0.8, linestyle=":")
        last.set_ylabel("training\nmultiply-adds\n(× plain)", fontsize=8)
        last.set_ylim(bottom=0)
    last.set_xlim(0, end)
    last.set_xlabel(unit)
    last.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes.flat:
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    path = Path(path)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _colour(branch: str) -> str:
    return COLOURS.get(branch, OTHERS)


def _short(layer: str) -> str:
    return layer.replace(".branches.1x1-KxK.conv", " > 1x1-KxK")


def _natural(layer: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in layer.split(".")]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m dyrep.report.evolution", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run, or its events.jsonl")
    parser.add_argument("-o", "--out", type=Path, default=Path("evolution.png"))
    arguments = parser.parse_args()
    log = arguments.run / "events.jsonl" if arguments.run.is_dir() else arguments.run
    print(draw_evolution(read_events(log), arguments.out))


if __name__ == "__main__":
    main()
