"""``dyrep train`` from end to end, and what the command answers."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import dyrep
from dyrep.cli.main import main
from dyrep.engine import running
from dyrep.engine.checkpoints import read
from dyrep.engine.recipes import RECIPES
from dyrep.engine.running import load_run
from dyrep.methods import METHODS
from dyrep.models import build

OWN_NETWORK = """
from torch import nn

def tiny(num_classes, in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )
"""


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def outputs_agree(model, plain, state):
    images = torch.randn(16, state["channels"], state["size"], state["size"])
    with torch.no_grad():
        ours, theirs = model.eval()(images), plain.eval()(images)
    return float((ours - theirs).abs().max() / ours.abs().max()) < 1e-5


# -- a run and its folder ---------------------------------------------------------------------------------------


def test_training_leaves_a_folder_that_says_what_was_done_and_what_came_out(evolved):
    recipe = json.loads((evolved / "config.json").read_text())["recipe"]
    assert recipe["epochs"] == 3
    assert recipe["dyrep"]["include"] == ["conv6"]
    (session,) = lines(evolved / "sessions.jsonl")
    assert session["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert session["versions"]["dyrep"] == dyrep.__version__
    assert "CPU" in session["hardware"]
    assert session["settings"]["out"] == str(evolved)
    rows = lines(evolved / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [row["branches"] for row in rows] == [0, 6, 12]
    assert rows[2]["train_loss"] < rows[0]["train_loss"]
    events = dyrep.read_events(evolved / "events.jsonl")
    assert [event["type"] for event in events] == ["started", "update", "update"]
    assert events[2]["edits"][0]["layer"] == "conv6.branches.1x1-KxK.conv"
    summary = json.loads((evolved / "summary.json").read_text())
    assert summary["recipe"] == recipe
    assert summary["test_accuracy"] == rows[2]["test_accuracy"] > 90
    assert summary["test_accuracy_folded"] == pytest.approx(summary["test_accuracy"], abs=0.3)
    assert summary["fold_passed"]
    assert summary["best"]["accuracy"] == max(row["test_accuracy"] for row in rows)
    assert summary["mean_macs"] == sum(row["macs"] for row in rows) / 3
    assert read(evolved / "last.ckpt")["epoch"] == 3
    assert read(evolved / "best.ckpt")["epoch"] == summary["best"]["epoch"]


@pytest.mark.parametrize("kind", ["evolved", "averaged", "plain"])
def test_the_weights_written_at_the_end_are_those_of_the_trained_network_in_plain_form(kind, request):
    folder = request.getfixturevalue(kind)
    model, state = load_run(folder)
    fresh = build("small_vgg", num_classes=10, in_channels=1)
    fresh.load_state_dict(load_file(folder / "plain.safetensors"))
    assert outputs_agree(model, fresh, state)
    assert bool(dyrep.structure(model)["blocks"]) == (kind != "plain")


def test_with_a_moving_average_that_is_what_counts(averaged):
    state = read(averaged / "last.ckpt")
    assert not torch.equal(state["average"]["conv1.weight"], state["model"]["conv1.weight"])
    model, _ = load_run(averaged)
    assert torch.equal(model.conv1.weight, state["average"]["conv1.weight"])


def test_progress_is_told_in_a_few_lines(capsys, tmp_path):
    words = ["train", "--epochs", "2", "--interval", "1", "--batch-size", "128", "--device", "cpu"]
    main([*words, "--out", str(tmp_path)])
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("digits, method dyrep, seed 0: small_vgg (")
    assert "1,408 training images per epoch, 360 to test" in told[0]
    assert told[1].startswith("epoch 1/2")
    assert told[2].startswith("    expand conv")
    assert told[3].startswith("epoch 2/2")
    assert told[4].startswith("test accuracy ")
    assert "passed" in told[5]
    assert told[6].startswith(f"results in {tmp_path}")
    assert len(told) == 7


def test_without_a_folder_the_run_goes_under_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["train", "--epochs", "1", "--method", "origin", "--seed", "3", "--batch-size", "512", "--device", "cpu"])
    assert (tmp_path / "runs" / "digits-origin-seed3" / "summary.json").exists()


def test_a_held_out_split_chooses_and_the_test_set_is_looked_at_once_in_the_end(averaged):
    rows = lines(averaged / "metrics.jsonl")
    assert all("val_accuracy" in row and "val_loss" in row for row in rows)
    assert not any(key.startswith("test") for row in rows for key in row)
    summary = json.loads((averaged / "summary.json").read_text())
    assert summary["best"]["split"] == "val"
    accuracies = [row["val_accuracy"] for row in rows]
    assert summary["best"]["accuracy"] == max(accuracies)
    assert summary["best"]["epoch"] == 1 + accuracies.index(max(accuracies))
    assert summary["val_accuracy"] == accuracies[-1]
    assert 0 < summary["test_accuracy"] <= 100
    assert read(averaged / "best.ckpt")["split"] == "val"


def test_evaluation_can_be_rarer_than_epochs_but_the_last_one_is_evaluated(tmp_path):
    words = ["train", "--method", "origin", "--epochs", "3", "--eval-every", "2", "--batch-size", "512"]
    main([*words, "--device", "cpu", "--out", str(tmp_path)])
    evaluated = ["test_accuracy" in row for row in lines(tmp_path / "metrics.jsonl")]
    assert evaluated == [False, True, True]


# -- networks of others -----------------------------------------------------------------------------------------


@pytest.fixture
def image_folder(tmp_path):
    """Two classes of images, light and dark."""
    for split, count in (("train", 12), ("val", 4)):
        for label, title in enumerate(("dark", "light")):
            folder = tmp_path / "images" / split / title
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = np.random.default_rng(100 * label + index).integers(0, 128, (32, 32, 3)) + 127 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.png")
    return tmp_path / "images"


@pytest.mark.parametrize("model", ["timm:test_resnet", "torchvision:resnet18"])
def test_a_network_of_another_library_learns_from_a_folder_of_images(model, image_folder, tmp_path):
    out = tmp_path / "run"
    words = ["train", "--model", model, "--dataset", "folder", "--data", str(image_folder), "--image-size", "32"]
    settings = ["--epochs", "2", "--batch-size", "8", "--interval", "1", "--workers", "1", "--lr", "0.01"]
    main([*words, *settings, "--out", str(out), "--device", "cpu"])
    assert lines(out / "metrics.jsonl")[1]["branches"] > 0
    evolved, state = load_run(out)
    assert state["classes"] == ["dark", "light"]
    fresh = build(model, num_classes=2, in_channels=3)
    fresh.load_state_dict(load_file(out / "plain.safetensors"))
    assert outputs_agree(evolved, fresh, state)


@pytest.fixture
def own_network(tmp_path, monkeypatch):
    (tmp_path / "own_network.py").write_text(OWN_NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_network:tiny"
    sys.modules.pop("own_network", None)


def test_a_network_of_ones_own_is_found_in_the_current_directory(own_network, tmp_path, capsys):
    words = ["train", "--model", own_network, "--epochs", "2", "--interval", "1", "--batch-size", "128"]
    main([*words, "--device", "cpu", "--out", "run"])
    assert lines(tmp_path / "run" / "metrics.jsonl")[1]["branches"] > 0
    evolved, state = load_run(tmp_path / "run")
    fresh = build(own_network, num_classes=10, in_channels=1)
    fresh.load_state_dict(load_file("run/plain.safetensors"))
    assert outputs_agree(evolved, fresh, state)
    main(["inspect", "run"])
    assert own_network in capsys.readouterr().out


def test_initial_weights_come_from_a_file(evolved, tmp_path, failing):
    words = ["train", "--method", "origin", "--epochs", "1", "--batch-size", "1437", "--lr", "1e-12", "--device", "cpu"]
    main([*words, "--weights", str(evolved / "plain.safetensors"), "--out", str(tmp_path / "run")])
    expected = load_file(evolved / "plain.safetensors")["conv3.weight"]
    torch.testing.assert_close(load_run(tmp_path / "run")[0].conv3.weight.detach(), expected)
    status, message = failing(*words, "--weights", tmp_path / "none.pt", "--out", tmp_path / "other")
    assert status == 1
    assert f"there is no file {tmp_path / 'none.pt'}" in message


# -- what the command answers -----------------------------------------------------------------------------------


def test_without_a_command_it_tells_which_there_are(capsys):
    for words, status in (([], 2), (["--help"], 0), (["help"], 0)):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == status
        told = capsys.readouterr().out
        assert all(
            f"\n  {command} " in told for command in ("train", "inspect", "deploy", "bench", "recipes", "methods")
        )
        assert max(map(len, told.splitlines())) <= 80


def test_it_tells_its_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out.strip() == dyrep.__version__


def test_it_lists_the_methods_with_what_they_are(capsys):
    main(["methods"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == list(METHODS)
    assert all(METHODS[line.split()[0]].title in line for line in lines[:-1])
    assert "dyrep-40" in lines[-1]


def test_it_lists_the_recipes(capsys):
    main(["recipes"])
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == list(RECIPES)
    assert "vgg16 on cifar10, 600 epochs, batch 128, t=15" in told[1]


def test_a_command_that_is_not_there_is_answered_with_those_that_are(failing):
    status, message = failing("trian")
    assert status == 2
    commands = "train, inspect, deploy, export, report, draw, reproduce, bench, recipes, methods"
    assert message == f"dyrep: there is no command 'trian'; valid are {commands}\n"


@pytest.mark.parametrize("command", ["inspect", "deploy"])
def test_a_folder_without_a_run_is_named(command, failing, tmp_path):
    status, message = failing(command, tmp_path)
    assert status == 1
    assert message == f"dyrep: {tmp_path} is not the folder of a run: it has no config.json\n"


def test_data_that_is_missing_ends_with_status_1_and_says_where_it_should_be(failing, tmp_path):
    status, message = failing("train", "cifar10-vgg16", "--device", "cpu", "--out", tmp_path / "run")
    assert status == 1
    assert "needs its folder: give --data DIR" in message


def test_a_place_that_cannot_be_written_to_is_named(failing, plain, tmp_path):
    taken = tmp_path / "file"
    taken.write_text("mine")
    for words in (("train", "digits", "--out", taken), ("deploy", plain, "-o", taken / "plain.safetensors")):
        status, message = failing(*words)
        assert status == 1
        assert message.startswith(f"dyrep: {taken}")
        assert "cannot be read or written" in message
    assert taken.read_text() == "mine"


def test_a_config_that_was_damaged_is_written_anew_when_the_run_goes_on(tmp_path, capsys):
    words = ["train", "digits", "--batch-size", "64", "--out", str(tmp_path / "run"), "--device", "cpu"]
    words += ["--epochs", "2", "--interval", "1"]
    main([*words, "--stop-after", "1"])
    before = (tmp_path / "run" / "config.json").read_text()
    (tmp_path / "run" / "config.json").write_text("garbage")
    main(words)
    assert "was damaged, and has been written anew" in capsys.readouterr().out
    recipes = [json.loads(text)["recipe"] for text in (before, (tmp_path / "run" / "config.json").read_text())]
    assert recipes[0] == recipes[1]


@pytest.mark.parametrize(("reason", "status"), [("Ctrl-C", 130), ("SIGTERM", 143), ("SIGUSR1", 138)])
def test_a_run_that_was_stopped_ends_with_the_status_of_the_signal(reason, status, failing, monkeypatch):
    def stopped(recipe, settings):
        raise running.Stopped(reason)

    monkeypatch.setattr(running, "train", stopped)
    assert failing("train") == (status, "")


def test_a_package_that_is_not_installed_is_named_with_the_way_to_get_it(failing, monkeypatch):
    for module in [name for name in sys.modules if name.startswith(("dyrep.cli.", "tyro"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "tyro", None)
    status, message = failing("train")
    assert status == 2  # what to install is a matter of setup, as a setting is
    assert message == 'dyrep: dyrep train needs tyro, which is not installed: pip install ".[train]" (or just tyro)\n'


def test_the_command_is_installed_and_its_output_may_be_cut_off():
    command = [sys.executable, "-m", "dyrep", "recipes"]
    read_all = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert len(read_all.stdout.splitlines()) == len(RECIPES)
    piped = subprocess.run(
        f"{sys.executable} -u -m dyrep recipes | true", shell=True, capture_output=True, text=True, timeout=60
    )
    assert piped.stderr == ""


LAZY_NETWORK = """
from torch import nn

