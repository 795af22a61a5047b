"""What a block of a run consists of, and what became of it: lanes side by side, and blocks inside of blocks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dyrep.branches import BRANCHES, ORIGIN, is_copy
from dyrep.errors import ConfigError
from dyrep.methods.catalogue import method
from dyrep.report.history import Life, cuts, epoch_of, lives
from dyrep.report.pictures import in_order
from dyrep.report.runs import Run

_MOST = 40  # layers that a message lists


@dataclass(frozen=True)
class Part:
    """One step of a lane.

    Attributes:
        kind: ``"kernel"`` is learned, ``"fixed"`` is not; ``"norm"``; or ``"identity"``, which does nothing.
        label: what is written on it.
        about: what it is, in words.
        block: what it has grown into; None if it is plain.
    """

    kind: str
    label: str
    about: str
    block: Block | None = None

    @property
    def name(self) -> str:
        """Its label as branches are written elsewhere."""
        return self.label.replace("×", "x")


@dataclass(frozen=True)
class Lane:
    """One of the parallel ways through a block.

    Attributes:
        branch: its name; ``"KxK"`` is the original convolution.
        parts: what it computes, one after the other; nothing if it was cut.
        importance: its s; None if it has no norm, or if that was not written down.
        fate: when it was grown, or grown and cut, in words.
        cut: when it was cut; empty if it is there.
    """

    branch: str
    parts: tuple[Part, ...]
    importance: float | None = None
    fate: str = ""
    cut: str = ""

    @property
    def title(self) -> str:
        """What it is called."""
        return f"the original {self.parts[0].name if self.parts else ORIGIN}" if self.branch == ORIGIN else self.branch

    @property
    def facts(self) -> str:
        """What is known of it, in words."""
        s = "" if self.importance is None else f"s = {importance_text(self.importance)}"
        return ", ".join(filter(None, (s, self.fate)))


@dataclass(frozen=True)
class Block:
    """A convolution with branches.

    Attributes:
        layer: its name.
        lanes: the original convolution and its branches, in a fixed order, with those that were cut.
        replaces: the norm whose place it takes; empty if there is none.
    """

    layer: str
    lanes: tuple[Lane, ...]
    replaces: str = ""

    @property
    def living(self) -> tuple[Lane, ...]:
        """The lanes that were not cut."""
        return tuple(lane for lane in self.lanes if not lane.cut)


def importance_text(value: float) -> str:
    """An importance in few characters.

    Example:
        >>> importance_text(0.018116), importance_text(1.00346), importance_text(0.0000321)
        ('0.0181', '1.003', '3.2e-05')
    """
    if value and abs(value) < 0.0005:
        return f"{value:.1e}"
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.3f}"


def blocks_of(run: Run) -> dict[str, dict[str, Any]]:
    """Plans of the blocks that a run's network had when it was last written down, by layer."""
    if run.summary is not None and "structure" in run.summary:
        found = run.summary["structure"]["blocks"]
    elif described := [event["structure"] for event in run.updates if "structure" in event]:
        found = described[-1]["blocks"]
    elif isinstance(run.recipe.get("structure"), dict):
        found = run.recipe["structure"]["blocks"]
    else:  # made before training, and not changed since
        edits = [edit for event in run.events if event["type"] == "converted" for edit in event["edits"]]
        usual = {"origin_norm": True, "scaling": method(run.method).scaling}
        found = {edit["layer"]: {**usual, **edit["detail"], "branches": edit["branches"]} for edit in edits}
    return dict(sorted(found.items(), key=lambda item: in_order(item[0])))


