"""A folded block is one convolution; with the whole batch and full gradients it is what its branches compute."""

from __future__ import annotations

import pytest
import torch
from execution_helpers import (
    assert_same,
    block_cases,
    eager,
    folded_with,
    images,
    make_block,
    measuring,
    norms_of,
    plain_convs,
    seven_branches,
    step,
    values_per_channel,
)
from hypothesis import assume, given, settings
from torch import nn
from torch.utils.checkpoint import checkpoint

import dyrep
from dyrep.execution import SIGMA_GRADIENTS, Clock, Execution, folded
from dyrep.execution.settings import SETTLING_STEPS
from strategies import PADDING_MODES, conv_cases

every_origin = pytest.mark.parametrize("origin", ["plain", "normalised", "off"])
with_and_without_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
two_dimensional = conv_cases().filter(lambda case: len(case.image) == 2)

exact = folded_with(images=99, gradient="full")


def check(block, x, first=False):
    expected = step(block, x, eager, needs_input_gradient=not first)
    assert_same(step(block, x, exact, needs_input_gradient=not first), expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=block_cases(plain_convs() | two_dimensional))
def test_any_block_folds_exactly_on_the_whole_batch(case):
    block, x = case.block(), case.input()
    assume(values_per_channel(block, x) > 3)  # gradients through σ of two nearly vanish
    check(block, x, first=not case.needs_input_gradient)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(case=block_cases(plain_convs() | two_dimensional))
def test_any_block_folds_exactly_in_a_long_sweep(case):
    block, x = case.block(), case.input()
    assume(values_per_channel(block, x) > 3)  # gradients through σ of two nearly vanish
    check(block, x, first=not case.needs_input_gradient)


@every_origin
@with_and_without_bias
@pytest.mark.parametrize("first", [False, True], ids=["inner layer", "first layer"])
def test_the_block_of_the_paper_folds_exactly(origin, bias, first):
    check(seven_branches(origin=origin, bias=bias), images(), first)


@every_origin
@pytest.mark.parametrize("name", ["1x1", "1x1-KxK", "1x1-AVG", "1xK", "Kx1", "residual", "KxK-2", "1x1-DCT", "DW-1x1"])
def test_every_branch_alone_folds_exactly(origin, name):
    check(make_block(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64), [name], origin), images())


@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize(("kernel", "padding"), [(3, 1), (4, "same"), ((2, 7), "same"), (3, 0)])
def test_every_padding_folds_exactly(mode, kernel, padding):
    conv = nn.Conv2d(4, 4, kernel, padding=padding, padding_mode=mode, dtype=torch.float64)
    check(make_block(conv), images())


@every_origin
@pytest.mark.parametrize(("groups", "out_channels"), [(2, 4), (2, 6), (4, 4), (4, 8)])
@pytest.mark.parametrize("stride", [1, 2])
def test_groups_fold_exactly(groups, out_channels, stride, origin):
    conv = nn.Conv2d(4, out_channels, 3, stride, padding=1, groups=groups, bias=False, dtype=torch.float64)
    check(make_block(conv, origin=origin), images())


@every_origin
def test_gates_get_their_gradient(origin):
    block = make_block(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64), dyrep.BRANCHES, origin, scaling="gated")
    check(block, images())


def test_a_wide_inner_layer_folds_exactly():
    conv = nn.Conv2d(4, 6, 3, padding=1, bias=False, dtype=torch.float64)
    check(make_block(conv, ["1x1-KxK", "1x1"], width=2), images())


def nested_block(bias=False):
    block = seven_branches(bias=bias)
    inner = make_block(block.branches["1x1-KxK"].conv, dyrep.BRANCHES, origin="normalised")
    make_block(inner.branches["1x1-KxK"].conv, ["1x1", "Kx1"])
    return block


@with_and_without_bias
def test_blocks_inside_blocks_fold_exactly(bias):
    check(nested_block(bias), images())


@pytest.mark.parametrize("method", ["repvgg", "acnet", "dbb", "dbb7", "mobileone", "repnas"])
@pytest.mark.parametrize("replace", ["conv", "conv+norm"])
def test_the_blocks_of_other_methods_fold_exactly(method, replace):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)).double()
    dyrep.convert_(model, method, example_input=images(), replace=replace)
    assert (norms_of(model[0])[0].bias is not None) == (replace == "conv+norm")
    check(model[0], images())


@with_and_without_bias
@pytest.mark.parametrize("origin", ["plain", "normalised"])
def test_gradients_add_up_over_several_passes(bias, origin):
    block = seven_branches(origin=origin, bias=bias)
    assert_same(step(block, images(), exact, passes=2), step(block, images(), eager, passes=2))


@with_and_without_bias
@pytest.mark.parametrize("gradient", SIGMA_GRADIENTS)
def test_a_block_may_be_run_again_before_the_backward_pass(gradient, bias):
    block, forward = seven_branches(origin="normalised", bias=bias), folded_with(images=2, gradient=gradient)
    assert_same(step(block, images(), forward, passes=2, at_once=True), step(block, images(), forward, passes=2))


# Fewer images than the batch has ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 6])
@every_origin
@with_and_without_bias
def test_with_fewer_images_every_norm_divides_by_their_spread(count, origin, bias):
    block, x = seven_branches(origin=origin, bias=bias), images(6)
    with measuring(count):
        expected = step(block, x, eager)
    assert_same(step(block, x, folded_with(images=count, gradient="full")), expected)


def test_with_fewer_images_blocks_inside_blocks_divide_by_their_spread_too():
    block, x = nested_block(), images(6)
    with measuring(2):
        expected = step(block, x, eager)
    assert_same(step(block, x, folded_with(images=2, gradient="full")), expected)


