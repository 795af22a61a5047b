"""Saving and loading a block: it takes on a file's structure if that was asked for, and else nothing slips in."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from blocks import add_origin_norm_, assert_state_is, full_block, images, snapshot, with_and_without_bias
from dyrep.block import as_block_
from dyrep.branches import BRANCHES, make_branch
from dyrep.errors import BranchError
from dyrep.geometry import ConvGeometry
from strategies import grown_block


@with_and_without_bias
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_saved_state_regrows_the_block(bias, training):
    block = add_origin_norm_(full_block(bias=bias)).train(training)
    grown_block(block.branches["1x1-KxK"].conv, ["1x1", "residual"])
    block.train(training)
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    fresh = as_block_(nn.Conv2d(4, 4, 3, padding=1, bias=bias, dtype=torch.float64)).train(training)
    weight = fresh.weight
    fresh.prepare_().load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert fresh.weight is weight
    assert_state_is(fresh, snapshot(block))
    assert {module.training for module in fresh.modules()} == {training}
    x = images()
    assert torch.equal(fresh(x), block(x))


def test_loading_sheds_branches_that_the_file_does_not_have():
    block = add_origin_norm_(full_block())
    plain = nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)
    block.prepare_().load_state_dict(plain.state_dict(), strict=True)
    x = images()
    assert not block.branches
    assert block.origin_norm is None
    assert torch.equal(block(x), plain(x))


def test_loading_keeps_the_branches_it_has_and_the_order_of_the_file():
    block, other = grown_block(nn.Conv2d(2, 2, 3, padding=1), ["1x1", "1xK", "residual"]), nn.Conv2d(2, 2, 3, padding=1)
    kept = block.branches["residual"]
    grown_block(other, ["residual", "Kx1"])
    block.prepare_().load_state_dict(other.state_dict(), strict=True)
    assert list(block.branches) == ["residual", "Kx1"]
    assert block.branches["residual"] is kept


def test_loading_follows_the_width_in_the_file():
    wide, narrow = (grown_block(nn.Conv2d(2, 2, 3, padding=1), ["1x1-KxK"], width=width) for width in (3, 1))
    narrow.prepare_().load_state_dict(wide.state_dict(), strict=True)
    assert narrow.branches["1x1-KxK"].point.out_channels == 6
    x = torch.randn(2, 2, 4, 4)
    assert torch.equal(narrow.eval()(x), wide.eval()(x))


def test_loading_grows_branches_inside_a_branch_that_is_there_already():
    block, other = (grown_block(nn.Conv2d(2, 2, 3, padding=1), ["1x1-KxK"]) for _ in range(2))
    grown_block(other.branches["1x1-KxK"].conv, ["residual"])
    block.prepare_().load_state_dict(other.state_dict(), strict=True)
    x = torch.randn(2, 2, 4, 4)
    assert torch.equal(block.eval()(x), other.eval()(x))


def test_loading_another_structure_into_a_block_that_was_not_prepared_fails_loudly():
    block = full_block()
    before = snapshot(block)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"branches.1x1.norm.weight\""):
        block.load_state_dict(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64).state_dict(), strict=True)
    assert list(block.state_dict()) == list(before)


@pytest.mark.parametrize("strict", [True, False])
def test_plain_weights_do_not_slip_into_a_block_that_was_not_prepared(strict):
    model = nn.Sequential(full_block())
    plain = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64))
    with pytest.raises(
        RuntimeError, match=r"layer '0' has branches \(.*\) and this state dict has none for it.*prepare_"
    ):
        model.load_state_dict(plain.state_dict(), strict=strict)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("saved", "has"), [(["1x1", "1xK"], "others: 1x1, 1xK"), (["residual"], "only residual")])
def test_other_branches_do_not_slip_into_a_block_that_was_not_prepared(saved, has, strict):
    model = nn.Sequential(grown_block(nn.Conv2d(4, 4, 3, padding=1), ["1x1", "residual"]))
    other = nn.Sequential(grown_block(nn.Conv2d(4, 4, 3, padding=1), saved))
    told = rf"layer '0' has branches \(1x1, residual\) and this state dict has {has} for it.*controller's state before"
    with pytest.raises(RuntimeError, match=told):
        model.load_state_dict(other.state_dict(), strict=strict)


def test_a_prepared_block_that_a_file_does_not_mention_stays_as_it_is():
    model = nn.Sequential(full_block().prepare_(), nn.Linear(2, 2))
    before = snapshot(model[0])
    model.load_state_dict({"1.weight": torch.zeros(2, 2), "1.bias": torch.zeros(2)}, strict=False)
    assert_state_is(model[0], before)


def test_loading_into_a_plain_convolution_fails_loudly():
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"branches.1x1.norm.weight\""):
        nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64).load_state_dict(full_block().state_dict())


def test_loading_an_unknown_branch_fails_loudly():
    state = {**snapshot(full_block()), "branches.5x5.norm.weight": torch.ones(4)}
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"branches.5x5.norm.weight\""):
        as_block_(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)).prepare_().load_state_dict(state)


def test_loading_a_branch_that_does_not_fit_says_why():
    state = full_block().state_dict()
    strided = as_block_(nn.Conv2d(4, 4, 3, stride=2, padding=1, dtype=torch.float64))
    with pytest.raises(BranchError, match=r"^branch 'residual' is not possible: the residual needs stride 1, not 2x2$"):
        strided.prepare_().load_state_dict(state)


def test_loading_an_incomplete_branch_fails_loudly():
    state = snapshot(full_block())
    del state["branches.1xK.conv.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"branches.1xK.conv.weight\""):
        as_block_(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)).prepare_().load_state_dict(state)


@pytest.mark.parametrize("name", BRANCHES)
def test_branch_keys_are_below_branches(name):
    block = grown_block(nn.Conv2d(4, 4, 3, padding=1), [name])
    branch = make_branch(name, ConvGeometry.of(nn.Conv2d(4, 4, 3, padding=1)), shift=True)
    expected = ["weight", "bias", *(f"branches.{name}.{key}" for key in branch.state_dict())]
    assert list(block.state_dict()) == expected
