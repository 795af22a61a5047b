"""The paper's tables, as data: complete, consistent, and runnable at every scale."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dyrep.engine.recipes import recipe
from dyrep.models import build
from dyrep.reproduce import SCALES, STUDIES, Training
from dyrep.reproduce.studies import COLUMNS

TRAININGS = {row.training.key: row.training for study in STUDIES.values() for row in study.rows if row.training}
every_study = pytest.mark.parametrize("study", STUDIES.values(), ids=list(STUDIES))
every_scale = pytest.mark.parametrize("scale", SCALES.values(), ids=list(SCALES))


def test_every_table_and_figure_with_results_is_there():
    sources = [study.source for study in STUDIES.values()]
    assert sorted(sources) == sorted([*(f"Table {n}" for n in range(1, 11)), *(f"Figure {n}" for n in (1, 4, 5, 6, 7))])


@every_study
def test_rows_have_names_of_their_own_and_figures_of_the_columns(study):
    assert set(study.columns) <= set(COLUMNS)
    names = [(row.group, row.label) for row in study.rows]
    assert len(set(names)) == len(names)
    for row in study.rows:
        assert set(row.paper) <= set(COLUMNS)
        assert row.training is not None or row.why_not
        for value in row.paper.values():
            assert isinstance(value, (int, float)) or re.match(r"[\d.]+", value)


def test_the_paper_says_what_it_says():
    accuracies = {(s.name, r.group, r.label): r.paper.get("accuracy") for s in STUDIES.values() for r in s.rows}
    assert accuracies["cifar", "CIFAR-10", "DyRep"] == "95.22 ± 0.13"
    assert accuracies["imagenet", "ResNet-50", "DBB"] == 76.71
    assert accuracies["intervals", "", "DyRep, t = 5"] == 95.39
    assert accuracies["scores", "CIFAR-100", "origin"] == 74.10


@every_scale
def test_every_training_makes_a_valid_recipe(scale):
    for training in TRAININGS.values():
        found = scale.recipe(training, seed=3)
        if found is None:
            assert scale.name == "smoke"
            assert recipe(training.recipe).dataset == "folder"
            assert not training.recipe.startswith("tiny")
        else:
            assert found.seed == 3


@pytest.mark.parametrize("name", sorted({row.model for study in STUDIES.values() for row in study.rows if row.model}))
def test_every_network_of_the_table_of_speeds_can_be_built(name, monkeypatch):
    import torch

    with torch.device("meta"):
        assert build(name, num_classes=1000, in_channels=3) is not None


def test_full_scale_is_the_recipe_of_the_paper():
    found = SCALES["full"].recipe(Training("cifar10-vgg16"), seed=0)
    assert found == recipe("cifar10-vgg16")
    interval = SCALES["full"].recipe(Training("cifar10-vgg16", dyrep={"interval": 50}), seed=0)
    assert interval == replace(found, dyrep=replace(found.dyrep, interval=50))


def test_short_scale_has_a_tenth_of_the_epochs_and_of_the_intervals():
    found = SCALES["short"].recipe(Training("cifar10-vgg16", dyrep={"interval": 50}), seed=0)
    assert (found.epochs, found.dyrep.interval, found.dataset) == (60, 5, "cifar10")
    assert SCALES["short"].recipe(Training("cifar10-vgg16", dyrep={"interval": 5}), seed=0).dyrep.interval == 1
    stage = SCALES["short"].recipe(Training("cifar100-vgg16", settings={"epochs": 100}, stop=40), seed=0)
    assert (stage.epochs, stage.dyrep.stop) == (10, 4)


def test_smoke_scale_is_digits():
    found = SCALES["smoke"].recipe(Training("cifar10-vgg16", "dbb"), seed=0)
    assert (found.dataset, found.model, found.epochs, found.method) == ("digits", "small_vgg", 3, "dbb")


def test_a_training_with_the_usual_settings_is_the_usual_one():
    assert (
        Training("cifar10-vgg16", dyrep={"interval": 15}).key == Training("cifar10-vgg16").key == "cifar10-vgg16-dyrep"
    )
    assert Training("cifar10-vgg16", dyrep={"interval": 5}).key == "cifar10-vgg16-dyrep-interval=5"
    assert Training("cifar10-vgg16", "fixed", stop=200).key == "cifar10-vgg16-fixed-at200"
