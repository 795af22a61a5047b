"""Branches from the first step: for which networks, on which convolutions, and how they begin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dyrep
from dyrep.surgery.beginning import begin_, fitting, is_new, trained_norm
from training import make_batches, make_net


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_a_network_is_new_until_a_norm_has_seen_a_batch():
    model = make_net()
    assert is_new(model, ["0", "3", "5"])
    model.eval()(make_batches()[0][0])
    assert is_new(model, ["0", "3", "5"])
    model.train()(make_batches()[0][0])
    assert not is_new(model, ["0", "3", "5"])
    assert trained_norm(model) == "1"


@pytest.mark.parametrize("statistic", ["running_mean", "running_var"])
def test_pretrained_statistics_tell_even_where_the_count_is_lost(statistic):
    model = make_net()
    getattr(model[6], statistic)[0] = 0.5
    assert trained_norm(model) == "6"


def test_a_new_head_says_nothing_of_a_network_without_norms():
    convs = [nn.Conv2d(4, 4, 3) for _ in range(5)]
    model = nn.Sequential(*convs, nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    assert not is_new(model, [str(number) for number in range(5)])
    assert is_new(model, ["0", "1", "2", "3"])
    assert not is_new(nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(1, 4)), ["0"])
    assert not is_new(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), ["0"])


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
