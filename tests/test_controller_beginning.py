"""What a controller lets a network begin with, and what follows from that."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dyrep
from dyrep import DyRep, DyRepConfig
from dyrep.errors import ConfigError, DesyncError, IneligibleLayerError, SettingsChangedWarning
from training import make_batches, make_net, member, train_epoch

BATCHES = make_batches()
USUAL = {"0": ["1x1"], "5": ["1x1"]}
"""What `make_net` begins with: one has other channels behind it, one a stride; behind the third there is no norm."""


def begin(model=None, ema=(), log=None, distributed=None, **settings):
    model = make_net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = DyRepConfig(**{"interval": 1, "calibration_batches": 2, **settings})
    return model, optimizer, DyRep(model, optimizer, config, ema=ema, log=log, distributed=distributed)


def branches(model):
    return {name: block["branches"] for name, block in dyrep.structure(model)["blocks"].items()}


def test_a_new_network_begins_with_cheap_branches_and_grows_others_beside_them():
    model, optimizer, controller = begin(macs_limit=3.0)
    assert branches(model) == USUAL
    assert {edit.layer: list(edit.branches) for edit in controller.begun} == USUAL
    assert [event["type"] for event in controller.events] == ["started", "converted"]
    before = make_net().state_dict()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    for _ in range(2):
        train_epoch(model, optimizer, BATCHES)
        (edit,) = controller.epoch_end(BATCHES)
        assert edit.kind == "expand"
        assert {"1x1-KxK", "1x1-AVG", "1xK", "Kx1"} <= set(edit.branches)
        assert ("1x1" in edit.branches) == (edit.layer not in USUAL)
    make_net().load_state_dict(controller.deploy().state_dict(), strict=True)
    assert dyrep.verify(model, controller.deploy(), BATCHES[0]).error < 1e-5


def test_what_it_costs_is_written_down_from_the_first_step_and_stays_below_the_limit():
    model, optimizer, controller = begin()
    begun = dyrep.costs(model, BATCHES[0]).macs
    for _ in range(4):
        train_epoch(model, optimizer, BATCHES)
        controller.epoch_end(BATCHES)
    first, *others, last = controller.events[2:]
    assert first["macs_before"] == begun > first["plain_macs"]
    assert not any("macs_before" in event for event in others)
    assert last["plain_macs"] < last["macs"] <= 1.5 * last["plain_macs"]
    train_epoch(model, optimizer, BATCHES)
    with pytest.raises(ConfigError, match=r"^macs_limit=1.5 needs batches"):
        controller.epoch_end()


def resized(batches, size):
    return [(torch.nn.functional.interpolate(images, size=size), labels) for images, labels in batches]


@pytest.mark.parametrize("sizes", [(12, 8), (8, 12)])
def test_the_limit_holds_on_batches_of_other_sizes_too(sizes):
    model, optimizer, controller = begin()
    for size in (*sizes, *sizes):
        train_epoch(model, optimizer, BATCHES)
        controller.epoch_end(resized(BATCHES, size))
    for event, size in zip(controller.events[2:], (*sizes, *sizes), strict=True):
        plain = dyrep.costs(make_net(), resized(BATCHES, size)[0]).macs
        assert event["plain_macs"] == plain
        assert plain < event["macs"] <= 1.5 * plain
    assert sum(len(event["edits"]) for event in controller.events[2:]) == 1


def test_a_model_that_cannot_be_copied_begins_and_grows():
    model = make_net()
    model.lock = threading.Lock()
    _, optimizer, controller = begin(model, macs_limit=3.0)
    train_epoch(model, optimizer, BATCHES)
    assert controller.epoch_end(BATCHES)


def test_once_nothing_fits_into_the_limit_nothing_is_scored_and_one_batch_is_read():
    begun, _, _ = begin()
    limit = dyrep.costs(begun, BATCHES[0]).macs / dyrep.costs(make_net(), BATCHES[0]).macs
    model, optimizer, controller = begin(macs_limit=limit, branches=("1x1",), score="snip")
    train_epoch(model, optimizer, BATCHES)
    assert controller.scorer.read().steps == len(BATCHES)
    assert controller.epoch_end(BATCHES) == []
    train_epoch(model, optimizer, BATCHES)
    assert not controller.scorer.read().means["snip"]

    _, _, later = begin(macs_limit=limit, branches=("1x1",), score="snip")
    later.load_state_dict(controller.state_dict())
    assert not later.scorer.read().means["snip"]
    other, stepping, roomier = begin(macs_limit=3.0, branches=("1x1",), score="snip")
    with pytest.warns(SettingsChangedWarning, match=r"macs_limit=1\.\d+ is now 3\.0"):
        roomier.load_state_dict(controller.state_dict())
    train_epoch(other, stepping, BATCHES)
    assert [edit.layer for edit in roomier.epoch_end(BATCHES)] == ["3"]

    assert controller.epoch_end(BATCHES) == []
    dyrep.cut_(model, "5", optimizer=optimizer)  # by hand, which makes room
    assert controller.update(BATCHES) == []
    train_epoch(model, optimizer, BATCHES)
    assert [event["grown_out"] for event in controller.events[2:]] == [True, True, False]
    assert [event["batches"] for event in controller.events[2:]] == [2, 1, 1]
    assert [edit.layer for edit in controller.epoch_end(BATCHES)] == ["5"]
    assert controller.events[-1]["grown_out"]
    assert controller.events[-1]["batches"] == 2
    assert not controller.scorer.read().means["snip"]


def test_what_may_never_grow_is_not_scored():
    model, optimizer, controller = begin(macs_limit=None, start_with=())
    train_epoch(model, optimizer, BATCHES)
    controller.epoch_end(BATCHES)
    train_epoch(model, optimizer, BATCHES)
    assert set(controller.scorer.read().means["snip"]) < {"0", "3", "5"}  # none inside branches


def test_a_network_that_was_trained_is_left_as_it_is():
    model = make_net()
    model(BATCHES[0][0])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    _, _, controller = begin(model)
    assert controller.begun == []
    assert branches(model) == {}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_branches_asked_for_by_name_are_refused_for_a_network_that_was_trained():
    model = make_net()
    model(BATCHES[0][0])
    with pytest.raises(ConfigError, match=r"start_with=\('1x1',\).*norm '1' shows.*leave start_with out"):
        begin(model, start_with=("1x1",))
    assert branches(model) == {}


def test_branches_that_fit_nowhere_are_refused():
    with pytest.raises(IneligibleLayerError, match=r"start_with=\('residual',\): no square convolution up to 5x5"):
        begin(nn.Sequential(nn.Conv2d(3, 8, 3)), start_with=("residual",))


def test_branches_asked_for_by_name_need_no_norms_to_tell():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    assert branches(begin(model)[0]) == {}
    assert branches(begin(model, start_with=("1xK",))[0]) == {"0": ["1xK"], "2": ["1xK"]}


def test_a_network_that_has_branches_goes_on_with_them():
    model = make_net()
    dyrep.expand_(model, "3", ["Kx1"])
    begin(model, start_with=("1x1",))
    assert branches(model) == {"3": ["Kx1"]}


def test_networks_of_two_optimizers_begin_one_by_one():
    model = nn.ModuleDict({"one": make_net(), "two": make_net()})
    for part in ("one", "two"):
        optimizer = torch.optim.SGD(model[part].parameters(), lr=0.05)
        controller = DyRep(model, optimizer, DyRepConfig(start_with=("1xK",)))
        assert [edit.layer for edit in controller.begun] == [f"{part}.0", f"{part}.3", f"{part}.5"]


def test_an_empty_start_is_plain():
    assert branches(begin(start_with=())[0]) == {}


def test_layers_that_are_excluded_or_frozen_begin_plain():
    model = make_net()
    model[0].weight.requires_grad_(False)
    begin(model, exclude=("5",), start_with=("1x1", "residual"))
    assert branches(model) == {"3": ["1x1", "residual"]}


def test_only_branches_that_may_grow_are_begun_with():
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
    assert branches(begin(model, branches=("1xK", "residual"))[0]) == {"0": ["residual"]}


def test_outputs_keep_the_values_they_start_at():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3))
    nn.init.zeros_(model[3].weight)
    nn.init.constant_(model[3].bias, -4.6)
    begin(model)
    assert torch.equal(model(BATCHES[0][0]), torch.full((8, 2, 4, 4), -4.6))


def test_a_refused_start_leaves_log_and_optimizer_alone(tmp_path):
    begin(log=tmp_path / "events.jsonl")
    before = (tmp_path / "events.jsonl").read_text()
    model = make_net()
    model(BATCHES[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(ConfigError):
        DyRep(model, optimizer, DyRepConfig(start_with=("1x1",)), log=tmp_path / "events.jsonl")
    assert not optimizer._optimizer_step_pre_hooks
    assert (tmp_path / "events.jsonl").read_text() == before


@pytest.mark.parametrize("reason", ["score", "no folder", "no file", "a file that fails later"])
def test_what_is_refused_for_another_reason_has_begun_nothing(reason, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    logs = {"no folder": tmp_path / "file" / "events.jsonl", "no file": tmp_path}
    refused = {"score": "grasp"} if reason == "score" else {"log": logs.get(reason)}
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def write(log, kind, **data):
        if kind == "converted":
            raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        if reason == "a file that fails later":
            patch.setattr(dyrep.events.EventLog, "write", write)
        with pytest.raises((dyrep.DyRepError, OSError)):
            DyRep(model, optimizer, DyRepConfig(score=refused.pop("score", "snip")), **refused)
    assert branches(model) == {}
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert DyRep(model, optimizer).begun  # nothing is in the way of another try


def test_an_optimizer_that_has_state_before_its_first_step_does_not_make_a_network_look_trained():
    model = make_net()
    optimizer = torch.optim.Adagrad(model.parameters())
    assert optimizer.state
    assert DyRep(model, optimizer, DyRepConfig(interval=1)).begun


def test_the_log_says_why_nothing_was_begun():
    stepped = make_net()
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.05, momentum=0.9)
    train_epoch(stepped, optimizer, BATCHES)
    for norm in (stepped[1], stepped[6]):
        norm.reset_running_stats()
    plain = DyRep(stepped, optimizer, DyRepConfig(interval=1))
    assert plain.events[0]["not_begun"].startswith("the optimizer's state shows that")
    assert branches(stepped) == {}
    trained, normless = make_net(), nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    trained(BATCHES[0][0])
    cases = [
        (trained, {}, "norm '1' shows that the network has been trained, or run in training mode"),
        (normless, {}, "no square convolution up to 5x5 right before a batch norm can have any of 1x1, residual"),
        (make_net(), {"branches": ("1xK",)}, "can have any of the branches allowed"),
    ]
    for model, settings, reason in cases:
        _, _, controller = begin(model, **settings)
        assert reason in controller.events[0]["not_begun"]
        assert controller.begun == []
    grown, _, _ = begin()
    _, _, second = begin(grown)
    assert second.events[0]["not_begun"] == "layer '0' has branches already"
    for settings in ({}, {"start_with": ()}):
        _, _, controller = begin(**settings)
        assert "not_begun" not in controller.events[0]


def test_an_average_begins_with_the_same():
    model = make_net()
    average = torch.optim.swa_utils.AveragedModel(model)
    begin(model, ema=average)
    ours, theirs = model.state_dict(), average.module.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.parametrize(("first", "then"), [((), None), (None, ())], ids=["plain, then new", "new, then plain"])
def test_an_average_is_continued_with_its_model_whatever_either_began_with(first, then):
    """A norm beside the kernel is there or not from the beginning, and goes or comes with the whole block."""
    model, average = make_net(), torch.optim.swa_utils.AveragedModel(make_net())
    _, optimizer, controller = begin(model, ema=average, start_with=first, macs_limit=None)
    for _ in range(3):
        train_epoch(model, optimizer, BATCHES)
        average.update_parameters(model)
        controller.epoch_end(BATCHES)
    assert set(branches(model)) == {"0", "3", "5"}
    state, weights, averages = controller.state_dict(), model.state_dict(), average.state_dict()

    again, theirs = make_net(), torch.optim.swa_utils.AveragedModel(make_net())
    _, stepping, later = begin(again, ema=theirs, start_with=then, macs_limit=None)
    assert len(later.begun) == (2 if first == () else 0)
    later.load_state_dict(state)
    again.load_state_dict(weights)
    theirs.load_state_dict(averages)
    assert later.begun == []
    train_epoch(again, stepping, BATCHES)
    theirs.update_parameters(again)
    train_epoch(model, optimizer, BATCHES)
    average.update_parameters(model)
    ours = average.state_dict()
    assert all(torch.equal(value, ours[key]) for key, value in theirs.state_dict().items())


def test_the_same_seed_begins_with_the_same_weights_whatever_was_drawn_before():
    torch.manual_seed(1)
    first = begin(seed=3)[0].state_dict()
    torch.rand(7)
    state = torch.get_rng_state()
    again, other = begin(make_net(), seed=3)[0].state_dict(), begin(make_net(), seed=4)[0].state_dict()
    assert torch.equal(first["5.branches.1x1.conv.weight"], again["5.branches.1x1.conv.weight"])
    assert not torch.equal(first["5.branches.1x1.conv.weight"], other["5.branches.1x1.conv.weight"])
    torch.set_rng_state(state)


def test_a_run_that_is_continued_takes_on_the_structure_it_had(tmp_path):
    model, optimizer, controller = begin(macs_limit=3.0, log=tmp_path / "events.jsonl")
    train_epoch(model, optimizer, BATCHES)
    controller.epoch_end(BATCHES)
    saved, weights = controller.state_dict(), model.state_dict()
    again, _, later = begin(macs_limit=3.0, log=tmp_path / "events.jsonl")
    later.load_state_dict(saved)
    again.load_state_dict(weights, strict=True)
    assert dyrep.structure(again) == dyrep.structure(model)
    kinds = [event["type"] for event in dyrep.read_events(tmp_path / "events.jsonl")]
    assert kinds == ["started", "converted", "update", "resumed"]


def test_a_run_that_started_plain_stays_so_when_it_is_continued():
    model, _, controller = begin(start_with=())
    again, _, later = begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that it started otherwise is over, and nothing to tell
        later.load_state_dict(controller.state_dict())
    assert branches(again) == branches(model) == {}


@pytest.mark.parametrize("place", ["updating.begin_", "controller.Followers.follow_"])
def test_after_an_error_everything_is_as_it_was(place, monkeypatch):
    begin_ = dyrep.updating.begin_

    def fail(*arguments, **_):
        if place == "updating.begin_":
            begin_(*arguments)
        raise RuntimeError("no")

    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monkeypatch.setattr(f"dyrep.{place}", fail)
    with pytest.raises(RuntimeError, match="no"):
        DyRep(model, optimizer)
    assert type(model[5]) is nn.Conv2d
    assert model.state_dict().keys() == make_net().state_dict().keys()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def begin_on_rank(rank, init_file, out):
    with member(rank, init_file):
        unwrapped, _, _ = begin(seed=rank, distributed=True)  # nothing but DyRep itself can give both the same branches
        torch.save({name: p.detach() for name, p in unwrapped.named_parameters()}, f"{out}/begun{rank}.pt")
        plain = make_net(seed=rank)  # DistributedDataParallel gives both the weights of rank 0
        model = DistributedDataParallel(plain)
        average = torch.optim.swa_utils.AveragedModel(plain, use_buffers=True)
        _, optimizer, controller = begin(model, seed=rank, ema=average)
        for size in (8, 9 - rank, 7 + rank):  # costs differ between ranks, as in detection
            train_epoch(model, optimizer, make_batches(seed=rank))
            average.update_parameters(plain)
            controller.epoch_end(resized(make_batches(seed=rank), size))
        weights = dict(plain.named_parameters())
        torch.save(
            {"weights": weights, "blocks": branches(model), "average": average.state_dict()}, f"{out}/rank{rank}.pt"
        )


def test_ranks_begin_and_go_on_alike(tmp_path):
    mp.spawn(begin_on_rank, args=(tmp_path / "init", str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert first["blocks"] == second["blocks"]
    assert first["blocks"] != USUAL
    for name, parameter in first["weights"].items():
        assert torch.equal(parameter, second["weights"][name]), name
    for name, value in first["average"].items():  # edits fold what norms of branches have seen into it
        if "branches" in name or "origin" in name or name.rpartition(".")[2] in ("weight", "bias"):
            assert torch.equal(value, second["average"][name]), name
    begun, other = (torch.load(tmp_path / f"begun{rank}.pt", weights_only=True) for rank in range(2))
    assert any("branches" in name for name in begun)
    assert all(torch.equal(parameter, other[name]) for name, parameter in begun.items())


def begin_with_an_average_on_one_rank(rank, init_file, keeper):
    with member(rank, init_file):
        plain = make_net(seed=rank)
        model = DistributedDataParallel(plain)
        averages = [torch.optim.swa_utils.AveragedModel(plain)] if rank == keeper else []
        _, optimizer, controller = begin(model, ema=averages, macs_limit=None)
        for _ in range(2):
            train_epoch(model, optimizer, make_batches(seed=rank))
            for average in averages:
                average.update_parameters(plain)
            assert controller.epoch_end(make_batches(seed=rank))
        assert all(dyrep.structure(average.module) == dyrep.structure(plain) for average in averages)


@pytest.mark.parametrize("keeper", [0, 1])
def test_one_rank_may_keep_an_average_alone(keeper, tmp_path):
    mp.spawn(begin_with_an_average_on_one_rank, args=(tmp_path / "init", keeper), nprocs=2)


def begin_after_training_on_one_rank(rank, init_file):
    with member(rank, init_file):
        model = make_net()
        if rank:
            model(BATCHES[0][0])
        with pytest.raises(DesyncError, match=r"the ranks disagree on what to begin with[ ;]"):
            begin(model, start_with=("1x1",), distributed=True)
        assert branches(model) == {}
        model(BATCHES[0][0])
        with pytest.raises(IneligibleLayerError, match=r"start_with=\('residual',\): no square convolution"):
            begin(make_net()[:2], start_with=("residual",), distributed=True)


def test_a_rank_that_refuses_does_not_leave_the_others_waiting(tmp_path):
    mp.spawn(begin_after_training_on_one_rank, args=(tmp_path / "init",), nprocs=2)
