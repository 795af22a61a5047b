"""Two processes must take the same decisions and end with the same weights."""

import pytest
import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import dyrep
from dyrep.errors import DesyncError
from dyrep.surgery.ranks import average_
from training import loss_of, make_batches, make_net, member, train_epoch


def run_rank(rank, init_file, out, in_place):
    with member(rank, init_file):
        evolve_on_rank(rank, out, in_place)


def evolve_on_rank(rank, out, in_place):
    plain = make_net(seed=rank)  # DistributedDataParallel gives both the weights of rank 0
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    config = dyrep.DyRepConfig.paper(interval=1, score="snip", calibration_batches=2, cut_threshold=0.0005)
    wrap = None if in_place else DistributedDataParallel
    controller = dyrep.DyRep(model, optimizer, config, wrap=wrap, log=f"{out}/rank{rank}.jsonl")
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(rank)
    batches = make_batches(seed=rank)
    kinds = []
    for _ in range(4):
        train_epoch(controller.model, optimizer, batches)
        kinds += [edit.kind for edit in controller.epoch_end(batches)]
    assert (controller.model is model) == in_place
    assert len(calls) == (12 if in_place else 3)  # a wrapper that is kept keeps its hooks
    saved = {"model": plain.state_dict(), "structure": dyrep.structure(model), "kinds": kinds}
    torch.save(saved, f"{out}/rank{rank}.pt")


@pytest.mark.parametrize("in_place", [True, False])
def test_two_ranks_decide_alike_and_end_with_identical_weights(tmp_path, in_place):
    mp.spawn(run_rank, args=(tmp_path / "init", str(tmp_path), in_place), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert first["structure"] == second["structure"]
    assert first["kinds"] == second["kinds"]
    assert set(first["kinds"]) == {"expand", "cut"}
    own = {"running_mean", "running_var", "num_batches_tracked"}  # each rank sees its own data
    shared = [key for key in first["model"] if key.rpartition(".")[2] not in own]
    assert any("branches" in key for key in shared)
    for key in shared:
        assert torch.equal(first["model"][key], second["model"][key]), key
    assert (tmp_path / "rank0.jsonl").exists()
    assert not (tmp_path / "rank1.jsonl").exists()


def run_absorbing_rank(rank, init_file, out):
    """Without a wrapper, which would give every rank the weights of the first one."""
    with member(rank, init_file):
        model = make_net()
        dyrep.convert_(model, "dbb7", replace="conv", generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        controller = dyrep.DyRep(model, optimizer, dyrep.DyRepConfig.paper(absorb_after=1))
        batches = make_batches(seed=rank)
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            average_([parameter.grad for parameter in model.parameters()])
            optimizer.step()
        if rank:
            model[1].running_var[0] = 0  # as of a channel that is constant here alone
        assert len(controller.epoch_end(batches)) == 3
        buffers = {f"{name} momentum": optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
        torch.save({**dict(model.named_parameters()), **buffers}, f"{out}/rank{rank}.pt")


def test_ranks_absorb_alike_though_their_statistics_differ(tmp_path):
    mp.spawn(run_absorbing_rank, args=(tmp_path / "init", str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert list(first)[: len(first) // 2] == list(dict(make_net().named_parameters()))
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name


def run_disagreeing_rank(rank, init_file):
    with member(rank, init_file):
        disagree_on_rank(rank)


def disagree_on_rank(rank):
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = dyrep.DyRepConfig.paper(interval=1, score="snip", include=("0",) if rank else ("3",))
    controller = dyrep.DyRep(model, optimizer, config)
    batches = make_batches()
    train_epoch(model, optimizer, batches)
    with pytest.raises(DesyncError, match="the ranks disagree on what to expand"):
        controller.epoch_end(batches)
    assert dyrep.structure(model)["blocks"] == {}


def test_ranks_with_different_settings_stop_with_the_reason(tmp_path):
    mp.spawn(run_disagreeing_rank, args=(tmp_path / "init",), nprocs=2)


def run_rank_that_sees_other_things(rank, init_file, out):
    """A convolution that its norm alone reads on one rank, and something else too on the other."""
    with member(rank, init_file):
        model = make_net()
        if rank:
            model[0].register_forward_hook(lambda module, args, output: output * 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        controller = dyrep.DyRep(model, optimizer, dyrep.DyRepConfig.paper(interval=1, calibration_batches=2))
        train_epoch(model, optimizer, make_batches(seed=rank))
        seen = controller.scorer.read()
        controller.update(make_batches(seed=rank))
        torch.save({"scores": controller.events[-1]["scores"], "flows": seen.flows}, f"{out}/rank{rank}.pt")


def test_ranks_score_alike_by_what_all_of_them_have_seen(tmp_path):
    mp.spawn(run_rank_that_sees_other_things, args=(tmp_path / "init", str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert first == second
    assert first["scores"]["5"] == first["flows"]["6"]
    assert first["scores"]["0"] != first["flows"]["1"]
