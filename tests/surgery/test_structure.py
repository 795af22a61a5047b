"""A structure as plain data, and models that take it on: by `restructure_`, or from a state dict after `prepare_`."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import dyrep
from dyrep.block import RepConv
from dyrep.errors import DyRepError, IneligibleLayerError, StructureError
from dyrep.norm import BranchNorm
from surgery_helpers import (
    COMPUTED,
    GOOD,
    assert_same_picture,
    conv_bn_net,
    held_parameters,
    images,
    picture,
    relative_change,
    structure_of,
    train_step,
)
from training import eval_output

INNER = "3.branches.1x1-KxK.conv"


def biased_net() -> nn.Sequential:
    """Two convolutions with a bias, so that branch norms have shifts: ``0`` and ``3``."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()
    )


def evolve_(model: nn.Module, **arguments) -> nn.Module:
    """Expand both layers and one branch of the second, train a step, cut a little."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dyrep.expand_(model, ["0", "3"], calibration=images(2), optimizer=optimizer, **arguments)
    dyrep.expand_(model, INNER, ["1x1-AVG", "1x1-KxK", "1x1"], calibration=images(2), optimizer=optimizer, **arguments)
    train_step(model, optimizer, images(1)[0])
    dyrep.cut_(model, "3", ["Kx1", "1x1"], optimizer=optimizer)
    return model


EVOLVED = {
    "plain origin": {},
    "origin norm": {"origin_norm": "calibrated"},
    "width 2": {"width": 2},
    "width 2 and origin norm": {"width": 2, "origin_norm": "reference"},
}


def test_structure_lists_branches_norm_and_width_of_every_block():
    model = conv_bn_net()
    assert dyrep.structure(model) == {"format": 1, "blocks": {}}
    dyrep.expand_(model, "3", ["residual", "1x1-KxK"], width=2, origin_norm="reference")
    dyrep.expand_(model, INNER, ["1xK"])
    assert dyrep.structure(model) == {
        "format": 1,
        "blocks": {
            "3": {"branches": ["residual", "1x1-KxK"], "origin_norm": True, "width": 2},
            INNER: {"branches": ["1xK"], "origin_norm": False, "width": 1},
        },
    }


def test_structure_of_a_prepared_model_is_empty():
    assert dyrep.structure(dyrep.prepare_(conv_bn_net()))["blocks"] == {}


@pytest.mark.parametrize("net", [conv_bn_net, biased_net], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", EVOLVED)
def test_structure_goes_through_json_and_rebuilds_the_same_keys_and_shapes(kind, net):
    model = evolve_(net(), **EVOLVED[kind])
    text = json.dumps(dyrep.structure(model))
    twin = net()
    x = images(1)[0]
    before = eval_output(twin, x)
    assert dyrep.restructure_(twin, json.loads(text)) is twin
    assert dyrep.structure(twin) == dyrep.structure(model)
    assert relative_change(eval_output(twin, x), before) <= 1e-5
    assert {k: v.shape for k, v in twin.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in model.named_parameters()]
    twin.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(eval_output(twin, x), eval_output(model, x))


@pytest.mark.parametrize("kind", EVOLVED)
@pytest.mark.parametrize("start", ["other branches", "other width", "other norm", "deeper", "prepared"])
def test_restructure_turns_any_structure_into_any_other_and_keeps_the_function(start, kind):
    wanted = dyrep.structure(evolve_(conv_bn_net(), **EVOLVED[kind]))
    model = conv_bn_net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    batches, x = images(2), images(1)[0]
    if start == "other branches":
        dyrep.expand_(model, ["0", "3"], ["1x1", "Kx1"], calibration=batches, optimizer=optimizer)
    elif start == "other width":
        dyrep.expand_(model, "3", width=3, calibration=batches, optimizer=optimizer)
        dyrep.expand_(model, INNER, ["1x1"], calibration=batches, optimizer=optimizer)
    elif start == "other norm":
        dyrep.expand_(model, "3", ["1x1"], calibration=batches, optimizer=optimizer, origin_norm="calibrated")
    elif start == "deeper":
        name = "3"
        for _ in range(4):
            dyrep.expand_(model, name, calibration=batches, optimizer=optimizer)
            name += ".branches.1x1-KxK.conv"
    else:
        dyrep.prepare_(model)
    train_step(model, optimizer, batches[0])
    before = eval_output(model, x)
    dyrep.restructure_(model, wanted, optimizer=optimizer)
    assert dyrep.structure(model) == wanted
    assert list(dyrep.structure(model)["blocks"]) == list(wanted["blocks"])
    assert relative_change(eval_output(model, x), before) <= 1e-5
    assert sorted(held_parameters(optimizer)) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    group = optimizer.param_groups[0]
    assert group["param_names"] == [names[id(p)] for p in group["params"]]
    train_step(model, optimizer, batches[1])


def test_restructure_to_the_structure_it_has_changes_nothing():
    model = evolve_(conv_bn_net(), origin_norm="calibrated", width=2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    train_step(model, optimizer, images(1)[0])
    before = picture(model, optimizer)
    generator = torch.get_rng_state()
    dyrep.restructure_(model, dyrep.structure(model), optimizer=optimizer)
    assert_same_picture(picture(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), generator)


def test_restructure_to_the_empty_structure_gives_the_plain_model():
    model = conv_bn_net()
    plain = picture(model)
    x = images(1)[0]
    before = eval_output(model, x)
    dyrep.expand_(model, ["0", "3"], calibration=[x])
    dyrep.expand_(model, INNER, calibration=[x])
    dyrep.restructure_(model, {"format": 1, "blocks": {}})
    assert picture(model)["classes"] == plain["classes"]
    assert list(model.state_dict()) == list(plain["values"])
    assert relative_change(eval_output(model, x), before) <= 1e-5


def test_restructure_keeps_the_surviving_branches_and_follows_the_order_of_the_file():
    model = conv_bn_net()
    dyrep.expand_(model, "3", ["1x1", "1xK", "residual"])
    kept = model[3].branches["1x1"].conv.weight
    wanted = {"format": 1, "blocks": {"3": {"branches": ["Kx1", "residual", "1x1"]}}}
    dyrep.restructure_(model, wanted)
    assert list(model[3].branches) == ["Kx1", "residual", "1x1"]
    assert model[3].branches["1x1"].conv.weight is kept


def test_restructure_draws_from_its_generator_only():
    wanted = dyrep.structure(evolve_(conv_bn_net()))
    model = conv_bn_net()
    twins = [copy.deepcopy(model) for _ in range(2)]
    state = torch.get_rng_state()
    for twin in twins:
        dyrep.restructure_(twin, wanted, gamma=0.02, generator=torch.Generator().manual_seed(4))
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (twin.state_dict() for twin in twins)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(first["0.branches.1x1.norm.weight"], torch.full((6,), 0.02))


MALFORMED = {
    "not a mapping": ([], r"not a structure of format 1: \[\]"),
    "no format": ({"blocks": {}}, "not a structure of format 1"),
    "another format": ({"format": 2, "blocks": {}}, "not a structure of format 1"),
    "no blocks": ({"format": 1}, "not a structure of format 1"),
    "list of blocks": ({"format": 1, "blocks": ["3"]}, "not a structure of format 1"),
    "unknown layer": (
        structure_of({"0": GOOD, "layer1.conv": GOOD}),
        r"names layer 'layer1\.conv', which this model does not have: is it the same architecture\?",
    ),
    "unknown branch": (structure_of({"0": GOOD, "3": {"branches": ["5x5"]}}), r"layer '3': branches must be a list"),
    "no branches": (structure_of({"0": GOOD, "3": {"branches": []}}), "layer '3': a block needs at least one branch"),
    "branches missing": (structure_of({"0": GOOD, "3": {}}), "layer '3': branches must be a list from 1x1, 1x1-KxK"),
    "branches a string": (structure_of({"0": GOOD, "3": {"branches": "1x1"}}), "layer '3': branches must be a list"),
    "branches nested": (structure_of({"0": GOOD, "3": {"branches": [["1x1"]]}}), "layer '3': branches must be a list"),
    "block a list": (structure_of({"0": GOOD, "3": ["1x1"]}), "layer '3': branches must be a list"),
    "zero width": (
        structure_of({"0": GOOD, "3": {"branches": ["1x1-KxK"], "width": 0}}),
        "layer '3': width must be a positive whole number, got 0",
    ),
    "fractional width": (
        structure_of({"0": GOOD, "3": {"branches": ["1x1-KxK"], "width": 1.5}}),
        "layer '3': width must be a positive whole number, got 1.5",
    ),
    "inner block before a malformed outer one": (structure_of({INNER: GOOD, "3": ["1x1-KxK"]}), "layer '3': branches"),
}


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize("expanded", [False, True], ids=["plain", "expanded"])
def test_malformed_structure_is_refused_in_words_and_changes_nothing(kind, expanded):
    wanted, message = MALFORMED[kind]
    model = conv_bn_net()
    if expanded:
        dyrep.expand_(model, "0", ["Kx1"])
    before = picture(model)
    with pytest.raises(StructureError, match=message):
        dyrep.restructure_(model, wanted)
    assert_same_picture(picture(model), before)


IMPOSSIBLE = {
    "a norm": ({"0": GOOD, "4": GOOD}, "'4'"),
    "a branch that does not fit": ({"3": GOOD, "0": {"branches": ["residual"]}}, "residual"),
    "a layer of computed weights": ({"0": GOOD, "3": GOOD}, "computed"),
    "an inner block without its outer one": ({"0": GOOD, INNER: GOOD}, INNER),
    "an inner block whose branch is cut": ({"0": GOOD, "3": GOOD, INNER: GOOD}, INNER),
    "an inner block of an inner one left out": (
        {"0": GOOD, "3": {"branches": ["1x1-KxK"]}, f"{INNER}.branches.1x1-KxK.conv": GOOD},
        r"1x1-KxK\.conv\.branches",
    ),
    "a layer inside a branch that is no conv": (
        {"0": GOOD, "3": {"branches": ["1x1-KxK"]}, "3.branches.1x1-KxK.norm": GOOD},
        "norm",
    ),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_structure_that_the_model_cannot_take_on_is_refused_in_words_and_changes_nothing(kind):
    blocks, message = IMPOSSIBLE[kind]
    model = conv_bn_net()
    if kind.startswith("an inner block"):
        dyrep.expand_(model, "3", ["1x1-KxK"])
    if kind == "a layer of computed weights":
        weight_norm(model[3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = picture(model, optimizer)
    with pytest.raises(DyRepError, match=message):
        dyrep.restructure_(model, structure_of(blocks), optimizer=optimizer)
    assert_same_picture(picture(model, optimizer), before)


@pytest.mark.parametrize("way", ["load", "restructure", "prepare"])
@pytest.mark.parametrize("held", [True, False], ids=["in the optimizer", "not in it"])
def test_a_frozen_model_takes_on_a_structure_and_its_branches_are_frozen_too(way, held, tmp_path):
    evolved, x = conv_bn_net(), images(1)[0]
    dyrep.expand_(evolved, ["0", "3"], calibration=[x], origin_norm="calibrated")
    model = conv_bn_net()
    model[3].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if held or p.requires_grad], lr=0.1)
    if way == "load":
        dyrep.load(dyrep.save(evolved, tmp_path / "model.safetensors"), model, optimizer=optimizer)
    elif way == "restructure":
        dyrep.restructure_(model, dyrep.structure(evolved), optimizer=optimizer).load_state_dict(evolved.state_dict())
    else:
        dyrep.prepare_(model).load_state_dict(evolved.state_dict())
    assert torch.equal(eval_output(model, x), eval_output(evolved, x))
    assert not any(p.requires_grad for p in model[3].parameters())
    assert all(p.requires_grad for p in model[0].parameters())
    if way != "prepare":
        assert sorted(held_parameters(optimizer)) == sorted(
            id(p) for p in model.parameters() if held or p.requires_grad
        )


def test_prepare_leaves_keys_parameters_and_function_alone():
    model = conv_bn_net()
    before, x = picture(model), images(1)[0]
    output, trained = eval_output(model, x), model(x)
    model.load_state_dict(before["values"])
    assert dyrep.prepare_(model) is model
    after = picture(model)
    assert list(after["values"]) == list(before["values"])
    assert after["parameters"] == before["parameters"]
    assert isinstance(model[3], dyrep.RepConv2d)
    assert torch.equal(eval_output(model, x), output)
    assert torch.equal(model(x), trained)
    dyrep.prepare_(model)
    assert list(model.state_dict()) == list(before["values"])


@pytest.mark.parametrize("net", [conv_bn_net, biased_net], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", EVOLVED)
def test_strict_load_into_a_prepared_model_grows_what_the_file_holds(kind, net):
    model = evolve_(net(), **EVOLVED[kind])
    twin = dyrep.prepare_(net()).eval()
    twin.load_state_dict(model.state_dict(), strict=True)
    assert dyrep.structure(twin) == dyrep.structure(model)
    assert list(twin.state_dict()) == list(model.state_dict())
    x = images(1)[0]
    assert torch.equal(eval_output(twin, x), eval_output(model, x))
    assert not any(module.training for module in twin.modules())
    assert torch.equal(twin.train()(x), model.train()(x))
    assert dyrep.verify(twin, dyrep.deploy(twin), x).passed
    assert list(dyrep.deploy(twin).state_dict()) == list(net().state_dict())


def test_strict_load_sheds_what_the_file_does_not_hold():
    plain = conv_bn_net()
    model = evolve_(copy.deepcopy(plain), origin_norm="calibrated")
    some = copy.deepcopy(plain)
    dyrep.expand_(some, "3", ["residual", "1x1-KxK"], calibration=images(1))
    x = images(1)[0]
    kept = model[3].branches["residual"]
    dyrep.prepare_(model).load_state_dict(some.state_dict(), strict=True)
    assert dyrep.structure(model) == dyrep.structure(some)
    assert model[3].branches["residual"] is kept
    assert torch.equal(eval_output(model, x), eval_output(some, x))
    model.load_state_dict(plain.state_dict(), strict=True)
    assert dyrep.structure(model)["blocks"] == {}
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(eval_output(model, x), eval_output(plain, x))


def test_strict_load_changes_the_width_of_a_branch():
    narrow, wide = conv_bn_net(), conv_bn_net()
    dyrep.expand_(narrow, "3", ["1x1-KxK", "1x1"], calibration=images(1))
    dyrep.expand_(wide, "3", ["1x1-KxK"], width=3, calibration=images(1))
    x = images(1)[0]
    dyrep.prepare_(narrow).load_state_dict(wide.state_dict(), strict=True)
    assert dyrep.structure(narrow) == dyrep.structure(wide)
    assert torch.equal(eval_output(narrow, x), eval_output(wide, x))


def test_loaded_blocks_can_be_expanded_cut_and_trained():
    model = evolve_(conv_bn_net(torch.float32))
    twin = dyrep.prepare_(conv_bn_net())
    twin.load_state_dict(model.state_dict(), strict=True)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    x = images(1)[0]
    train_step(twin, optimizer, x)
    before = eval_output(twin, x)
    dyrep.expand_(twin, "3", ["1x1"], calibration=[x], optimizer=optimizer)
    dyrep.expand_(twin, f"{INNER}.branches.1x1-KxK.conv", ["1x1"], calibration=[x], optimizer=optimizer)
    dyrep.cut_(twin, "0", optimizer=optimizer)
    assert relative_change(eval_output(twin, x), before) <= 1e-5


def test_strict_load_gives_new_branches_the_dtype_of_the_conv():
    model = evolve_(conv_bn_net())
    twin = dyrep.prepare_(conv_bn_net(torch.float64))
    twin.load_state_dict(model.state_dict(), strict=True)
    assert {p.dtype for p in twin.parameters()} == {torch.float64}


def test_strict_load_gives_new_branches_the_memory_format_of_the_conv():
    model = evolve_(conv_bn_net().to(memory_format=torch.channels_last))
    twin = dyrep.prepare_(conv_bn_net().to(memory_format=torch.channels_last))
    twin.load_state_dict(model.state_dict(), strict=True)
    for name, parameter in twin.named_parameters():
        assert parameter.stride() == model.get_parameter(name).stride(), name


@pytest.mark.parametrize("how", ["load", "restructure"])
def test_branches_that_come_back_from_a_file_are_synchronized_in_a_model_with_sync_batch_norm(how):
    model, twin = (nn.SyncBatchNorm.convert_sync_batchnorm(conv_bn_net()) for _ in range(2))
    dyrep.expand_(model, "3", origin_norm="reference")
    if how == "load":
        dyrep.prepare_(twin)
    else:
        dyrep.restructure_(twin, dyrep.structure(model))
    twin.load_state_dict(model.state_dict(), strict=True)
    flags = [[norm.synchronized for norm in m.modules() if isinstance(norm, BranchNorm)] for m in (model, twin)]
    assert flags == [[True] * 8] * 2


def test_strict_load_into_a_depthwise_conv_is_exact_in_training_mode():
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.BatchNorm2d(6))

    model = net()
    dyrep.expand_(model, "0", calibration=[torch.randn(4, 6, 8, 8)])
    twin = dyrep.prepare_(net())
    twin.load_state_dict(model.state_dict(), strict=True)
    x = torch.randn(4, 6, 8, 8)
    assert torch.equal(twin.train()(x), model.train()(x))


@pytest.mark.parametrize("prepared_layers", [[], ["0"]], ids=["plain", "partly prepared"])
def test_strict_load_into_a_model_that_was_not_prepared_fails_loudly(prepared_layers):
    model = evolve_(conv_bn_net())
    twin = conv_bn_net()
    for name in prepared_layers:
        dyrep.expand_(twin, name, ["1x1"])
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: .*"3\.branches\.1x1-KxK') as error:
        twin.load_state_dict(model.state_dict(), strict=True)
    assert "3.branches.1xK.conv.weight" in str(error.value)
    assert type(twin[3]) is nn.Conv2d


def test_unknown_branch_in_a_file_is_reported_as_unexpected():
    model = conv_bn_net()
    dyrep.expand_(model, "3", ["1x1"])
    state = model.state_dict()
    state["3.branches.9x9.conv.weight"] = torch.zeros(6, 6, 9, 9)
    twin = dyrep.prepare_(conv_bn_net())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "3\.branches\.9x9\.conv\.weight"'):
        twin.load_state_dict(state, strict=True)


def test_file_that_lacks_a_tensor_of_a_branch_is_reported_as_missing():
    model = conv_bn_net()
    dyrep.expand_(model, "3", ["1x1"])
    state = model.state_dict()
    del state["3.branches.1x1.norm.running_var"]
    twin = dyrep.prepare_(conv_bn_net())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "3\.branches\.1x1\.norm\.running_var"'):
        twin.load_state_dict(state, strict=True)


def test_prepared_model_only_touches_layers_that_can_grow():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 3))
    dyrep.prepare_(model)
    assert [isinstance(module, RepConv) for module in model] == [True, False, False]


def test_model_that_is_a_single_convolution_is_described_and_rebuilt():
    conv, twin = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
    dyrep.expand_(conv, "", ["1x1-KxK", "1xK"])
    dyrep.expand_(conv, "branches.1x1-KxK.conv", ["1x1"])
    dyrep.expand_(conv, "branches.1xK.conv", ["1x1"])
    dyrep.restructure_(twin, dyrep.structure(conv))
    twin.load_state_dict(conv.state_dict(), strict=True)
    assert dyrep.structure(twin) == dyrep.structure(conv)
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(eval_output(twin, x), eval_output(conv, x))
    with pytest.raises(StructureError, match=r"'branches\.nothing' is inside a branch that"):
        dyrep.restructure_(twin, {"format": 1, "blocks": {"": GOOD, "branches.nothing": GOOD}})


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("way", COMPUTED)
def test_structure_that_would_rewrite_a_computed_weight_is_refused_and_changes_nothing(way):
    model, x = biased_net(), images(1)[0]
    dyrep.expand_(model, ["0", "3"], gamma=0.5)
    model.eval().requires_grad_(False)
    COMPUTED[way][0](model[0])
    output, before = model(x), picture(model)
    dyrep.restructure_(model, dyrep.structure(model))  # nothing has to be rewritten for this
    with pytest.raises(IneligibleLayerError, match=r"^layer '0' cannot be folded: its weight is computed"):
        dyrep.restructure_(model, {"format": 1, "blocks": {}})
    assert_same_picture(picture(model), before)
    assert torch.equal(model(x), output)
