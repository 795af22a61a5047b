"""One update: what is counted, grown and cut, and that all of it can be taken back."""

import copy
import threading

import pytest
import torch

import dyrep
from dyrep import DyRep, DyRepConfig
from dyrep.candidates import Candidates
from dyrep.errors import DyRepError
from dyrep.updating import Updater
from training import make_batches, make_net, start, train_epoch

BATCHES = make_batches()


def test_an_update_says_what_it_did_and_can_be_taken_back():
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_epoch(model, optimizer, BATCHES)
    before, config = copy.deepcopy(model.state_dict()), DyRepConfig(cut_threshold=1e9)
    updater = Updater(config, optimizer, Candidates(model, optimizer, config), None, None)
    plain = updater.costs(model, BATCHES).macs
    made = updater.update(model, {"0": 1.0, "3": 3.0, "5": 2.0}, BATCHES, seed=0)
    grown = made.edits[0]
    assert (grown.kind, grown.layer, grown.detail["score"]) == ("expand", "3", 3.0)
    assert set(made.importances) == {"3"}
    assert made.macs == dyrep.costs(model, BATCHES[0]).macs
    assert updater.plain_macs == plain
    made.guard.undo_all()
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}


def test_a_model_that_cannot_be_copied_evolves_and_is_deployed_in_place():
    model, optimizer, controller = start()
    model.lock = threading.Lock()
    train_epoch(model, optimizer, BATCHES)
    assert controller.epoch_end(BATCHES)
    with pytest.raises(DyRepError, match=r"the model cannot be copied \(.*lock.*\): give inplace=True"):
        controller.deploy()
    assert dyrep.deploy(model, inplace=True) is model


def test_blocks_that_another_optimizer_trains_are_not_cut():
    model = make_net()
    dyrep.expand_(model, "0", ["1x1", "1xK"])
    optimizer = torch.optim.SGD(model[3:].parameters(), lr=0.05)
    controller = DyRep(model, optimizer, DyRepConfig(interval=1, score="snip", cut_threshold=1e9))
    train_epoch(model, optimizer, BATCHES)
    edits = controller.epoch_end(BATCHES)
    assert {edit.layer for edit in edits} & {"3", "5"}
    assert list(model[0].branches) == ["1x1", "1xK"]
