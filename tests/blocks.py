"""A full block, what it is fed with, and how its state is compared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dyrep.block import RepConv
from dyrep.branches import BRANCHES
from dyrep.norm import BranchNorm
from dyrep.scaling import ChannelScale
from strategies import grown_block, randomize_norms_

with_and_without_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
either_mode = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def full_block(dtype: torch.dtype = torch.float64, **arguments) -> RepConv:
    """A 2-d block with all six branches."""
    arguments = {"padding": 1, **arguments}
    return grown_block(nn.Conv2d(4, 4, 3, dtype=dtype, **arguments), list(BRANCHES))


def images(dtype: torch.dtype = torch.float64, batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 4, 6, 5, dtype=dtype) * 1.3 + 0.4


@torch.no_grad()
def randomize_(module: nn.Module) -> None:
    """Like `randomize_norms_`, for scales too."""
    randomize_norms_(module)
    for scale in module.modules():
        if isinstance(scale, ChannelScale):
            scale.weight.copy_(torch.randn(scale.weight.shape, dtype=torch.float64))


def add_origin_norm_(block: RepConv) -> RepConv:
    shift = block.bias is not None
    block.origin_norm = BranchNorm(block.out_channels, shift=shift, dtype=block.weight.dtype)
    randomize_norms_(block.origin_norm)
    block.origin_norm.train(block.training)
    return block


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_state_is(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = module.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], value) for key, value in expected.items())
