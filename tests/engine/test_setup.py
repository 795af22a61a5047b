"""What a run trains with, made from its recipe."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dyrep.config import DyRepConfig
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.resources import uses_channels_last
from dyrep.engine.setup import (
    load_plain_weights_,
    make_data,
    make_model,
    make_optimizer,
    suit_device_,
    uses_graph,
)
from dyrep.engine.world import World
from dyrep.errors import CheckpointError, ConfigError
from dyrep.models import small_vgg

CPU = torch.device("cpu")


def plain(**values):
    return Recipe(method="origin", **values)


def test_data_is_divided_among_the_ranks():
    ranks = [make_data(plain(batch_size=64), RunSettings(), World(CPU, rank, 2)) for rank in range(2)]
    assert [data.train.steps for data in ranks] == [22, 22]
    images = [data.train.prepare(next(iter(data.train.batches(0))))[0] for data in ranks]
    alone = make_data(plain(batch_size=64), RunSettings(), World(CPU))
    assert torch.equal(torch.cat(images), alone.train.prepare(next(iter(alone.train.batches(0))))[0])


def test_the_layout_of_memory_follows_the_device_unless_asked_otherwise():
    assert not uses_channels_last(RunSettings(), CPU)
    assert uses_channels_last(RunSettings(), torch.device("cuda"))
    assert uses_channels_last(RunSettings(channels_last=True), CPU)
    data = make_data(plain(), RunSettings(channels_last=True), World(CPU))
    images, _ = data.train.prepare(next(iter(data.train.batches(0))))
    assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("graph", "device", "size", "expected"),
    [
        (None, "cpu", 1, (False, "")),
        (False, "cpu", 1, (False, "")),
        (True, "cpu", 1, (False, "--graph needs a GPU; steps run eagerly")),
        (None, "cuda", 1, (True, "")),
        (True, "cuda", 1, (True, "")),
        (False, "cuda", 1, (False, "")),
        (None, "cuda", 2, (False, "")),
        (True, "cuda", 2, (False, "--graph works on a single GPU; with several, steps run eagerly")),
    ],
)
def test_steps_are_captured_on_a_single_gpu_alone(graph, device, size, expected):
    assert uses_graph(RunSettings(graph=graph), World(torch.device(device), 0, size)) == expected


# -- optimizer --------------------------------------------------------------------------------------------------


def test_the_optimizer_has_the_settings_of_the_recipe_for_all_parameters():
    model = small_vgg()
    chosen = plain(lr=0.3, momentum=0.8, nesterov=True, weight_decay=0.01)
    (group,) = make_optimizer(model, chosen, CPU).param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters()}
    found = {key: group[key] for key in ("lr", "momentum", "nesterov", "weight_decay", "fused")}
    assert found == {"lr": 0.3, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01, "fused": False}


def test_norms_and_biases_can_be_left_undecayed():
    model = small_vgg()
    decayed, others = make_optimizer(model, plain(weight_decay=0.01, decay_norms=False), CPU).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.01, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {f"conv{n}.weight" for n in range(1, 7)} | {"classifier.weight"}
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_an_optimizer_that_comes_from_a_gpu_suits_a_cpu_again():
    optimizer = make_optimizer(small_vgg(), plain(), CPU)
    optimizer.param_groups[0].update(lr=torch.tensor(0.25), fused=True)
    suit_device_(optimizer, CPU)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    assert optimizer.param_groups[0]["fused"] is False


# -- initial weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_model_starts_from_the_weights_in_a_file(tmp_path, suffix):
    source, path = small_vgg(), tmp_path / f"weights{suffix}"
    write = save_file if suffix == ".safetensors" else torch.save
    write(source.state_dict(), path)
    model = make_model(plain(weights=str(path)), classes=10, channels=1)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in source.state_dict().items())
    assert not torch.equal(make_model(plain(), classes=10, channels=1).conv1.weight, source.conv1.weight)


def test_weights_that_are_missing_or_do_not_fit_are_refused_and_say_why(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no file .*none\.safetensors to take initial weights from"):
        load_plain_weights_(small_vgg(), tmp_path / "none.safetensors")
    save_file({"conv1.weight": torch.zeros(16, 1, 3, 3)}, tmp_path / "few.safetensors")
    with pytest.raises(CheckpointError, match=r"few\.safetensors do not fit the model: .*Missing key\(s\).*norm1"):
        load_plain_weights_(small_vgg(), tmp_path / "few.safetensors")
    save_file(small_vgg(num_classes=3).state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"size mismatch for classifier"):
        load_plain_weights_(small_vgg(), tmp_path / "other.safetensors")
    (tmp_path / "rubbish.pt").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"rubbish\.pt cannot be read"):
        load_plain_weights_(small_vgg(), tmp_path / "rubbish.pt")


class Harmful:
    """Would write a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_file_of_weights_runs_no_code(tmp_path):
    torch.save({"conv1.weight": Harmful(tmp_path / "ran")}, tmp_path / "harmful.pt")
    with pytest.raises(CheckpointError, match=r"harmful\.pt cannot be read"):
        load_plain_weights_(small_vgg(), tmp_path / "harmful.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dyrep": DyRepConfig(start_with=("1x1",)), "weights": "file.pt"},
            "starts at random, and that of weights='file.pt' does not",
        ),
        (
            {"dyrep": DyRepConfig(start_with=("1x1",)), "method": "dbb"},
            "is for method='dyrep', and this one is 'dbb': leave it out",
        ),
        (
            {"dyrep": DyRepConfig(start_with=("1x1",)), "max_kernel": 3},
            r"max_kernel=3 is for the blocks of other methods, and start_with=\('1x1',\) for kernels up to 5x5",
        ),
        (
            {"dyrep": DyRepConfig.paper(absorb_after=2), "method": "dbb"},
            "absorb_after=2 is for method='dyrep', and this one",
        ),
        (
            {"dyrep": DyRepConfig.paper(interval=5, absorb_after=3)},
            "absorb_after=3 comes before the first update, after 5 e",
        ),
    ],
)
def test_branches_from_the_start_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Recipe(**changes)


def test_what_a_network_begins_with_was_a_setting_of_the_recipe_once():
    old = Recipe(dyrep=DyRepConfig.paper()).to_dict()
    del old["dyrep"]["start_with"]
    assert Recipe.from_dict(old).dyrep.start_with == ()
    assert Recipe.from_dict({**old, "start_with": ["1x1"]}).dyrep.start_with == ("1x1",)
