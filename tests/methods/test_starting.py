"""How the published blocks begin."""

import math

import pytest
import torch
from methods_helpers import BLOCK_METHODS, blocks, small_net
from torch import nn

import dyrep

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def converted(method, model=None, **options):
    model = small_net(16, groups=2) if model is None else model
    dyrep.convert_(model, method, example_input=X, **options)
    return model


def identity(channels, groups):
    """What a 1x1 convolution has to hold to pass every channel on."""
    weight = torch.zeros(channels, channels // groups, 1, 1)
    for channel in range(channels):
        weight[channel, channel % (channels // groups)] = 1
    return weight


@pytest.mark.parametrize("method", ["dbb", "dbb7", "orepa", "repnas"])
def test_the_1x1_before_a_kernel_begins_by_passing_channels_on(method):
    for block in blocks(converted(method)).values():
        point = block.branches["1x1-KxK"].point.weight
        assert torch.equal(point, identity(block.in_channels, block.groups))
        x = torch.randn(2, block.in_channels, 3, 3)
        assert torch.equal(block.branches["1x1-KxK"].point(x), x)


def test_a_1x1_that_widens_begins_at_random():
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16))
    dyrep.convert_(model, "dbb", example_input=torch.randn(2, 16, 5, 5))
    branch = model[0].branches["1x1-KxK"]
    assert (branch.width, branch.point.weight.shape) == (2, (32, 1, 1, 1))
    assert branch.point.weight.unique().numel() == 32


def test_a_preserving_conversion_begins_at_random_so_that_branches_differ_from_the_origin():
    point = converted("dbb", preserve=True)[3].branches["1x1-KxK"].point.weight
    assert not torch.equal(point, identity(16, 2))


@pytest.mark.parametrize("method", [m for m in BLOCK_METHODS if m != "orepa"])
def test_norms_begin_as_batch_norms_do(method):
    for block in blocks(converted(method)).values():
        norms = [block.origin_norm, *(branch.norm for branch in block.branches.values())]
        if "1x1-KxK" in block.branches:
            norms.append(block.branches["1x1-KxK"].inner_norm)
        for norm in norms:
            assert torch.equal(norm.weight, torch.ones_like(norm.weight))
            assert torch.equal(norm.running_var, torch.ones_like(norm.weight))
            assert norm.eps == 1e-5
        for norm in norms[: len(block.branches) + 1]:
            assert torch.equal(norm.bias, torch.zeros_like(norm.weight))
            assert torch.equal(norm.running_mean, torch.zeros_like(norm.weight))


def kernels_of(block, skip_identity=True):
    """Every kernel that was drawn at random, by branch and name."""
    return {
        f"{name}.{part}": weight
        for name, branch in block.branches.items()
        for part, weight in branch.named_parameters()
        if weight.dim() == 4 and not (skip_identity and (name, part) == ("1x1-KxK", "point.weight"))
    }


@pytest.mark.parametrize("method", [*BLOCK_METHODS])
def test_kernels_fill_the_range_they_are_drawn_from(method):
    gain = math.sqrt(6) if method == "orepa" else 1.0  # OREPA's is Kaiming's for a ReLU; the others are torch's own
    for block in blocks(converted(method)).values():
        drawn = kernels_of(block)
        assert drawn
        for name, weight in drawn.items():
            bound = gain / math.sqrt(weight[0].numel())
            assert weight.abs().max() <= bound, name
            assert weight.abs().max() >= 0.8 * bound, name
            # a uniform distribution over the range has a standard deviation of bound / √3
            assert float(weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.3), name


def test_torchs_own_range_is_torchs_own():
    conv = nn.Conv2d(16, 64, 3)
    assert conv.weight.abs().max() <= 1 / math.sqrt(conv.weight[0].numel())
    assert conv.weight.abs().max() >= 0.99 / math.sqrt(conv.weight[0].numel())


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_the_original_kernel_is_the_models_own(method):
    model = small_net(16, groups=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    converted(method, model)
    for name in blocks(model):
        assert torch.equal(model.get_submodule(name).weight, before[f"{name}.weight"])


def test_orepas_cosine_filters_begin_with_the_first_wave_along_either_side():
    block = converted("orepa")[3]
    filters = block.branches["1x1-DCT"].filters
    wave = torch.tensor([math.cos(math.pi * (k + 0.5) / 3) for k in range(3)])
    torch.testing.assert_close(filters[0], wave[:, None].expand(3, 3))
    torch.testing.assert_close(filters[8], wave[None, :].expand(3, 3))
    assert "3.branches.1x1-DCT.filters" not in dict(converted("orepa").named_parameters())


def test_the_copies_of_mobileone_differ_from_each_other():
    block = converted("mobileone")[3]
    kernels = [block.weight, *(block.branches[f"KxK-{i}"].conv.weight for i in (2, 3, 4))]
    assert all(kernel.shape == block.weight.shape for kernel in kernels)
    assert not any(torch.equal(a, b) for i, a in enumerate(kernels) for b in kernels[:i])
