"""Our figures beside the paper's, as text, as Markdown and as data."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from dyrep.reproduce.outcomes import Outcome
from dyrep.reproduce.scales import Scale
from dyrep.reproduce.studies import COLUMNS, Study
from dyrep.wording import MISSING, mean_and_spread

_FORMS = {"accuracy": ".2f", "macs": ".0f", "parameters": ".1f", "cost": ".1f", "speed": ".0f", "branches": ".0f"}
_UNITS = {"cost": " min"}
METRICS = ("accuracy", "mAP", "mIoU")
_WIDTH = 100  # columns of a terminal


def ours(column: str, outcome: Outcome) -> str:
    """Our figure: the mean over seeds, and of metrics their spread."""
    values = outcome.figures.get(column)
    if not values:
        return MISSING
    form = _FORMS.get(column, ".2f") if max(values) >= 10 or column == "branches" else ".2f"
    told = mean_and_spread(values if column in METRICS else [statistics.mean(values)], form)
    return f"{told}{_UNITS.get(column, '')}"


def lines(study: Study, outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The table as cells, head first: every column twice, the paper's figure and ours."""
    titles = [f"{COLUMNS[column]}: {who}" for column in study.columns for who in ("paper", "ours")]
    table = [["", *titles, "state"]]
    for outcome in outcomes:
        row = outcome.row
        cells = [f"{row.group}, {row.label}" if row.group else row.label]
        for column in study.columns:
            cells += [str(row.paper.get(column, MISSING)), ours(column, outcome)]
        table.append([*cells, _state(outcome)])
    return table


def _state(outcome: Outcome) -> str:
    if outcome.state == "done" and not outcome.reason:
        seeds = max(map(len, outcome.figures.values()))
        return f"{seeds} seed{'s' if seeds > 1 else ''}"
    return f"{outcome.state}: {outcome.reason}" if outcome.reason else outcome.state


def as_text(study: Study, scale: Scale, outcomes: Sequence[Outcome]) -> str:
    """For a terminal: what a column is about stands over its two figures, and reasons below, each of them once."""
    reasons = list(dict.fromkeys(outcome.reason for outcome in outcomes if outcome.reason))
    rows = [line[:-1] for line in lines(study, outcomes)[1:]]
    for row, outcome in zip(rows, outcomes, strict=True):
        mark = reasons.index(outcome.reason) + 1 if outcome.reason else 0
        row.append(f"{outcome.state} [{mark}]" if mark else _state(outcome))
    under = ["", *("paper", "ours") * len(study.columns), "state"]
    widths = [max(map(len, column)) for column in zip(under, *rows, strict=True)]
    over = [" " * widths[0]]
    for place, column in enumerate(study.columns):
        paper, own = 1 + 2 * place, 2 + 2 * place
        widths[own] = max(widths[own], len(COLUMNS[column]) - widths[paper] - 2)
        over.append(COLUMNS[column].ljust(widths[paper] + 2 + widths[own]))
    body = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in (under, *rows)]
    head = [f"{study.source}: {study.title}", *_wrapped(f"scale: {scale.name}, {scale.about}")]
    told = [line for number, reason in enumerate(reasons, 1) for line in _wrapped(f"[{number}] {reason}")]
    notes = [line for note in _notes(study) for line in _wrapped(note)]
    return "\n".join([*head, "", "  ".join(over).rstrip(), *body, *([""] if told else []), *told, *notes])


def _wrapped(words: str) -> list[str]:
    """Lines for a terminal; names of folders and files stay whole."""
    return textwrap.wrap(words, _WIDTH, break_long_words=False, break_on_hyphens=False) or [""]


def as_markdown(study: Study, scale: Scale, outcomes: Sequence[Outcome]) -> str:
    """For a page."""
    head, *rows = lines(study, outcomes)
    body = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    title = f"## {study.source}: {study.title}"
    return "\n".join([title, "", f"Scale: {scale.name}, {scale.about}.", "", *body, *_notes(study), ""])


def _notes(study: Study) -> list[str]:
    return ["", study.note] if study.note else []


def as_data(study: Study, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For a file."""
    return [
        {
            "label": outcome.row.label,
            "group": outcome.row.group,
            "training": None if outcome.row.training is None else outcome.row.training.key,
            "paper": dict(outcome.row.paper),
            "state": outcome.state,
            "reason": outcome.reason,
            "ours": {column: values for column, values in outcome.figures.items() if column in study.columns},
            "runs": [run.name for run in outcome.runs],
        }
        for outcome in outcomes
    ]
