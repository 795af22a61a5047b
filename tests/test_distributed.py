"""Two processes must take the same decisions and end with the same weights."""

import pytest
import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import dyrep
from dyrep.errors import DesyncError
from training import make_batches, make_net, member, train_epoch


def run_rank(rank, init_file, out, in_place):
    with member(rank, init_file):
        evolve_on_rank(rank, out, in_place)


def evolve_on_rank(rank, out, in_place):
    plain = make_net(seed=rank)  # DistributedDataParallel gives both the weights of rank 0
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    config = dyrep.DyRepConfig(interval=1, score="snip", calibration_batches=2, cut_threshold=0.0005)
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


def run_disagreeing_rank(rank, init_file):
    with member(rank, init_file):
        disagree_on_rank(rank)


def disagree_on_rank(rank):
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = dyrep.DyRepConfig(interval=1, score="snip", include=("0",) if rank else ("3",))
    controller = dyrep.DyRep(model, optimizer, config)
    batches = make_batches()
    train_epoch(model, optimizer, batches)
    with pytest.raises(DesyncError, match="the ranks disagree on what to expand"):
        controller.epoch_end(batches)
    assert dyrep.structure(model)["blocks"] == {}


def test_ranks_with_different_settings_stop_with_the_reason(tmp_path):
    mp.spawn(run_disagreeing_rank, args=(tmp_path / "init",), nprocs=2)