def lazy(num_classes):
    layers = nn.LazyConv2d(8, 3, padding=1), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
    return nn.Sequential(*layers, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes))

def unfit(num_classes):
    return nn.Sequential(nn.LazyConv2d(8, 9), nn.Flatten(), nn.LazyLinear(num_classes))
"""


def test_a_network_without_shapes_gets_them_from_the_images(tmp_path, monkeypatch, failing, capsys):
    (tmp_path / "lazy_networks.py").write_text(LAZY_NETWORK)
    monkeypatch.chdir(tmp_path)
    words = ["train", *"--epochs 2 --interval 1 --batch-size 512 --device cpu --out run".split()]  # noqa: SIM905
    main([*words, "--model", "lazy_networks:lazy", "--method", "dyrep-default"])
    assert "with 3 branches" in capsys.readouterr().out.splitlines()[0]
    assert set(dyrep.structure(load_run(tmp_path / "run")[0])["blocks"]) == {"0", "3"}
    status, message = failing(*words, "--model", "lazy_networks:unfit")
    assert status == 2
    assert "'0.weight' of the model has no shape before it has run, and it does not run on images of 1x1x8x8" in message


@pytest.mark.parametrize("command", ["recipes", "methods"])
def test_lists_take_no_words(command, failing, capsys):
    status, message = failing(command, "--nope")
    assert status == 2
    assert f"dyrep {command} lists what there is and takes no arguments: --nope" in message
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"usage: dyrep {command}" in capsys.readouterr().out
