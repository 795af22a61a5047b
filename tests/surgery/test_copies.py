"""Copies of a model that take on its structure: moving averages, and what is kept like one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import dyrep
from dyrep.errors import IneligibleLayerError
from surgery_helpers import COMPUTED, assert_same_picture, conv_bn_net, images, picture, relative_change
from training import eval_output


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_an_average_kept_in_another_precision_follows_in_its_own(dtypes):
    model, x = conv_bn_net(dtypes[0]), images(1, dtype=dtypes[1])[0]
    average = AveragedModel(copy.deepcopy(model).to(dtypes[1]))
    before = eval_output(average, x)
    dyrep.expand_(model, "3", gamma=0.3, origin_norm="reference")
    dyrep.follow_(average, model)
    assert {p.dtype for p in average.parameters()} == {dtypes[1]}
    assert relative_change(eval_output(average, x), before) <= 1e-5


def test_a_copy_of_a_model_that_calls_something_module_follows_as_it_is():
    class Wrapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = conv_bn_net()

        def forward(self, x):
            return self.module(x)

    model = Wrapping()
    twin = copy.deepcopy(model)
    dyrep.expand_(model, "module.3", ["1x1"])
    dyrep.follow_(twin, model)
    assert dyrep.structure(twin) == dyrep.structure(model)


@pytest.mark.parametrize("branches", [[], ["1x1", "residual"]], ids=len)
def test_a_copy_sheds_blocks_that_the_model_no_longer_has_and_keeps_its_function(branches):
    """Those that are a norm alone, too."""
    model, x = conv_bn_net(), images(1)[0]
    block = {"branches": branches, "origin_norm": True, "width": 1}
    dyrep.restructure_(model, {"format": 1, "blocks": {"3": block}})
    average = copy.deepcopy(model)
    with torch.no_grad():
        average[3].origin_norm.weight.mul_(1.5)
    before = eval_output(average, x)
    dyrep.cut_(model, "3")
    dyrep.follow_(average, model)
    assert dyrep.structure(average)["blocks"] == {}
    assert relative_change(eval_output(average, x), before) <= 1e-5


def test_average_whose_weight_is_computed_cannot_follow():
    model = conv_bn_net()
    average = copy.deepcopy(model)
    dyrep.expand_(average, "3", ["1x1"])
    COMPUTED["parametrized"][0](average[3])
    dyrep.expand_(model, "3", ["1x1", "residual"])
    before = picture(average)
    with pytest.raises(IneligibleLayerError, match=r"^layer '3' cannot be folded: its weight is computed"):
        dyrep.follow_(average, model)
    assert_same_picture(picture(average), before)
