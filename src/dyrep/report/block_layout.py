"""Where everything of a block's picture goes, in points from the top left; a block in a block is laid out alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

from dyrep.report.block_tree import Block, Lane, Part, importance_text

LARGE, MEDIUM, SMALL = 8.5, 8.0, 7.0
"""Sizes of text: on kernels, importances, and all else."""

SUM_RADIUS = 6.0
_KERNEL, _NORM, _LINE = 19.0, 13.0, 9.5  # heights of boxes and of a line of small text
_SIDE = 7.0  # between a label and the side of its box
_STEP, _BETWEEN = 9.0, 11.0  # between the parts of a lane; between lanes
_SPLIT, _IMPORTANCE, _MERGE = 8.0, 15.0, 10.0  # heights of the split, of the row of importances, of the merge
_PAD, _HEAD = 9.0, 14.0  # inside of a frame; above what it frames


@dataclass(frozen=True)
class Mark:
    """Something with a place: a box, a frame, a text.

    Attributes:
        kind: ``"kernel"``, ``"fixed"``, ``"norm"``, ``"identity"``, ``"frame"``, ``"sum"``, ``"importance"`` or
            ``"cut"``.
        x: left side.
        y: upper side.
        width: from side to side.
        height: from above to below.
        label: what is written in it; a frame's is in its corner.
        branch: what gives it its colour.
        tip: what it stands for, in words.
    """

    kind: str
    x: float
    y: float
    width: float
    height: float
    label: str = ""
    branch: str = ""
    tip: str = ""

    @property
    def middle(self) -> tuple[float, float]:
        """Its middle."""
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True)
class Wire:
    """A line; ``branch`` gives it its colour, none that of the ink."""

    points: tuple[tuple[float, float], ...]
    branch: str = ""
    cut: bool = False


@dataclass
class Sheet:
    """Everything that is drawn."""

    marks: list[Mark] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)


@cache
def text_width(text: str, size: float, bold: bool = False) -> float:
    """How wide a text is, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    font = FontProperties(family="sans-serif", weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().width) if text.strip() else 0.0


def size_of(block: Block) -> tuple[float, float]:
    """Width and height of a block, from where its input enters to below its sum."""
    sizes = [_lane_size(lane) for lane in block.lanes]
    width = sum(lane[0] for lane in sizes) + _BETWEEN * (len(sizes) - 1)
    return width, 2 * _SPLIT + _body(block) + _merging(block) + 2 * SUM_RADIUS


def place(sheet: Sheet, block: Block, x: float, y: float) -> None:
    """Put a block on a sheet, its upper left corner at a point; it is entered and left in the middle."""
    width, height = size_of(block)
    middle, split, body = x + width / 2, y + _SPLIT, _body(block)
    merge = split + _SPLIT + body + (_merging(block) - _MERGE)
    sheet.wires.append(Wire(((middle, y), (middle, split))))
    ends: list[tuple[float, bool]] = []
    for lane in block.lanes:
        own, _ = _lane_size(lane)
        _place_lane(sheet, lane, x + own / 2, split, merge, body)
        ends.append((x + own / 2, bool(lane.cut)))
        x += own + _BETWEEN
    living = [end for end, cut in ends if not cut] or [middle]
    for level, across in ((split, [end for end, _ in ends]), (merge, living)):
        left, right = min(*across, middle), max(*across, middle)
        sheet.wires.append(Wire(((left, level), (right, level))))
    count = len(block.living)
    lanes = f"{count} lanes" if count != 1 else "1 lane"
    instead = f", in place of {block.replaces}" if block.replaces else ""
    above = y + height - 2 * SUM_RADIUS
    sheet.wires.append(Wire(((middle, merge), (middle, above))))
    sheet.marks.append(
        Mark("sum", middle - SUM_RADIUS, above, 2 * SUM_RADIUS, 2 * SUM_RADIUS, tip=f"sum of {lanes}{instead}")
    )


