"""The report of one or several runs: one HTML file that needs nothing else, and its figures as PNGs beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from dyrep.errors import ConfigError, DyRepError
from dyrep.records import PLAIN, PREDICTIONS, finite, write_text
from dyrep.report import figures, history, results
from dyrep.report.html import card, embedded, figure, number, page, section, table
from dyrep.report.pictures import Picture, short
from dyrep.report.runs import Group, Run, grouped, read_run
from dyrep.report.timeline import timeline
from dyrep.wording import METRICS, MISSING, counted, duration, large, mean_and_spread


def write_report(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> tuple[Path, list[Path]]:
    """Read the folders of runs and write a report of them.

    Args:
        runs: the folders. Runs that differ in nothing but the seed are taken together.
        out: the page; its figures go into a folder beside it, called as the page with ``-figures`` at the end.

    Returns:
        The page, and the figures as PNGs.

    Raises:
        CheckpointError: one of the folders holds no run, or a damaged one.
        ConfigError: there is no run, the same run twice, or the page has another ending than .html.
    """
    out = Path(out)
    if out.suffix not in (".html", ".htm"):
        raise ConfigError(f"{out}: a report is an .html file")
    folders = [Path(run).resolve() for run in runs]
    if not folders:
        raise ConfigError("no run to report: give at least one folder of a run")
    if len(set(folders)) < len(folders):
        raise ConfigError("the same run was given twice")
    report = Report([read_run(run) for run in runs])
    text = report.html()
    beside = out.with_name(f"{out.stem}-figures")
    write_text(out, text)
    try:
        return out, [picture.save_png(beside / f"{picture.name}.png") for picture in report.pictures]
    except OSError as error:
        raise DyRepError(f"{beside} cannot be written: {error}") from error


class Report:
    """Puts a page together.

    Args:
        runs: what it is about.

    Attributes:
        pictures: all figures of the page, once it has been made.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.groups = grouped(runs)
        self.runs = [run for group in self.groups for run in group.runs]
        self.unit = self.runs[0].unit
        if any(run.unit != self.unit for run in self.runs):
            raise ConfigError("some of the runs count epochs and others steps: make a report of each kind")
        metrics = sorted({METRICS[run.metric] for run in self.runs})
        if len(metrics) > 1:
            raise ConfigError(f"the runs are measured by {' and '.join(metrics)}: make a report of each kind")
        self.metric = metrics[0]
        self._named = [(f"{group.label}, seed {run.seed}", run) for group in self.groups for run in group.runs]
        self.pictures: list[Picture] = []

    def html(self) -> str:
        """The whole page."""
        self.pictures = []
        parts = [
            ("result", "Result", self._result()),
            ("convergence", "Convergence", self._convergence()),
            ("cost", "Cost of training", self._cost()),
            ("predictions", "Predictions", self._predictions()),
            ("structure", "Structure", self._structure()),
            ("proof", "The deployed network is the same function", self._proof()),
            ("time", "Where the time went", self._time()),
            ("provenance", "Provenance", self._provenance()),
        ]
        shown = [(name, title, content) for name, title, content in parts if content]
        title = f"dyrep: {', '.join(sorted({run.title for run in self.runs}))}"
        epochs = sorted({run.epochs for run in self.runs})
        subtitle = (
            f"{counted(len(self.runs), 'run')} of {counted(len(self.groups), 'kind')}, "
            f"{' and '.join(map(str, epochs))} {self.unit}s; made from the folders of the runs alone"
        )
        body = "\n".join(section(*part) for part in shown)
        files = resources.files("dyrep.report")
        styles, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
        return page(title, subtitle, [(name, title) for name, title, _ in shown], body, styles, script)

    def _figure(self, picture: Picture | None, words: str, data: str = "") -> str:
        if picture is not None:
            self.pictures.append(picture)
        return figure(picture, words, data)

    # -- what came out ------------------------------------------------------------------------------------------

    def _result(self) -> str:
        cards = "".join(self._card(group) for group in self.groups)
        rows = [
            (
                group.label,
                len(group.runs),
                mean_and_spread(results.accuracies(group)) + ("" if results.ended(group) else ", so far"),
                _relative(results.macs(group), results.plain_macs(group)),
                _relative(results.epoch_seconds(group), self._plain_seconds(group)),
                number(results.fold_error(group), ".1e"),
            )
            for group in self.groups
        ]
        ratios = ("multiply-adds, × plain", "time per epoch, × plain")
        heads = ("method", "seeds", f"{self.metric}, %", *ratios, "fold error")
        compared = table(f"All kinds of runs; {self.metric} of the folded network, mean ± sd over seeds", heads, rows)
        return f'<div class="cards">{cards}</div>' + (compared if len(self.groups) > 1 else "")

    def _card(self, group: Group) -> str:
        facts: list[tuple[str, str, bool | None]] = [
            ("multiply-adds in training", _relative(results.macs(group), results.plain_macs(group), " plain"), None)
        ]
        if results.seconds(group):
            facts.append(("time in all", duration(results.seconds(group)), None))
        plain_seconds = self._plain_seconds(group)
        if plain_seconds is not None and group.runs[0].method != "origin":
            facts.append(("time per epoch", _relative(results.epoch_seconds(group), plain_seconds, " plain"), None))
        error, passed = results.fold_error(group), results.fold_passed(group)
        if error is not None:
            words = number(error, ".1e") + ("" if passed else ", too much")
            facts.append(("folding changes the output by", words, passed))
        going = sum(run.summary is None and not run.own_loop for run in group.runs)
        if going:
            facts.append(("not finished", counted(going, "run"), False))
        found = results.accuracies(group)
        if not found:
            why = "is not defined on these test images" if results.ended(group) else "was not written down"
            return card(group.label, MISSING, f"{self.metric} {why}", facts)
        seeds = "one seed" if len(found) == 1 else f"mean ± sd over {len(found)} seeds"
        split = f"{group.runs[0].split} set, so far" if error is None else "test set, folded"
        return card(group.label, f"{mean_and_spread(found)} %", f"{self.metric} ({split}), {seeds}", facts)

    def _plain_seconds(self, group: Group) -> float | None:
        """Time of an epoch of plain training under the same circumstances, if it is among the runs."""
        plain = [other for other in self.groups if other.runs[0].method == "origin"]
        alike = [other for other in plain if results.can_be_timed_against(group, other)]
        return results.epoch_seconds(alike[0]) if alike else None

    # -- how it went --------------------------------------------------------------------------------------------

    def _convergence(self) -> str:
        rows = [(name, *_row(run)) for name, run in self._named]
        measured = (f"{self.metric}, %", f"best {self.metric}, %")
        heads = ("run", f"{self.unit}s", "training loss", "training accuracy, %", *measured)
        first = "Accuracy" if self.metric == "accuracy" else self.metric
        words = (
            f"{first} and training loss of all runs. Ticks at the bottom are updates that changed a structure: an edit "
            "must not show as a jump."
        )
        return self._figure(figures.curves(self.groups), words, table(f"After the last {self.unit}", heads, rows))

    def _cost(self) -> str:
        rows = []
        for name, run in self._named:
            macs, parameters = (history.average(history.series(run, key)) for key in ("macs", "parameters"))
            rows.append(
                (
                    name,
                    f"{_large(macs)} ({_relative(macs, run.plain_macs)})",
                    _large(parameters),
                    number(history.average(history.step_milliseconds(run)), ".2f"),
                    number(max((value for _, value in history.series(run, "memory_gib")), default=None), ".2f"),
                )
            )
        heads = ("run", "multiply-adds", "parameters", "ms per step", "peak memory, GiB")
        averages = table("Averages over time, as the paper reports them; of memory, the peak", heads, rows)
        words = "What a training step costs while the structure changes; the deployed network is the plain one."
        return self._figure(figures.costs(self.groups), words) + averages

    def _predictions(self) -> str:
        """What detectors and segmentation networks drew at their end, of the first run of every kind."""
        shown = [(group, group.runs[0].path / PREDICTIONS) for group in self.groups]
        words = "What the folded network says about a few images that it was not trained on"
        return "".join(
            embedded(path.read_bytes(), f"{words}: {group.label}, seed {group.runs[0].seed}.")
            for group, path in shown
            if path.is_file()
        )

    def _structure(self) -> str:
        parts = []
        changed = [(name, run) for name, run in self._named if history.lives(run)]
        for index, (name, run) in enumerate(changed):
            head = f"<summary>{escape(name)}</summary>"
            content = self._evolution(run, str(index + 1))
            parts.append(f'<details class="run"{" open" if index == 0 else ""}>{head}{content}</details>')
        return "".join(parts)

    def _evolution(self, run: Run, suffix: str) -> str:
        born = history.lives(run)
        lived = table(
            "All branches",
            ("branch", f"grown after {self.unit}", "why", f"absorbed after {self.unit}", "why"),
            [(f"{short(x.layer)}, {x.branch}", x.born, x.why, x.died, x.end or MISSING) for x in born],
        )
        drifts = history.drifts(run)
        changes = table(
            "Relative change of the output by every edit",
            ("edit", self.unit, "in eval mode", "in training mode"),
            [(d.edit, d.epoch, f"{d.evaluated:.1e}", number(d.training, ".1e")) for d in drifts],
        )
        found = history.scores(run)
        scored = table(
            "Scores",
            ("layer", *(f"{self.unit} {epoch:g}" for epoch in found.epochs)),
            [(short(layer), *values) for layer, values in found.values.items()],
        )
        strengths = history.importances(run)
        final = table(
            "Importance at the end of every branch's life",
            ("branch", "importance", self.unit),
            [
                (f"{short(layer)}, {branch}", f"{values[-1][1]:.4f}", values[-1][0])
                for layer, branches in strengths.items()
                for branch, values in branches.items()
            ],
        )
        return (
            self._figure(
                timeline(run, f"timeline-{suffix}"),
                "A bar for every branch, from the update that grew it to the one that absorbed it.",
                lived,
            )
            + self._figure(
                figures.importance(run, f"importance-{suffix}"),
                "Importance of branches, the mean of |γ|."
                + (" When they differ enough, those below the mean are absorbed." if run.cuts else ""),
                final,
            )
            + self._figure(
                figures.score_map(run, f"scores-{suffix}"),
                "Which convolution matters most? At every update the largest score of those that may grow is expanded.",
                scored,
            )
            + self._figure(
                figures.drift(run, f"drift-{suffix}"),
                "Edits preserve the function: in eval mode up to rounding, in training mode up to the new branches' γ.",
                changes,
            )
        )

    # -- what to trust it for -----------------------------------------------------------------------------------

    def _proof(self) -> str:
        rows: list[tuple[Any, ...]] = []
        for name, run in self._named:
            found = run.summary
            if found is None:
                verdict = "a loop of your own: see dyrep.verify" if run.own_loop else "not finished"
                rows.append((name, verdict, None, None, None, MISSING))
                continue
            rows.append(
                (
                    name,
                    "passed" if found["fold_passed"] else "failed",
                    number(float(found["fold_error"]), ".1e"),
                    number(finite(found[f"test_{run.metric}"]), ".2f"),
                    number(finite(found[f"test_{run.metric}_folded"]), ".2f"),
                    found.get("fold_report", MISSING),
                )
            )
        measured = (f"{self.metric} with branches, %", "folded, %")
        heads = ("run", "verdict", "largest error", *measured, "what was compared")
        words = (
            "At the end every run was folded into the plain network, key for key, and both were run on the same test "
            f"images. Its weights are in <code>{PLAIN}</code> of the run's folder."
        )
        return f"<p>{words}</p>" + table("Folded against trained", heads, rows)

    def _time(self) -> str:
        if not any(map(results.seconds, self.groups)):
            return ""
        kinds = list(dict.fromkeys(kind for run in self.runs for kind in history.time_shares(run)))
        rows = []
        for name, run in self._named:
            shares = history.time_shares(run)
            total = sum(shares.values()) or 1.0
            cells = [
                f"{duration(shares[kind])} ({shares[kind] / total:.0%})" if kind in shares else None for kind in kinds
            ]
            rows.append((name, duration(total), *cells))
        return table("Wall-clock time", ("run", "in all", *kinds), rows)

    def _provenance(self) -> str:
        parts = []
        for name, run in self._named:
            first = run.sessions[0] if run.sessions else {}
            hardware = sorted({str(session.get("hardware")) for session in run.sessions})
            versions = ", ".join(f"{package} {version}" for package, version in first.get("versions", {}).items())
            facts: list[tuple[str, Any]] = [
                ("folder", run.path.name),
                ("seed", run.seed),
                ("hardware", "; ".join(hardware) or MISSING),
                ("processes", first.get("processes")),
                ("versions", versions or MISSING),
                ("started", counted(len(run.sessions), "time")),
            ]
            recipe = escape(json.dumps(run.recipe, indent=2))
            parts.append(
                f"<h3>{escape(name)}</h3>"
                + table("Where it comes from", ("fact", "value"), facts)
                + f'<details class="data"><summary>All settings</summary><pre>{recipe}</pre></details>'
            )
        return "".join(parts)


def _row(run: Run) -> tuple[Any, ...]:
    last = run.rows[-1]
    measured = [value for _, value in history.series(run, f"{run.split}_{run.metric}")]
    return (
        last["epoch"],
        number(finite(last.get("train_loss")), ".4f"),
        number(finite(last.get("train_accuracy")), ".2f"),
        number(measured[-1] if measured else None, ".2f"),
        number(max(measured, default=None), ".2f"),
    )


def _large(value: float | None) -> str:
    return MISSING if value is None else large(value)


def _relative(value: float | None, plain: float | None, unit: str = "") -> str:
    return MISSING if value is None or not plain else f"{value / plain:.2f} ×{unit}"
