"""Multiply-adds and parameters, counted by hand and against what papers print."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

import dyrep
from dyrep.surgery.costs import Positions, added_macs
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


@pytest.mark.parametrize("branch", dyrep.BRANCHES)
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
    assert dyrep.costs(model, x).macs > before.macs
    assert dyrep.costs(dyrep.deploy(model), x) == before
