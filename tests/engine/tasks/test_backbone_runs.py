"""The stages of the paper: an evolved classifier as backbone (C), evolution in the task (D), both (C+D), none."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from engine_helpers import assert_same, result, settings
from PIL import Image
from safetensors.torch import load_file, save_file
from task_recipes import EVOLUTION, segmentation

from dyrep.engine.recipe import Recipe
from dyrep.engine.running import load_run, train
from dyrep.engine.setup import backbone_weights, make_model
from dyrep.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A finished run of a ResNet-18 that has grown branches."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            for number in range(8):
                pixels = generator.integers(0, 255, (16, 16, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    run = tmp_path_factory.mktemp("classifier") / "run"
    chosen = Recipe(model="resnet18", dataset="folder", image_size=16, batch_size=8, epochs=2, lr=0.01, dyrep=EVOLUTION)
    train(chosen, settings(run, data=folder))
    return run


def downstream(**changes):
    return segmentation(**{"model": "fcn_resnet18", "epochs": 2, "batch_size": 4, **changes})


def backbone(model):
    return {key: value for key, value in model.backbone.state_dict().items() if "num_batches" not in key}


@pytest.mark.parametrize("form", ["run", "file"])
def test_deployed_weights_of_a_run_become_the_backbone(classifier, form):
    source = classifier if form == "run" else classifier / "plain.safetensors"
    model = make_model(downstream(backbone=str(source)), classes=3, channels=3)
    known = load_file(classifier / "plain.safetensors")
    assert all(torch.equal(value, known[key]) for key, value in backbone(model).items())


@pytest.mark.parametrize(("stage", "method"), [("C", "origin"), ("C+D", "dyrep")])
def test_a_task_goes_on_from_a_classifier(classifier, data, tmp_path, stage, method):
    chosen = downstream(backbone=str(classifier), method=method)
    summary = train(chosen, settings(tmp_path / "run", data=data(chosen)))
    assert summary["fold_passed"]
    assert bool(summary["structure"]["blocks"]) == (stage == "C+D")
    assert summary["recipe"]["backbone"] == str(classifier)
    model, _ = load_run(tmp_path / "run")  # needs neither the classifier nor its folder
    assert model is not None


def test_blocks_made_before_training_keep_what_the_backbone_computes(classifier, data, tmp_path):
    chosen = downstream(backbone=str(classifier), method="dbb", epochs=1)
    summary = train(chosen, settings(tmp_path, data=data(chosen)))
    assert summary["fold_passed"]
    with pytest.raises(ConfigError, match="method=orepa cannot start from backbone="):
        train(downstream(backbone=str(classifier), method="orepa"), settings(tmp_path / "b", data=data(chosen)))


def test_runs_that_have_not_ended_and_files_that_do_not_fit_are_refused(classifier, tmp_path):
    (tmp_path / "config.json").write_text((classifier / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"has no plain.safetensors to take a backbone from, so it has not ended"):
        backbone_weights(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no file .*nowhere to take initial weights from"):
        backbone_weights(tmp_path / "nowhere")
    for name in ("damaged.safetensors", "damaged.pt"):
        (tmp_path / name).write_bytes(b"\x00" * 100)
        with pytest.raises(CheckpointError, match=rf"{name} cannot be read, so it is damaged, or no file of weights"):
            make_model(downstream(backbone=str(tmp_path / name)), classes=3, channels=3)
    save_file({"conv1.weight": torch.zeros(1)}, tmp_path / "few.safetensors")
    with pytest.raises(CheckpointError, match=r"few.safetensors do not fit the backbone \('backbone'\)"):
        make_model(downstream(backbone=str(tmp_path / "few.safetensors")), classes=3, channels=3)
    chosen = segmentation(model="fcn_resnet50", backbone=str(classifier))
    with pytest.raises(CheckpointError, match=r"the run in .* \(resnet18\) do not fit the backbone"):
        make_model(chosen, classes=3, channels=3)


def test_the_backbone_is_part_of_what_decides_a_run(classifier, data, tmp_path):
    chosen = downstream(backbone=str(classifier), method="origin")
    train(chosen, settings(tmp_path, data=data(chosen), stop_after=1))
    with pytest.raises(ConfigError, match="backbone: "):
        train(downstream(method="origin"), settings(tmp_path, data=data(chosen)))
    assert json.loads((tmp_path / "config.json").read_text())["recipe"]["backbone"] == str(classifier)


@pytest.mark.parametrize(("kind", "method"), [("backbone", "dbb"), ("backbone", "dyrep"), ("weights", "origin")])
def test_a_run_goes_on_without_the_file_it_started_from(classifier, data, tmp_path, kind, method):
    file = tmp_path / "start.safetensors"
    if kind == "backbone":
        shutil.copy(classifier / "plain.safetensors", file)
    else:
        save_file(make_model(downstream(), classes=3, channels=3).state_dict(), file)
    chosen = downstream(**{kind: str(file)}, method=method)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(chosen, settings(whole, data=data(chosen)))
    train(chosen, settings(parts, data=data(chosen), stop_after=1))
    file.unlink()
    train(chosen, settings(parts, data=data(chosen)))
    assert_same(result(parts), result(whole))
    with pytest.raises(CheckpointError, match="there is no file"):
        train(chosen, settings(tmp_path / "new", data=data(chosen)))