def importances_of(run: Run) -> tuple[dict[str, dict[str, float]], float | None]:
    """The last importances that were written down, by layer and branch, and of which epoch the newest are."""
    if run.summary is not None and "importances" in run.summary:
        return _numbers(run.summary["importances"]), float(run.rows[-1]["epoch"])
    told = [(float(row["epoch"]), row["importances"]) for row in run.rows if row.get("importances")]
    # a row tells of the time before its epoch's update
    told += [(epoch_of(run, event), event["importances"]) for event in run.updates if event.get("importances")]
    told.sort(key=lambda entry: entry[0])
    newest: dict[str, dict[str, float]] = {}
    for _, layers in told:
        for layer, values in _numbers(layers).items():
            newest.setdefault(layer, {}).update(values)
    return newest, told[-1][0] if told else None


def read_block(run: Run, layer: str) -> Block:
    """What a layer has grown into.

    Raises:
        ConfigError: it has no branches; the message lists layers that have.
    """
    plans = blocks_of(run)
    if layer not in plans:
        raise ConfigError(_no_block(run, layer, list(plans)))
    return _Reader(plans, importances_of(run)[0], lives(run), run).block(layer, since=0.0)


def which_layers(layers: list[str]) -> str:
    """Layers that have blocks, for messages."""
    more = f" and {len(layers) - _MOST} more" if len(layers) > _MOST else ""
    return f"layers with branches: {', '.join(layers[:_MOST])}{more}"


def nothing_to_draw(run: Run) -> str:
    """Why a run has no block at all, for messages."""
    if run.method == "origin":
        return f"the network of {run.path} is plain, as its method says: there is no block to draw"
    when = "has no branches" if lives(run) else "has grown no branches yet"
    return f"the network of {run.path} {when} after {run.unit} {run.rows[-1]['epoch']}: there is no block to draw"


