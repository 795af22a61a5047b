"""Momentum of a block's parameters, carried over to the kernel that it folds to."""

import pytest
import torch
from torch import nn

import dyrep
from dyrep.block import as_block_
from dyrep.branches import BRANCHES
from dyrep.surgery.momentum import carried_momentum, set_momentum_
from dyrep.surgery.undo import Snapshot


def make_block(bias, origin_norm=True, dtype=torch.float64):
    """A block that has been trained for some steps, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=bias), nn.BatchNorm2d(6), nn.ReLU()).to(dtype)
    if origin_norm:
        dyrep.convert_(model, "dbb7", branches=list(BRANCHES), replace="conv")
    else:
        dyrep.expand_(model, "0", gamma=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 6, 8, 8, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return model[0], optimizer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("origin_norm", [False, True])
def test_it_is_how_the_folded_kernel_moves_when_all_parameters_follow_their_momentum(bias, origin_norm):
    block, optimizer = make_block(bias, origin_norm)
    carried = carried_momentum(block, optimizer)
    assert list(carried) == (["weight", "bias"] if bias else ["weight"])
    parts = {}
    for sign in (1, -1):
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.add_(optimizer.state[parameter]["momentum_buffer"], alpha=sign * 1e-5)
            parts[sign] = [part.clone() for part in block.folded() if part is not None]
            for parameter in block.parameters():
                parameter.sub_(optimizer.state[parameter]["momentum_buffer"], alpha=sign * 1e-5)
    for value, ahead, back in zip(carried.values(), parts[1], parts[-1], strict=True):
        torch.testing.assert_close(value, (ahead - back) / 2e-5, rtol=1e-6, atol=1e-9)


def test_a_kernel_by_itself_keeps_its_own():
    conv = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1, momentum=0.9)
    conv(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    before = {name: optimizer.state[p]["momentum_buffer"].clone() for name, p in conv.named_parameters()}
    for name, momentum in carried_momentum(as_block_(conv), optimizer).items():
        torch.testing.assert_close(momentum.float(), before.pop(name))
    assert not before


def test_without_momentum_there_is_none_to_carry_over():
    block, optimizer = make_block(bias=True)
    assert carried_momentum(block, None) == {}
    assert carried_momentum(block, torch.optim.SGD(block.parameters(), lr=0.1)) == {}
    adam = torch.optim.Adam(block.parameters())
    block.weight.grad = torch.ones_like(block.weight)
    adam.step()
    assert carried_momentum(block, adam) == {}
    block.requires_grad_(False)
    assert carried_momentum(block, optimizer) == {}


def test_parameters_that_have_not_moved_yet_count_as_standing_still():
    block, optimizer = make_block(bias=False)
    everything = carried_momentum(block, optimizer)["weight"]
    for parameter in block.branches.parameters():
        del optimizer.state[parameter]
    origin = carried_momentum(block, optimizer)["weight"]
    assert not torch.allclose(origin, everything)
    assert not torch.allclose(origin, torch.zeros_like(origin))


@pytest.mark.parametrize("origin_norm", [False, True])
@pytest.mark.parametrize("learning", ["weight", "bias", "norm.weight", "norm.bias", "conv.weight", "nothing"])
@pytest.mark.parametrize("forgotten", ["weight", "bias", "norm.weight", "nothing"])
def test_a_block_that_is_frozen_or_has_not_moved_in_part_is_cut_all_the_same(origin_norm, learning, forgotten):
    block, optimizer = make_block(bias=True, origin_norm=origin_norm)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(name.endswith(learning))
        if name.endswith(forgotten):
            del optimizer.state[parameter]
    dyrep.cut_(nn.Sequential(block), "0", optimizer=optimizer)
    for parameter in block.parameters():
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        assert momentum is None or (momentum.shape == parameter.shape and momentum.isfinite().all())


def test_state_is_replaced_and_not_rewritten():
    block, optimizer = make_block(bias=False, dtype=torch.float32)
    state = optimizer.state[block.weight]
    state["momentum_buffer"] = state["momentum_buffer"].to(memory_format=torch.channels_last)
    kept, before = state["momentum_buffer"], state["momentum_buffer"].clone()
    set_momentum_(block, {"weight": torch.ones(6, 6, 3, 3, dtype=torch.float64)}, optimizer)
    assert torch.equal(kept, before)
    assert optimizer.state[block.weight] is not state
    new = optimizer.state[block.weight]["momentum_buffer"]
    assert new.eq(1).all()
    assert (new.dtype, new.stride()) == (kept.dtype, kept.stride())


def test_a_block_that_is_cut_whole_hands_it_on_and_gets_it_back_when_that_is_undone():
    block, optimizer = make_block(bias=True)
    model = nn.Sequential(block)
    before = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in block.parameters()]
    carried, snapshot = carried_momentum(block, optimizer), Snapshot([block], optimizer)
    dyrep.cut_(model, "0", optimizer=optimizer)
    for name, momentum in carried.items():
        torch.testing.assert_close(optimizer.state[block.get_parameter(name)]["momentum_buffer"], momentum)
    assert not torch.allclose(carried["weight"], before[0])
    snapshot.restore_()
    after = [optimizer.state[parameter]["momentum_buffer"] for parameter in block.parameters()]
    assert len(after) == len(before) > 2
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, before, strict=True))
