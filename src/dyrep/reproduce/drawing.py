"""The paper's figures, drawn from our runs."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

from dyrep.report.block_picture import block_picture
from dyrep.report.block_tree import blocks_of
from dyrep.report.figures import curves
from dyrep.report.pictures import RUN_COLOURS, Picture, new_figure, styled
from dyrep.report.runs import grouped, read_run
from dyrep.reproduce.outcomes import Outcome
from dyrep.reproduce.studies import Study

_MARKERS = "osD^v"


def picture(study: Study, outcomes: Sequence[Outcome]) -> Picture | None:
    """The figure of a study; None if it has none, or nothing was run that it could show.

    Of accuracy against cost the paper's own points are shown in any case.
    """
    runs = [read_run(run) for outcome in outcomes for run in outcome.runs]
    if study.picture == "cost":
        return _cost(study, outcomes)
    if not runs or not study.picture:
        return None
    if study.picture == "curves":
        return curves(grouped(runs))
    blocks = list(blocks_of(runs[0]))
    if not blocks:
        return None
    return block_picture(runs[0], "conv1" if "conv1" in blocks else blocks[0])


def _cost(study: Study, outcomes: Sequence[Outcome]) -> Picture:
    """Accuracy against training cost, the paper's hollow and ours filled, each relative to the first network."""
    with styled():
        figure = new_figure(6.5, 4)
        axis = figure.subplots()
        drawn = Picture(study.name, figure, f"{study.title}: accuracy against training time")
        plain_paper = _number(outcomes[0].row.paper["cost"])
        plain_ours = outcomes[0].figures.get("cost")
        labels = list(dict.fromkeys(outcome.row.label for outcome in outcomes))
        for outcome in outcomes:
            row, place = outcome.row, labels.index(outcome.row.label)
            look: dict[str, Any] = {"marker": _MARKERS[place], "color": RUN_COLOURS[place], "linestyle": "none"}
            cost, accuracy = _number(row.paper["cost"]) / plain_paper, _number(row.paper["accuracy"])
            (point,) = axis.plot(cost, accuracy, markerfacecolor="none", **look)
            drawn.tell(point, f"paper, {row.group}, {row.label}: {accuracy:.2f} % at {cost:.2f} times the cost")
            if plain_ours and outcome.figures.keys() >= {"cost", "accuracy"}:
                cost = statistics.mean(outcome.figures["cost"]) / statistics.mean(plain_ours)
                accuracy = statistics.mean(outcome.figures["accuracy"])
                (point,) = axis.plot(cost, accuracy, **look)
                drawn.tell(point, f"ours, {row.group}, {row.label}: {accuracy:.2f} % at {cost:.2f} times the cost")
        for place, label in enumerate(labels):
            axis.plot([], [], marker=_MARKERS[place], color=RUN_COLOURS[place], linestyle="none", label=label)
        axis.set_xlabel(f"training time, × {outcomes[0].row.group} {outcomes[0].row.label}")
        axis.set_ylabel("accuracy, %")
        axis.set_title("hollow: the paper's, filled: ours")
        figure.legend(loc="outside upper right", ncols=len(labels), frameon=False)
    return drawn


def _number(value: float | str) -> float:
    """The first number in a cell: 4.8 of "4.8 d"."""
    found = re.match(r"[\d.]+", str(value))
    assert found is not None, value
    return float(found[0])
