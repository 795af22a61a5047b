"""The structure of one block as a picture: its branches side by side, those they have grown inside of them.

Under every branch is its importance s, as in the paper's figure of an evolved structure.
"""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

from dyrep.branches import ORIGIN
from dyrep.report import block_layout as layout
from dyrep.report.block_layout import Mark, Sheet, Wire, text_width
from dyrep.report.block_tree import Block, Lane, importances_of, read_block
from dyrep.report.pictures import FAINT, INK, Picture, colour, new_figure, short, styled
from dyrep.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARGIN, _TITLE, _ENTRY, _FOOT = 14.0, 34.0, 22.0, 12.0  # points
_NARROWEST = 230.0
_FILLS = {"kernel": 0.22, "fixed": 0.0, "norm": 0.06, "frame": 0.05}  # what is learned is filled most
_STYLES = {"identity": "italic"}
_ROUND = {"kernel": 3.0, "fixed": 3.0, "frame": 5.0, "norm": 6.5}


def block_picture(run: Run, layer: str) -> Picture:
    """Draw the structure that a layer had when the run was last written down.

    Args:
        run: what `dyrep.report.runs.read_run` returned.
        layer: a convolution with branches, also one inside of a branch.

    Raises:
        ConfigError: the layer has no branches; the message lists those that have.
    """
    block = read_block(run, layer)
    title, subtitle, notes = _words(run, block)
    with styled():
        width, height = layout.size_of(block)
        titles = max(text_width(title, 11, bold=True), text_width(subtitle, layout.MEDIUM))
        total = max(width, titles, _NARROWEST) + 2 * _MARGIN
        lines = _wrapped(notes, total - 2 * _MARGIN)
        tall = _MARGIN + _TITLE + _ENTRY + height + _ENTRY + _FOOT * len(lines) + _MARGIN
        figure = new_figure(total / 72, tall / 72)
        figure.set_layout_engine("none")  # everything has its place already
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, total)
        axes.set_ylim(tall, 0)
        picture = Picture(f"block-{re.sub(r'[^A-Za-z0-9_]+', '-', layer)}", figure, _alt(run, block))
        axes.text(_MARGIN, _MARGIN, title, fontsize=11, fontweight="bold", va="top")
        axes.text(_MARGIN, _MARGIN + 17, subtitle, fontsize=layout.MEDIUM, va="top", color=FAINT)
        sheet, top = Sheet(), _MARGIN + _TITLE + _ENTRY
        layout.place(sheet, block, (total - width) / 2, top)
        _draw(picture, axes, sheet)
        _draw_ends(axes, total / 2, top, top + height)
        for number, line in enumerate(reversed(lines)):
            axes.text(_MARGIN, tall - _MARGIN - number * _FOOT, line, fontsize=layout.SMALL, va="baseline", color=FAINT)
    return picture


def _words(run: Run, block: Block) -> tuple[str, str, str]:
    """Title, subtitle and notes of the picture."""
    told = run.rows[-1]["epoch"]
    subtitle = (
        f"{run.recipe.get('model', 'network')}, {run.method}, seed {run.seed}, after {run.unit} {told} of {run.epochs}"
    )
    _, measured = importances_of(run)
    if measured is None:
        return short(block.layer), subtitle, "Importances were not written down."
    labels = {part.label for lane in block.living for part in lane.parts if part.kind == "norm"}
    norm = "scale" if "scale γ" in labels else "norm"
    late = f", at {run.unit} {round(measured, 1):g}" if measured != told else ""
    return short(block.layer), subtitle, f"Under each branch its importance s, the mean |γ| of its {norm}{late}."


def _wrapped(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, max(20, int(len(text) * width / text_width(text, layout.SMALL) * 0.97)))


def _draw(picture: Picture, axes: Axes, sheet: Sheet) -> None:
    for wire in sheet.wires:
        _draw_wire(axes, wire)
    for mark in sheet.marks:
        _draw_mark(picture, axes, mark)


