"""Every setting is a flag, with its description and its default; mistakes are answered with what is valid."""

import dataclasses
import json
import re

import pytest

from dyrep.cli.flags import parse_training
from dyrep.cli.main import main
from dyrep.config import DyRepConfig
from dyrep.engine import running
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.recipes import RECIPES
from dyrep.methods import RepNASConfig
from dyrep.scoring import SCORES


def described(cls):
    """The settings of a class with their descriptions, from its docstring."""
    found, name = {}, None
    for line in cls.__doc__.partition("Attributes:\n")[2].partition("\n\n")[0].splitlines():
        begins = re.match(r" {8}(\w+): (.*)", line)
        if begins:
            name = begins[1]
            found[name] = begins[2]
        else:
            found[name] += " " + line.strip()
    return found


def squeezed(text):
    """Letters and digits alone: help is broken into lines and framed."""
    return re.sub(r"[^\w]", "", text)


@pytest.fixture(scope="module")
def help_text():
    import contextlib
    import io

    told = io.StringIO()
    with contextlib.redirect_stdout(told), pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])
    assert stopped.value.code == 0
    return told.getvalue()


@pytest.mark.parametrize(
    ("cls", "hidden"),
    [
        (Recipe, {"name", "structure", "dyrep", "repnas"}),
        (DyRepConfig, {"seed", "total"}),
        (RepNASConfig, {"total"}),
        (RunSettings, set()),
    ],
)
def test_help_names_every_setting_with_its_description(cls, hidden, help_text):
    fields = {field.name for field in dataclasses.fields(cls)}
    descriptions = described(cls)
    assert set(descriptions) == fields
    whole = squeezed(help_text)
    for name in fields - hidden:
        flag = f"--{name.replace('_', '-')}"
        assert re.search(rf"{flag}[ ,]", help_text), flag
        assert squeezed(descriptions[name]) in whole, name


def test_help_has_no_marks_that_are_for_pages(help_text):
    assert "`" not in help_text


def test_a_default_that_is_told_in_words_is_not_told_twice(help_text):
    squeezed_text = squeezed(help_text)
    assert squeezed("(default: none).") in squeezed_text  # of --ema
    assert squeezed("(default: none). (default: None)") not in squeezed_text
    assert squeezed("(default: never stop). (default") not in squeezed_text
    assert squeezed("folder of the data set. (default: None)") in squeezed_text


def test_help_names_the_recipes(help_text):
    assert all(name in re.sub(r"\s+", " ", help_text) for name in RECIPES)


def test_settings_that_follow_from_others_are_no_flags(help_text):
    assert not re.search(r"--(name|total)\b", help_text)
    assert help_text.count("--seed") == 1


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_printed_and_is_printed_as_it_is(name, capsys, monkeypatch):
    monkeypatch.setattr(running, "train", lambda *_: pytest.fail("trained"))
    main(["train", name, "--print-config"])
    printed = json.loads(capsys.readouterr().out)
    assert Recipe.from_dict(printed["recipe"]) == RECIPES[name]
    assert printed["folder"] == f"runs/{name}-dyrep-seed0"


