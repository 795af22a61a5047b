"""Nets and measurements that the tests of the methods share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dyrep.block import RepConv
from dyrep.norm import BranchNorm

BLOCK_METHODS = ("repvgg", "acnet", "dbb", "dbb7", "mobileone", "orepa", "repnas")


def small_net(channels: int = 6, groups: int = 1) -> nn.Sequential:
    """Two conv-BN-ReLU layers (``0`` and ``3``), one strided (``6``), and a classifier."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False, groups=groups),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False, groups=groups),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, 4),
    )


def blocks(model: nn.Module) -> dict[str, RepConv]:
    """The blocks of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, RepConv)}


@torch.no_grad()
def look_trained_(model: nn.Module) -> nn.Module:
    """Give every norm, the branches' included, statistics and parameters that matter."""
    for norm in model.modules():
        if isinstance(norm, (nn.modules.batchnorm._BatchNorm, BranchNorm)):
            norm.weight.uniform_(0.5, 1.5)
            norm.running_var.uniform_(0.5, 2.0)
            if norm.bias is not None:
                norm.bias.normal_(std=0.3)
                norm.running_mean.normal_(std=0.3)
    return model


def relative_error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.detach() - expected.detach()).abs().max() / expected.detach().abs().max())


def picture(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """Everything that a refused conversion must leave alone, copied."""
    seen = {
        "classes": [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()],
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "parameters": [(name, id(p), p.requires_grad) for name, p in model.named_parameters()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "values": {name: value.clone() for name, value in model.state_dict().items()},
    }
    if optimizer is not None:
        seen["groups"] = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        seen["state"] = [id(p) for p in optimizer.state]
    return seen


def assert_same_picture(after: dict, before: dict) -> None:
    """Fail unless nothing has changed between two pictures."""
    for what in before:
        if what != "values":
            assert after[what] == before[what], what
    assert after["values"].keys() == before["values"].keys()
    for name, value in before["values"].items():
        assert torch.equal(after["values"][name], value), name


def held(optimizer: torch.optim.Optimizer) -> set[int]:
    """Identities of all parameters in an optimizer."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
