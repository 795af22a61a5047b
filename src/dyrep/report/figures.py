"""The figures of a report, apart from the timeline: curves, costs, importances, scores, drifts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from dyrep.branches import BRANCHES, ORIGIN
from dyrep.report import history
from dyrep.report.history import Scores, Series, epoch_of
from dyrep.report.pictures import FAINT, INK, RUN_COLOURS, Picture, colour, new_figure, over_epochs, short, styled
from dyrep.report.runs import Group, Run
from dyrep.wording import METRICS

_WIDTH = 8.5
_STYLES = ("-", "--", ":", "-.")


def curves(groups: Sequence[Group]) -> Picture | None:
    """The metric and the loss of all runs over each other, with a tick for every edit: the paper's convergence."""
    if not any(_accuracy(run) or history.series(run, "train_loss") for group in groups for run in group.runs):
        return None
    with styled():
        figure = new_figure(_WIDTH, 3.4 + 0.16 * len(groups))
        axes = figure.subplots(1, 2)
        measured = [value for group in groups for run in group.runs for _, value in _accuracy(run)]
        metric = METRICS[groups[0].runs[0].metric]
        best = f"; best {metric} {max(measured):.2f} %" if measured else ""
        words = f"Training loss and {metric}" if metric != "accuracy" else "Accuracy and training loss"
        picture = Picture("curves", figure, f"{words} of {len(groups)} kinds of runs{best}")
        for name, run, look in _drawn(groups):
            for axis, values in ((axes[0], _accuracy(run)), (axes[1], history.series(run, "train_loss"))):
                _line(picture, axis, values, name, run.unit, look)
            _edit_ticks(picture, axes[0], run, look["color"])
        split = "/".join(sorted({run.split for group in groups for run in group.runs}))
        axes[0].set_title(f"{metric} ({split}), %")
        axes[1].set_title("training loss")
        axes[1].set_yscale("log")
        _zoom(axes[0], measured)
        for axis in axes:
            over_epochs(axis, _longest(groups))
            axis.set_xlabel(groups[0].runs[0].unit)
        _legend(figure, groups)
    return picture


def _longest(groups: Sequence[Group]) -> int:
    return max(run.epochs for group in groups for run in group.runs)


def _drawn(groups: Sequence[Group]) -> Iterator[tuple[str, Run, dict[str, Any]]]:
    """Every run with its name and its look: groups differ in colour, seeds in the style of their lines."""
    for number, group in enumerate(groups):
        for index, run in enumerate(group.runs):
            look = {"color": RUN_COLOURS[number % len(RUN_COLOURS)], "linestyle": _STYLES[index % len(_STYLES)]}
            yield f"{group.label}, seed {run.seed}", run, look


def _legend(figure: Any, groups: Sequence[Group]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=RUN_COLOURS[number % len(RUN_COLOURS)], label=group.label)
        for number, group in enumerate(groups)
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False)


def _accuracy(run: Run) -> Series:
    return history.series(run, f"{run.split}_{run.metric}")


