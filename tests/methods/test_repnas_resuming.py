"""Copies of a model that is being searched, searches that go on after an interruption, and several processes."""

import copy
import io

import pytest
import torch
import torch.multiprocessing as mp
from methods_helpers import assert_same_picture, picture, relative_error
from repnas_helpers import BATCHES, FAVOURITES, FAVOURITES_ALONE, X, favour_, run_epoch, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dyrep
from dyrep import RepNAS, RepNASConfig
from dyrep.errors import CheckpointError
from dyrep.methods.gates import Gates
from training import eval_output, make_batches, make_net, member, train_epoch

# -- copies -----------------------------------------------------------------------------------------------------


def test_a_moving_average_that_was_given_follows():
    model, optimizer, search, average = start(averaged=True)
    for epoch in range(4):
        torch.manual_seed(epoch)
        if epoch == 1:
            favour_(search)
        for batch in BATCHES:
            train_epoch(model, optimizer, [batch])
            average.update_parameters(model)
        if epoch == 2:
            twin = copy.deepcopy(average.module)
            Gates(twin, 0.34).set_open(search.gates.ranked(search.strengths.detach()))
            expected = eval_output(twin, X)
        search.epoch_end()
        if epoch == 2:
            assert relative_error(eval_output(average.module, X), expected) < 1e-6
    assert dyrep.structure(average.module) == dyrep.structure(model)
    assert [n for n, _ in average.module.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert dyrep.verify(average.module, dyrep.deploy(average.module), X).passed
    assert not torch.equal(eval_output(average.module, X), eval_output(model, X))


def test_a_moving_average_goes_by_the_strongest_gates_while_the_search_runs():
    model, optimizer, search, average = start(averaged=True)
    run_epoch(model, optimizer, search)
    favour_(search)
    train_epoch(model, optimizer, BATCHES)
    average.update_parameters(model)
    search.epoch_end()
    expected = search.gates.ranked(search.strengths.detach())
    found = torch.stack([norm.gate for norm in Gates(average.module, 0.34)._norms])
    assert torch.equal(found, expected)


def test_a_model_is_copied_and_deployed_while_the_search_runs():
    model, optimizer, search = start()
    run_epoch(model, optimizer, search)
    favour_(search)
    train_epoch(model, optimizer, BATCHES)
    before = picture(model, optimizer)
    output = eval_output(model, X)
    twin, plain, plain_too = copy.deepcopy(model), search.deploy(), dyrep.deploy(model)
    assert torch.equal(eval_output(twin, X), output)
    assert relative_error(eval_output(plain, X), output) < 1e-5
    assert torch.equal(eval_output(plain_too, X), eval_output(plain, X))
    assert list(plain.state_dict()) == list(make_net().state_dict())
    search.refresh()
    after = picture(model, optimizer)
    for gate in [name for name in after["values"] if name.endswith(".gate")]:  # the only thing that may differ
        del after["values"][gate], before["values"][gate]
    assert_same_picture(after, before)


def test_a_deployed_model_does_not_carry_the_search_along():
    _, _, search = start()
    plain = search.deploy()
    assert not plain._forward_pre_hooks
    assert not plain._forward_hooks
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    plain.train()(X)
    assert torch.equal(torch.rand(1), expected), "training the plain model draws gates"


def test_a_copy_made_while_the_search_runs_goes_by_the_gates_it_is_given():
    model, optimizer, search = start()
    run_epoch(model, optimizer, search)
    twin = copy.deepcopy(model)  # as a moving average begins
    favour_(search)
    train_epoch(model, optimizer, BATCHES)
    expected = eval_output(model, X)
    twin.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(eval_output(twin, X), expected)


def test_closing_removes_every_hook():
    model, optimizer, search = start()
    search.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    train_epoch(model, optimizer, BATCHES)
    assert search.state_dict()["counters"]["step"] == 0
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    model(X)
    assert torch.equal(torch.rand(1), expected)


# -- going on after an interruption -----------------------------------------------------------------------------


def saved(model, optimizer, search):
    """Everything a run is saved with, by way of a file."""
    file = io.BytesIO()
    torch.save({"search": search.state_dict(), "model": model.state_dict()}, file)
    return file


def resumed(file, **settings):
    """A run of another seed that takes over a saved one."""
    model, optimizer, search, *averages = start(seed=7, **settings)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    search.load_state_dict(state["search"])
    model.load_state_dict(state["model"], strict=True)
    return (model, optimizer, search, *averages)


def assert_same_run(one, other):
    for first, second in zip(one[0].state_dict().items(), other[0].state_dict().items(), strict=True):
        assert first[0] == second[0]
        assert torch.equal(first[1], second[1]), first[0]
    assert dyrep.structure(one[0]) == dyrep.structure(other[0])
    states = [torch.load(io.BytesIO(saved(*run).getvalue()), weights_only=True)["search"] for run in (one, other)]
    first, second = states
    assert torch.equal(first["strengths"], second["strengths"])
    assert first["counters"] == second["counters"]
    assert first["optimizer"]["groups"] == second["optimizer"]["groups"]
    assert first["optimizer"]["state"].keys() == second["optimizer"]["state"].keys()
    for name, values in first["optimizer"]["state"].items():
        assert torch.equal(values["momentum_buffer"], second["optimizer"]["state"][name]["momentum_buffer"]), name


@pytest.mark.parametrize("favourites", [FAVOURITES, FAVOURITES_ALONE])
@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4])
def test_a_run_that_stopped_goes_on_bit_for_bit(stop, favourites):
    whole = start()
    file = None
    for epoch in range(5):
        if epoch == stop:
            file = saved(*whole)
        run_epoch(*whole, favourites)
    again = resumed(file)
    assert again[2].epoch == stop
    assert (again[2].gates is None) == (stop >= 3)
    for _ in range(stop, 5):
        run_epoch(*again, favourites)
    assert_same_run(again, whole)
    assert not torch.equal(whole[0][0].weight, make_net()[0].weight)
    assert dyrep.verify(again[0], again[2].deploy(), X).passed


