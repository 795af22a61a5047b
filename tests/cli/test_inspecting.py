"""``dyrep inspect`` shows what is there, and its numbers add up."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dyrep
from dyrep.block import RepConv
from dyrep.cli.inspecting import describe
from dyrep.cli.main import main
from dyrep.engine.running import load_run
from dyrep.geometry import PLAIN_CONVS


def macs_of_convolutions(model, image):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(image)
    return counter.get_flop_counts()["Global"].get(torch.ops.aten.convolution, 0) // 2


def all_layers(found):
    for layer in found["layers"]:
        yield layer
        for branch in layer["branches"]:
            yield from all_layers({"layers": branch.get("layers", [])})


def assert_adds_up(model, image):
    found = describe(model, image)
    counted = dyrep.costs(model, image)
    assert found["macs"] == counted.macs
    assert found["parameters"] == counted.parameters == sum(p.numel() for p in model.parameters())
    plain = dyrep.costs(dyrep.deploy(model), image)
    assert (found["plain_macs"], found["plain_parameters"]) == (plain.macs, plain.parameters)
    assert sum(layer["macs"] for layer in found["layers"]) == macs_of_convolutions(model, image)
    layers = {layer["name"]: layer for layer in all_layers(found)}
    for name, module in model.named_modules():
        if isinstance(module, RepConv) and module.branches:
            entry = layers[name]
            assert entry["parameters"] == sum(p.numel() for p in module.parameters())
            importances = {branch["branch"]: branch["importance"] for branch in entry["branches"]}
            assert importances == {key: float(value) for key, value in module.importances().items()}
            for branch in entry["branches"]:
                inside = module.branch_modules()[branch["branch"]]
                assert branch["parameters"] == sum(p.numel() for p in inside.parameters())
    assert [layer["name"] for layer in found["layers"]] == [
        name for name, m in model.named_modules() if isinstance(m, PLAIN_CONVS) and ".branches." not in f".{name}."
    ]
    return found


@pytest.mark.parametrize("which", ["last", "best"])
def test_the_numbers_of_a_run_add_up(evolved, which, capsys):
    model, state = load_run(evolved, which)
    image = torch.zeros(1, state["channels"], state["size"], state["size"])
    found = assert_adds_up(model, image)
    assert found["macs"] - sum(layer["macs"] for layer in found["layers"]) == 64 * 10  # the classifier
    main(["inspect", str(evolved), "--which", which, "--as-json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["recipe"]["name"] == "digits"
    assert printed["epoch"] == state["epoch"]
    assert {key: printed[key] for key in found} == found


def test_the_tree_shows_every_convolution_branch_and_nested_block_on_a_line_of_its_own(evolved, capsys):
    main(["inspect", str(evolved)])
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "digits, method dyrep, seed 0: small_vgg, after epoch 3 of 3"
    names = [f"conv{number}" for number in range(1, 7)]
    shown = [line.removeprefix("├── ").removeprefix("└── ") for line in told if line.startswith(("├── ", "└── "))]
    assert [line.split()[0] for line in shown] == names
    model, state = load_run(evolved)
    counted = dyrep.costs(model, torch.zeros(1, state["channels"], state["size"], state["size"]))
    outer, inner = model.conv6, model.get_submodule("conv6.branches.1x1-KxK.conv")
    for block in (outer, inner):
        for key, importance in block.importances().items():
            assert any(key in line and f"importance {float(importance):.4f}" in line for line in told), key
    assert sum("importance" in line for line in told) == 12
    (nested,) = [line for line in told if "conv6.branches.1x1-KxK.conv " in line]
    assert nested.startswith(" " * 4 + "│   └── conv6")
    assert nested.endswith("multiply-adds")
    assert told[-2].startswith(f"in training: {counted.parameters / 1e3:.2f} k parameters, {counted.macs / 1e6:.2f} M")
    assert told[-1].startswith("deployed:    72.67 k parameters, 599.68 k multiply-adds")


def test_a_run_of_the_plain_method_has_layers_without_branches(plain, capsys):
    main(["inspect", str(plain), "--as-json"])
    found = json.loads(capsys.readouterr().out)
    assert [layer["branches"] for layer in found["layers"]] == [[]] * 6
    assert found["macs"] == found["plain_macs"] == 599_680


def network(*convs):
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(8, 8, 3, padding=1, groups=4),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 8, 5, padding=4, dilation=2),
        nn.Conv2d(8, 8, (1, 3), padding=(0, 1)),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
    ],
    ids=["plain", "stride", "groups", "depthwise", "dilation", "flat", "reflect"],
)
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("norm", ["none", "calibrated"])
def test_the_numbers_of_any_convolution_add_up(conv, width, norm):
    model = network(nn.Conv2d(1, 8, 3), copy.deepcopy(conv))
    batches = [torch.randn(4, 1, 12, 12)]
    dyrep.expand_(model, "1", width=width, calibration=batches, origin_norm=norm)
    found = assert_adds_up(model, torch.zeros(1, 1, 12, 12))
    assert found["layers"][1]["branches"]


def test_blocks_in_several_branches_and_depths_add_up():
    model = network(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, stride=2))
    batches = [torch.randn(4, 1, 12, 12)]
    layers = ["1", "2", "1.branches.1x1-KxK.conv", "1.branches.1x1-KxK.conv.branches.1x1-KxK.conv"]
    for layer in layers:
        dyrep.expand_(model, layer, calibration=batches)
    found = assert_adds_up(model, torch.zeros(1, 1, 12, 12))
    assert {layer["name"] for layer in all_layers(found)} == {"0", *layers}


def test_a_convolution_that_runs_twice_costs_twice():
    conv = nn.Conv2d(8, 8, 3, padding=1)
    model = network(nn.Conv2d(1, 8, 3), conv, nn.ReLU(), conv)
    dyrep.expand_(model, "1", calibration=[torch.randn(4, 1, 12, 12)])
    assert_adds_up(model, torch.zeros(1, 1, 12, 12))


def test_a_model_that_is_one_convolution_adds_up():
    model = nn.Conv2d(4, 4, 3, padding=1)
    dyrep.expand_(model, "", calibration=[torch.randn(4, 4, 8, 8)])
    found = assert_adds_up(model, torch.zeros(1, 4, 8, 8))
    assert found["layers"][0]["branches"]
