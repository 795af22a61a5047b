"""Runs of detectors and segmentation networks: what holds for classification holds for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_helpers import assert_same, make_trainer, result, settings, train_some
from PIL import Image
from safetensors.torch import load_file
from task_recipes import MAKERS

import dyrep
from dyrep.cli.main import main
from dyrep.engine import checkpoints
from dyrep.engine.recipe import Recipe
from dyrep.engine.running import load_run, train
from dyrep.engine.setup import make_model
from dyrep.engine.tasks import task_of
from dyrep.errors import ConfigError
from dyrep.models.backbones import backbone_of
from dyrep.report.runs import read_run

METRIC = {"detection": "map", "segmentation": "miou"}
TITLE = {"detection": "mAP", "segmentation": "mIoU"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """Uninterrupted runs of both tasks: their folders."""
    folders = {}
    for name, make in MAKERS.items():
        folders[name] = tmp_path_factory.mktemp(name) / "run"
        train(make(ema=0.5), settings(folders[name], data=data(make())))
    return folders


@pytest.fixture(params=list(MAKERS))
def run(request, whole):
    return request.param, whole[request.param]


def test_a_run_evolves_folds_and_says_how_good_it_is(run):
    task, folder = run
    summary, key = json.loads((folder / "summary.json").read_text()), METRIC[task]
    assert summary["fold_passed"]
    assert summary[f"test_{key}"] == pytest.approx(summary[f"test_{key}_folded"], abs=0.5)
    assert set(summary["best"]) == {"epoch", "split", key}
    assert summary["best"]["split"] == "val"
    assert summary["structure"]["blocks"]
    assert summary["macs_plain"] < summary["mean_macs"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(f"val_{key}" in row and 0 <= row[f"val_{key}"] <= 100 for row in rows)
    assert ("train_accuracy" in rows[0]) == (task == "segmentation")
    names = {"detection": ("val_ap_disc", "val_map50"), "segmentation": ("val_iou_disc", "val_pixel_accuracy")}
    assert all(name in rows[-1] for name in names[task])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    edits = [edit for event in events for edit in event.get("edits", ())]
    assert edits
    assert all(edit["detail"]["drift"] < 1e-4 for edit in edits)


def test_predictions_are_drawn(run):
    _, folder = run
    with Image.open(folder / "predictions.png") as picture:
        assert picture.width > 600
        assert len(picture.convert("RGB").getcolors(10**6)) > 50


def test_the_folded_weights_fit_the_plain_network(run):
    task, folder = run
    model, state = load_run(folder)
    chosen = MAKERS[task]()
    plain = make_model(chosen, classes=len(state["classes"]), channels=3, size=state["size"])
    plain.load_state_dict(load_file(folder / "plain.safetensors"), strict=True)
    inputs = task_of(chosen).random_inputs(channels=3, size=state["size"])
    assert dyrep.verify(model, plain.eval(), inputs)


@pytest.mark.parametrize("places", [(3,), (2, 2)])
def test_stopping_anywhere_changes_nothing(run, places, data, tmp_path, monkeypatch):
    task, folder = run
    chosen = MAKERS[task](ema=0.5)
    options = settings(tmp_path, data=data(chosen))
    for steps in places:
        assert not train_some(chosen, options, steps, monkeypatch)
    train(chosen, options)
    assert_same(result(tmp_path), result(folder))


def test_methods_with_blocks_from_the_start_train_too(make, data, tmp_path):
    chosen = make(method="dbb", epochs=1)
    summary = train(chosen, settings(tmp_path, data=data(chosen)))
    assert summary["fold_passed"]
    assert summary["structure"]["blocks"]


def test_frozen_parts_and_eval_norms_survive_evaluation_and_updates(data, tmp_path):
    chosen = MAKERS["detection"](
        model="fasterrcnn_resnet18_fpn",
        image_size=32,
        epochs=2,
        boxes_per_image=8,
        norms="eval",
        frozen_stages=2,
        dyrep=MAKERS["detection"]().dyrep,
    )
    trainer = make_trainer(chosen, tmp_path, data=data(chosen), stop_after=1)
    _, body = backbone_of(trainer.model)
    before = {name: value.clone() for name, value in body.named_buffers()}
    stem = body.conv1.weight.detach().clone()
    weight = body.layer2[0].conv1.weight.detach().clone()
    trainer.train()
    assert trainer.controller.updates == 1
    assert not body.layer1.training
    assert not body.layer3[0].bn1.training
    assert body.layer3[0].training
    after = dict(body.named_buffers())
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.equal(body.conv1.weight, stem)
    assert not torch.equal(body.layer2[0].conv1.weight, weight)


# -- from the shell ---------------------------------------------------------------------------------------------


def test_commands_work_on_such_runs(run, tmp_path, capsys):
    task, folder = run
    main(["inspect", str(folder)])
    assert "x plain" in capsys.readouterr().out
    main(["deploy", str(folder), "-o", str(tmp_path / "plain.safetensors")])
    assert "passed" in capsys.readouterr().out
    main(["report", str(folder), "-o", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text()
    read = read_run(folder)
    assert read.plain_macs == read.summary["macs_plain"] == read.rows[0]["macs"]
    assert f"{TITLE[task]} (test set, folded)" in page
    assert "data:image/png;base64," in page
    assert "Predictions" in page


def test_runs_of_two_tasks_are_not_put_into_one_report(whole, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["report", *map(str, whole.values()), "-o", str(tmp_path / "report.html")])
    assert "the runs are measured by mAP and mIoU: make a report of each kind" in capsys.readouterr().err


def test_a_detector_is_not_exported_and_says_why(whole, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["export", str(whole["detection"]), "--onnx", str(tmp_path / "a.onnx")])
    assert "is of a detector" in capsys.readouterr().err


def test_a_segmentation_network_is_exported_for_whole_images(whole, tmp_path, capsys):
    main(["export", str(whole["segmentation"]), "--pt2", str(tmp_path / "a.pt2")])
    assert "test images cannot be read" not in capsys.readouterr().out
    program = torch.export.load(tmp_path / "a.pt2").module()
    assert program(torch.zeros(2, 3, 64, 64)).shape == (2, 3, 64, 64)


def test_a_network_trained_on_whole_images_is_exported_with_some_of_them(data, tmp_path, capsys):
    chosen = MAKERS["segmentation"](crop="none", image_size=None, scale=(1.0, 1.0), epochs=1, method="origin")
    train(chosen, settings(tmp_path / "run", data=data(chosen)))
    main(["export", str(tmp_path / "run"), "--pt2", str(tmp_path / "a.pt2")])
    told = capsys.readouterr().out
    assert "test images cannot be read" not in told
    assert "given ones" in told


def test_which_parts_may_grow_is_said_on_the_command_line(data, tmp_path, capsys):
    words = ["train", "bccd-fasterrcnn", "--model", "tiny_models:detector", "--image-size", "None", "--batch-size", "2"]
    words += ["--epochs", "3", "--interval", "1", "--device", "cpu", "--data", str(data(MAKERS["detection"]()))]
    words += ["--calibration-batches", "1", "--boxes-per-image", "512", "--lr", "0.01"]
    main([*words, "--include", "rpn.*", "--out", str(tmp_path / "heads")])
    assert "expand rpn.head.conv.0.0" in capsys.readouterr().out
    main([*words, "--include", "*", "--exclude", "rpn.*", "backbone.0", "--out", str(tmp_path / "rest")])
    told = capsys.readouterr().out
    assert "expand backbone." in told
    assert "expand rpn" not in told
    assert "expand backbone.0" not in told


def test_what_a_run_prints_names_the_metric(data, tmp_path, capsys):
    chosen = MAKERS["segmentation"](epochs=1, method="origin")
    train(chosen, settings(tmp_path, data=data(chosen)))
    told = capsys.readouterr().out
    assert "val mIoU " in told
    assert "test mIoU " in told


# -- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "values", "message"),
    [
        ("detection", {"cutout": 4}, r"cutout=4 has no use in detection \(dataset=voc\)"),
        ("detection", {"crop": "pad"}, "crop='pad' has no use in detection"),
        ("detection", {"dyrep": {"score": "grasp"}}, "score='grasp': must be another one"),
        ("segmentation", {"crop": "pad"}, "crop='pad': must be none or resized"),
        ("segmentation", {"image_size": None}, "image_size=None: must be given with crop=resized"),
        ("segmentation", {"scale": (2.0, 1.0)}, r"scale=\(2.0, 1.0\): must be two factors"),
        ("segmentation", {"crop": "none", "image_size": None}, r"scale=\(0.75, 1.5\) has no use with crop=none"),
        ("segmentation", {"weights": "a", "backbone": "b"}, "weights='a' and backbone='b': .* give one of the two"),
        ("detection", {"weights": "a", "backbone": "b"}, "weights='a' and backbone='b': .* give one of the two"),
        ("segmentation", {"ignore_label": 300}, "ignore_label=300: must be from 0 to 255"),
        ("detection", {"frozen_stages": 6}, "frozen_stages=6: must be from 0 to 5"),
        ("detection", {"norms": "group"}, "norms='group': must be one of batch, eval, frozen"),
    ],
)
def test_settings_that_make_no_sense_are_refused(task, values, message):
    base = MAKERS[task]()
    if "dyrep" in values:
        values = {"dyrep": replace(base.dyrep, **values["dyrep"])}
    with pytest.raises(ConfigError, match=message):
        replace(base, **values)


def test_settings_of_other_tasks_are_refused_in_classification():
    for values in ({"backbone": "run"}, {"norms": "frozen"}, {"frozen_stages": 1}, {"scale": (0.5, 2.0)}):
        with pytest.raises(ConfigError, match="has no use in classification"):
            Recipe(**values)


def test_networks_of_other_tasks_are_refused(make, data, tmp_path):
    chosen = make(model="resnet18")
    with pytest.raises(ConfigError, match="model 'resnet18' is not for this task; use one of"):
        train(chosen, settings(tmp_path, data=data(chosen)))


def test_a_recipe_survives_being_written_down(make):
    chosen = make(scale=(1.0, 1.0)) if make is MAKERS["detection"] else make()
    assert Recipe.from_dict(json.loads(json.dumps(chosen.to_dict()))) == chosen


def test_a_checkpoint_holds_the_task_and_the_best_by_its_metric(run):
    task, folder = run
    state = checkpoints.read(Path(folder) / checkpoints.BEST)
    assert METRIC[task] in state
    assert state["recipe"]["dataset"] == {"detection": "voc", "segmentation": "masks"}[task]
