"""What follows a model when its structure changes."""

import copy

import pytest
import torch
from torch import nn

import dyrep
from dyrep.errors import ConfigError, StructureError
from dyrep.following import Followers
from training import make_net


def test_averages_take_on_the_structure_and_the_wrapper_is_made_anew():
    model = make_net()
    averages = [torch.optim.swa_utils.AveragedModel(model), copy.deepcopy(model)]
    followers = Followers(model, ema=averages, wrap=lambda bare: nn.Sequential(bare), execution="eager")
    dyrep.expand_(model, ["0", "3"])
    trained = followers.follow_(model)
    assert trained[0] is model
    for average in (averages[0].module, averages[1]):
        assert dyrep.structure(average) == dyrep.structure(model)
    assert model[3].execution.name == "eager"


def test_averages_are_put_back_if_the_wrapper_fails():
    model = make_net()
    average = copy.deepcopy(model)

    def wrap(bare):
        raise MemoryError

    followers = Followers(model, ema=average, wrap=wrap)
    dyrep.expand_(model, "3")
    with pytest.raises(MemoryError):
        followers.follow_(model)
    assert dyrep.structure(average)["blocks"] == {}


def test_averages_of_something_else_are_refused():
    model = make_net()
    with pytest.raises(ConfigError, match="give a moving average of the model"):
        Followers(model, ema="ema")
    with pytest.raises(StructureError, match="layer '0' of the copy does not exist"):
        Followers(model, ema=nn.Sequential())


def test_an_average_without_the_norm_that_makes_up_for_another_length_is_refused_and_stays():
    model = make_net()
    average = copy.deepcopy(model)
    average[1] = nn.Identity()
    followers = Followers(model, ema=average)
    before = copy.deepcopy(average.state_dict())
    with pytest.raises(
        StructureError, match=r"layer '0' .* norm '1', and the average has a Identity without statistics"
    ):
        followers.follow_(model, {"0": ("1", torch.full((8,), 0.5))})
    torch.testing.assert_close(average.state_dict(), before, rtol=0, atol=0)
