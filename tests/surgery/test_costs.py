"""Multiply-adds and parameters, counted by hand and against what papers print."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

import dyrep
from dyrep.surgery.costs import Positions, added_macs
from strategies import OF_OTHER_METHODS
from surgery_helpers import assert_same_picture, conv_bn_net, images, picture


def test_resnet18_has_the_multiply_adds_and_parameters_that_papers_print():
    cost = dyrep.costs(torchvision.models.resnet18(), torch.randn(1, 3, 224, 224))
    assert round(cost.macs / 1e9, 2) == 1.81
    assert cost.macs == 1_814_073_344
    assert cost.parameters == 11_689_512
    assert cost.positions["conv1"] == Positions(input=224 * 224, output=112 * 112)
    assert cost.positions["layer4.1.conv2"] == Positions(input=7 * 7, output=7 * 7)


def vgg_like() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 16, 3, padding=1, groups=4),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 10),
    )


def test_small_vgg_equals_the_count_by_hand():
    cost = dyrep.costs(vgg_like(), torch.randn(1, 3, 16, 16))
    convs = 8 * 3 * 9 * 256 + 16 * 8 * 9 * 64 + 16 * 4 * 9 * 64
    assert cost.macs == convs + 16 * 64 * 10
    assert cost.parameters == (8 * 27 + 8) + 16 * 72 + 32 + (16 * 36 + 16) + (16 * 64 * 10 + 10)
    assert cost.positions == {"0": Positions(256, 256), "3": Positions(64, 64), "5": Positions(64, 64)}


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_count_is_per_example(batch):
    model = vgg_like()
    alone = dyrep.costs(model, torch.randn(1, 3, 16, 16))
    assert dyrep.costs(model, torch.randn(batch, 3, 16, 16)) == alone
    assert dyrep.costs(model, {"input": torch.randn(batch, 3, 16, 16), "label": torch.zeros(batch)}) == alone
    forward = dyrep.costs(model, {"image": torch.randn(batch, 3, 16, 16)}, forward=lambda m, b: m(b["image"]))
    assert forward == alone


def test_unbatched_input_is_one_example():
    conv = nn.Conv2d(3, 8, 3, padding=1)
    assert dyrep.costs(conv, torch.randn(3, 6, 6)) == dyrep.costs(conv, torch.randn(2, 3, 6, 6))


def test_count_is_per_example_where_the_model_itself_is_never_called():
    model = nn.ModuleDict({"body": vgg_like()})
    cost = dyrep.costs(model, torch.randn(4, 3, 16, 16), forward=lambda m, b: m["body"](b))
    assert cost.macs == dyrep.costs(vgg_like(), torch.randn(1, 3, 16, 16)).macs


def test_conv_called_twice_counts_twice():
    conv = nn.Conv2d(3, 3, 3, padding=1)
    cost = dyrep.costs(nn.Sequential(conv, nn.ReLU(), conv), torch.randn(2, 3, 8, 8))
    assert cost.macs == 2 * 3 * 27 * 64
    assert cost.positions == {"0": Positions(128, 128)}
    assert cost.parameters == 84


def test_counting_leaves_the_model_and_random_numbers_alone():
    model = nn.Sequential(nn.Dropout(0.3), *conv_bn_net()).train()
    before, state, x = picture(model), torch.get_rng_state(), torch.ones(2, 3, 8, 8)
    dyrep.costs(model, x)
    assert_same_picture(picture(model), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


CONVS = {
    "3x3": ({"kernel_size": 3, "padding": 1}, 6, 6),
    "same": ({"kernel_size": 3, "padding": "same"}, 6, 4),
    "5x5": ({"kernel_size": 5, "padding": 2}, 4, 6),
    "1x3": ({"kernel_size": (1, 3), "padding": (0, 1)}, 6, 6),
    "grouped": ({"kernel_size": 3, "padding": 1, "groups": 2}, 6, 4),
    "depthwise": ({"kernel_size": 3, "padding": 1, "groups": 6}, 6, 6),
    "stride 2": ({"kernel_size": 3, "padding": 1, "stride": 2}, 6, 6),
    "depthwise stride 2": ({"kernel_size": 3, "padding": 1, "stride": 2, "groups": 6}, 6, 6),
    "no padding": ({"kernel_size": 3}, 6, 6),
    "no padding, stride 3": ({"kernel_size": 3, "stride": 3}, 6, 6),
    "reflect": ({"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}, 6, 6),
    "even and dilated": ({"kernel_size": 2, "padding": "same", "dilation": 2}, 6, 6),
    "asymmetric stride": ({"kernel_size": 3, "padding": 1, "stride": (1, 2)}, 6, 8),
}


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("kind", CONVS)
def test_predicted_multiply_adds_equal_those_measured_after_the_expansion(kind, width):
    arguments, in_channels, out_channels = CONVS[kind]
    model = nn.Sequential(nn.Conv2d(3, in_channels, 1), nn.Conv2d(in_channels, out_channels, **arguments))
    x = torch.randn(2, 3, 8, 8)
    before = dyrep.costs(model, x)
    target = dyrep.targets(model)[1]
    predicted = added_macs(model[1], target.branches, before.positions["1"], width)
    dyrep.expand_(model, "1", width=width)
    assert predicted > 0
    assert dyrep.costs(model, x).macs - before.macs == predicted


@pytest.mark.parametrize("branches", [[name] for name in OF_OTHER_METHODS] + [["KxK-2", "KxK-3", "1x1-DCT"]], ids=str)
@pytest.mark.parametrize("kind", CONVS)
def test_predicted_multiply_adds_of_copies_and_other_methods_branches_equal_those_measured(kind, branches):
    arguments, in_channels, out_channels = CONVS[kind]
    model = nn.Sequential(nn.Conv2d(3, in_channels, 1), nn.Conv2d(in_channels, out_channels, **arguments))
    x = torch.randn(2, 3, 8, 8)
    before = dyrep.costs(model, x)
    predicted = added_macs(model[1], branches, before.positions["1"])
    dyrep.expand_(model, "1", branches)
    assert predicted > 0
    assert dyrep.costs(model, x).macs - before.macs == predicted


def test_copy_of_a_pointwise_convolution_costs_what_it_does():
    model, x = nn.Sequential(nn.Conv2d(4, 6, 1)), torch.randn(1, 4, 8, 8)
    before = dyrep.costs(model, x)
    assert added_macs(model[0], ["KxK-2"], before.positions["0"]) == before.macs == 4 * 6 * 64
    dyrep.expand_(model, "0", ["KxK-2"])
    assert dyrep.costs(model, x).macs == 2 * before.macs


@pytest.mark.parametrize("branch", [*dyrep.BRANCHES, *OF_OTHER_METHODS])
def test_predicted_multiply_adds_of_every_branch_alone_equal_those_measured(branch):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1))
    x = torch.randn(1, 4, 8, 8)
    before = dyrep.costs(model, x)
    predicted = added_macs(model[0], [branch], before.positions["0"])
    dyrep.expand_(model, "0", [branch])
    after = dyrep.costs(model, x)
    assert after.macs - before.macs == predicted
    assert after.parameters - before.parameters == sum(p.numel() for p in model[0].branches.parameters())


def test_deployed_model_costs_what_the_plain_one_did():
    model, x = conv_bn_net(), images(1)[0]
    before = dyrep.costs(model, x)
    dyrep.expand_(model, ["0", "3"])
    dyrep.expand_(model, "0.branches.1x1-KxK.conv")
    after = dyrep.costs(model, x)
    assert after.macs > after.plain_macs == before.plain_macs == before.macs
    assert dyrep.costs(dyrep.deploy(model), x) == before


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("groups", [1, 2])
def test_linear_block_costs_one_convolution_per_example_and_its_folding_per_step(batch, groups):
    model, x = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=groups)), torch.randn(batch, 4, 8, 8)
    before = dyrep.costs(model, x)
    dyrep.convert_(model, "orepa")
    after = dyrep.costs(model, x)
    assert list(model[0].branches) == ["1x1-AVG", "1x1-DCT", "1x1-KxK", "1x1", "DW-1x1"]
    assert after.macs == after.plain_macs == before.macs == 4 // groups * 6 * 9 * 64
    inputs, outputs, taps, filters_per_input = 4 // groups, 6, 9, 8
    pointwise_then_kernel = inputs * outputs * taps * inputs  # a sum over inner channels, of which there are as many
    depthwise_then_pointwise = inputs * outputs * taps * filters_per_input
    assert after.folding_macs == pointwise_then_kernel + depthwise_then_pointwise
    assert before.folding_macs == 0
    assert after.positions == before.positions
    assert after.parameters == sum(p.numel() for p in model.parameters())


def test_folding_is_counted_for_every_call_of_a_block_and_every_block():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    model, x = nn.Sequential(conv, nn.ReLU(), conv, nn.Conv2d(4, 4, 3)), torch.randn(3, 4, 8, 8)
    before = dyrep.costs(model, x)
    dyrep.convert_(model, "orepa")
    after = dyrep.costs(model, x)
    assert after.macs == after.plain_macs == before.macs
    assert after.folding_macs == 3 * 4 * 4 * 9 * (4 + 8)


@pytest.mark.parametrize("method", ["repvgg", "dbb", "mobileone", "repnas"])
def test_blocks_with_norms_have_nothing_to_fold_at_every_step(method):
    model, x = conv_bn_net(), images(1)[0]
    before = dyrep.costs(model, x)
    predicted = before.macs
    plain = {name: model.get_submodule(name) for name in ("0", "3")}
    dyrep.convert_(model, method, example_input=x)
    for name, conv in plain.items():
        predicted += added_macs(conv, list(conv.branches), before.positions[name])
    after = dyrep.costs(model, x)
    assert after.folding_macs == 0
    assert after.macs == predicted > after.plain_macs == before.macs
    assert dyrep.costs(dyrep.deploy(model), x) == before


def test_a_parameter_that_is_expanded_into_an_input_can_be_counted():
    """Class tokens are; without gradients, torch's own tracker of modules fails on such views."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 3, 6, 6))
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x):
            return self.conv(self.token.expand_as(x))

    assert dyrep.costs(Tokens(), torch.randn(2, 3, 6, 6)).macs == 8 * 3 * 9 * 16
