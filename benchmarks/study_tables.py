"""Tables of the documentation that are made from what `arms.py` has found."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arms import against_baseline
from comparisons import COMPARISONS, Comparison
from runs import short, told

from dyrep.reproduce import STUDIES
from dyrep.wording import MISSING, mean_and_spread

ROOT = Path(__file__).resolve().parent.parent


def executions_table() -> str:
    data = json.loads((ROOT / "results" / "executions.json").read_text())
    lines = ["| VGG-16, CIFAR-10, 40 epochs | test accuracy, folded (%) | seeds | s per epoch |", "|---|---|---|---|"]
    for arm, flags in COMPARISONS["executions"].arms.items():
        found = [run["test_accuracy"] for run in data["runs"] if run["flags"] == flags]
        if found:
            each = ", ".join(f"{accuracy:.2f}" for accuracy in found)
            seconds = f"{data['epoch_seconds'][flags]:.2f}" if flags in data["epoch_seconds"] else "not measured"
            lines.append(f"| {arm} | {mean_and_spread(found)} | {each} | {seconds} |")
    versions = data["versions"]
    lines += ["", f"({data['hardware']}; torch {versions['torch']}; `make executions`, `results/executions.json`)"]
    return "\n".join(lines)


def selection_tables() -> str:
    """What the studies have found that choose defaults."""
    parts = []
    for name, comparison in COMPARISONS.items():
        table = selection_table(name) if comparison.held_out else ""
        if table:
            parts.append(f"{comparison.title[0].upper()}{comparison.title[1:]}:\n\n{table}")
    return "\n\n".join(parts)


def selection_table(name: str) -> str:
    """What one of them has found so far; nothing while there is nothing to compare."""
    data = json.loads((ROOT / "results" / "selection.json").read_text())
    comparison, runs = COMPARISONS[name], data["runs"]
    heads = ["", "accuracy on 5,000 images held out (%)", "against the first (95 %)", "seeds"]
    heads += ["training loss", "multiply-adds, average"]
    minutes = {arm: minutes_alone(runs, flags) for arm, flags in comparison.arms.items()}
    timed = sum(span is not None for span in minutes.values()) > 1  # one alone compares nothing
    heads += ["training alone on the GPU"] if timed else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for arm, flags in comparison.arms.items():
        own = [run for run in runs if run["flags"] == flags]
        if not own:
            continue
        found = [run["val_accuracy"] for run in own]
        loss = mean_and_spread([run["train_loss"] for run in own], ".3f")
        macs = short(statistics.mean(run["mean_macs"] for run in own))
        against = told(against_baseline(runs, comparison, arm))
        cells = [arm, mean_and_spread(found), against, str(len(found)), loss, macs]
        cells += [told_minutes(minutes[arm])] if timed else []
        lines.append(f"| {' | '.join(cells)} |")
    if len(lines) < 4:  # one arm alone says nothing
        return ""
    about = f"{data['hardware']}; torch {data['versions']['torch']}; `{command(name, 'selection')}`"
    return "\n".join([*lines, "", f"({about})"])


def minutes_alone(runs: list[dict[str, Any]], flags: str) -> float | None:
    """How long the training of an arm takes alone on the GPU, if that was measured."""
    spans = [run["alone_minutes"] for run in runs if run["flags"] == flags and "alone_minutes" in run]
    return statistics.mean(spans) if spans else None


def told_minutes(minutes: float | None) -> str:
    return MISSING if minutes is None else f"{minutes:.1f} min"


def growth_figures() -> str:
    """What networks without a limit grow to, and what is cut with the paper's λ."""
    runs = json.loads((ROOT / "results" / "selection.json").read_text())["runs"]
    flags = [(run["flags"].split(), run) for run in runs if run["flags"].startswith("--method dyrep ")]
    evolved = [(words, run) for words, run in flags if "--start-with" not in words]  # those did not grow what they have
    grown = [
        f"{words[words.index('--score') + 1]} {short(run['mean_macs'])}"
        for words, run in evolved
        if "--macs-limit" not in words
    ]
    cuts = [run["cut"] for words, run in evolved if "--cut" not in words and "cut" in run]
    layers = ", ".join(sorted({layer for cut in cuts for layer, *_ in cut}))
    return "\n".join(
        [
            f"- Multiply-adds without a limit, average over training, one seed per score: {', '.join(grown)}.",
            f"- In {len(cuts)} runs with the paper's rule: cuts in {layers}, and in no other of 13 layers.",
            "",
            "(`results/selection.json`)",
        ]
    )


