"""Recipes: the paper's settings, checked values, and a round trip through plain data."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest

from dyrep.config import DyRepConfig
from dyrep.engine.data import DATASETS
from dyrep.engine.precision import DTYPES, Precision
from dyrep.engine.recipe import TASKS, Dataset, Recipe, RunSettings
from dyrep.engine.recipes import RECIPES, recipe
from dyrep.errors import ConfigError
from dyrep.models import DETECTORS, SEGMENTERS, names

CIFAR = ("cifar10-vgg16", "cifar100-vgg16")
RESNETS = ("imagenet-resnet18", "imagenet-resnet34", "imagenet-resnet50")
STRONG = ("imagenet-repvgg-b2g4", "imagenet-repvgg-b3", "imagenet-repvgg-b3-300")


# -- the paper --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CIFAR)
def test_cifar_is_trained_as_in_the_paper(name):
    chosen = recipe(name)
    assert (chosen.epochs, chosen.batch_size, chosen.lr, chosen.weight_decay) == (600, 128, 0.1, 1e-4)
    assert (chosen.crop, chosen.crop_padding, chosen.flip, chosen.cutout) == ("pad", 4, True, 16)
    assert (chosen.color_jitter, chosen.auto_augment, chosen.label_smoothing) == (0, False, 0)
    assert (chosen.model, chosen.dataset) == ("vgg16", name.partition("-")[0])
    assert chosen.dyrep.interval == 15


def test_mobilenet_is_trained_as_in_the_paper():
    chosen = recipe("imagenet-mobilenet-v1")
    assert (chosen.model, chosen.epochs, chosen.batch_size, chosen.lr) == ("mobilenet_v1", 90, 256, 0.1)
    assert (chosen.weight_decay, chosen.dyrep.interval) == (4e-5, 5)
    assert (chosen.crop, chosen.flip, chosen.color_jitter) == ("resized", True, 0.0)


@pytest.mark.parametrize("name", RESNETS)
def test_resnets_are_trained_as_in_the_paper(name):
    chosen = recipe(name)
    assert chosen.model == name.partition("-")[2]
    assert (chosen.epochs, chosen.batch_size, chosen.lr, chosen.weight_decay) == (120, 256, 0.1, 1e-4)
    assert (chosen.image_size, chosen.crop, chosen.flip) == (224, "resized", True)
    assert chosen.color_jitter > 0
    assert (chosen.auto_augment, chosen.label_smoothing, chosen.dyrep.interval) == (False, 0, 5)


@pytest.mark.parametrize("name", STRONG)
def test_large_repvgg_networks_are_trained_as_in_the_paper(name):
    chosen = recipe(name)
    assert chosen.auto_augment
    assert chosen.label_smoothing == 0.1
    assert (chosen.epochs, chosen.dyrep.interval) == ((300, 10) if name.endswith("300") else (200, 5))
    assert (chosen.batch_size, chosen.weight_decay, chosen.crop, chosen.flip) == (256, 1e-4, "resized", True)
    assert chosen.model == ("repvgg_b2g4" if "b2g4" in name else "repvgg_b3")


def test_the_small_repvgg_network_is_trained_with_simple_augmentation():
    chosen = recipe("imagenet-repvgg-a2")
    assert (chosen.model, chosen.epochs, chosen.dyrep.interval) == ("repvgg_a2", 120, 5)
    assert (chosen.auto_augment, chosen.label_smoothing, chosen.color_jitter) == (False, 0, 0)
    assert (chosen.crop, chosen.flip) == ("resized", True)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith(("cifar", "imagenet", "tiny"))])
def test_classifiers_on_images_evolve_by_the_algorithm_of_the_paper(name):
    chosen = recipe(name)
    assert chosen.dyrep == DyRepConfig.paper(interval=chosen.dyrep.interval)
    assert (chosen.schedule, chosen.min_lr, chosen.warmup_epochs, chosen.momentum) == ("cosine", 0, 0, 0.9)
    assert (chosen.nesterov, chosen.decay_norms, chosen.ema) == (False, True, None)
    assert (chosen.dyrep.score, chosen.dyrep.gamma, chosen.dyrep.cut_threshold) == ("synflow", 0.01, 0.02)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_called_by_their_name_and_train_a_network_that_exists(name):
    assert RECIPES[name].name == name
    assert RECIPES[name].model in (*names(), *DETECTORS, *SEGMENTERS)
    assert RECIPES[name].method == "dyrep"


def test_a_recipe_that_is_not_there_is_answered_with_those_that_are():
    with pytest.raises(ConfigError, match="no recipe 'cifar'; valid are digits, cifar10-vgg16, "):
        recipe("cifar")


# -- checked values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"method": "bdd"},
            "method='bdd' is unknown; valid are origin, repvgg, acnet, dbb, dbb7, mobileone, orepa, repnas, dyrep, "
            "fixed, and variants of dyrep such as dyrep-default, dyrep4, dyrep-nodep and dyrep-40",
        ),
        ({"dataset": "mnist"}, "dataset='mnist': must be one of digits, cifar10, cifar100, folder, voc, coco, masks"),
        ({"schedule": "step"}, "schedule='step': must be one of cosine, constant"),
        ({"crop": "centre"}, "crop='centre': must be one of none, pad, resized"),
        ({"precision": "fp8"}, "precision='fp8': must be one of auto, fp32, bf16, fp16"),
        ({"epochs": 0}, "epochs=0: must be at least 1"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"eval_every": 0}, "eval_every=0: must be at least 1"),
        ({"crop_padding": -1}, "crop_padding=-1: must be at least 0"),
        ({"cutout": -2}, "cutout=-2: must be at least 0"),
        ({"color_jitter": -0.1}, "color_jitter=-0.1: must be at least 0"),
        ({"weight_decay": float("nan")}, "weight_decay=nan: must be at least 0"),
        ({"val_split": -1}, "val_split=-1: must be at least 0"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
        ({"lr": 0}, "lr=0: must be above 0"),
        ({"lr": float("nan")}, "lr=nan: must be above 0"),
        ({"min_lr": 0.2}, "min_lr=0.2: must be from 0 to lr=0.1"),
        ({"min_lr": -0.2}, "min_lr=-0.2: must be from 0 to lr=0.1"),
        ({"momentum": 1}, "momentum=1: must be from 0 to below 1"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0: must be from 0 to below 1"),
        ({"ema": 1.0}, "ema=1.0: must be above 0 and below 1"),
        ({"ema": 0.0}, "ema=0.0: must be above 0 and below 1"),
        ({"image_size": 0}, "image_size=0: must be at least 1"),
        ({"warmup_epochs": 24}, "warmup_epochs=24: must be below epochs=24"),
        ({"warmup_epochs": -1}, "warmup_epochs=-1: must be at least 0"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov=True needs momentum above 0"),
    ],
)
def test_a_value_outside_its_range_is_named_with_the_range(values, message):
    with pytest.raises(ConfigError) as error:
        Recipe(**values)
    assert str(error.value) == message


def test_there_is_a_reader_for_every_data_set_and_a_dtype_for_every_precision():
    assert get_args(Dataset) == (*DATASETS, *TASKS)
    assert get_args(Precision) == ("auto", *DTYPES)


def test_the_values_at_the_ends_of_their_ranges_are_fine():
    Recipe(epochs=1, batch_size=1, min_lr=0.1, momentum=0, warmup_epochs=0.5, weight_decay=0, method="origin")
    Recipe(label_smoothing=0.999, ema=0.9999, val_split=0.5, eval_every=100)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"checkpoint_minutes": -1}, "checkpoint_minutes=-1: must be at least 0"),
        ({"checkpoint_minutes": float("nan")}, "checkpoint_minutes=nan: must be at least 0"),
        ({"workers": -1}, "workers=-1: must be at least 0"),
        ({"stop_after": 0}, "stop_after=0: must be at least 1"),
    ],
)
def test_how_a_run_is_carried_out_is_checked_too(values, message):
    with pytest.raises(ConfigError) as error:
        RunSettings(**values)
    assert str(error.value) == message
    RunSettings(checkpoint_minutes=0, workers=0, stop_after=1)


def test_an_interval_longer_than_the_run_is_refused_unless_nothing_evolves():
    with pytest.raises(ConfigError, match="no update would ever be due: the first comes after 5 epochs"):
        Recipe(epochs=5, dyrep=DyRepConfig.paper(interval=5))
    Recipe(epochs=5, dyrep=DyRepConfig.paper(interval=5), method="origin")
    Recipe(epochs=5, dyrep=DyRepConfig.paper(interval=500, unit="step"))


# -- what follows from a recipe ---------------------------------------------------------------------------------


def test_the_method_takes_its_length_and_seed_from_the_recipe():
    evolution = Recipe(epochs=30, seed=5, dyrep=DyRepConfig.paper(interval=10, seed=1, total=99)).evolution()
    assert (evolution.total, evolution.seed, evolution.interval) == (30, 5, 10)
    assert [epoch for epoch in range(1, 31) if evolution.is_due(epoch)] == [10, 20]
    in_steps = Recipe(epochs=2, dyrep=DyRepConfig.paper(interval=10, unit="step", total=99)).evolution()
    assert in_steps.total == 99


def test_the_folder_of_a_run_follows_from_the_recipe_unless_given():
    chosen = replace(recipe("digits"), seed=2, method="origin")
    assert RunSettings().folder(chosen.name, chosen.method, chosen.seed) == Path("runs/digits-origin-seed2")
    assert RunSettings(out=Path("there")).folder(chosen.name, chosen.method, chosen.seed) == Path("there")


UNUSUAL = Recipe(
    name="mine",
    model="timm:test_resnet",
    dataset="folder",
    image_size=64,
    val_split=0.1,
    epochs=7,
    schedule="constant",
    ema=0.999,
    resident=False,
    weights="start.pt",
    seed=3,
    dyrep=DyRepConfig.paper(
        interval=2, branches=("1x1", "residual"), include=("conv*",), exclude=("conv1",), macs_limit=2.5
    ),
)


@pytest.mark.parametrize("chosen", [*RECIPES.values(), UNUSUAL], ids=lambda chosen: chosen.name)
def test_a_recipe_survives_being_written_as_json_and_read(chosen):
    data = json.loads(json.dumps(chosen.to_dict()))
    assert set(data) == {field.name for field in fields(Recipe)}
    assert Recipe.from_dict(data) == chosen


def test_settings_that_nobody_knows_are_refused_and_missing_ones_have_their_defaults():
    assert Recipe.from_dict({"epochs": 9}) == Recipe(epochs=9)
    with pytest.raises(ConfigError, match="unknown settings epoch, lrate; valid are auto_augment, backbone, "):
        Recipe.from_dict({"epoch": 9, "lrate": 1})
    with pytest.raises(ConfigError, match="unknown settings gama"):
        Recipe.from_dict({"dyrep": {"gama": 1}})


def test_recipes_of_earlier_versions_are_read_where_nothing_of_them_is_missing():
    assert Recipe.from_dict({"epochs": 9, "start_as": None}) == Recipe(epochs=9)
    with pytest.raises(ConfigError, match="unknown settings start_as"):
        Recipe.from_dict({"epochs": 9, "start_as": "repvgg"})


def test_differences_are_named_with_both_values_also_those_of_the_method():
    other = replace(UNUSUAL, lr=0.05, ema=None, dyrep=replace(UNUSUAL.dyrep, gamma=0.1, branches=None))
    assert UNUSUAL.differences(other) == [
        "lr: 0.1 against 0.05",
        "ema: 0.999 against None",
        "dyrep.branches: ['1x1', 'residual'] against None",
        "dyrep.gamma: 0.01 against 0.1",
    ]
    assert UNUSUAL.differences(replace(UNUSUAL)) == []