def _zoom(axis: Any, values: list[float]) -> None:
    """Leave the beginning out where it would flatten all the rest."""
    if len(values) > 4:
        low = sorted(values)[len(values) // 4]
        top = max(values)
        axis.set_ylim(max(min(values), low - (top - low)) - 0.02 * (top - low), top + 0.08 * (top - low) + 1e-9)


def _line(picture: Picture, axis: Any, values: Series, words: str, unit: str, look: dict[str, Any]) -> None:
    if not values:
        return
    axis.plot(*zip(*values, strict=True), linewidth=1.3, **look)
    epoch, last = values[-1]
    (end,) = axis.plot(epoch, last, marker="o", markersize=4, color=look["color"])
    picture.tell(end, f"{words}: {last:.4g} after {unit} {epoch:g}")


def _edit_ticks(picture: Picture, axis: Any, run: Run, ink: str) -> None:
    for event in run.updates:
        if event["edits"]:
            epoch = epoch_of(run, event)
            (tick,) = axis.plot(
                [epoch, epoch], [0, 0.03], transform=axis.get_xaxis_transform(), color=ink, linewidth=1.2, alpha=0.8
            )
            edits = "; ".join(f"{edit['kind']} {short(edit['layer'])}" for edit in event["edits"])
            picture.tell(tick, f"{run.unit} {epoch:g}: {edits}")


def costs(groups: Sequence[Group]) -> Picture | None:
    """Multiply-adds, parameters, time of a step and memory over epochs."""
    largest = max((row.get("macs", 0) for group in groups for run in group.runs for row in run.rows), default=0)
    unit, size = ("G", 1e9) if largest >= 1e8 else ("M", 1e6)
    panels = [
        (f"multiply-adds of a forward pass, {unit}", lambda run: _scaled(history.series(run, "macs"), 1 / size)),
        ("parameters, M", lambda run: _scaled(history.series(run, "parameters"), 1e-6)),
        ("time of a step, ms", history.step_milliseconds),
        ("peak memory, GiB", lambda run: history.series(run, "memory_gib")),
    ]
    shown = [(title, of) for title, of in panels if any(of(run) for group in groups for run in group.runs)]
    if not shown:
        return None
    with styled():
        figure = new_figure(_WIDTH, 2.3 * math.ceil(len(shown) / 2) + 0.16 * len(groups))
        axes = figure.subplots(math.ceil(len(shown) / 2), 2, squeeze=False).flatten()
        picture = Picture("costs", figure, f"{', '.join(title for title, _ in shown)}, over time")
        for axis, (title, of) in zip(axes, shown, strict=False):
            for name, run, look in _drawn(groups):
                values = of(run)
                values = [(0.0, values[0][1]), *values] if values else []  # each stands for the time up to it
                _line(picture, axis, values, f"{name}: {title}", run.unit, {**look, "drawstyle": "steps-pre"})
            axis.set_title(title)
            axis.set_ylim(bottom=0)
            over_epochs(axis, _longest(groups))
            axis.set_xlabel(groups[0].runs[0].unit)
        for axis in axes[len(shown) :]:
            axis.set_visible(False)
        _legend(figure, groups)
    return picture


def _scaled(values: Series, factor: float) -> Series:
    return [(epoch, value * factor) for epoch, value in values]


def importance(run: Run, name: str = "importance") -> Picture | None:
    """Importance of every branch over time: a panel per block, with the mean and the cuts."""
    layers = history.importances(run)
    if not layers:
        return None
    columns = min(3, len(layers))
    rows = math.ceil(len(layers) / columns)
    absorbed = history.cuts(run)
    with styled():
        figure = new_figure(_WIDTH, 1.75 * rows + 0.7)
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten()
        alt = f"Importance of branches over time in {len(layers)} blocks; {len(absorbed)} branches were absorbed"
        picture = Picture(name, figure, alt)
        used: dict[str, Any] = {}
        for axis, (layer, branches) in zip(axes, layers.items(), strict=False):
            for branch, values in branches.items():
                style = "-" if branch != ORIGIN else "-."
                for part in _unbroken(values):
                    (line,) = axis.plot(*zip(*part, strict=True), color=colour(branch), linestyle=style, linewidth=1.3)
                    used.setdefault(branch, line)
                epoch, last = values[-1]
                (end,) = axis.plot(epoch, last, marker="o", markersize=3.5, color=colour(branch))
                picture.tell(end, f"{short(layer)}, {branch}: importance {last:.4f} at {run.unit} {epoch:g}")
            mean = history.mean_importance(branches)
            for part in _unbroken(mean):
                (line,) = axis.plot(*zip(*part, strict=True), color=INK, linestyle="--", linewidth=1)
                used["mean"] = line
            for epoch, where, branch, strength in absorbed:
                if where == layer and strength is not None:
                    (cross,) = axis.plot(epoch, strength, marker="x", markersize=7, color=INK, linestyle="none")
                    picture.tell(
                        cross, f"{short(layer)}, {branch}: absorbed at {run.unit} {epoch:g}, importance {strength:.4f}"
                    )
                    used["absorbed"] = cross
            axis.set_title(short(layer))
            over_epochs(axis, run.epochs)
            _give_room(axis, [value for values in branches.values() for _, value in values])
        for axis in axes[len(layers) :]:
            axis.set_visible(False)
        for axis in axes[max(len(layers) - columns, 0) : len(layers)]:
            axis.set_xlabel(run.unit)
            axis.tick_params(labelbottom=True)
        known = [*BRANCHES, *used]
        names = sorted(used, key=lambda name: (name in ("mean", "absorbed"), known.index(name)))
        handles = [used[name] for name in names]
        figure.legend(handles, names, loc="outside upper right", ncols=min(len(used), 8), frameon=False)
    return picture


def _give_room(axis: Any, values: list[float]) -> None:
    """Show all values, but do not blow differences up that mean nothing."""
    low, high = min(values), max(values)
    middle, reach = (low + high) / 2, max((high - low) * 0.6, abs(high) * 0.02, 1e-9)
    axis.set_ylim(middle - reach, middle + reach)
    axis.ticklabel_format(axis="y", useOffset=False)


def _unbroken(values: Series) -> list[Series]:
    """A series in parts without gaps: a branch that was absorbed and grew again has two lives."""
    if len(values) < 2:
        return [values]
    usual = min(after - before for (before, _), (after, _) in itertools.pairwise(values))
    parts: list[Series] = [[values[0]]]
    for before, now in itertools.pairwise(values):
        if now[0] - before[0] > 1.5 * usual:
            parts.append([])
        parts[-1].append(now)
    return parts


def score_map(run: Run, name: str = "scores") -> Picture | None:
    """Scores as a heat map: a row per layer, a column per update, what was chosen marked.

    Scores fall by orders of magnitude in the course of training, so colours are relative to the largest of an update.
    Some scores have a sign; what is far below zero is the last to be expanded, and has a colour of its own.
    """
    found: Scores = history.scores(run)
    if not found.epochs:
        return None
    layers = list(found.values)
    signed = any(value is not None and value < 0 for values in found.values.values() for value in values)
    reference = "largest in size" if signed else "largest"
    with styled():
        figure = new_figure(_WIDTH, 1.1 + 0.17 * len(layers))
        axis = figure.subplots()
        alt = f"Scores of {len(layers)} candidates at {len(found.epochs)} updates, relative to the {reference} of each"
        picture = Picture(name, figure, alt)
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        shades, scale = colormaps["PuOr_r" if signed else "viridis"], Normalize(-1 if signed else 0, 1)
        for column, epoch in enumerate(found.epochs):
            known = [values[column] for values in found.values.values()]
            largest = max((abs(value) for value in known if value is not None), default=0.0) or 1.0
            for row, layer in enumerate(layers):
                value = known[row]
                if value is None:
                    continue
                chosen = layer in found.chosen[column]
                share = value / largest
                colour = shades(scale(share))
                (cell,) = axis.barh(row, 0.94, left=column - 0.47, height=0.94, color=colour, linewidth=0)
                words = f"{short(layer)} at {run.unit} {epoch:g}: score {value:.3g}, {share:.0%} of the {reference}"
                picture.tell(cell, words + (", expanded" if chosen else ""))
                if chosen:
                    axis.plot(column, row, marker="o", markersize=5, markerfacecolor="white", markeredgecolor="black")
        axis.set_yticks(range(len(layers)), [short(layer) for layer in layers], fontsize=8)
        step = max(math.ceil(len(found.epochs) / 20), 1)
        places = range(0, len(found.epochs), step)
        axis.set_xticks(list(places), [f"{found.epochs[place]:g}" for place in places])
        axis.set_ylim(len(layers) - 0.4, -0.6)
        axis.set_xlim(-0.6, len(found.epochs) - 0.4)
        axis.set_xlabel(f"update, at the end of {run.unit}")
        title = f"score ({run.recipe['dyrep']['score']}) relative to the {reference} of the update (○ expanded)"
        axis.set_title(title)
        bar = figure.colorbar(ScalarMappable(scale, shades), ax=axis, fraction=0.025, pad=0.01, aspect=12)
        bar.set_ticks([-1, 0, 1] if signed else [0, 1], labels=["-largest", "0", "largest"][0 if signed else 1 :])
        bar.outline.set_visible(False)
    return picture


def drift(run: Run, name: str = "drift") -> Picture | None:
    """How much every edit changed what the network computes, in eval and in training mode."""
    found = history.drifts(run)
    if not found:
        return None
    with styled():
        figure = new_figure(_WIDTH, 2.6)
        axis = figure.subplots()
        worst = max(edit.evaluated for edit in found)
        picture = Picture(
            name, figure, f"Relative change of the output by {len(found)} edits; at most {worst:.1e} in eval mode"
        )
        floor = 1e-9  # no change at all has no place on a logarithmic scale
        for edit in found:
            modes = [("eval mode", edit.evaluated, INK), ("training mode", edit.training, "#ee6677")]
            for mode, value, ink in modes:
                if value is not None:
                    sign = "^" if edit.kind == "expand" else "v"
                    (point,) = axis.plot(
                        edit.epoch, max(value, floor), marker=sign, markersize=6, color=ink, linestyle="none"
                    )
                    picture.tell(point, f"{run.unit} {edit.epoch:g}, {edit.edit}: {value:.1e} in {mode}")
        for mode, ink in (("eval mode", INK), ("training mode", "#ee6677")):
            axis.plot([], [], marker="^", linestyle="none", color=ink, label=f"{mode} (▲ expanded, ▼ cut)")
        axis.axhline(2**-23, color=FAINT, linewidth=0.8, linestyle=":")
        axis.text(0, 2**-23, " rounding of float32", fontsize=7, va="bottom", color=FAINT)
        axis.set_yscale("log")
        over_epochs(axis, run.epochs)
        axis.set_xlabel(run.unit)
        axis.set_title("relative change of the output")
        figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return picture
