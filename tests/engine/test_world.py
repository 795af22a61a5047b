"""Processes that train together, or one that is alone."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dyrep.engine import world as world_module
from dyrep.engine.world import World, joined_world, pick_device
from dyrep.errors import ConfigError, DesyncError, LostRankError

CPU = torch.device("cpu")


def test_a_process_alone_agrees_with_itself():
    world = World(CPU)
    assert world.is_main
    assert world.any([True, False]) == [True, False]
    assert world.sum(torch.tensor([1.0, 2.0])).tolist() == [1, 2]
    (gathered,) = world.gather(torch.tensor([3]))
    assert gathered.tolist() == [3]
    world.barrier()


def test_without_torchrun_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined_world("cpu") as world:
        assert world == World(CPU, 0, 1)
        assert not dist.is_initialized()


def talk(rank, size, init_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=size)
    world = World(CPU, rank, size)
    assert world.is_main == (rank == 0)
    assert world.any([rank == 1, False, True]) == [True, False, True]
    assert world.sum(torch.tensor([1.0, float(rank)])).tolist() == [size, sum(range(size))]
    gathered = world.gather(torch.tensor([rank, 10 * rank], dtype=torch.uint8))
    assert [part.tolist() for part in gathered] == [[r, 10 * r] for r in range(size)]
    assert [part.numel() for part in world.gather(torch.zeros(0))] == [0] * size
    world.barrier()
    dist.destroy_process_group()


def test_processes_agree_add_up_and_gather(tmp_path):
    mp.spawn(talk, args=(2, tmp_path / "init"), nprocs=2)


# -- devices ----------------------------------------------------------------------------------------------------


def test_a_device_that_is_not_one_is_answered_with_those_that_are():
    assert pick_device("cpu") == CPU
    with pytest.raises(ConfigError, match="--device 'gpu' is not a device; valid are cpu, cuda, cuda:0"):
        pick_device("gpu")
    with pytest.raises(ConfigError, match="--device 'mps': only cpu and cuda devices are supported"):
        pick_device("mps")


@pytest.mark.parametrize(
    ("device", "local_rank", "expected"),
    [(None, 1, "cuda:1"), ("cuda", 1, "cuda:1"), ("cuda:0", 1, "cuda:0"), ("cpu", 1, "cpu")],
)
def test_every_process_takes_the_gpu_of_its_own_number_unless_told_otherwise(device, local_rank, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device(device, local_rank) == torch.device(expected)


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="--device 'cuda': there is no GPU number 2, this machine has 2"):
        pick_device("cuda", 2)
    with pytest.raises(ConfigError, match="--device 'cuda:5': there is no GPU number 5"):
        pick_device("cuda:5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(None) == CPU


# -- others that are gone ---------------------------------------------------------------------------------------


@pytest.fixture
def member(monkeypatch):
    """Be rank 1 of 2, without another process; note what happens to the group."""
    seen = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(world_module.dist, "init_process_group", lambda *a, **k: seen.append("init"))
    monkeypatch.setattr(world_module.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(world_module.dist, "barrier", lambda: seen.append("barrier"))
    monkeypatch.setattr(world_module.dist, "destroy_process_group", lambda: seen.append("destroy"))
    return seen


def test_processes_leave_together(member):
    with joined_world("cpu") as world:
        assert world == World(CPU, 1, 2)
        member.append("work")
    assert member == ["init", "work", "barrier", "destroy"]


@pytest.mark.parametrize(
    "text",
    [
        "[/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:5",
        "Broken pipe",
        "Connection reset by peer",
        "Timed out waiting 600000ms for recv operation to complete",
    ],
)
def test_the_loss_of_another_process_is_told_with_what_to_do(text, member):
    with pytest.raises(LostRankError) as error, joined_world("cpu"):
        raise RuntimeError(f"{text}\nand more")
    message = str(error.value)
    assert message.startswith("rank 1 lost another of the 2 processes (")
    assert text in message
    assert "and more" not in message
    assert "continues from its last checkpoint when the same command is given again" in message
    assert member == ["init"]  # leaving could wait for those that are gone


def test_an_error_of_the_backend_means_a_lost_process_too(member):
    with pytest.raises(LostRankError, match="lost another"), joined_world("cpu"):
        raise dist.DistBackendError("NCCL error in: ...")


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), DesyncError("the ranks disagree with a peer"), ValueError("peer")]
)
def test_other_errors_stay_what_they_are(error, member):
    with pytest.raises(type(error)) as caught, joined_world("cpu"):
        raise error
    assert caught.value is error
    assert member == ["init"]