def _no_block(run: Run, layer: str, layers: list[str]) -> str:
    if not layers:
        return nothing_to_draw(run)
    gone = [epoch for epoch, where, _, _ in cuts(run) if where == layer]
    if gone:
        return f"layer {layer!r} has no branches since {_at(run, max(gone))}, when it was cut; {which_layers(layers)}"
    close = [name for name in layers if name.endswith(f".{layer}")]
    close = close or difflib.get_close_matches(layer, layers, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"layer {layer!r} of {run.path} has no branches; {which_layers(layers)}{hint}"


@dataclass(frozen=True)
class _Reader:
    """Puts together what is told of a run in different places."""

    plans: Mapping[str, Mapping[str, Any]]
    strengths: Mapping[str, Mapping[str, float]]
    lives: list[Life]
    run: Run

    def block(self, layer: str, since: float) -> Block:
        """A block, and what it was in the course of a run; ``since`` is when the branch it is in was grown."""
        plan = self.plans[layer]
        own = {life.branch: life for life in self.lives if life.layer == layer and life.born >= since}  # the latest
        names = {*plan["branches"], *own} - {ORIGIN}
        lanes = [self._origin(layer, plan), *(self._lane(layer, name, plan, own) for name in sorted(names, key=_rank))]
        return Block(layer, tuple(lanes), plan.get("replaces") or "")

    def _origin(self, layer: str, plan: Mapping[str, Any]) -> Lane:
        if not plan.get("origin", True):
            gone = [epoch for epoch, where, branch, _ in cuts(self.run) if (where, branch) == (layer, ORIGIN)]
            when = _at(self.run, gone[-1]) if gone else "some time"
            return Lane(ORIGIN, (), fate=f"dropped at {when}", cut=f"dropped at {when}")
        kernel = Part("kernel", _kernel(layer), "the original convolution")
        norm = (_end(plan),) if plan.get("origin_norm") else ()
        s = self.strengths.get(layer, {}).get(ORIGIN)
        return Lane(ORIGIN, (kernel, *norm), s, "" if norm else "without a norm of its own, so without s")

    def _lane(self, layer: str, branch: str, plan: Mapping[str, Any], own: Mapping[str, Life]) -> Lane:
        life = own.get(branch)
        grown = (
            "" if life is None else "there from the start" if life.born == 0 else f"grown at {_at(self.run, life.born)}"
        )
        if branch not in plan["branches"]:
            assert life is not None
            when = "cut" if life.died is None else f"cut at {_at(self.run, life.died)}"
            reason = f" ({life.end})" if life.end else ""
            return Lane(branch, (), fate=f"{grown}, {when}{reason}", cut=when)
        inside = f"{layer}.branches.{branch}." if layer else f"branches.{branch}."
        parts = []
        for path, part in _steps(branch, plan):
            block = None
            if path and inside + path in self.plans:
                block = self.block(inside + path, 0.0 if life is None else life.born)
            parts.append(replace(part, label=part.label.replace("K×K", _kernel(layer)), block=block))
        s = self.strengths.get(layer, {}).get(branch)
        return Lane(branch, (*parts, _end(plan)), s, grown)


def _kernel(layer: str) -> str:
    """The kernel of a convolution in terms of the outermost one's: ``1×K`` inside of a branch ``1xK``.

    Example:
        >>> _kernel("conv"), _kernel("conv.branches.1x1-KxK.conv"), _kernel("conv.branches.1xK.conv")
        ('K×K', 'K×K', '1×K')
    """
    rows = columns = "K"
    for branch, module in re.findall(r"branches\.([^.]+)\.(\w+)", layer):
        rows = "1" if module == "point" or branch in ("1x1", "1xK") else rows
        columns = "1" if module == "point" or branch in ("1x1", "Kx1") else columns
    return f"{rows}×{columns}"


def _steps(branch: str, plan: Mapping[str, Any]) -> Iterator[tuple[str, Part]]:
    """What a branch computes before its norm, in the order it is computed; each with its module's name."""
    point = Part("kernel", "1×1", "mixes the channels")
    if branch == "1x1-KxK":
        width = plan.get("width", 1)
        yield "point", Part("kernel", "1×1", f"{point.about} into {width} times as many") if width > 1 else point
        if plan.get("scaling") != "linear":
            yield "", Part("norm", "norm γ", "normalises and scales by γ, without a shift")
        yield "conv", Part("kernel", "K×K", "a convolution of its own")
    elif branch == "1x1-AVG":  # the pool comes first: the two commute, and there is less to compute
        yield "", Part("fixed", "AVG K×K", "average pooling; nothing to learn")
        yield "point", Part("kernel", "1×1", f"{point.about}, unless the convolution is depthwise")
    elif branch == "1x1-DCT":
        yield "point", point
        yield "", Part("fixed", "DCT K×K", "a fixed cosine filter for every channel; nothing to learn")
    elif branch == "DW-1x1":
        yield "depthwise", Part("kernel", "DW K×K", "filters every channel by itself, several times")
        yield "point", point
    elif branch == "residual":
        yield "", Part("identity", "identity", "the input itself")
    elif is_copy(branch):
        yield "conv", Part("kernel", _times(branch), "another convolution of the original size")
    else:
        yield "conv", Part("kernel", _times(branch), point.about if branch == "1x1" else "a convolution")


def _end(plan: Mapping[str, Any]) -> Part:
    """What stands at the end of every branch."""
    scaling = plan.get("scaling", "norm")
    if scaling == "linear":
        return Part("norm", "scale γ", "multiplies every channel by γ")
    gate = ", behind a gate that the search opens and shuts" if scaling == "gated" else ""
    return Part("norm", "norm γ", f"normalises and scales by γ{gate}")


def _rank(branch: str) -> tuple[int, int, str]:
    """A key that sorts branches: copies of the origin, those of the paper, and others."""
    if is_copy(branch):
        return 0, int(branch.rpartition("-")[2]), ""
    return (1, BRANCHES.index(branch), "") if branch in BRANCHES else (2, 0, branch)


def _numbers(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Importances as numbers; a log has text for those that JSON has no word for."""
    return {layer: {branch: float(value) for branch, value in values.items()} for layer, values in layers.items()}


def _at(run: Run, when: float) -> str:
    return f"{run.unit} {round(when, 1):g}"


def _times(branch: str) -> str:
    return branch.replace("x", "×")
