"""Newcomers join the group of the optimizer that they belong to, and names keep step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dyrep
from dyrep.norm import BranchNorm
from surgery_helpers import conv_bn_net, decay_groups, names_in


def test_kernels_follow_the_origin_and_scales_follow_the_norm_after_it():
    model = conv_bn_net()
    optimizer = torch.optim.SGD(decay_groups(model), lr=0.1)
    dyrep.expand_(model, "3", ["1x1", "1x1-KxK", "residual"], optimizer=optimizer, origin_norm="reference")
    branches = "3.branches"
    assert names_in(model, optimizer.param_groups[0]) == [
        "0.weight",
        "3.weight",
        f"{branches}.1x1.conv.weight",
        f"{branches}.1x1-KxK.point.weight",
        f"{branches}.1x1-KxK.conv.weight",
        "8.weight",
    ]
    assert names_in(model, optimizer.param_groups[1]) == [
        "1.weight",
        "1.bias",
        "4.weight",
        f"{branches}.1x1.norm.weight",
        f"{branches}.1x1-KxK.norm.weight",
        f"{branches}.1x1-KxK.inner_norm.weight",
        f"{branches}.residual.norm.weight",
        "3.origin_norm.weight",
        "4.bias",
        "8.bias",
    ]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-3, 0.0]


def test_shifts_of_a_conv_with_bias_join_the_norms_group():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6))
    optimizer = torch.optim.SGD(decay_groups(model), lr=0.1)
    dyrep.expand_(model, "3", optimizer=optimizer)
    norms = {id(p) for m in model.modules() if isinstance(m, BranchNorm) for p in m.parameters()}
    assert any("bias" in name for name, _ in model[3].branches.named_parameters())
    second = {id(p) for p in optimizer.param_groups[1]["params"]}
    assert norms <= second
    assert all(p.dim() == 4 or p.dim() == 2 for p in optimizer.param_groups[0]["params"])


def test_nested_expansion_keeps_kernels_and_scales_apart():
    model = conv_bn_net()
    optimizer = torch.optim.SGD(decay_groups(model), lr=0.1)
    dyrep.expand_(model, "3", ["1x1-KxK"], optimizer=optimizer)
    dyrep.expand_(model, "3.branches.1x1-KxK.conv", ["1x1"], optimizer=optimizer)
    assert names_in(model, optimizer.param_groups[0])[1:5] == [
        "3.weight",
        "3.branches.1x1-KxK.point.weight",
        "3.branches.1x1-KxK.conv.weight",
        "3.branches.1x1-KxK.conv.branches.1x1.conv.weight",
    ]
    assert "3.branches.1x1-KxK.conv.branches.1x1.norm.weight" in names_in(model, optimizer.param_groups[1])


def test_without_norms_gamma_and_beta_join_the_bias_and_all_the_conv_if_that_has_none():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3))
    optimizer = torch.optim.SGD(decay_groups(model), lr=0.1)
    dyrep.expand_(model, "2", ["1x1"], optimizer=optimizer)
    assert names_in(model, optimizer.param_groups[0]) == [
        "0.weight",
        "2.weight",
        "2.branches.1x1.conv.weight",
    ]
    assert names_in(model, optimizer.param_groups[1]) == [
        "0.bias",
        "2.bias",
        "2.branches.1x1.norm.weight",
        "2.branches.1x1.norm.bias",
    ]
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, bias=False))
    optimizer = torch.optim.SGD(decay_groups(model), lr=0.1)
    dyrep.expand_(model, "2", ["1x1"], optimizer=optimizer)
    assert names_in(model, optimizer.param_groups[1]) == ["0.bias"]


class HandWrittenNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        return self.scale.reshape(-1, 1, 1) * x / x.square().mean(1, keepdim=True).sqrt()


class ChannelsLast(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.RMSNorm(channels)

    def forward(self, x):
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("norm", [HandWrittenNorm, ChannelsLast])
def test_gamma_joins_norms_of_any_make(norm):
    model = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), norm(6))
    optimizer = torch.optim.SGD(decay_groups(model), lr=0.1)
    dyrep.expand_(model, "0", ["1x1"], optimizer=optimizer)
    assert "0.branches.1x1.norm.weight" in names_in(model, optimizer.param_groups[1])
    assert "0.branches.1x1.conv.weight" in names_in(model, optimizer.param_groups[0])


def test_layer_wise_groups_take_the_branches_of_their_own_layer():
    model = conv_bn_net()
    layers = {"0": [*model[0].parameters(), *model[1].parameters()], "3": [*model[3].parameters()]}
    layers["3"] += model[4].parameters()
    optimizer = torch.optim.SGD(
        [
            {"params": layers["0"], "lr": 0.01},
            {"params": layers["3"], "lr": 0.02},
            {"params": model[8].parameters(), "lr": 0.04},
        ]
    )
    dyrep.expand_(model, ["0", "3"], ["1x1", "1x1-AVG"], optimizer=optimizer)
    first, second, head = (names_in(model, group) for group in optimizer.param_groups)
    assert first[0] == "0.weight"
    assert second[0] == "3.weight"
    assert len(first) == len(second) == 7
    assert {name.split(".")[0] for name in first} == {"0", "1"}
    assert {name.split(".")[0] for name in second} == {"3", "4"}
    assert head == ["8.weight", "8.bias"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02, 0.04]


def test_layer_wise_groups_take_the_scales_of_layers_that_begin_with_their_norm():
    model = nn.Sequential(*(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)) for _ in range(2)))
    optimizer = torch.optim.SGD([{"params": layer.parameters(), "lr": 0.1 * (i + 1)} for i, layer in enumerate(model)])
    dyrep.expand_(model, "0.2", ["1x1"], optimizer=optimizer)
    assert all(name.startswith("0.") for name in names_in(model, optimizer.param_groups[0]))
    assert all(name.startswith("1.") for name in names_in(model, optimizer.param_groups[1]))


def test_group_that_holds_only_some_layers_is_not_given_the_others():
    model = conv_bn_net()
    optimizer = torch.optim.SGD([model[3].weight], lr=0.1)
    dyrep.expand_(model, "3", ["1x1"], optimizer=optimizer)
    assert names_in(model, optimizer.param_groups[0]) == [
        "3.weight",
        "3.branches.1x1.conv.weight",
        "3.branches.1x1.norm.weight",
    ]


def test_param_names_keep_step_with_params_through_expansions_and_cuts():
    model = conv_bn_net()
    named = [(f"backbone.{name}", p) for name, p in model.named_parameters()]
    optimizer = torch.optim.SGD(
        [
            {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 1e-3},
            {"params": [(n, p) for n, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=0.1,
        momentum=0.9,
    )

    def assert_in_step():
        for group in optimizer.param_groups:
            assert group["param_names"] == [f"backbone.{name}" for name in names_in(model, group)]

    dyrep.expand_(model, ["3", "0"], optimizer=optimizer, origin_norm="reference")
    assert_in_step()
    dyrep.expand_(model, "3.branches.1x1-KxK.conv", ["1x1"], optimizer=optimizer)
    assert_in_step()
    dyrep.cut_(model, "3", ["1x1", "1x1-KxK"], optimizer=optimizer)
    assert_in_step()
    dyrep.cut_(model, ["0", "3"], optimizer=optimizer)
    assert_in_step()
    assert [n for group in optimizer.param_groups for n in group["param_names"]] == sorted(
        (n for n, _ in named), key=lambda n: (dict(named)[n].dim() <= 1, [m for m, _ in named].index(n))
    )