def _draw_wire(axes: Axes, wire: Wire) -> None:
    xs, ys = zip(*wire.points, strict=True)
    style: dict[str, Any] = {"linewidth": 1.0, "solid_capstyle": "round", "zorder": 1}
    style["color"] = colour(wire.branch) if wire.branch else FAINT
    if wire.cut:
        style |= {"color": FAINT, "linewidth": 0.8, "linestyle": (0, (2.5, 2.5)), "dash_capstyle": "butt"}
    axes.plot(xs, ys, **style)


def _draw_mark(picture: Picture, axes: Axes, mark: Mark) -> None:
    from matplotlib.patches import Circle, FancyBboxPatch, Patch

    x, y = mark.middle
    text: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 2, "linespacing": 1.15}
    if mark.kind in ("identity", "importance", "cut"):
        size = layout.SMALL if mark.kind == "cut" else layout.MEDIUM
        text |= {"color": FAINT if mark.kind == "cut" else INK, "style": _STYLES.get(mark.kind, "normal")}
        picture.tell(axes.text(x, y, mark.label, fontsize=size, **text), mark.tip)
        return
    tint = INK if mark.kind == "sum" else colour(mark.branch)
    patch: Patch
    if mark.kind == "sum":
        reach = mark.width / 2
        axes.plot([x - reach, x + reach], [y, y], color=INK, linewidth=1.0, zorder=2)
        axes.plot([x, x], [y - reach, y + reach], color=INK, linewidth=1.0, zorder=2)
        patch = Circle((x, y), reach)
    else:
        style = f"round,pad=0,rounding_size={_ROUND[mark.kind]}"
        patch = FancyBboxPatch((mark.x, mark.y), mark.width, mark.height, boxstyle=style)
        fill = 0.4 if (mark.kind, mark.branch) == ("kernel", ORIGIN) else _FILLS[mark.kind]
        ground = FancyBboxPatch((mark.x, mark.y), mark.width, mark.height, boxstyle=style)
        ground.set(facecolor=(tint, fill), linewidth=0, zorder=0 if mark.kind == "frame" else 2)
        axes.add_patch(ground)
        if mark.kind == "frame":
            axes.text(mark.x + 6, mark.y + 4, mark.label, fontsize=layout.SMALL, fontweight="bold", va="top", zorder=2)
        else:
            axes.text(x, y, mark.label, fontsize=layout.SMALL if mark.kind == "norm" else layout.LARGE, **text)
    # a pane of glass over the text, so that the whole of a box can be pointed at; a frame must not cover what is in it
    patch.set(edgecolor=tint, facecolor=(tint, 0.01), linewidth=1.0, zorder=0.5 if mark.kind == "frame" else 3)
    axes.add_patch(patch)
    picture.tell(patch, mark.tip)


def _draw_ends(axes: Axes, middle: float, top: float, bottom: float) -> None:
    """Where the input comes from, and where the sum goes."""
    arrow = {"arrowstyle": "-|>", "color": FAINT, "linewidth": 1.0, "mutation_scale": 7, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (middle, top), (middle, top - 11), arrowprops=arrow)
    axes.annotate("", (middle, bottom + 12), (middle, bottom), arrowprops=arrow)
    words: dict[str, Any] = {"ha": "center", "fontsize": layout.MEDIUM}
    axes.text(middle, top - 14, "input", va="baseline", **words)


def _alt(run: Run, block: Block) -> str:
    told = run.rows[-1]["epoch"]
    return f"Structure of {block.layer} after {run.unit} {told} of {run.epochs}: {_described(block)}."


def _described(block: Block) -> str:
    """A block in words."""
    lanes = "; ".join(_lane_words(lane) for lane in block.living)
    cut = ", ".join(f"{lane.branch} ({lane.cut})" for lane in block.lanes if lane.cut)
    return f"the sum of {lanes}" + (f"; no longer there: {cut}" if cut else "")


def _lane_words(lane: Lane) -> str:
    words = f"{lane.title} ({lane.facts})" if lane.facts else lane.title
    for part in lane.parts:
        if part.block is not None:
            words += f", whose {part.name} is in turn [{_described(part.block)}]"
    return words