def choices_table() -> str:
    """Which layers each score lets grow, in order."""
    data, comparison = json.loads((ROOT / "results" / "selection.json").read_text()), COMPARISONS["scores"]
    by_arm = {
        arm: {run["seed"]: run["expanded"] for run in data["runs"] if run["flags"] == flags}
        for arm, flags in comparison.arms.items()
    }
    seeds = sorted({seed for runs in by_arm.values() for seed in runs})
    heads = ["convolutions that grow, in order", *(f"seed {seed}" for seed in seeds)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for arm, runs in by_arm.items():
        cells = [", ".join(layer.removeprefix("conv") for layer in runs.get(seed, ())) or MISSING for seed in seeds]
        lines += [f"| {arm} | {' | '.join(cells)} |"] if runs else []
    about = f"{data['hardware']}; torch {data['versions']['torch']}; `{command('scores', 'selection')}`"
    return "\n".join([*lines, "", f"(VGG-16, CIFAR-10, 40 epochs under autocast, 1.5 × the multiply-adds. {about})"])


def command(study: str, file: str) -> str:
    return f"python benchmarks/arms.py {study} --data DIR --out results/{file}.json"


def missing_studies() -> str:
    """Studies that have no table, and arms that are missing in those that have one."""
    titles = {name: f"`{name}` ({comparison.title})" for name, comparison in COMPARISONS.items()}
    choosing = [titles[name] for name in COMPARISONS if COMPARISONS[name].held_out and not selection_table(name)]
    parts = [f"{', '.join(choosing)}: `{command('STUDY', 'selection')}`."] if choosing else []
    for name, comparison in COMPARISONS.items():
        lacking = not_begun(comparison, "selection") if comparison.held_out else ()
        if lacking and selection_table(name):
            parts.append(f"Of `{name}`: {'; '.join(lacking)}.")
    if not cifar_table():
        parts.append(f"{titles['table']}: `{command('table', 'cifar')}`.")
    elif lacking := not_begun(COMPARISONS["table"], "cifar"):
        parts.append(f"Of `table` ({COMPARISONS['table'].title}): {'; '.join(lacking)}.")
    return " ".join(parts) or "Nothing."


def not_begun(comparison: Comparison, file: str) -> list[str]:
    """Its usual arms that a result file has no run of."""
    begun = {run["flags"] for run in json.loads((ROOT / "results" / f"{file}.json").read_text())["runs"]}
    return [arm for arm, flags in list(comparison.arms.items())[: comparison.usual] if flags not in begun]


def cifar_table() -> str:
    """A section with the paper's table of CIFAR-10, its figures beside ours; nothing while there are no runs."""
    path = ROOT / "results" / "cifar.json"
    if not path.exists():
        return ""
    data, comparison = json.loads(path.read_text()), COMPARISONS["table"]
    paper = {row.label: row.paper for row in STUDIES["cifar"].rows if row.group == "CIFAR-10" and row.paper}
    heads = ["600 epochs", "paper (%)", "ours (%)", "against origin (95 %)", "seeds"]
    heads += ["paper, GPU time", "ours", "× origin", "multiply-adds: paper", "ours", "parameters: paper", "ours"]
    lines = ["## The table of CIFAR-10", "", CIFAR, ""]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    minutes = {arm: minutes_alone(data["runs"], flags) for arm, flags in comparison.arms.items()}
    plain = minutes[comparison.baseline]
    for arm, flags in comparison.arms.items():
        own = [run for run in data["runs"] if run["flags"] == flags]
        theirs = paper.get(arm.removesuffix(", as in the paper"))
        if not own and theirs is None:
            continue
        span = minutes[arm]
        accuracies = mean_and_spread([run["test_accuracy"] for run in own]) if own else "not run"
        costs = [
            short(statistics.mean(run[key] for run in own)) if own else MISSING
            for key in ("mean_macs", "mean_parameters")
        ]
        cells = [
            *(arm, cell(theirs, "accuracy"), accuracies),
            *(told(against_baseline(data["runs"], comparison, arm)), str(len(own))),
            *(cell(theirs, "cost"), told_minutes(span)),
            f"{span / plain:.2f}" if span and plain else MISSING,
            *(cell(theirs, "macs", " M"), costs[0], cell(theirs, "parameters", " M"), costs[1]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    about = f"{data['hardware']}; times of training alone on it (`benchmarks/alone.py`), the paper's on a V100"
    about += f"; torch {data['versions']['torch']}; `{command('table', 'cifar')}`"
    return "\n".join([*lines, "", f"(Test set, folded networks, mean ± sd. {about})"])


def cell(figures: Mapping[str, Any] | None, key: str, unit: str = "") -> str:
    return MISSING if figures is None else f"{figures[key]}{unit}"


CIFAR = (
    "VGG-16, 600 epochs of the paper's recipe on all 50,000 images, looked at on the 10,000 test images after training."
)
