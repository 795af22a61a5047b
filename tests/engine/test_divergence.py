"""A loss that is not finite stops the run, says where it began, and spoils nothing."""

import json
import sys

import pytest
import torch
from torch import nn

import dyrep
from dyrep.cli.main import main
from dyrep.config import DyRepConfig
from dyrep.engine.checkpoints import read
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.running import train
from dyrep.errors import DivergedError
from dyrep.surgery.divergence import find_origin

NETWORKS = '''
import os

import torch
from torch import nn

from dyrep.models import small_vgg


class Overflow(nn.Module):
    """Goes to infinity from a training step on, in the forward pass or in the backward pass."""

    def __init__(self, backward):
        super().__init__()
        self.backward, self.steps = backward, 0

    def forward(self, x):
        if not self.training:
            return x
        self.steps += torch.is_grad_enabled()
        if self.steps < int(os.environ.get("OVERFLOW", "1000000")):
            return x
        if self.backward and torch.is_grad_enabled():
            x.register_hook(lambda gradient: gradient * float("inf"))
        return x if self.backward else x * float("inf")


def network(backward, num_classes, in_channels):
    chain = small_vgg(num_classes, in_channels, widths=((4,), (8,)))
    return nn.Sequential(*chain[:5], Overflow(backward), *chain[5:])


def forward(num_classes, in_channels):
    return network(False, num_classes, in_channels)


def backward(num_classes, in_channels):
    return network(True, num_classes, in_channels)
'''
STEPS = 11
"""Steps per epoch of the runs here."""


