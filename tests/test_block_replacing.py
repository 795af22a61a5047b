"""Blocks that take the place of the norm that follows, and blocks without the original kernel."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dyrep
from blocks import either_mode, images, randomize_, with_and_without_bias
from dyrep.block import RepConv, as_block_, as_plain_, branch_for, origin_scaling_for
from dyrep.branches import BRANCHES
from dyrep.errors import BranchError, IneligibleLayerError, StructureError
from dyrep.norm import BranchNorm
from dyrep.passing import PassedNorm
from strategies import OF_OTHER_METHODS, relative_error

REPLACING = (*BRANCHES, *OF_OTHER_METHODS)
EPS = 1e-3  # of the replaced norm, and of the norms in its place


def plain_net(bias: bool, eps: float = EPS) -> nn.Sequential:
    """A convolution and a batch norm that has been trained."""
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, bias=bias, dtype=torch.float64), nn.BatchNorm2d(4, eps=eps, dtype=torch.float64)
    )
    with torch.no_grad():
        model[1].weight.uniform_(0.5, 1.5)
        model[1].bias.normal_()
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.3, 2)
    return model


def replacing_net(bias: bool, names: tuple[str, ...] = REPLACING, scaling: str = "norm") -> nn.Sequential:
    """The same, with a block in place of both."""
    model = plain_net(bias)
    block = as_block_(model[0])
    block.replace_norm_(model[1])
    block.set_branches_({name: branch_for(block, name, scaling=scaling) for name in names})
    block.origin_norm = origin_scaling_for(block, scaling)
    randomize_(block)
    return model


def batch_norm(y: Tensor, norm: BranchNorm) -> Tensor:
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    return F.batch_norm(y, mean, var, norm.weight, norm.bias, norm.training, 0.1, EPS)


def by_hand(block: RepConv, x: Tensor) -> Tensor:
    """Every branch's map as torch runs it, through torch's batch norm, added up; the branches are 3x3, padding 1."""

    def inner(branch: nn.Module) -> Tensor:
        norm = branch.inner_norm
        y = F.conv2d(x, branch.point.weight)
        var = y.var((0, 2, 3), correction=0) if norm.training else norm.running_var
        return y * (norm.weight / (var + EPS).sqrt()).reshape(1, -1, 1, 1)

    maps = {
        "1x1": lambda b: F.conv2d(x, b.conv.weight),
        "1x1-KxK": lambda b: F.conv2d(inner(b), b.conv.weight, padding=1),
        "1x1-AVG": lambda b: F.conv2d(F.avg_pool2d(x, 3, 1, 1), b.point.weight),
        "1xK": lambda b: F.conv2d(x, b.conv.weight, padding=(0, 1)),
        "Kx1": lambda b: F.conv2d(x, b.conv.weight, padding=(1, 0)),
        "residual": lambda b: x,
        "KxK-2": lambda b: F.conv2d(x, b.conv.weight, padding=1),
        "1x1-DCT": lambda b: F.conv2d(F.conv2d(x, b.point.weight), b.filters.unsqueeze(1), padding=1, groups=4),
        "DW-1x1": lambda b: F.conv2d(F.conv2d(x, b.depthwise.weight, padding=1, groups=4), b.point.weight),
    }
    y = 0
    if not block.origin_off:
        y = batch_norm(F.conv2d(x, block.weight, block.bias, padding=1), block.origin_norm)
    for name, branch in block.branches.items():
        y = y + batch_norm(maps[name](branch), branch.norm)
    return y


@with_and_without_bias
@either_mode
def test_a_block_in_place_of_a_norm_is_the_sum_of_batch_norms_of_its_branches(bias, training):
    model, x = replacing_net(bias).train(training), images()
    expected = by_hand(model[0], x)
    assert relative_error(model(x), expected) <= 1e-10
    assert all(branch.norm.bias is not None for branch in model[0].branches.values())


@with_and_without_bias
def test_kernel_and_bias_of_a_block_in_place_of_a_norm_are_its_eval_function(bias):
    model, x = replacing_net(bias).eval(), images()
    kernel, shift = model[0].folded()
    assert relative_error(F.conv2d(x, kernel, shift, padding=1), by_hand(model[0], x)) <= 1e-10


@with_and_without_bias
def test_fuse_gives_a_convolution_with_a_bias_and_leaves_block_and_norm_alone(bias):
    model, x = replacing_net(bias).eval(), images()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    fused = model[0].fuse()
    assert type(fused) is nn.Conv2d
    assert list(fused.state_dict()) == ["weight", "bias"]
    assert set(vars(fused)) == set(vars(nn.Conv2d(4, 4, 3)))
    assert fused.bias.requires_grad
    assert relative_error(fused(x), by_hand(model[0], x)) <= 1e-10
    assert isinstance(model[0], RepConv)
    assert type(model[1]) is PassedNorm
    assert (model[0].bias is not None) == bias
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())


@with_and_without_bias
def test_becoming_plain_again_brings_the_norm_back_with_the_same_eval_function(bias):
    model, x = replacing_net(bias), images()
    for _ in range(3):
        model(images())
    model.eval()
    expected = by_hand(model[0], x).detach()
    weight, norm = model[0].weight, model[1]
    as_plain_(model[0])
    assert model[0].weight is weight
    assert model[1] is norm
    assert [type(module) for module in model] == [nn.Conv2d, nn.BatchNorm2d]
    reference = plain_net(bias).eval()
    assert [set(vars(module)) for module in model] == [set(vars(module)) for module in reference]
    assert relative_error(model(x), expected) <= 1e-10
    reference.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(reference(x), model(x))
    assert all(p.requires_grad for p in model.parameters())


def test_after_becoming_plain_training_starts_from_nearly_the_same_function():
    model = replacing_net(bias=False, names=("1x1", "residual"))
    x = images(batch=256)
    for _ in range(100):
        model(x)
    trained = model(x).detach()
    as_plain_(model[0])
    assert relative_error(model.train()(x), trained) <= 0.01


@with_and_without_bias
def test_a_block_and_its_norm_are_copied_together(bias):
    model, x = replacing_net(bias).eval(), images()
    twin = copy.deepcopy(model)
    assert twin[0].passed_norm is twin[1]
    assert model[0].passed_norm is model[1]
    expected = model(x).detach()
    dyrep.deploy(twin, inplace=True)
    assert relative_error(twin(x), expected) <= 1e-10
    assert type(model[1]) is PassedNorm
    assert torch.equal(model(x), expected)


def test_the_norm_whose_place_it_takes_is_not_a_child_of_the_block():
    model = replacing_net(bias=False)
    assert not any(isinstance(module, PassedNorm) for module in model[0].modules())
    assert model[0].passed_norm is model[1]


def test_a_norm_that_cannot_step_aside_is_refused():
    block = as_block_(nn.Conv2d(4, 4, 3))
    with pytest.raises(IneligibleLayerError, match="GroupNorm is not one of torch's batch norms"):
        block.replace_norm_(nn.GroupNorm(1, 4))
    assert block.passed_norm is None
    assert not block.has_shift or block.bias is not None


@with_and_without_bias
def test_setting_the_origin_of_a_block_in_place_of_a_norm_is_exact_where_gamma_is_nearly_zero(bias):
    model = replacing_net(bias, names=()).eval()
    block, x = model[0], images()
    with torch.no_grad():
        block.origin_norm.weight.copy_(torch.tensor([0.0, 1e-7, -5e-5, 0.8]))
    kernel, shift = torch.randn(4, 4, 3, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    weight = block.weight
    block.set_origin_(kernel, shift)
    assert block.weight is weight
    assert (block.bias is not None) == bias
    y, expected = block(x), F.conv2d(x, kernel, shift, padding=1)
    for channel in range(4):
        assert relative_error(y[:, channel], expected[:, channel]) <= 1e-10


@with_and_without_bias
@pytest.mark.parametrize("cut", [("1x1",), ("residual", "1x1-KxK"), REPLACING[:-1]], ids=["one", "two", "all but one"])
def test_a_partial_cut_of_a_block_in_place_of_a_norm_keeps_the_eval_function(bias, cut):
    model, x = replacing_net(bias).eval(), images()
    expected = by_hand(model[0], x).detach()
    dyrep.cut_(model, "0", list(cut))
    assert list(model[0].branches) == [name for name in REPLACING if name not in cut]
    assert relative_error(by_hand(model[0], x), expected) <= 1e-10
    assert relative_error(model(x), expected) <= 1e-10
    dyrep.cut_(model, "0")
    assert [type(module) for module in model] == [nn.Conv2d, nn.BatchNorm2d]
    assert relative_error(model(x), expected) <= 1e-10


def test_searched_blocks_fold_only_what_is_open():
    model, x = replacing_net(bias=False, scaling="gated").eval(), images()
    whole = by_hand(model[0], x)
    assert relative_error(model(x), whole) <= 1e-10
    for name, branch in model[0].branches.items():
        branch.norm.gate.fill_(float(name in ("1x1", "KxK-2")))
    y = model(x)
    assert relative_error(y, whole) > 0.01
    block = copy.deepcopy(model[0])
    block.set_branches_({name: block.branch_modules()[name] for name in ("1x1", "KxK-2")})
    assert relative_error(y, by_hand(block, x)) <= 1e-10
    assert relative_error(dyrep.deploy(model)(x), y) <= 1e-10


# Blocks without the original kernel --------------------------------------------------------------------------------


@with_and_without_bias
@either_mode
def test_without_the_original_kernel_only_the_branches_are_left(bias, training):
    model, x = replacing_net(bias).train(training), images()
    model[0].switch_origin_off_()
    assert model[0].origin_off
    assert relative_error(model(x), by_hand(model[0], x)) <= 1e-10


@with_and_without_bias
def test_without_the_original_kernel_folding_gives_the_branches_alone(bias):
    model, x = replacing_net(bias).eval(), images()
    model[0].switch_origin_off_()
    expected = by_hand(model[0], x).detach()
    kernel, shift = model[0].folded()
    assert relative_error(F.conv2d(x, kernel, shift, padding=1), expected) <= 1e-10
    assert relative_error(model[0].fuse()(x), expected) <= 1e-10
    as_plain_(model[0])
    assert relative_error(model(x), expected) <= 1e-10


@with_and_without_bias
def test_the_original_kernel_is_not_trained_while_off_and_is_again_afterwards(bias):
    model = replacing_net(bias)
    block, parameters = model[0], dict(model[0].named_parameters(recurse=False))
    block.switch_origin_off_()
    assert block.origin_norm is None
    assert not any(p.any() or p.requires_grad for p in parameters.values())
    model(images()).square().sum().backward()
    assert all(p.grad is None for p in parameters.values())
    assert all(p.grad is not None for p in block.branches.parameters())
    fused = block.fuse()
    assert all(p.requires_grad for p in fused.parameters())
    assert not block.weight.requires_grad
    plain = as_plain_(block)
    assert dict(plain.named_parameters()) == parameters
    assert all(p.requires_grad for p in parameters.values())
    assert "origin_off" not in vars(plain)


def test_absorbing_a_branch_switches_the_original_kernel_on_again():
    block = as_block_(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)).eval()
    block.set_branches_({name: branch_for(block, name) for name in ("1x1", "residual")})
    randomize_(block)
    block.switch_origin_off_()
    model, x = nn.Sequential(block), images()
    expected = sum(branch(x) for branch in block.branches.values()).detach()
    assert relative_error(model(x), expected) <= 1e-10
    dyrep.cut_(model, "0", ["1x1"])
    assert not block.origin_off
    assert block.weight.requires_grad
    assert block.bias.requires_grad
    assert relative_error(model(x), expected) <= 1e-10


def test_cutting_part_of_a_block_that_cannot_absorb_a_shift_is_refused_and_changes_nothing():
    model, x = replacing_net(bias=False).eval(), images()
    model[0].switch_origin_off_()
    expected = model(x)
    with pytest.raises(BranchError, match="cut all its branches at once, or none"):
        dyrep.cut_(model, "0", ["1x1"])
    assert model[0].origin_off
    assert not model[0].weight.requires_grad
    assert torch.equal(model(x), expected)


# Loading -----------------------------------------------------------------------------------------------------------


@with_and_without_bias
@either_mode
@pytest.mark.parametrize("scaling", ["linear", "gated"])
def test_a_prepared_block_takes_on_linear_and_gated_branches(bias, training, scaling):
    def conv() -> nn.Module:
        return nn.Conv2d(4, 4, 3, padding=1, bias=bias, dtype=torch.float64).train(training)

    block, x = as_block_(conv()), images()
    block.set_branches_({name: branch_for(block, name, scaling=scaling) for name in REPLACING})
    block.origin_norm = origin_scaling_for(block, scaling)
    randomize_(block)
    if scaling == "gated":
        block.branches["1x1"].norm.gate.zero_()
    fresh = as_block_(conv()).prepare_()
    fresh.load_state_dict(block.state_dict(), strict=True)
    assert {norm.kind for norm in (fresh.origin_norm, *(b.norm for b in fresh.branches.values()))} == {scaling}
    assert fresh.is_linear == (scaling == "linear")
    assert {module.training for module in fresh.modules()} == {training}
    assert torch.equal(fresh(x), block(x))


def test_a_prepared_block_exchanges_branches_of_another_kind():
    def grown(scaling: str) -> RepConv:
        block = as_block_(nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)).eval()
        block.set_branches_({name: branch_for(block, name, scaling=scaling) for name in ("1x1", "1x1-KxK")})
        block.origin_norm = origin_scaling_for(block, scaling)
        randomize_(block)
        return block

    x = images()
    for before in ("norm", "linear", "gated"):
        for after in ("norm", "linear", "gated"):
            block, other = grown(before).prepare_(), grown(after)
            block.load_state_dict(other.state_dict(), strict=True)
            assert {branch.norm.kind for branch in block.branches.values()} == {after}
            assert torch.equal(block(x), other(x))


@with_and_without_bias
def test_a_prepared_model_refuses_blocks_in_place_of_a_norm_and_says_what_to_do(bias):
    saved = nn.Sequential(nn.Identity(), *replacing_net(bias))
    fresh = dyrep.prepare_(nn.Sequential(nn.Identity(), *plain_net(bias)))
    with pytest.raises(StructureError) as caught:
        fresh.load_state_dict(saved.state_dict(), strict=True)
    assert str(caught.value).startswith(
        "layer '1': in this state dict the block replaces the norm after the convolution"
    )
    assert "load it with dyrep.load, or give the model its structure with dyrep.restructure_ first" in str(caught.value)


@with_and_without_bias
def test_a_model_with_that_structure_already_takes_such_a_state_dict(bias):
    saved, fresh, x = replacing_net(bias).eval(), plain_net(bias).eval(), images()
    dyrep.prepare_(dyrep.restructure_(fresh, dyrep.structure(saved)))
    fresh.load_state_dict(saved.state_dict(), strict=True)
    assert torch.equal(fresh(x), saved(x))


def test_norms_in_place_of_another_have_its_epsilon_and_momentum():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, eps=1e-3, momentum=0.03))
    dyrep.convert_(model, "dbb", example_input=torch.randn(2, 4, 6, 6))
    norms = [module for module in model.modules() if isinstance(module, BranchNorm)]
    assert len(norms) == 5  # four branches, and the one inside 1x1-KxK
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 0.03)}
    twin = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, eps=1e-3, momentum=0.03))
    dyrep.restructure_(twin, dyrep.structure(model))
    assert all(norm.eps == 1e-3 for norm in twin.modules() if isinstance(norm, BranchNorm))


def test_a_moving_average_that_averages_buffers_follows_a_block_in_place_of_a_norm():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
    x = torch.randn(8, 4, 6, 6)
    dyrep.convert_(model, "repvgg", example_input=x)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    for _ in range(3):
        model(x)
        average.update_parameters(model)
    plain = dyrep.deploy(average.module)
    assert relative_error(plain.eval()(x), average.eval()(x)) < 1e-5
