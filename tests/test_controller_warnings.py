"""What a controller says before it is too late: at the end of the first epoch, or when it is made."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

import dyrep
from dyrep import DyRep, DyRepConfig
from dyrep.errors import (
    ConfigError,
    DyRepError,
    NoUpdateWarning,
    OptimizerError,
    ScoreNoiseWarning,
    UnsynchronisedWarning,
)
from training import make_batches, make_net, start, train_epoch

BATCHES = make_batches()


@pytest.mark.parametrize(
    ("settings", "asked"), [({"macs_limit": 2.0}, "macs_limit=2.0"), ({"per_mac": True}, "per_mac=True")]
)
def test_a_loop_without_batches_hears_in_its_first_epoch_that_updates_will_need_some(settings, asked):
    model, optimizer, controller = start(interval=3, **settings)
    train_epoch(model, optimizer, BATCHES)
    with pytest.warns(NoUpdateWarning, match=f"^the update after epoch 3 will need batches to keep to {asked}") as told:
        controller.epoch_end()
    assert told[0].filename == __file__
    train_epoch(model, optimizer, BATCHES)
    controller.epoch_end()  # once is enough
    train_epoch(model, optimizer, BATCHES)
    with pytest.raises(ConfigError, match=f"^{asked} needs batches"):
        controller.epoch_end()


def test_batches_are_not_asked_for_where_none_are_needed():
    model, optimizer, controller = start(interval=2)
    for _ in range(2):
        train_epoch(model, optimizer, BATCHES)
        edits = controller.epoch_end()
    assert edits


def test_an_optimizer_that_does_not_step_is_noticed_in_the_first_epoch():
    model = make_net()
    stepping, given = (torch.optim.SGD(model.parameters(), lr=0.05) for _ in range(2))
    controller = DyRep(model, given, DyRepConfig(interval=5))
    train_epoch(model, stepping, BATCHES)
    with pytest.warns(NoUpdateWarning, match="no step of the optimizer given to DyRep was seen in this epoch"):
        controller.epoch_end(BATCHES)


def test_a_trained_network_with_no_update_to_come_is_told_so():
    model = make_net()
    model(BATCHES[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.warns(NoUpdateWarning, match=r"as norm '1' shows .* would come after 5 epochs, which is too late"):
        DyRep(model, optimizer, DyRepConfig(total=4))


@pytest.mark.parametrize("absorbed", [None, 3])
def test_a_network_that_keeps_what_it_begins_with_is_told_so(absorbed):
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert DyRep(model, optimizer, DyRepConfig(total=4, absorb_after=absorbed)).begun
    told = [str(warning.message) for warning in caught]
    assert [("keeps the branches that it begins with" in words) for words in told] == ([] if absorbed else [True])


def test_noise_is_warned_about_once():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(1, 8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(1, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    controller = DyRep(model, optimizer, DyRepConfig.paper(interval=1, calibration_batches=2))
    train_epoch(model, optimizer, BATCHES)
    with pytest.warns(
        ScoreNoiseWarning,
        match=r"It is exact only where a batch norm that learns, and nothing else, reads the convolution",
    ):
        controller.epoch_end(BATCHES)
    train_epoch(model, optimizer, BATCHES)
    controller.epoch_end(BATCHES)


def test_a_closed_controller_changes_nothing_any_more():
    model, optimizer, controller = start()
    controller.close()
    train_epoch(model, optimizer, BATCHES)
    with pytest.raises(DyRepError, match=r"^this controller was closed"):
        controller.epoch_end(BATCHES)
    assert dyrep.verify(model, controller.deploy(), BATCHES[0]).error < 1e-5


def test_a_second_controller_of_an_optimizer_is_refused_until_the_first_is_closed():
    model, optimizer, controller = start()
    with pytest.raises(ConfigError, match=r"^another controller watches this optimizer already.*call close\(\)"):
        DyRep(model, optimizer)
    assert dyrep.structure(model)["blocks"] == {}
    controller.close()
    second = DyRep(model, optimizer, DyRepConfig(interval=1))
    train_epoch(model, optimizer, BATCHES)
    assert second.epoch_end(BATCHES)


def test_branches_that_were_loaded_behind_its_back_are_noticed():
    evolved, optimizer, controller = start()
    train_epoch(evolved, optimizer, BATCHES)
    assert controller.epoch_end(BATCHES)
    model, optimizer, controller = start()
    dyrep.prepare_(model).load_state_dict(evolved.state_dict())
    train_epoch(model, optimizer, BATCHES)
    with pytest.raises(OptimizerError, match="has branches that the optimizer does not train"):
        controller.epoch_end(BATCHES)


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"distributed": True}, {"wrap": lambda m: m}], ids=["", "distributed", "wrap"]
)
def test_ranks_without_a_wrapper_are_told_that_nothing_keeps_them_alike(several, settings, monkeypatch):
    monkeypatch.setattr("dyrep.surgery.ranks.distributed", lambda wanted=None: several and wanted is not False)
    monkeypatch.setattr("dyrep.surgery.ranks.check_agreement", lambda *_: None)
    monkeypatch.setattr("dyrep.surgery.ranks.broadcast_", lambda _: None)
    model = make_net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DyRep(model, torch.optim.SGD(model.parameters(), lr=0.05), **settings)
    assert [warning.category for warning in caught] == [UnsynchronisedWarning] * (several and not settings)


def test_a_limit_that_nothing_fits_into_is_told_once_with_what_would_fit():
    model, optimizer, controller = start(macs_limit=1.01, cut="none", branches=("1x1-KxK",))
    train_epoch(model, optimizer, BATCHES)
    told = (
        r"no layer's branches fit into macs_limit=1.01; those of layer '5', the cheapest, would make .* 1\.\d\d times"
    )
    with pytest.warns(NoUpdateWarning, match=told) as caught:
        assert controller.epoch_end(BATCHES) == []
    share = float(re.search(r"network (\S+) times", str(caught[0].message))[1])
    train_epoch(model, optimizer, BATCHES)
    assert controller.epoch_end(BATCHES) == []
    again, optimizer, controller = start(macs_limit=share + 0.01, cut="none", branches=("1x1-KxK",))
    train_epoch(again, optimizer, BATCHES)
    assert [edit.layer for edit in controller.epoch_end(BATCHES)] == ["5"]


def test_a_limit_that_what_a_network_begins_with_fills_is_nothing_to_warn_of():
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    controller = DyRep(model, optimizer, DyRepConfig(interval=1, score="snip", macs_limit=1.0, calibration_batches=2))
    train_epoch(model, optimizer, BATCHES)
    assert controller.epoch_end(BATCHES) == []
    assert controller.events[-1]["grown_out"]


def test_a_limit_that_nothing_fits_into_is_nothing_to_warn_of_once_all_branches_are_absorbed():
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = DyRepConfig(interval=5, score="snip", macs_limit=1.01, absorb_after=1, calibration_batches=2)
    controller = DyRep(model, optimizer, config)
    train_epoch(model, optimizer, BATCHES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert controller.epoch_end(BATCHES)
    assert dyrep.structure(model)["blocks"] == {}