@pytest.fixture(autouse=True)
def _networks(tmp_path, monkeypatch):
    (tmp_path / "overflowing.py").write_text(NETWORKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("overflowing", None)


def words(out, *more):
    settings = ["--epochs", "3", "--interval", "1", "--batch-size", "128", "--device", "cpu"]
    return ["train", *settings, "--out", str(out), *more]


def all_finite(state):
    return all(torch.isfinite(value).all() for value in state["model"].values() if value.is_floating_point())


# -- runs -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::dyrep.errors.SettingsChangedWarning")
def test_a_run_that_explodes_stops_and_goes_on_from_its_last_good_checkpoint(tmp_path, capsys):
    out = tmp_path / "run"
    main(words(out, "--stop-after", "1"))
    good = read(out / "last.ckpt")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(words(out, "--lr", "1e30", "--change-settings"))
    assert stopped.value.code == 1
    message = capsys.readouterr().err
    assert message.startswith("dyrep: the loss is not finite at epoch 2, step ")
    assert "It began with " in message
    assert "layer '" in message
    assert f"the last good checkpoint is kept in {out}" in message
    assert "--lr 3.3e+29 --change-settings" in message
    kept = read(out / "last.ckpt")
    assert (kept["epoch"], kept["step"]) == (1, 0)
    assert all(torch.equal(value, kept["model"][key]) for key, value in good["model"].items())
    assert not (out / "summary.json").exists()
    main(words(out, "--lr", "0.01", "--change-settings"))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[2]["test_accuracy"] > 80
    assert (out / "summary.json").exists()


@pytest.mark.parametrize("method", ["origin", "dyrep"])
@pytest.mark.parametrize("at", [5, STEPS, STEPS + 7])
def test_the_layer_and_the_step_where_it_began_are_named(method, at, tmp_path, monkeypatch):
    monkeypatch.setenv("OVERFLOW", str(at))
    evolution = DyRepConfig.paper(interval=1, score="snip")
    recipe = Recipe(model="overflowing:forward", method=method, epochs=3, batch_size=128, dyrep=evolution)
    out = tmp_path / "run"
    with pytest.raises(DivergedError) as error:
        train(recipe, RunSettings(out=out, device="cpu", checkpoint_minutes=0))
    epoch, step = divmod(at - 1, STEPS)
    assert f"at epoch {epoch + 1}, step {step + 1}. It began with the output of layer '5' (Overflow)" in str(
        error.value
    )
    kept = read(out / "last.ckpt")
    assert (kept["epoch"], kept["step"]) == (epoch, step)
    assert all_finite(kept)


def test_without_a_checkpoint_the_message_does_not_promise_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OVERFLOW", "8")
    with pytest.raises(SystemExit) as stopped:
        main(words(tmp_path / "run", "--model", "overflowing:forward"))
    assert stopped.value.code == 1
    message = capsys.readouterr().err
    assert "at epoch 1, step 8. It began with the output of layer '5' (Overflow), from finite inputs" in message
    assert f"there is no checkpoint in {tmp_path / 'run'} yet" in message


@pytest.mark.parametrize("at", [6, STEPS])
def test_weights_that_a_gradient_has_spoiled_are_never_saved(at, tmp_path, monkeypatch):
    """The loss of the step itself is finite: before the next one it shows in the weights alone."""
    monkeypatch.setenv("OVERFLOW", str(at))
    recipe = Recipe(model="overflowing:backward", method="origin", epochs=3, batch_size=128)
    out = tmp_path / "run"
    with pytest.raises(
        DivergedError, match=r"the gradient of layer '4' \(Conv2d\), whose weight is not finite any more"
    ):
        train(recipe, RunSettings(out=out, device="cpu", checkpoint_minutes=0))
    kept = read(out / "last.ckpt")
    assert all_finite(kept)
    assert (kept["epoch"], kept["step"]) == (0, at - 1)
    monkeypatch.delenv("OVERFLOW")
    assert train(recipe, RunSettings(out=out, device="cpu"))["fold_passed"]


# -- where it began ---------------------------------------------------------------------------------------------


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_images_that_are_not_finite_are_blamed_first(bad):
    images, model = IMAGES.clone(), make_net()
    images[1, 2, 3, 4] = bad
    with torch.no_grad():
        model[3].weight[0, 0, 0, 0] = bad
    assert find_origin(model, images) == "the images: they hold values that are not finite"


def test_of_layers_that_a_bad_gradient_has_spoiled_the_last_is_where_it_began():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("nan")

    class Layer(nn.Module):
        def forward(self, x):
            return Bad.apply(x)

    model = make_net()
    model.insert(4, Layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(IMAGES).square().sum()
    assert torch.isfinite(loss)
    loss.backward()
    optimizer.step()
    assert torch.isfinite(model[7].weight).all()
    assert find_origin(model, IMAGES) == "the gradient of layer '3' (Conv2d), whose bias is not finite any more"


def test_a_parameter_of_the_model_itself_is_named_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(float("inf")))

        def forward(self, x):
            return x * self.scale

    assert find_origin(Scaled(), IMAGES) == "the gradient of layer '' (Scaled), whose scale is not finite any more"


def test_the_innermost_layer_that_makes_infinity_out_of_finite_numbers_is_named():
    model = nn.Sequential(make_net(), nn.Softmax(1))
    with torch.no_grad():
        model[0][3].weight.fill_(3e38)
    assert find_origin(model, IMAGES) == "the output of layer '0.3' (Conv2d), from finite inputs and weights"


@pytest.mark.parametrize("branch", ["1x1", "1x1-KxK", "residual"])
def test_a_layer_inside_a_block_is_named(branch):
    model = make_net()
    dyrep.expand_(model, "3", calibration=[IMAGES])
    inside = [name for name, _ in model.named_parameters() if f".{branch}." in name and name.endswith("weight")]
    with torch.no_grad():
        model.get_parameter(inside[-1]).fill_(3e38)
    layer = inside[-1].rpartition(".")[0]
    kind = type(model.get_submodule(layer)).__name__
    model.eval()  # so that a norm does not undo the scale of what comes before it
    assert find_origin(model, IMAGES).startswith(f"the output of layer '{layer}' ({kind})")


def test_what_happens_between_layers_is_blamed_on_the_one_around_it_and_not_on_the_next():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.conv(x / 0)

    model = nn.Sequential(nn.Conv2d(3, 3, 1), Between(), nn.ReLU())
    assert find_origin(model, IMAGES) == "the output of layer '1' (Between), from finite inputs and weights"


def test_if_nothing_else_is_to_blame_it_was_the_loss():
    assert find_origin(make_net(), IMAGES) == "the loss itself: all weights and outputs of layers are finite"


def test_looking_for_the_origin_leaves_no_hooks_behind_also_after_an_error():
    model = make_net()
    find_origin(model, IMAGES)
    with pytest.raises(RuntimeError):
        find_origin(model, torch.ones(1, 2, 8, 8))
    assert not any(module._forward_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_layers_may_give_tuples_and_whole_numbers():
    class Pair(nn.Module):
        def forward(self, x):
            return x.argmax(1), x

    class Second(nn.Module):
        def forward(self, pair):
            return pair[1] / 0

    model = nn.Sequential(Pair(), Second())
    assert find_origin(model, IMAGES) == "the output of layer '1' (Second), from finite inputs and weights"
