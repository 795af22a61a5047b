"""``dyrep inspect``, ``dyrep deploy`` and the picture, for runs of every kind of block."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

import dyrep
from dyrep.block import RepConv
from dyrep.cli.main import main
from dyrep.engine.running import load_run
from dyrep.models import build
from dyrep.report.history import lives
from dyrep.report.runs import read_run
from dyrep.report.timeline import timeline

PLAIN_MACS, PLAIN_PARAMETERS, CLASSIFIER = 599_680, 72_666, 64 * 10
RUNS = {
    "dbb": ("--method", "dbb", "--epochs", "2"),
    "dbb, conv": ("--method", "dbb", "--epochs", "2", "--replace", "conv"),
    "mobileone": ("--method", "mobileone", "--epochs", "2", "--copies", "3"),
    "orepa": ("--method", "orepa", "--epochs", "2"),
    "repnas": ("--method", "repnas", "--epochs", "3"),
    "searching": ("--method", "repnas", "--epochs", "3", "--stop-after", "1"),
    "averaged": ("--method", "repnas", "--epochs", "3", "--ema", "0.5"),
}


@pytest.fixture
def folder(trained):
    """The folder of one of the runs."""

    def find(name):
        return trained("--val-split", "1000", "--lr", "0.03", *RUNS[name])

    return find


@pytest.fixture
def inspected(folder, capsys):
    """What ``dyrep inspect --as-json`` prints about one of the runs."""

    def inspect(name, *more):
        capsys.readouterr()
        main(["inspect", str(folder(name)), "--as-json", *more])
        return json.loads(capsys.readouterr().out)

    return inspect


@pytest.fixture
def told(folder, capsys):
    """The lines that ``dyrep inspect`` prints about one of the runs."""

    def inspect(name, *more):
        capsys.readouterr()
        main(["inspect", str(folder(name)), *more])
        return capsys.readouterr().out.splitlines()

    return inspect


def image_of(state):
    return torch.zeros(1, state["channels"], state["size"], state["size"])


def blocks_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, RepConv)}


# -- inspect ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["last", "best"])
@pytest.mark.parametrize("name", RUNS)
def test_the_multiply_adds_of_all_layers_add_up_to_the_total(name, which, inspected, folder):
    found = inspected(name, "--which", which)
    model, state = load_run(folder(name), which)
    assert found["epoch"] == state["epoch"]
    assert sum(layer["macs"] for layer in found["layers"]) + CLASSIFIER == found["macs"]
    assert found["macs"] == dyrep.costs(model, image_of(state)).macs
    assert (found["plain_macs"], found["plain_parameters"]) == (PLAIN_MACS, PLAIN_PARAMETERS)
    for layer in found["layers"]:
        own = layer["macs"] - sum(branch["macs"] for branch in layer["branches"])
        assert own == (conv_macs(layer, state["size"]) if layer.get("origin", True) else 0)


def conv_macs(layer, size):
    """By hand, for a small VGG: 3x3 kernels, and a pool after every second convolution."""
    side = size >> (int(layer["name"].removeprefix("conv")) - 1) // 2
    return side**2 * layer["channels"][0] * layer["channels"][1] * 9


@pytest.mark.parametrize("name", ["dbb", "mobileone", "repnas", "searching"])
def test_what_is_counted_is_what_is_computed(name, inspected, folder):
    model, state = load_run(folder(name))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image_of(state))
    assert inspected(name)["macs"] == counter.get_total_flops() // 2


@pytest.mark.parametrize("name", RUNS)
def test_every_block_is_shown_with_its_branches_and_importances(name, inspected, folder):
    model, _ = load_run(folder(name))
    found = {layer["name"]: layer for layer in inspected(name)["layers"]}
    assert list(found) == [f"conv{number}" for number in range(1, 7)]
    for layer, block in blocks_of(model).items():
        shown = {branch["branch"]: branch["importance"] for branch in found[layer]["branches"]}
        assert shown == {key: float(value) for key, value in block.importances().items()}
        assert all(
            branch["parameters"] == sum(p.numel() for p in block.branch_modules()[branch["branch"]].parameters())
            for branch in found[layer]["branches"]
        )


@pytest.mark.parametrize("name", RUNS)
def test_the_parameters_of_all_layers_and_norms_that_take_part_add_up_to_the_total(name, inspected, folder):
    found = inspected(name)
    model, _ = load_run(folder(name))
    blocks = blocks_of(model)
    replaced = {id(block.passed_norm) for block in blocks.values()}
    norms = sum(
        p.numel()
        for name, module in model.named_modules()
        if name.startswith("norm") and id(module) not in replaced
        for p in module.parameters()
    )
    classifier = sum(p.numel() for p in model.classifier.parameters())
    assert sum(layer["parameters"] for layer in found["layers"]) + norms + classifier == found["parameters"]


def test_blocks_of_dbb_cost_more_in_training_than_the_plain_network(inspected, told):
    found = inspected("dbb")
    assert found["macs"] > 2 * PLAIN_MACS
    assert found["folding_macs"] == 0
    assert [branch["branch"] for branch in found["layers"][1]["branches"]] == ["1x1-KxK", "1x1-AVG", "1x1"]
    lines = told("dbb")
    assert lines[0] == "digits, method dbb, seed 0: small_vgg, after epoch 2 of 2"
    assert sum("importance" in line for line in lines) == 3 * 6
    assert not any("per step" in line or "without its own kernel" in line for line in lines)
    assert lines[-2].startswith("in training: ")
    assert f"({found['macs'] / PLAIN_MACS:.2f} x plain)" in lines[-2]
    assert lines[-1] == "deployed:    72.67 k parameters, 599.68 k multiply-adds"


def test_blocks_of_orepa_cost_nothing_but_their_folding(inspected, told, folder):
    found = inspected("orepa")
    assert found["macs"] == PLAIN_MACS
    assert found["parameters"] > 2 * PLAIN_PARAMETERS
    branches = [branch for layer in found["layers"] for branch in layer["branches"]]
    assert len(branches) == 5 * 6
    assert {branch["macs"] for branch in branches} == {0}
    model, state = load_run(folder("orepa"))
    assert found["folding_macs"] == dyrep.costs(model, image_of(state)).folding_macs > 0
    lines = told("orepa")
    assert lines[-2] == f"per step:    {found['folding_macs'] / 1e6:.2f} M multiply-adds to fold the blocks"
    assert "(1.00 x plain)" in lines[-3]


def test_kernels_that_a_search_has_left_out_are_marked(inspected, told, folder):
    model, _ = load_run(folder("repnas"))
    blocks = blocks_of(model)
    off = [layer for layer, block in blocks.items() if block.origin_off]
    assert 0 < len(off) < len(blocks)
    found = inspected("repnas")
    assert [layer["name"] for layer in found["layers"] if not layer.get("origin", True)] == off
    lines = [line for line in told("repnas") if "channels" in line]
    assert len(lines) == 6
    assert [line.split()[1] for line in lines if "without its own kernel" in line] == off


def test_a_search_under_way_shows_all_branches(inspected, told):
    found = inspected("searching")
    assert [len(layer["branches"]) for layer in found["layers"]] == [5, 6, 5, 6, 5, 6]
    assert all(layer.get("origin", True) for layer in found["layers"])
    assert told("searching")[0] == "digits, method repnas, seed 0: small_vgg, after epoch 1 of 3"


# -- deploy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["last", "best"])
@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_deployed_as_the_plain_network(name, which, folder, tmp_path, capsys):
    file = tmp_path / "plain.safetensors"
    main(["deploy", str(folder(name)), "-o", str(file), "--which", which])
    said = capsys.readouterr().out
    assert "passed: " in said
    assert f"{file}: 72,666 parameters of small_vgg" in said
    fresh = build("small_vgg", num_classes=10, in_channels=1)
    fresh.load_state_dict(load_file(file), strict=True)
    model, _ = load_run(folder(name), which)
    images = torch.randn(32, 1, 8, 8)
    with torch.no_grad():
        ours, theirs = model(images), fresh.eval()(images)
    assert float((ours - theirs).abs().max() / ours.abs().max()) < 1e-4


@pytest.mark.parametrize("name", [name for name in RUNS if name != "searching"])
def test_a_run_is_deployed_as_it_was_when_training_ended(name, folder, tmp_path):
    main(["deploy", str(folder(name)), "-o", str(tmp_path / "again.safetensors")])
    ours, theirs = load_file(tmp_path / "again.safetensors"), load_file(folder(name) / "plain.safetensors")
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


# -- the picture ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dbb", "repnas"])
def test_the_picture_of_a_run_reaches_to_its_last_epoch(name, folder):
    drawn = timeline(read_run(folder(name))).svg()
    words = re.findall(">([^<]+)</text>", drawn)
    assert "conv6" in words
    assert "epoch" in words
    assert RUNS[name][3] in words


def test_branches_built_before_training_live_from_the_start(folder):
    born = lives(read_run(folder("dbb")))
    assert len(born) == 3 * 6
    assert {(life.born, life.died) for life in born} == {(0, None)}


def test_branches_that_a_search_drops_die_when_it_ends(folder):
    run = folder("repnas")
    born = lives(read_run(run))
    assert {life.born for life in born} == {0}
    assert {life.died for life in born} == {None, 2}
    model, _ = load_run(run)
    assert {(life.layer, life.branch) for life in born if life.died is None} == {
        (layer, branch) for layer, block in blocks_of(model).items() for branch in block.branches
    }
