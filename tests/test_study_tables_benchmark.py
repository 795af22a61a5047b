"""The tables of the documentation, made from files of results that are there in part."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import arms
import study_tables


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Writes a file of results that tables are made from."""
    monkeypatch.setattr(study_tables, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()

    def write(name, runs, **more):
        data = {"hardware": "a GPU", "versions": {"torch": "2.6"}, "runs": runs, **more}
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(data))

    return write


def rows(text):
    """The lines of a table, its head first."""
    return [line for line in text.splitlines() if line.startswith("|")]


def cifar_runs(**minutes):
    """Two seeds of arms of the table of CIFAR-10 by their minutes alone; None where these were not measured."""
    names = {"origin": ("origin", 94.0), "dbb": ("DBB", 94.5), "dyrep": ("DyRep, our defaults", 95.0)}
    costs = {"mean_macs": 5e8, "mean_parameters": 2e7}
    return [
        {"flags": arms.COMPARISONS["table"].arms[arm], "seed": seed, "test_accuracy": accuracy + seed, **costs}
        | ({"alone_minutes": minutes[name]} if minutes[name] else {})
        for name, (arm, accuracy) in names.items()
        for seed in (0, 1)
    ]


def test_the_table_of_cifar_stands_beside_the_papers(found):
    assert study_tables.cifar_table() == ""
    found("cifar", cifar_runs(origin=8.0, dbb=None, dyrep=10.0))
    assert study_tables.cifar_table().startswith("## The table of CIFAR-10\n")
    lines = rows(study_tables.cifar_table())
    assert lines[2].startswith(
        "| origin | 94.68 ± 0.08 | 94.50 ± 0.71 |  | 2 | 2.4 h | 8.0 min | 1.00 | 313 M | 500.0 M |"
    )
    assert lines[3].startswith("| DBB | 94.97 ± 0.06 | 95.00 ± 0.71 | +0.50 ± 0.00 | 2 | 9.4 h | – | – |")
    assert lines[4].startswith("| DyRep, as in the paper | 95.22 ± 0.13 | not run |  | 0 | 6.9 h | – | – | 597 M | – |")
    assert lines[5].startswith(
        "| DyRep, our defaults | – | 95.50 ± 0.71 | +1.00 ± 0.00 | 2 | – | 10.0 min | 1.25 | – |"
    )


def test_a_time_has_no_ratio_to_that_of_a_baseline_without_one(found):
    found("cifar", cifar_runs(origin=None, dbb=None, dyrep=10.0))
    lines = rows(study_tables.cifar_table())
    assert "| 2.4 h | – | – |" in lines[2]
    assert "| – | 10.0 min | – |" in lines[5]


def test_one_seed_has_no_spread(found):
    flags = arms.COMPARISONS["executions"].arms["plain"]
    found("executions", [{"flags": flags, "seed": 0, "test_accuracy": 92.4}], epoch_seconds={})
    assert study_tables.executions_table().splitlines()[2] == "| plain | 92.40 | 92.40 | not measured |"


def selection_runs(study, *chosen):
    flags = arms.COMPARISONS[study].arms
    found = {"seed": 0, "val_accuracy": 92.0, "mean_macs": 4e8, "train_loss": 0.2}
    return [{"flags": flags[arm], **found} for arm in chosen]


def test_studies_without_results_are_listed_in_one_line_with_their_commands(found):
    found("selection", selection_runs("cuts", "paper", "never"))
    shown, missing = study_tables.selection_tables(), study_tables.missing_studies()
    assert shown.startswith("When to cut:\n\n|")
    assert len(rows(shown)) == 4
    assert len(missing.splitlines()) == 1
    assert "`cuts` (" not in missing
    assert "Of `cuts`: paper, λ = 0.002; reference, reference norm." in missing
    assert "`limits` (how much our defaults grow, and what less costs), `folding` (" in missing
    assert ": `python benchmarks/arms.py STUDY --data DIR --out results/selection.json`. " in missing
    assert missing.endswith(": `python benchmarks/arms.py table --data DIR --out results/cifar.json`.")


def test_times_alone_stand_in_the_tables_of_studies_that_have_them(found):
    runs = selection_runs("growth", "no norm, γ = 0.01", "reference norm, γ = 0.01", "calibrated norm, γ = 0.01")
    found("selection", [runs[0] | {"alone_minutes": 0.5}, *runs[1:]])
    assert "alone" not in study_tables.selection_tables()  # with nothing to compare it with
    found("selection", [runs[0] | {"alone_minutes": 0.5}, runs[1] | {"alone_minutes": 0.75}, runs[2]])
    head, _, *lines = rows(study_tables.selection_table("growth"))
    assert head.endswith("| training alone on the GPU |")
    assert [line.split(" | ")[-1] for line in lines] == ["0.5 min |", "– |", "0.8 min |"]  # in the order of the arms


def test_when_everything_was_run_nothing_is_missing(found):
    choosing = {name: comparison for name, comparison in arms.COMPARISONS.items() if comparison.held_out}
    runs = [run for name, comparison in choosing.items() for run in selection_runs(name, *comparison.arms)]
    found("selection", [dict(run) for run in {run["flags"]: run for run in runs}.values()])
    begun = cifar_runs(origin=8.0, dbb=9.0, dyrep=10.0)
    found("cifar", begun)
    lacking = "origin, weight decay 5e-4; DyRep, as in the paper."
    assert study_tables.missing_studies() == f"Of `table` (the table of CIFAR-10, 600 epochs): {lacking}"
    table = arms.COMPARISONS["table"]
    found("cifar", [begun[0] | {"flags": flags} for flags in list(table.arms.values())[: table.usual]])
    assert study_tables.missing_studies() == "Nothing."


def test_growth_is_told_of_runs_without_a_limit_and_cuts_of_those_with_the_papers_rule(found):
    free = {"flags": "--method dyrep --interval 1 --score snip", "mean_macs": 1.2e9}
    limited = {"flags": "--method dyrep --macs-limit 1.5 --score snip", "mean_macs": 4e8, "cut": [["conv2", "1x1"]]}
    other_rule = limited | {"flags": f"{limited['flags']} --cut none", "cut": [["conv9", "1x1"]]}
    begun = {"flags": "--method dyrep --start-with 1x1 --absorb-after 6", "mean_macs": 9e8, "cut": [["conv1", "1x1"]]}
    found("selection", [free, limited, other_rule, begun, {"flags": "--method origin", "mean_macs": 3e8}])
    first, second = study_tables.growth_figures().splitlines()[:2]
    assert first.endswith("one seed per score: snip 1.20 G.")
    assert second == "- In 1 runs with the paper's rule: cuts in conv2, and in no other of 13 layers."


def test_choices_are_told_seed_by_seed(found):
    runs = selection_runs("scores", "synflow", "random")
    chosen = [{**runs[0], "expanded": ["conv13", "conv2"]}, {**runs[1], "seed": 1, "expanded": ["conv7"]}]
    found("selection", chosen)
    head, _, *lines = rows(study_tables.choices_table())
    assert head == "| convolutions that grow, in order | seed 0 | seed 1 |"
    assert lines == ["| synflow | 13, 2 | – |", "| random | – | 7 |"]
