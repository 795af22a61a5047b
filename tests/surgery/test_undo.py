"""Taking an edit back restores everything it touched, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dyrep
from dyrep.surgery.undo import Snapshot
from surgery_helpers import assert_same_picture, conv_bn_net, images, picture, train_step
from training import eval_output

INNER = "3.branches.1x1-KxK.conv"

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def trained(kind: str, expanded: bool, **arguments) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = conv_bn_net()
    named = list(model.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named if p.dim() > 1]},
        {"params": [(n, p) for n, p in named if p.dim() <= 1]},
    ]
    optimizer = OPTIMIZERS[kind](groups)
    train_step(model, optimizer, images(1)[0])
    if expanded:
        dyrep.expand_(model, ["0", "3"], gamma=0.3, calibration=images(2), optimizer=optimizer, **arguments)
        dyrep.expand_(model, INNER, gamma=0.3, calibration=images(2), optimizer=optimizer, **arguments)
        train_step(model, optimizer, images(1)[0])
    return model, optimizer


def assert_undone(model, optimizer, names, edit) -> None:
    x = images(1)[0]
    convs = [model.get_submodule(name) for name in names]
    children = [[(name, id(module)) for name, module in conv.named_modules()] for conv in convs]
    before, output = picture(model, optimizer), eval_output(model, x)
    snapshot = Snapshot(convs, optimizer)
    edit()
    assert picture(model, optimizer)["classes"] != before["classes"]
    snapshot.restore_()
    assert_same_picture(picture(model, optimizer), before)
    assert [[(name, id(module)) for name, module in conv.named_modules()] for conv in convs] == children
    assert torch.equal(eval_output(model, x), output)
    train_step(model, optimizer, x)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("origin_norm", ["none", "calibrated", "reference"])
def test_expansion_of_a_plain_model_is_undone_bit_for_bit(kind, origin_norm):
    model, optimizer = trained(kind, expanded=False)

    def edit():
        dyrep.expand_(model, ["0", "3"], gamma=0.3, calibration=images(2), optimizer=optimizer, origin_norm=origin_norm)

    assert_undone(model, optimizer, ["0", "3"], edit)
    assert type(model[3]) is nn.Conv2d


@pytest.mark.parametrize("origin_norm", ["none", "calibrated"])
def test_further_expansion_of_a_block_is_undone_bit_for_bit(origin_norm):
    model, optimizer = trained("SGD", expanded=False)
    dyrep.expand_(model, "3", ["1x1", "residual"], optimizer=optimizer, origin_norm="reference")
    train_step(model, optimizer, images(1)[0])

    def edit():
        dyrep.expand_(model, "3", calibration=images(2), optimizer=optimizer, origin_norm=origin_norm)
        dyrep.expand_(model, "0", calibration=images(2), optimizer=optimizer, origin_norm=origin_norm)

    assert_undone(model, optimizer, ["0", "3"], edit)
    assert list(model[3].branches) == ["1x1", "residual"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("branches", [["1x1", "1x1-KxK"], None], ids=["some", "all"])
@pytest.mark.parametrize("origin_norm", ["none", "calibrated"])
def test_cut_is_undone_bit_for_bit(kind, branches, origin_norm):
    model, optimizer = trained(kind, expanded=True, origin_norm=origin_norm)

    def edit():
        dyrep.cut_(model, ["0", "3"], branches, optimizer=optimizer)
        if branches is not None:
            dyrep.cut_(model, ["0", "3"], optimizer=optimizer)

    assert_undone(model, optimizer, ["0", "3"], edit)
    assert INNER in dyrep.structure(model)["blocks"]


def test_cut_of_an_inner_block_is_undone_bit_for_bit():
    model, optimizer = trained("SGD", expanded=True)
    assert_undone(model, optimizer, [INNER], lambda: dyrep.cut_(model, INNER, optimizer=optimizer))


def test_cut_that_reset_channels_of_the_origin_norm_is_undone_bit_for_bit():
    model, optimizer = trained("SGD", expanded=True, origin_norm="calibrated")
    with torch.no_grad():
        model[3].origin_norm.weight[0] = 0.0
    assert_undone(model, optimizer, ["3"], lambda: dyrep.cut_(model, "3", ["1x1", "1x1-KxK"], optimizer=optimizer))


def test_expansion_and_cut_in_a_row_are_undone_together():
    model, optimizer = trained("AdamW", expanded=False)

    def edit():
        dyrep.expand_(model, ["0", "3"], calibration=images(2), optimizer=optimizer)
        dyrep.cut_(model, "3", ["1xK"], optimizer=optimizer)
        dyrep.cut_(model, "0", optimizer=optimizer)

    assert_undone(model, optimizer, ["0", "3"], edit)


def test_edit_without_an_optimizer_is_undone_bit_for_bit():
    model, x = conv_bn_net(), images(1)[0]
    before, output = picture(model), eval_output(model, x)
    snapshot = Snapshot([model[3]], None)
    dyrep.expand_(model, "3", gamma=1.0, calibration=[x])
    snapshot.restore_()
    assert_same_picture(picture(model), before)
    assert torch.equal(eval_output(model, x), output)


def test_conv_with_bias_is_restored_with_its_bias():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    before = picture(model)
    snapshot = Snapshot([model[0]], None)
    dyrep.expand_(model, "0", gamma=1.0, calibration=[torch.randn(4, 3, 8, 8) + 2])
    assert not torch.equal(model[0].bias, before["values"]["0.bias"])
    snapshot.restore_()
    assert_same_picture(picture(model), before)


def test_training_goes_on_after_an_undone_edit_as_if_it_had_never_been():
    def run(edit: bool) -> dict:
        torch.manual_seed(1)
        model, optimizer = trained("SGD", expanded=False)
        batches = images(3)
        if edit:
            snapshot = Snapshot([model[3]], optimizer)
            dyrep.expand_(model, "3", calibration=batches, optimizer=optimizer)
            snapshot.restore_()
        for batch in batches:
            train_step(model, optimizer, batch)
        return model.state_dict()

    edited, plain = run(edit=True), run(edit=False)
    assert all(torch.equal(edited[key], plain[key]) for key in plain)


def test_lbfgs_steps_after_an_undone_expansion_as_before():
    def run(*, edit: bool) -> list[float]:
        torch.manual_seed(0)
        model = conv_bn_net().eval()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        x = images(1)[0]
        train_step(model, optimizer, x)
        if edit:
            before = picture(model, optimizer)
            snapshot = Snapshot([model[3]], optimizer)
            with torch.random.fork_rng():
                dyrep.expand_(model, "3", calibration=[x], optimizer=optimizer)
            snapshot.restore_()
            assert_same_picture(picture(model, optimizer), before)
        return [float(train_step(model, optimizer, x)) for _ in range(3)]

    assert run(edit=True) == run(edit=False)


def test_compiled_model_runs_the_restored_structure():
    torch.compiler.reset()
    model, x = conv_bn_net().eval(), images(1)[0]
    compiled = torch.compile(model, backend="eager")
    before = compiled(x)
    snapshot = Snapshot([model[3]], None)
    dyrep.expand_(compiled, "3", gamma=1.0, calibration=[x])
    compiled(x)
    snapshot.restore_()
    assert torch.equal(compiled(x), before)


METHODS = ("repvgg", "dbb", "mobileone", "orepa", "repnas")


@pytest.mark.parametrize(
    ("method", "preserve"),
    [(method, preserve) for method in METHODS for preserve in (False, True) if method != "orepa" or not preserve],
)
def test_conversion_is_undone_bit_for_bit(method, preserve):
    model, optimizer = trained("SGD", expanded=False)
    model[4].bias.requires_grad_(False)

    def edit():
        dyrep.convert_(model, method, example_input=images(1)[0], preserve=preserve, optimizer=optimizer)
        model(images(1)[0])

    assert_undone(model, optimizer, ["0", "1", "3", "4"], edit)
    assert [type(module) for module in model[:5:3]] == [nn.Conv2d] * 2
    assert [type(model[place]) for place in (1, 4)] == [nn.BatchNorm2d] * 2


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_cut_of_a_converted_model_is_undone_bit_for_bit_with_its_norms(method, kind):
    model, optimizer = trained(kind, expanded=False)
    dyrep.convert_(model, method, example_input=images(1)[0], optimizer=optimizer)
    train_step(model, optimizer, images(1)[0])
    aside = [type(model[place]) for place in (1, 4)]
    assert_undone(model, optimizer, ["0", "3"], lambda: dyrep.cut_(model, ["0", "3"], optimizer=optimizer))
    assert [type(model[place]) for place in (1, 4)] == aside
    assert model[1].weight.requires_grad == (method == "orepa")


def test_partial_cut_of_a_block_in_place_of_a_norm_is_undone_bit_for_bit():
    model, optimizer = trained("SGD", expanded=False)
    dyrep.convert_(model, "dbb", example_input=images(1)[0], optimizer=optimizer)
    train_step(model, optimizer, images(1)[0])
    x = images(1)[0]
    before, output = picture(model, optimizer), eval_output(model, x)
    snapshot = Snapshot([model[3]], optimizer)
    dyrep.cut_(model, "3", ["1x1", "1x1-AVG"], optimizer=optimizer)
    assert not torch.equal(model[3].origin_norm.bias, before["values"]["3.origin_norm.bias"])
    snapshot.restore_()
    assert_same_picture(picture(model, optimizer), before)
    assert torch.equal(eval_output(model, x), output)


def test_switching_the_original_kernel_off_and_on_again_is_undone_bit_for_bit():
    model, optimizer = trained("SGD", expanded=False)
    dyrep.convert_(model, "repvgg", example_input=images(1)[0], optimizer=optimizer)
    x = images(1)[0]
    before, output = picture(model, optimizer), eval_output(model, x)
    snapshot = Snapshot([model[3]], optimizer)
    model[3].switch_origin_off_()
    assert not model[3].weight.requires_grad
    snapshot.restore_()
    assert_same_picture(picture(model, optimizer), before)
    assert torch.equal(eval_output(model, x), output)
    model[3].switch_origin_off_()
    off, output = picture(model, optimizer), eval_output(model, x)
    snapshot = Snapshot([model[3]], optimizer)
    dyrep.cut_(model, "3", optimizer=optimizer)
    assert model[3].weight.requires_grad
    snapshot.restore_()
    assert_same_picture(picture(model, optimizer), off)
    assert torch.equal(eval_output(model, x), output)
