"""Structures of blocks of other methods, with norms that stepped aside, gates and kernels that are off."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import dyrep
from dyrep.errors import DyRepError, StructureError
from dyrep.methods.gates import settle_
from dyrep.passing import PassedNorm
from surgery_helpers import (
    GOOD,
    assert_same_picture,
    held_parameters,
    images,
    picture,
    relative_change,
    structure_of,
    train_step,
)
from training import eval_output

METHODS = ("repvgg", "dbb", "mobileone", "orepa", "repnas")


def normed_net(bias: bool = False) -> nn.Sequential:
    """Two convolutions, ``0`` and ``3``, each followed by a batch norm, and a depthwise one, ``6``."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=bias),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1, bias=bias),
        nn.BatchNorm2d(6, eps=1e-3),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=bias),
        nn.ReLU(),
    )


def converted(method: str, bias: bool = False, **arguments) -> nn.Sequential:
    """A net of another method, trained for a few steps."""
    model = normed_net(bias)
    dyrep.convert_(model, method, example_input=images(1)[0], **arguments)
    if method == "repnas":
        model[3].branches["1x1"].norm.gate.zero_()
    return train_a_little_(model)


def train_a_little_(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in images(3):
        train_step(model, optimizer, batch)
    return model


def settled(keep: dict[str, list[str]], bias: bool = False, **arguments) -> nn.Sequential:
    """What is left of a search that kept these branches."""
    model = converted("repnas", bias, **arguments)
    everything = {layer: ["KxK", *block["branches"]] for layer, block in dyrep.structure(model)["blocks"].items()}
    settle_(model, {**everything, **keep})
    return train_a_little_(model)


FOUND = {
    "origin off": {"3": ["1x1", "residual"]},
    "origin alone": {"0": ["KxK"]},
    "both": {"0": ["1xK"], "3": ["KxK"], "6": ["KxK"]},
}


def assert_rebuilt(model: nn.Module, twin: nn.Module) -> None:
    x = images(1)[0]
    assert dyrep.structure(twin) == dyrep.structure(model)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert [name for name, p in twin.named_parameters() if p.requires_grad] == [
        name for name, p in model.named_parameters() if p.requires_grad
    ]
    assert torch.equal(eval_output(twin, x), eval_output(model, x))
    assert torch.equal(twin.train()(x), model.train()(x))
    plain, reference = dyrep.deploy(twin), normed_net(twin[0].bias is not None)
    assert relative_change(eval_output(plain, x), eval_output(twin, x)) <= 1e-5
    reference.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(eval_output(reference, x), eval_output(plain, x))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("method", METHODS)
def test_structure_of_a_converted_model_goes_through_json_onto_a_plain_one(method, bias):
    model, twin = converted(method, bias), normed_net(bias)
    dyrep.restructure_(twin, json.loads(json.dumps(dyrep.structure(model))))
    twin.load_state_dict(model.state_dict(), strict=True)
    assert_rebuilt(model, twin)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("method", METHODS)
def test_converted_model_is_saved_and_loaded_into_a_plain_one(method, bias, tmp_path):
    model = converted(method, bias)
    twin = dyrep.load(dyrep.save(model, tmp_path / "model.safetensors"), normed_net(bias))
    assert_rebuilt(model, twin)


@pytest.mark.parametrize("replace", ["conv", "conv+norm"])
@pytest.mark.parametrize("kind", FOUND)
def test_what_a_search_has_found_is_saved_and_loaded_into_a_plain_model(kind, replace, tmp_path):
    model = settled(FOUND[kind], replace=replace)
    twin = dyrep.load(dyrep.save(model, tmp_path / "model.safetensors"), normed_net())
    assert_rebuilt(model, twin)


def test_structure_of_a_converted_model_says_what_its_blocks_are():
    blocks = dyrep.structure(settled({"3": ["1x1"]}))["blocks"]
    assert blocks["0"] == {
        "branches": ["1x1", "1x1-KxK", "1x1-AVG", "1xK", "Kx1"],
        "origin_norm": True,
        "width": 1,
        "replaces": "1",
    }
    assert blocks["3"] == {"branches": ["1x1"], "origin_norm": False, "width": 1, "replaces": "4", "origin": False}
    assert dyrep.structure(converted("orepa"))["blocks"]["3"]["scaling"] == "linear"
    assert dyrep.structure(converted("repnas"))["blocks"]["3"]["scaling"] == "gated"
    assert dyrep.structure(converted("dbb"))["blocks"]["6"] == {
        "branches": ["1x1-KxK", "1x1-AVG"],
        "origin_norm": True,
        "width": 2,
    }


@pytest.mark.parametrize("after", ["dbb", "orepa", "repnas"])
@pytest.mark.parametrize("before", ["repvgg", "mobileone", "orepa", "repnas"])
def test_restructure_turns_one_method_into_another_and_keeps_the_eval_function(before, after):
    model, wanted, x = converted(before).double(), dyrep.structure(converted(after)), images(1)[0].double()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.01, momentum=0.9)
    output = eval_output(model, x)
    dyrep.restructure_(model, wanted, optimizer=optimizer)
    assert dyrep.structure(model) == wanted
    assert relative_change(eval_output(model, x), output) <= 1e-10
    assert sorted(held_parameters(optimizer)) == sorted(id(p) for p in model.parameters())
    train_step(model, optimizer, x)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("method", METHODS)
