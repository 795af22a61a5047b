"""Detectors and segmentation networks that diverge, or have lazy layers, low precision or several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from engine_helpers import settings
from safetensors.torch import load_file
from task_recipes import MAKERS

from dyrep.engine.running import train
from dyrep.engine.setup import make_model
from dyrep.engine.tasks import task_of
from dyrep.engine.world import World
from dyrep.errors import ConfigError, DivergedError


def test_a_detector_that_diverges_says_where(data, tmp_path):
    chosen = MAKERS["detection"](lr=1e8)
    with pytest.raises(DivergedError, match=r"It began with the (output|gradient) of layer '"):
        train(chosen, settings(tmp_path, data=data(chosen)))


LAZY_DETECTORS = """
import tiny_models
from torch import nn

def lazy(num_classes, padding=1):
    model = tiny_models.detector(num_classes)
    first = model.backbone[0]
    model.backbone[0] = nn.LazyConv2d(first.out_channels, 3, stride=first.stride, padding=padding)
    return model

def unfit(num_classes):
    return lazy(num_classes, padding=-40)
"""


def test_a_detector_without_shapes_gets_them_or_says_what_does_not_run(tiny_models, tmp_path, monkeypatch):
    (tmp_path / "lazy_detectors.py").write_text(LAZY_DETECTORS)
    monkeypatch.syspath_prepend(tmp_path)
    model = make_model(MAKERS["detection"](model="lazy_detectors:lazy"), classes=3, channels=3, size=64)
    assert model.backbone[0].weight.shape[1:] == (3, 3, 3)
    assert model.training
    with pytest.raises(ConfigError, match=r"'backbone.0.weight' of the model .* does not run on images of 3x64x64: "):
        make_model(MAKERS["detection"](model="lazy_detectors:unfit"), classes=3, channels=3, size=64)


def test_low_precision_trains(make, data, tmp_path):
    chosen = make(precision="bf16", epochs=2)
    assert train(chosen, settings(tmp_path, data=data(chosen)))["fold_passed"]


@pytest.mark.slow
@pytest.mark.parametrize("task", list(MAKERS))
def test_two_processes_train_one_network_and_measure_it_together(task, data, tiny_models, tmp_path):
    chosen = MAKERS[task]()
    words = ["--model", chosen.model, "--epochs", "3", "--interval", "1", "--batch-size", "4", "--lr", "0.01"]
    words += ["--include", "*", "--calibration-batches", "1", "--eval-every", "1", "--warmup-epochs", "0"]
    if task == "detection":
        words += ["--image-size", "None", "--boxes-per-image", "512"]
    else:
        words += ["--image-size", "32", "--class-names", *chosen.class_names]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dyrep"]
    command += ["train", chosen.name, *words, "--data", str(data(chosen)), "--device", "cpu", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tiny_models, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["processes"], summary["fold_passed"]) == (2, True)
    assert summary["structure"]["blocks"]
    learnt = task_of(chosen)
    opened = learnt.open_data(settings(None, data=data(chosen)), World(torch.device("cpu")))
    model = make_model(chosen, classes=len(opened.classes), channels=3, size=opened.size)
    model.load_state_dict(load_file(tmp_path / "plain.safetensors"))
    alone = learnt.evaluate(model, opened.test, World(torch.device("cpu")), torch.float32, opened.classes)
    assert alone[learnt.metric] == pytest.approx(summary[f"test_{learnt.metric}_folded"], abs=0.5)
