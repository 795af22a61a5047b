import pytest
import torch
from torch import nn

import dyrep
from dyrep import DyRepConfig
from dyrep.candidates import Candidates
from dyrep.errors import ConfigError, OptimizerError
from training import make_net


def found(model, optimizer=None, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    return Candidates(model, optimizer, DyRepConfig.paper(**settings))


def names(candidates):
    return [target.name for target in candidates.targets()]


def test_a_layer_frozen_later_drops_out_and_comes_back_when_unfrozen():
    model = make_net()
    candidates = found(model)
    assert names(candidates) == ["0", "3", "5"]
    model[3].weight.requires_grad_(False)
    assert names(candidates) == ["0", "5"]
    assert "frozen" in candidates.ignored()["3"]
    model[3].weight.requires_grad_(True)
    assert names(candidates) == ["0", "3", "5"]


def test_a_rejected_layer_stays_out_with_the_reason():
    candidates = found(make_net())
    candidates.rejected["3"] = "it misbehaved"
    assert names(candidates) == ["0", "5"]
    assert candidates.ignored() == {"3": "it misbehaved"}


def test_a_layer_that_has_branches_is_ignored_for_a_reason_and_not_for_having_all():
    model = make_net()
    dyrep.expand_(model, "0", ["1x1"])
    dyrep.expand_(model, "3")
    candidates = found(model, regrow=True, max_depth=1)
    assert candidates.ignored() == {}
    candidates.rejected["0"] = "it misbehaved"
    model[3].weight.requires_grad_(False)
    assert set(candidates.ignored()) == {"0", "3"}
    assert candidates.ignored()["3"].startswith("its weight is frozen")


def test_convolutions_inside_branches_go_by_the_name_of_the_outermost():
    model = make_net()
    dyrep.expand_(model, "3", ["1x1-KxK"])
    assert names(found(model, include=("3",))) == ["3.branches.1x1-KxK.conv"]
    with_branches_excluded = found(model, exclude=("*.branches.*",))
    assert names(with_branches_excluded) == ["0", "5"]


def test_depth_and_shape_are_limited_as_asked_for():
    model = make_net()
    dyrep.expand_(model, "3", ["1x1-KxK", "1xK"])
    long, deep = "3.branches.1xK.conv", "3.branches.1x1-KxK.conv"
    assert names(found(model)) == ["0", deep, "5"]
    assert set(names(found(model, square_only=False))) == {"0", deep, long, "5"}
    assert names(found(model, max_depth=1, square_only=False)) == ["0", "5"]


def test_branches_that_the_optimizer_does_not_train_are_refused_by_name():
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dyrep.expand_(model, "3", ["1x1"])
    with pytest.raises(OptimizerError, match=r"layer '3' has branches that the optimizer does not train \(1x1\."):
        found(model, optimizer)
    assert names(found(model)) == ["0", "5"]


def test_existing_blocks_without_a_norm_on_the_origin_do_not_go_with_the_reference_rule():
    model = make_net()
    dyrep.expand_(model, "3", ["1x1"])
    with pytest.raises(ConfigError, match=r"layer '3' has branches but no norm on its origin.*cut='paper'"):
        found(model, origin_norm="reference", cut="reference")


def test_branches_asked_for_are_offered_where_they_fit():
    candidates = found(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 8, 3)), branches=("residual",))
    assert names(candidates) == ["0"]
    assert candidates.wanted(candidates.targets()[0]) == ("residual",)


def test_a_saved_structure_is_for_the_layers_that_the_optimizer_holds():
    model = make_net()
    found = Candidates(model, torch.optim.SGD(model[:3].parameters(), lr=0.1), DyRepConfig.paper())
    dyrep.expand_(model, "3", ["1xK"])
    assert (found.trains("0"), found.trains("3"), found.trains("0.branches.1x1-KxK.conv")) == (True, False, True)
    saved = {"0": {"branches": ["1x1"]}, "5": {"branches": ["1x1"]}, "unknown": {"branches": ["1x1"]}}
    own = found.own_structure({"format": 1, "blocks": saved})["blocks"]
    assert sorted(own) == ["0", "3", "unknown"]  # the last one is for those to refuse who read it
    assert own["3"]["branches"] == ["1xK"]


def test_a_pattern_that_includes_nothing_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'typo\.\*' matches no convolution of this model, whose are 0, 3, 5;"):
        found(make_net(), include=("0", "typo.*"))