def test_printing_the_configuration_trains_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["train", "--print-config", "--seed", "7", "--out", str(tmp_path / "run")])
    printed = json.loads(capsys.readouterr().out)
    assert printed["recipe"]["seed"] == 7
    assert printed["folder"] == str(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_flags_change_a_recipe_and_leave_the_rest():
    words = ["cifar10-vgg16", "--epochs", "30", "--interval", "7", "--no-flip", "--ema", "0.99", "--resident", "True"]
    more = ["--include", "conv1", "conv2", "--branches", "1x1", "residual", "--macs-limit", "None", "--workers", "0"]
    recipe, settings = parse_training([*words, *more])
    base = RECIPES["cifar10-vgg16"]
    evolution = dataclasses.replace(
        base.dyrep, interval=7, include=("conv1", "conv2"), branches=("1x1", "residual"), macs_limit=None
    )
    expected = dataclasses.replace(base, epochs=30, flip=False, ema=0.99, resident=True, dyrep=evolution)
    assert recipe.differences(expected) == []
    assert settings == RunSettings(workers=0)


def test_by_default_is_shown_as_what_it_stands_for():
    (chosen, _) = parse_training(["cifar10-vgg16", "--method", "dyrep-default", "--macs-limit", "2"])
    assert chosen.dyrep == DyRepConfig(interval=15, macs_limit=2.0)
    assert Recipe.from_dict(chosen.to_dict()) == chosen


def test_without_a_recipe_the_digits_are_trained():
    recipe, settings = parse_training([])
    assert recipe == RECIPES["digits"]
    assert settings == RunSettings()


def test_a_recipe_that_is_not_there_is_answered_with_those_that_are(failing):
    status, message = failing("train", "cifar11")
    assert status == 2
    assert message.startswith("dyrep: there is no recipe 'cifar11'; valid are digits, ")
    assert all(name in message for name in RECIPES)


def test_a_flag_that_is_not_there_is_answered_with_the_ones_it_resembles(failing):
    status, message = failing("train", "--epoch", "3")
    assert status == 2
    assert "Unrecognized options: --epoch" in message
    assert "--epochs INT" in message
    assert "dyrep train digits --help" in message


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--crop", "round"), ("'round'", "'--crop'", "none", "pad", "resized")),
        (("--method", "bdd"), ("'bdd'", "origin", "dbb", "dyrep-40")),
        (("--dataset", "mnist"), ("'mnist'", "digits", "cifar10", "cifar100", "folder")),
        (("--precision", "int8"), ("'int8'", "auto", "fp32", "bf16", "fp16")),
        (("--score", "luck"), ("score='luck'", *SCORES)),
        (("--unit", "hour"), ("unit='hour'", "epoch, step")),
        (("--branches", "2x2"), ("'2x2'", "1x1, 1x1-KxK, 1x1-AVG, 1xK, Kx1, residual")),
        (("--epochs", "many"), ("--epochs", "'many'", "passes over the training set")),
        (("--epochs", "0"), ("epochs=0: must be at least 1",)),
        (("--lr", "-1"), ("lr=-1.0: must be above 0",)),
        (("--stop-after", "0"), ("stop_after=0: must be at least 1",)),
        (("--checkpoint-minutes", "-1"), ("checkpoint_minutes=-1.0: must be at least 0",)),
        (("--interval", "40"), ("no update would ever be due", "interval=40", "total=24")),
        (
            ("--method", "dyrep4-default", "--cut", "paper"),
            ("cut='paper'", "'none' in its place", "--method dyrep4 with"),
        ),
        (("--method", "dyrep-default", "--macs-limit", "None"), ("macs_limit=None", "default 1.5")),
        (("--model", "torchvision:resnet81"), ("torchvision has no model 'resnet81'", "did you mean")),
        (("--model", "resnet81"), ("'resnet81'", "did you mean", "resnet18", "timm:NAME", "package.module:function")),
        (("--device", "gpu"), ("--device 'gpu'", "cpu, cuda, cuda:0")),
        (("--device", "mps"), ("--device 'mps'", "only cpu and cuda")),
        (("--device", "cuda:99"), ("there is no GPU number 99",)),
        (("--device", "cpu", "--precision", "fp16"), ("precision='fp16' needs a GPU", "fp32 or bf16")),
        (("--device", "cpu", "--sync-norms"), ("--sync-norms needs GPUs",)),
        (("--device", "cpu", "--batch-size", "2000"), ("batch_size=2000", "only 1437 examples")),
        (("--device", "cpu", "--image-size", "9"), ("size=9", "8x8")),
        (("--device", "cpu", "--color-jitter", "0.4"), ("color_jitter", "needs image files")),
        (("digits", "cifar10-vgg16"), ("cifar10-vgg16",)),
        (("--epochs", "5", "cifar10-vgg16"), ("the recipe comes first: dyrep train cifar10-vgg16 --epochs 5",)),
        (("--device", "cpu", "--image-size", "16"), ("image_size=16: the images of digits are 8x8",)),
    ],
)
def test_a_value_that_cannot_be_is_answered_with_what_can(words, told, failing, tmp_path):
    status, message = failing("train", *words, "--out", tmp_path / "run")
    assert status == 2
    message = re.sub(r"\s+", " ", re.sub("[│╭╮╰╯─]", " ", message))
    assert all(part in message for part in told), message


def test_a_mistake_in_another_command_is_answered_too(failing, evolved):
    status, message = failing("inspect", evolved, "--which", "worst")
    assert status == 2
    assert "'worst'" in message
    assert "'last', 'best'" in re.sub(r"[│\s]+", " ", message)
    status, message = failing("deploy")
    assert status == 2
    assert "folder of the run" in message