def test_restructure_to_the_empty_structure_brings_the_norms_back(method, bias):
    model, x = converted(method, bias).double(), images(1)[0].double()
    output = eval_output(model, x)
    dyrep.restructure_(model, {"format": 1, "blocks": {}})
    assert [type(module) for module in model] == [type(module) for module in normed_net(bias)]
    assert all(p.requires_grad for p in model.parameters())
    assert relative_change(eval_output(model, x), output) <= 1e-10


@pytest.mark.parametrize("replace", ["conv", "conv+norm"])
@pytest.mark.parametrize(
    "branches", [["1x1"], ["1x1", "residual", "1xK"], ["residual"], ["Kx1"]], ids=["less", "more", "the other", "new"]
)
def test_restructure_changes_the_branches_of_a_block_without_its_original_kernel(branches, replace):
    model = settled({"3": ["1x1", "residual"]}, replace=replace)
    wanted = dyrep.structure(model)
    wanted["blocks"]["3"]["branches"] = branches
    dyrep.restructure_(model, wanted)
    assert dyrep.structure(model) == wanted
    assert model[3].origin_off
    assert not model[3].weight.requires_grad
    assert not model[3].weight.any()


REPLACING = {"branches": ["1x1"], "origin_norm": True, "replaces": "4"}
WRONG_NORMS = {
    "a norm the model does not have": ({**REPLACING, "replaces": "9"}, "layer '3': .* replaces the norm '9', which"),
    "a layer that is no norm": (
        {**REPLACING, "replaces": "2"},
        "layer '3': the structure replaces the norm '2', which",
    ),
    "a number": ({**REPLACING, "replaces": 4}, "layer '3': the structure replaces the norm 4, which"),
}


@pytest.mark.parametrize("kind", WRONG_NORMS)
def test_structure_that_replaces_something_else_than_a_norm_is_refused_and_changes_nothing(kind):
    block, message = WRONG_NORMS[kind]
    model = normed_net()
    before = picture(model)
    with pytest.raises(StructureError, match=message):
        dyrep.restructure_(model, structure_of({"0": GOOD, "3": block}))
    assert_same_picture(picture(model), before)


HALF_WAY = {
    "a branch that does not fit": ({"3": REPLACING, "0": {"branches": ["residual"]}}, "residual"),
    "one norm for two layers": (
        {"3": REPLACING, "6": REPLACING},
        "cannot be replaced",
    ),
    "a layer of computed weights": ({"3": REPLACING, "6": GOOD}, "computed"),
    "without the original kernel": (
        {"3": {**REPLACING, "origin_norm": False, "origin": False}, "0": {"branches": ["residual"]}},
        "residual",
    ),
}


@pytest.mark.parametrize("method", [None, "repvgg", "orepa", "repnas"])
@pytest.mark.parametrize("kind", HALF_WAY)
def test_failure_half_way_restores_norms_and_what_is_trained(kind, method):
    blocks, message = HALF_WAY[kind]
    model = normed_net() if method is None else converted(method)
    if kind == "a layer of computed weights":
        if method is not None:
            dyrep.cut_(model, "6")
        weight_norm(model[6])
    model[4].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    x = images(1)[0]
    train_step(model, optimizer, x)
    before, output = picture(model, optimizer), eval_output(model, x)
    with pytest.raises(DyRepError, match=message):
        dyrep.restructure_(model, structure_of(blocks), optimizer=optimizer)
    assert_same_picture(picture(model, optimizer), before)
    assert torch.equal(eval_output(model, x), output)
    replaces = method not in (None, "orepa")
    assert [type(model[place]) is PassedNorm for place in (1, 4)] == [replaces, replaces]
    train_step(model, optimizer, x)
