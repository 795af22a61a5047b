"""The picture of docs/results.md: what each way to train gains over the plain network, with its interval and its cost.

``python benchmarks/gains.py --out docs/gains.png`` draws it from ``results/selection.json``; arms with a single seed
have no interval and are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arms import by_seed
from comparisons import COMPARISONS, STRONGER_DECAY, WARM
from runs import paired

from dyrep.report.pictures import FAINT, INK, RUN_COLOURS, Picture, new_figure, styled

RESULTS = Path(__file__).resolve().parent.parent / "results" / "selection.json"
CHOSEN_BY = 5  # seeds that the rule asks for

SHOWN = {
    "the paper's weight decay": {
        "plain, five times the weight decay": ("recipes", "weight decay 5e-4"),
        "RepVGG's blocks": ("rivals", "RepVGG"),
        "DBB": ("rivals", "DBB"),
        "seven branches from the start": ("rivals", "seven branches"),
        "DyRep, our defaults": ("rivals", "DyRep, our defaults"),
        "DyRep as in the paper": ("rivals", "DyRep"),
        "DyRep as in the paper, reference norm": ("growth", "reference norm, γ = 0.01"),
        "DyRep as in the paper, layers by snip": ("scores", "snip"),
        "DyRep as in the paper, layers at random": ("scores", "random"),
        "DyRep as in the paper, folded": ("folding", "folded"),
    },
    "five times the paper's weight decay": {
        "residual alone": ("spaces", "residual"),
        "1x1 and residual": ("spaces", "1x1 and residual"),
        "1x1 and residual, folded": ("spaces", "1x1 and residual, folded"),
        "all but 1x1-KxK, folded": ("spaces", "all but 1x1-KxK, folded"),
        "seven branches": ("spaces", "seven branches"),
        "DyRep, our defaults": ("decays", "DyRep, our defaults"),
    },
}
"""Arms of studies by what they are called here, under what the plain network they are compared with has."""
PLAIN = {
    "the paper's weight decay": f"--method origin{WARM}",
    "five times the paper's weight decay": f"--method origin{STRONGER_DECAY}{WARM}",
}


@dataclass(frozen=True)
class Gain:
    """What an arm gains over the plain network of the same seeds.

    Attributes:
        label: of the arm.
        mean: points of accuracy.
        reach: half the width of the 95 % confidence interval.
        seeds: that both have.
        cost: multiply-adds of training, × plain.
    """

    label: str
    mean: float
    reach: float
    seeds: int
    cost: float


def gains(runs: list[dict[str, Any]], group: str) -> list[Gain]:
    """The arms of a group that have an interval, the largest gain first."""
    plain = by_seed(runs, "val_accuracy", PLAIN[group])
    found = []
    for label, (study, arm) in SHOWN[group].items():
        flags = COMPARISONS[study].arms[arm]
        ours = by_seed(runs, "val_accuracy", flags)
        difference = paired(ours, plain)
        if difference is not None:
            seeds = len(ours.keys() & plain.keys())
            cost = mean_macs(runs, flags) / mean_macs(runs, PLAIN[group])
            found.append(Gain(label, *difference, seeds, cost))
    return sorted(found, key=lambda gain: gain.mean, reverse=True)


def mean_macs(runs: list[dict[str, Any]], flags: str) -> float:
    return statistics.mean(run["mean_macs"] for run in runs if run["flags"] == flags)


def draw(groups: Mapping[str, Sequence[Gain]], about: str) -> Picture:
    """An interval for every arm, hollow where the rule asks for more seeds."""
    rows = sum(len(found) + 1.4 for found in groups.values())
    with styled():
        figure = new_figure(8.5, 0.6 + 0.25 * rows)
        sizes = [max(len(found), 1) for found in groups.values()]
        axes = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
        best = max((gain for found in groups.values() for gain in found), key=lambda gain: gain.mean)
        words = f"What ways to train gain over the plain network; the most: {best.label}, {best.mean:+.2f} points"
        picture = Picture("gains", figure, words)
        for axis, (group, found) in zip(axes, groups.items(), strict=True):
            axis.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
            for row, gain in enumerate(found):
                ink = RUN_COLOURS[1] if gain.label.startswith("DyRep, our") else RUN_COLOURS[0]
                face = ink if gain.seeds >= CHOSEN_BY else "white"
                axis.plot([gain.mean - gain.reach, gain.mean + gain.reach], [row, row], color=ink, linewidth=1.4)
                (dot,) = axis.plot(gain.mean, row, "o", markersize=5, color=ink, markerfacecolor=face)
                picture.tell(dot, f"{gain.label}: {gain.mean:+.2f} ± {gain.reach:.2f}, {gain.seeds} seeds")
                axis.annotate(
                    f"{gain.cost:.2f} ×", (1.01, row), xycoords=axis.get_yaxis_transform(), va="center", color=INK
                )
            axis.set_yticks(range(len(found)), [gain.label for gain in found])
            axis.set_ylim(len(found) - 0.4, -0.6)
            axis.tick_params(axis="y", length=0)
            axis.set_title(f"against the plain network with {group}")
        axes[0].annotate(
            "multiply-adds", (1.01, 1.0), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points", color=INK
        )
        words = "points of accuracy on 5,000 images held out, paired by seed, 95 %; hollow: fewer than 5 seeds"
        figure.supxlabel(f"{words}\n{about}", fontsize=8)
    return picture


def main(command: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(command)
    data = json.loads(given.results.read_text())
    groups = {group: found for group in SHOWN if (found := gains(data["runs"], group))}
    about = "VGG-16, CIFAR-10, 40 epochs, DyRep at most 1.5 × the multiply-adds"
    about += f"; {data['hardware']}, torch {data['versions']['torch']}"
    draw(groups, about).save_png(given.out)


if __name__ == "__main__":
    main()