def _place_lane(sheet: Sheet, lane: Lane, middle: float, split: float, merge: float, body: float) -> None:
    branch, y = lane.branch, split + _SPLIT
    if lane.cut:
        lines = _cut_lines(lane)
        width, tall = _lane_size(lane)
        text = Mark("cut", middle - width / 2, y + _STEP, width, tall - _STEP, "\n".join(lines), branch, _story(lane))
        sheet.marks.append(text)
        sheet.wires.append(Wire(((middle, split), (middle, text.y)), branch, cut=True))
        return
    boxes = [part for part in lane.parts if part.kind in ("kernel", "fixed") and part.block is None]
    wide = max((_part_size(part)[0] for part in boxes), default=0.0)
    y += (body - _chain(lane)) / 2
    before = split
    for part in lane.parts:
        own, tall = _part_size(part)
        own = wide if part in boxes else own
        sheet.wires.append(Wire(((middle, before), (middle, y)), branch))
        left, tip = middle - own / 2, _tip(lane, part)
        if part.block is None:
            sheet.marks.append(Mark(part.kind, left, y, own, tall, part.label, branch, tip))
        else:
            sheet.marks.append(Mark("frame", left, y, own, tall, part.label, branch, tip))
            inner, _ = size_of(part.block)
            sheet.wires.append(Wire(((middle, y), (middle, y + _HEAD))))
            place(sheet, part.block, middle - inner / 2, y + _HEAD)
            end = y + tall
            sheet.wires.append(Wire(((middle, end - _PAD), (middle, end))))
        before, y = y + tall, y + tall + _STEP
    if lane.importance is not None:
        words = importance_text(lane.importance)
        own = text_width(words, MEDIUM)
        top = merge - _STEP / 2 - _IMPORTANCE + 2
        label = Mark("importance", middle - own / 2, top, own, _IMPORTANCE - 4, words, branch, _story(lane))
        sheet.marks.append(label)
        sheet.wires.append(Wire(((middle, before), (middle, label.y)), branch))
        before = label.y + label.height
    sheet.wires.append(Wire(((middle, before), (middle, merge)), branch))


def _lane_size(lane: Lane) -> tuple[float, float]:
    if lane.cut:
        lines = _cut_lines(lane)
        return max(text_width(line, SMALL) for line in lines), _STEP + _LINE * len(lines)
    widths = [_part_size(part)[0] for part in lane.parts]
    if lane.importance is not None:
        widths.append(text_width(importance_text(lane.importance), MEDIUM))
    return max(widths), _chain(lane)


def _chain(lane: Lane) -> float:
    """Height of a lane's parts with what is between them."""
    return sum(_part_size(part)[1] for part in lane.parts) + _STEP * (len(lane.parts) - 1)


def _body(block: Block) -> float:
    """Height of the highest lane."""
    return max(_lane_size(lane)[1] for lane in block.lanes)


def _merging(block: Block) -> float:
    """Height of what is between the lanes and the sum."""
    told = any(lane.importance is not None for lane in block.living)
    return (_STEP + _IMPORTANCE if told else _STEP) + _MERGE


def _part_size(part: Part) -> tuple[float, float]:
    if part.block is not None:
        width, height = size_of(part.block)
        corner = 2 * (text_width(part.label, SMALL, bold=True) + _SIDE + 4)  # beside the wire that enters
        return max(width + 2 * _PAD, corner), _HEAD + height + _PAD
    if part.kind in ("kernel", "fixed"):
        return math.ceil(text_width(part.label, LARGE) + 2 * _SIDE), _KERNEL
    size = SMALL if part.kind == "norm" else MEDIUM
    return math.ceil(text_width(part.label, size) + (_SIDE if part.kind == "norm" else 0)), _NORM


def _cut_lines(lane: Lane) -> list[str]:
    verb, _, when = lane.cut.partition(" at ")
    return [lane.branch.replace("x", "×"), *([f"{verb} at", when] if when else [verb])]


def _story(lane: Lane) -> str:
    """A lane in words."""
    return f"{lane.title}: {lane.facts}" if lane.facts else lane.title


def _tip(lane: Lane, part: Part) -> str:
    """A part in words."""
    if part.block is None:
        return f"{_story(lane)}; {part.name}: {part.about}"
    branches = len(part.block.living) - 1
    grown = f"has grown {branches} branch{'es' if branches != 1 else ''} of its own"
    return f"{part.name} of {_story(lane)}; it {grown} ({part.block.layer})"