@pytest.mark.parametrize(
    ("asked", "batch", "positions", "looked_at"),
    [
        ({"images": 16}, 256, 56 * 56, 16),
        ({"images": 16}, 8, 56 * 56, 8),
        ({"images": 16, "values": 1000}, 256, 49, 21),
        ({"images": 16, "values": 1000}, 20, 49, 20),
        ({"images": 2, "values": 12}, 6, 3, 4),
        ({"images": 2, "values": 13}, 6, 3, 5),
    ],
)
def test_images_of_few_positions_take_more_images(asked, batch, positions, looked_at):
    assert Execution("folded", **asked).images_for(batch, positions) == looked_at


def test_as_many_images_are_looked_at_as_have_enough_values():
    conv = nn.Conv2d(4, 4, 3, stride=2, padding=1, dtype=torch.float64)
    block, x = make_block(conv, ["1x1", "1xK"]), images(6)  # nine positions of the output
    found = step(block, x, folded_with(images=2, values=28))
    assert_same(found, step(block, x, folded_with(images=4)))
    assert not torch.allclose(found["output"], step(block, x, folded_with(images=3))["output"])


@pytest.mark.parametrize("gradient", SIGMA_GRADIENTS)
def test_the_kernel_is_the_same_whatever_the_other_images_are(gradient):
    x = images(6)
    other = torch.cat([x[:2], 7 * x[2:] - 3])
    forward = folded_with(images=2, gradient=gradient)
    block = seven_branches()
    found, again = (step(block, batch, forward) for batch in (x, other))
    assert torch.equal(again["output"][:2], found["output"][:2])
    assert all(torch.equal(again[name], found[name]) for name in found if "running" in name)
    assert not torch.equal(again["output"], found["output"])


@pytest.mark.parametrize("gradient", SIGMA_GRADIENTS)
def test_the_gradient_leaves_statistics_alone(gradient):
    block = make_block(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64), ["1x1", "1x1-AVG", "residual"], "normalised")
    found, full = (step(block, images(), folded_with(images=4, gradient=g)) for g in (gradient, "full"))
    assert all(torch.equal(found[name], full[name]) for name in full if "running" in name)


def test_a_single_convolution_reads_the_whole_batch(monkeypatch):
    block, x = nested_block().train(), images(6)
    batches, conv2d = [], torch.nn.functional.conv2d

    def counted(x, *args, **kwargs):
        batches.append(len(x))
        return conv2d(x, *args, **kwargs)

    monkeypatch.setattr("torch.nn.functional.conv2d", counted)
    folded.forward(block, x, Execution("folded", images=2, values=1))
    assert batches.count(6) == 1
    assert batches.count(2) == len(batches) - 1 > 7


# Measuring now and then ---------------------------------------------------------------------------------------------


def statistics_of(block):
    return {name: buffer.clone() for name, buffer in block.named_buffers() if "running" in name}


def test_at_first_every_step_measures():
    clock = Clock(every=7)
    due = []
    for clock.step in range(SETTLING_STEPS + 15):
        due.append(clock.due)
    assert all(due[:SETTLING_STEPS])
    assert [step for step, is_due in enumerate(due) if is_due][SETTLING_STEPS:] == [21, 28]


@pytest.mark.parametrize("origin", ["plain", "normalised"])
def test_statistics_change_in_every_nth_step_alone_and_count_for_all_in_between(origin):
    block = seven_branches(origin=origin).train()
    block.execution = settings = Execution("folded", images=99, gradient="full", clock=Clock(3))
    settings.clock.step = 30
    for number in range(30, 37):
        before = statistics_of(block)
        eagerly_tracked = step(block, images(number), eager)
        block(images(number))
        assert settings.clock.step == number + 1
        for name, value in statistics_of(block).items():
            batch = before[name] + (eagerly_tracked[name] - before[name]) / 0.1
            expected = before[name].lerp(batch, 1 - 0.9**3 if number % 3 == 0 else 0.0)
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gradient", ["none", "full"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_between_two_measurements_running_statistics_serve(gradient, nested):
    block, x = nested_block() if nested else seven_branches(origin="normalised"), images()
    clock = Clock(3)
    clock.step = 31
    expected = step(block, x, lambda block, x: block._conv_forward(x, *block.folded()))
    assert_same(step(block, x, folded_with(gradient=gradient, clock=clock)), expected)


def test_training_steps_alone_move_the_clock_on():
    block = seven_branches()
    block.execution = Execution("folded", clock=Clock(3))
    block.eval()(images())
    assert block.execution.clock.step == 0
    block.train()(images())
    with torch.no_grad():
        block(images())
    assert block.execution.clock.step == 2


def test_a_clock_that_somebody_manages_is_left_to_them():
    block = seven_branches().train()
    block.execution = Execution("folded", clock=Clock(3, managed=True))
    block.execution.clock.step = 31
    before = statistics_of(block)
    block(images())
    assert block.execution.clock.step == 31
    assert all(torch.equal(value, before[name]) for name, value in statistics_of(block).items())
    block.execution.clock.step = 33
    block(images())
    assert not any(torch.equal(value, before[name]) for name, value in statistics_of(block).items())


@pytest.mark.parametrize("gradient", SIGMA_GRADIENTS)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_activation_checkpointing_runs_the_same_step_again(gradient, reentrant):
    def trained(run):
        torch.manual_seed(0)
        block = seven_branches(origin="normalised").train()
        block.execution = Execution("folded", gradient=gradient, clock=Clock(3))
        block.execution.clock.step = 30
        optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
        for number in range(5):
            optimizer.zero_grad()
            run(block, images(number + 2).requires_grad_()).square().mean().backward()
            optimizer.step()
        assert block.execution.clock.step == 35
        return block.state_dict()

    ours = trained(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    theirs = trained(lambda block, x: block(x))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
