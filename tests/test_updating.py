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
    before, config = copy.deepcopy(model.state_dict()), DyRepConfig.paper(cut_threshold=1e9)
    updater = Updater(config, optimizer, Candidates(model, optimizer, config), None, None)
    plain = updater.costs(model, BATCHES).macs
    made = updater.update(model, {"0": 1.0, "3": 3.0, "5": 2.0}, BATCHES, seed=0)
    grown = made.edits[0]
    assert (grown.kind, grown.layer, grown.detail["score"]) == ("expand", "3", 3.0)
    assert set(made.importances) == {"3"}
    assert made.costs == dyrep.costs(model, BATCHES[0])
    assert made.costs.plain_macs == plain
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
    controller = DyRep(model, optimizer, DyRepConfig.paper(interval=1, score="snip", cut_threshold=1e9))
    train_epoch(model, optimizer, BATCHES)
    edits = controller.epoch_end(BATCHES)
    assert {edit.layer for edit in edits} & {"3", "5"}
    assert list(model[0].branches) == ["1x1", "1xK"]


def test_all_blocks_of_the_optimizer_are_absorbed_and_no_others():
    """Blocks that are a norm alone, too."""
    model = make_net()
    alone = {"branches": [], "origin_norm": True, "width": 1}
    blocks = {"0": alone, "3": alone | {"branches": ["1x1"]}, "5": alone | {"branches": ["1x1", "1x1-KxK"]}}
    dyrep.restructure_(model, {"format": 1, "blocks": blocks})
    dyrep.expand_(model, "5.branches.1x1-KxK.conv", ["1x1"])
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[5].parameters()], lr=0.05)
    config = DyRepConfig.paper(score="snip")
    updater = Updater(config, optimizer, Candidates(model, optimizer, config), None, None)
    assert list(updater.absorbable(model)) == ["0", "5"]
    made = updater.absorb(model, BATCHES)
    assert [(edit.layer, edit.branches) for edit in made.edits] == [("0", ()), ("5", ("1x1", "1x1-KxK"))]
    assert all(edit.detail["why"] == "as were all others" and edit.detail["scale"] < 1 for edit in made.edits)
    assert {layer: norm for layer, (norm, _) in made.rescaled.items()} == {"0": "1", "5": "6"}
    assert list(dyrep.structure(model)["blocks"]) == ["3"]
    assert updater.absorbable(model) == {}


class WithPathsCalledBranches(torch.nn.Module):
    """A user's own module that has the name of a block's."""

    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8))
            for _ in range(2)
        )

    def forward(self, x):
        return sum(branch(x) for branch in self.branches)


def test_modules_of_the_users_that_are_called_branches_grow_and_are_absorbed():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        WithPathsCalledBranches(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    controller = DyRep(model, optimizer, DyRepConfig.paper(score="snip", top_k=2, cut="none", max_depth=1))
    train_epoch(model, optimizer, BATCHES)
    assert {edit.layer for edit in controller.update(BATCHES)} == {"0.branches.0.0", "0.branches.1.0"}
    assert {edit.layer for edit in controller.absorb(BATCHES)} == {"0.branches.0.0", "0.branches.1.0"}
    assert dyrep.structure(model)["blocks"] == {}


def test_branches_are_not_cut_in_the_update_that_grew_them():
    """Beside branches that were there from the start, at full strength, they are all below the mean."""
    model = make_net()
    dyrep.convert_(model, "dbb7", branches=["1x1"], replace="conv")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = DyRepConfig.paper(score="snip", max_depth=1, regrow=True)
    updater = Updater(config, optimizer, Candidates(model, optimizer, config), None, None)
    (edit,) = updater.update(model, {"0": 1.0, "3": 3.0, "5": 2.0}, BATCHES, seed=0).edits
    assert (edit.kind, edit.layer) == ("expand", "3")
    edits = updater.update(model, {"0": 1.0, "5": 2.0}, BATCHES, seed=0).edits
    assert [(edit.kind, edit.layer) for edit in edits] == [("expand", "5"), ("cut", "3")]
