"""Tables and figures of studies."""

from __future__ import annotations

from pathlib import Path

import pytest

from dyrep.reproduce import SCALES, STUDIES, Row, Study, Training
from dyrep.reproduce.drawing import picture
from dyrep.reproduce.outcomes import Outcome
from dyrep.reproduce.tables import as_data, as_markdown, as_text, lines, ours
from report.run_folders import write_run

STUDY = Study(
    "some",
    "Table 0",
    "something",
    ("cost", "accuracy"),
    (
        Row("origin", {"cost": "2.4 h", "accuracy": "94.68 ± 0.08"}, Training("cifar10-vgg16", "origin"), group="VGG"),
        Row("DyRep", {"accuracy": 95.22}, Training("cifar10-vgg16")),
    ),
    note="A note.",
)
OUTCOMES = [
    Outcome(
        STUDY.rows[0], "done", figures={"cost": [10.0, 12.0], "accuracy": [94.0, 95.0]}, runs=[Path("a"), Path("b")]
    ),
    Outcome(STUDY.rows[1], "not run", "no data"),
]


def test_our_figures_stand_beside_the_papers():
    assert lines(STUDY, OUTCOMES) == [
        ["", "training time: paper", "training time: ours", "accuracy, %: paper", "accuracy, %: ours", "state"],
        ["VGG, origin", "2.4 h", "11.0 min", "94.68 ± 0.08", "94.50 ± 0.71", "2 seeds"],
        ["DyRep", "–", "–", "95.22", "–", "not run: no data"],
    ]


def test_on_a_terminal_the_head_of_two_columns_stands_over_both():
    text = as_text(STUDY, SCALES["short"], OUTCOMES).splitlines()
    assert text[3:] == [
        "             training time    accuracy, %",
        "             paper  ours      paper         ours          state",
        "VGG, origin  2.4 h  11.0 min  94.68 ± 0.08  94.50 ± 0.71  2 seeds",
        "DyRep        –      –         95.22         –             not run [1]",
        "",
        "[1] no data",
        "",
        "A note.",
    ]
    short = Outcome(STUDY.rows[1], "counted", figures={"cost": [0.0]})
    for line in as_text(STUDY, SCALES["short"], [short]).splitlines()[3:5]:  # a head wider than what is below it
        assert line.index("paper" if "paper" in line else "training") == len("DyRep") + 2
        assert line.index("state" if "state" in line else "accuracy") > len("DyRep  training time")


def test_the_scale_and_the_note_are_told():
    for made in (as_text, as_markdown):
        text = made(STUDY, SCALES["short"], OUTCOMES)
        assert "Table 0: something" in text
        assert "a tenth of the paper's epochs" in text
        assert "A note." in text


def test_data_has_all_seeds():
    first, second = as_data(STUDY, OUTCOMES)
    assert first["ours"] == {"cost": [10.0, 12.0], "accuracy": [94.0, 95.0]}
    assert (first["training"], first["runs"]) == ("cifar10-vgg16-origin", ["a", "b"])
    assert (second["state"], second["reason"], second["ours"]) == ("not run", "no data", {})


def test_cost_is_drawn_relative_to_the_plain_network():
    study = STUDIES["accuracy-against-cost"]
    found = [Outcome(row) for row in study.rows]
    found[1] = Outcome(study.rows[1], "done", figures={"cost": [30.0], "accuracy": [70.0]})
    found[0] = Outcome(study.rows[0], "done", figures={"cost": [20.0], "accuracy": [69.0]})
    told = list(picture(study, found).told.values())
    assert "paper, ResNet-18, DBB: 70.99 % at 1.69 times the cost" in told
    assert "ours, ResNet-18, DBB: 70.00 % at 1.50 times the cost" in told
    assert len(told) == len(study.rows) + 2


def test_an_accuracy_that_is_not_defined_is_a_dash_and_has_no_point():
    study = STUDIES["accuracy-against-cost"]
    found = [Outcome(row, "done", figures={"cost": [30.0, 40.0]}) for row in study.rows]
    found[1].figures["accuracy"] = [70.0]  # of one seed of two
    assert len(picture(study, found).told) == len(study.rows) + 1
    assert [ours("accuracy", outcome) for outcome in found[:2]] == ["–", "70.00"]


def test_curves_are_those_of_the_runs(tmp_path):
    runs = [write_run(tmp_path / "a", method="origin"), write_run(tmp_path / "b")]
    study = STUDIES["convergence"]
    drawn = picture(study, [Outcome(row, runs=[run]) for row, run in zip(study.rows, runs, strict=False)])
    assert "origin, seed 0: 90 after epoch 10" in drawn.told.values()


@pytest.mark.parametrize("name", ["convergence", "structure", "cifar"])
def test_without_runs_there_is_no_picture(name):
    assert picture(STUDIES[name], [Outcome(row) for row in STUDIES[name].rows]) is None


def test_a_cost_without_one_to_compare_with_is_left_out():
    study = STUDIES["accuracy-against-cost"]
    found = [Outcome(row) for row in study.rows]
    found[1] = Outcome(study.rows[1], "done", figures={"cost": [30.0], "accuracy": [70.0]})
    assert len(picture(study, found).told) == len(study.rows)
