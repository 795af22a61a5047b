"""Branches from the first step: for which networks, on which convolutions, and how they begin."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

import dyrep
from dyrep.models import build
from dyrep.surgery.beginning import begin_, fitting, normed, trained_norm
from training import make_batches, make_net


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_a_network_is_new_until_a_norm_has_seen_a_batch():
    model = make_net()
    assert trained_norm(model) is None
    model.eval()(make_batches()[0][0])
    assert trained_norm(model) is None
    model.train()(make_batches()[0][0])
    assert trained_norm(model) == "1"


@pytest.mark.parametrize("statistic", ["running_mean", "running_var"])
def test_pretrained_statistics_tell_even_where_the_count_is_lost(statistic):
    model = make_net()
    getattr(model[6], statistic)[0] = 0.5
    assert trained_norm(model) == "6"


def test_norms_of_any_make_tell_if_they_have_statistics():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), FrozenBatchNorm2d(4), nn.GroupNorm(1, 4), nn.LazyBatchNorm2d())
    model.append(nn.BatchNorm2d(4, track_running_stats=False))
    assert trained_norm(model) is None
    model[1].running_var.fill_(2)
    assert trained_norm(model) == "1"


def test_what_stands_right_before_a_batch_norm_of_its_channels_is_known():
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8)),
        *(nn.Conv2d(8, 8, 3), FrozenBatchNorm2d(8)),
        *(nn.Conv2d(8, 8, 3), nn.GroupNorm(1, 8)),
        *(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(8)),
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)),
        *(nn.Conv2d(8, 8, 3), nn.LazyBatchNorm2d()),
        *(nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, track_running_stats=True)),
        nn.Conv2d(8, 8, 3),
    )
    assert normed(model) == {"0"}


def test_the_order_of_modules_is_trusted_within_a_module_alone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Conv2d(8, 8, 3)  # registered first, run last
            self.stem = nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
            self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)])
            self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])

    assert normed(Net()) == {"stem.1"}


@pytest.mark.parametrize(("name", "count"), [("vgg16", 13), ("resnet18", 20), ("repvgg_a2", 22)])
def test_every_convolution_before_a_norm_of_known_networks_is_known(name, count):
    model = build(name, num_classes=10, in_channels=3)
    assert len(normed(model)) == count == sum(isinstance(m, nn.Conv2d) for m in model.modules())


def test_convolutions_begin_with_what_fits_them():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 7),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 8, 1),
        nn.Conv2d(8, 8, (1, 3)),
        nn.Conv2d(8, 16, 5, stride=2, padding=2),
    )
    assert fitting(dyrep.targets(model), ("1x1", "residual")) == {"1": ("1x1", "residual"), "4": ("1x1",)}
    dyrep.expand_(model, "1", ["1x1"])
    assert list(fitting(dyrep.targets(model), ("1x1", "residual"))) == ["4"]


def test_branches_begin_as_a_network_converted_before_training_does():
    ours, theirs = make_net(), make_net()
    edits = begin_(ours, {"3": ("1x1", "1x1-KxK", "residual")}, sgd(ours), torch.Generator().manual_seed(4))
    dyrep.convert_(
        theirs,
        "dbb7",
        branches=["1x1", "1x1-KxK", "residual"],
        replace="conv",
        include=("3",),
        generator=torch.Generator().manual_seed(4),
    )
    assert [(edit.kind, edit.layer, edit.branches) for edit in edits] == [
        ("expand", "3", ("1x1", "1x1-KxK", "residual"))
    ]
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for key, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[key]), key


def test_new_parameters_join_the_optimizer():
    model = make_net()
    optimizer = sgd(model)
    begin_(model, {"0": ("1x1",), "3": ("residual",)}, optimizer, torch.Generator())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