def test_a_moving_average_takes_on_the_structure_of_a_resumed_run():
    whole = start(averaged=True)
    for _ in range(4):
        run_epoch(*whole[:3])
    again = resumed(saved(*whole[:3]), averaged=True)
    assert dyrep.structure(again[3].module) == dyrep.structure(again[0]) == dyrep.structure(whole[0])
    again[3].module.load_state_dict(whole[3].module.state_dict(), strict=True)
    again[3].update_parameters(again[0])


def test_the_log_of_a_resumed_run_leaves_out_what_did_not_happen(tmp_path):
    whole = start(log=tmp_path / "events.jsonl")
    run_epoch(*whole)
    file = saved(*whole)
    run_epoch(*whole)
    again = resumed(file, log=tmp_path / "events.jsonl")
    for _ in range(2):
        run_epoch(*again)
    kinds = [(event["type"], event.get("epoch")) for event in dyrep.read_events(tmp_path / "events.jsonl")]
    assert kinds == [("started", None), ("search", 1), ("resumed", 1), ("search", 2), ("update", 3)]


def test_going_back_to_the_random_part_stops_learning():
    run = start(total=10, random_share=0.3, search_share=0.6)
    file = saved(*run)
    for _ in range(4):
        run_epoch(*run)
    model, optimizer, search = run
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    search.load_state_dict(state["search"])
    model.load_state_dict(state["model"])
    train_epoch(model, optimizer, BATCHES)
    assert not search.strengths.any()


def test_a_search_that_is_over_does_not_go_back_to_searching():
    run = start()
    file = None
    for epoch in range(4):
        if epoch == 2:
            file = saved(*run)
        run_epoch(*run)
    model, _, search = run
    structure = dyrep.structure(model)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    with pytest.raises(CheckpointError, match="was not over yet, and this one is: build the model and RepNAS anew"):
        search.load_state_dict(state["search"])
    assert dyrep.structure(model) == structure


def test_states_of_something_else_are_refused():
    _, _, search = start()
    for state in ({}, {"format": 1}, None, {"format": 2, "strengths": torch.zeros(19)}):
        with pytest.raises(CheckpointError, match="not a RepNAS state of format 1"):
            search.load_state_dict(state)
    other = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    state = RepNAS(other, optimizer, RepNASConfig(total=3), example_input=X).state_dict()
    with pytest.raises(CheckpointError, match="the saved search has 6 gates, this one 19"):
        search.load_state_dict(state)


# -- several processes ------------------------------------------------------------------------------------------


def search_on_rank(rank, init_file, out, convert_first):
    with member(rank, init_file):
        plain = make_net(seed=rank)  # DistributedDataParallel gives both the weights of rank 0
        torch.manual_seed(rank)
        if convert_first:
            dyrep.convert_(plain, "repnas", example_input=X)
        model = DistributedDataParallel(plain)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
        config = RepNASConfig(total=5, random_share=0.2, search_share=0.6)
        search = RepNAS(model, optimizer, config, example_input=X, log=f"{out}/rank{rank}.jsonl")
        batches = make_batches(seed=rank)
        strengths = []
        for _ in range(5):
            train_epoch(model, optimizer, batches)
            search.epoch_end()
            strengths.append(search.strengths.detach().clone())
        saved = {"model": plain.state_dict(), "structure": dyrep.structure(model), "strengths": strengths}
        torch.save(saved, f"{out}/rank{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("convert_first", [True, False])
def test_two_ranks_learn_the_same_strengths_and_end_with_the_same_weights(tmp_path, convert_first):
    mp.spawn(search_on_rank, args=(tmp_path / "init", str(tmp_path), convert_first), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first["strengths"], second["strengths"], strict=True))
    assert not first["strengths"][0].any()
    assert first["strengths"][1].unique().numel() > 1
    assert first["structure"] == second["structure"]
    own = {"running_mean", "running_var", "num_batches_tracked"}  # each rank sees its own data
    shared = [key for key in first["model"] if key.rpartition(".")[2] not in own]
    assert any("origin_norm" in key or "branches" in key for key in shared)
    for key in shared:
        assert torch.equal(first["model"][key], second["model"][key]), key
    assert (tmp_path / "rank0.jsonl").exists()
    assert not (tmp_path / "rank1.jsonl").exists()
