"""Kernels made longer or shorter behind a norm that makes up for it."""

import pytest
import torch
from torch import nn

import dyrep
from dyrep.block import as_block_
from dyrep.branches import BRANCHES
from dyrep.surgery.lengths import factors_for, rescale_, turning_scale

KINDS = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d), 3: (nn.Conv3d, nn.BatchNorm3d)}


def make_layer(dims=2, bias=False, eps=1e-5):
    """A convolution and its norm in float64, with statistics as if they were trained."""
    torch.manual_seed(dims)
    conv, norm = KINDS[dims][0](3, 6, 3, bias=bias).double(), KINDS[dims][1](6, eps=eps).double()
    nn.init.uniform_(norm.weight, 0.5, 2)
    nn.init.normal_(norm.bias)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.1, 3)
    return conv, norm, torch.randn(4, 3, *[6] * dims, dtype=torch.float64)


@pytest.mark.parametrize("dims", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_the_function_stays_whatever_the_factors(dims, bias, eps):
    conv, norm, x = make_layer(dims, bias, eps)
    factors = torch.tensor([0.5, 0.7, 1, 1.5, 3, 10], dtype=torch.float64)
    norm.eval()
    before, kernel = norm(conv(x)), conv.weight.clone()
    rescale_(conv, norm, factors)
    torch.testing.assert_close(norm(conv(x)), before, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(conv.weight, kernel * factors.view(-1, *[1] * (dims + 1)))


def test_in_training_the_function_moves_by_no_more_than_the_norms_epsilon():
    conv, norm, x = make_layer()
    before = norm(conv(x))
    rescale_(conv, norm, torch.full((6,), 0.3, dtype=torch.float64))
    moved = (norm(conv(x)) - before).abs().max()
    assert 0 < moved < 1e-3


def make_block(branches):
    """A block of a network that has seen data, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)).double()
    if branches:
        dyrep.convert_(model, "dbb7", branches=branches, replace="conv")
    else:
        as_block_(model[0])
    for _ in range(30):
        model(torch.randn(16, 6, 8, 8, dtype=torch.float64))
    return model


def test_a_kernel_of_its_own_needs_no_scale():
    assert float(turning_scale(make_block(())[0])) == pytest.approx(1)


@pytest.mark.parametrize("branches", [["1x1"], ["1x1", "residual"], list(BRANCHES)], ids=len)
def test_a_step_moves_the_absorbed_kernel_as_far_along_the_gradient_as_the_block(branches):
    block = make_block(branches)[0]
    scale = turning_scale(block)
    gradient = torch.randn_like(block.weight)

    def after_a_step(kernel, parameters, size):
        moved = torch.autograd.grad((kernel() * gradient).sum(), parameters)
        with torch.no_grad():
            for parameter, by in zip(parameters, moved, strict=True):
                parameter.sub_(size * by)
        return kernel().detach()

    plain = (block.folded()[0].detach() * scale).requires_grad_()
    before = block.folded()[0].detach()
    as_plain = after_a_step(lambda: plain / scale, [plain], 1e-6) - before
    as_block = after_a_step(lambda: block.folded()[0], list(block.parameters()), 1e-6) - before
    assert float((as_plain * gradient).sum() / (as_block * gradient).sum()) == pytest.approx(1, abs=0.15)


def test_parameters_that_are_frozen_do_not_count():
    block = make_block(["1x1"])[0]
    before = turning_scale(block)
    block.branches["1x1"].requires_grad_(False)
    assert turning_scale(block) > before
    block.requires_grad_(False)
    assert float(turning_scale(block)) == 1


def test_the_same_generator_gives_the_same_scale_and_leaves_the_global_one_alone():
    block = make_block(list(BRANCHES))[0]
    state = torch.get_rng_state()
    first, second = (turning_scale(block, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def test_channels_that_are_constant_stay_as_they_are():
    _, reader, _ = make_layer()
    reader.running_var[2] = 0
    assert factors_for(reader, torch.tensor(0.25)).tolist() == [0.25, 0.25, 1.0, 0.25, 0.25, 0.25]
    reader.running_var[:2] = torch.tensor([101.0, 99.0]) * reader.eps / 0.25**2  # less, and ε would count
    assert factors_for(reader, torch.tensor(0.25)).tolist() == [0.25, 1.0, 1.0, 0.25, 0.25, 0.25]
    assert factors_for(reader, torch.tensor(4.0)).tolist() == [4.0] * 6  # there is room above zero


def test_a_variance_that_is_smaller_than_the_factors_allow_is_zero_and_never_negative():
    conv, norm, _ = make_layer()
    norm.running_var.fill_(1e-7)  # of an average, whose model has larger ones
    rescale_(conv, norm, torch.full((6,), 0.1, dtype=torch.float64))
    assert norm.running_var.tolist() == [0.0] * 6
