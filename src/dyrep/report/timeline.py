"""The structure of a run over time: a bar per branch, from the update that grew it to the one that absorbed it."""

from __future__ import annotations

from typing import Any

from dyrep.branches import BRANCHES
from dyrep.report.history import Life, lives, series
from dyrep.report.pictures import INK, Picture, colour, in_order, new_figure, over_epochs, short, styled
from dyrep.report.runs import Run

_ROW, _GAP = 0.13, 0.7  # inches for a branch; rows between layers


def timeline(run: Run, name: str = "timeline") -> Picture:
    """Draw when every branch lived, and what training cost meanwhile."""
    born = lives(run)
    layers = sorted({life.layer for life in born}, key=in_order)
    height = 0.9 + _ROW * (len(born) + _GAP * len(layers))
    macs = series(run, "macs") if run.plain_macs else []
    heights = (height, 1.1) if macs else (height,)
    with styled():
        figure = new_figure(8.5, sum(heights) + 0.4)
        axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
        cut = sum(life.died is not None for life in born)
        alt = f"{len(born)} branches in {len(layers)} layers over {run.epochs} {run.unit}s; {cut} were absorbed again"
        picture = Picture(name, figure, alt)
        _draw_lives(picture, axes[0, 0], born, layers, run)
        if macs:
            _draw_macs(axes[-1, 0], macs, run)
        over_epochs(axes[-1, 0], run.epochs)
        axes[-1, 0].set_xlabel(run.unit)
    return picture


def _draw_lives(picture: Picture, axis: Any, born: list[Life], layers: list[str], run: Run) -> None:
    from matplotlib.patches import Patch

    y, ticks = 0.0, []
    for layer in layers:
        first = y
        for life in (life for life in born if life.layer == layer):
            gone = run.epochs if life.died is None else life.died
            (bar,) = axis.barh(y, gone - life.born, left=life.born, height=0.8, color=colour(life.branch), linewidth=0)
            picture.tell(bar, _story(life, run.unit))
            if life.died is not None:
                axis.plot(life.died, y, marker="x", color=INK, markersize=4)
            y += 1
        ticks.append(((first + y - 1) / 2, short(layer)))
        y += _GAP
    axis.set_yticks([place for place, _ in ticks], [layer for _, layer in ticks])
    axis.set_ylim(max(y, 1) - 0.2, -1)
    axis.set_title("Branches over time (× absorbed again)")
    known = [*BRANCHES, *(life.branch for life in born)]
    used = sorted({life.branch for life in born}, key=known.index)
    handles = [Patch(color=colour(branch), label=branch) for branch in used]
    if handles:
        picture.figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)


def _draw_macs(axis: Any, macs: list[tuple[float, float]], run: Run) -> None:
    plain = run.plain_macs or 1
    # a row tells what its own epoch cost
    times = [0.0, *(epoch for epoch, _ in macs)]
    values = [value / plain for _, value in macs]
    axis.step(times, [values[0], *values], where="pre", color="#4477aa")
    axis.axhline(1, color="#999999", linewidth=0.8, linestyle=":")
    axis.set_ylabel("training\nmultiply-adds\n(× plain)")
    axis.set_ylim(bottom=0)


def _story(life: Life, unit: str) -> str:
    start = "from the start" if life.born == 0 else f"grown after {unit} {life.born:g}"
    reason = f" ({life.why})" if life.why and life.born else ""
    end = "lived to the end" if life.died is None else f"absorbed after {unit} {life.died:g} ({life.end})"
    return f"{short(life.layer)}, {life.branch}: {start}{reason}, {end}"
