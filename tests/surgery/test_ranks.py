"""Two processes operate on their copies of a model and end with the same one."""

from __future__ import annotations

import os
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from filelock import FileLock
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import dyrep
from dyrep.errors import CalibrationError, DesyncError
from dyrep.norm import BranchNorm
from dyrep.surgery import ranks
from dyrep.surgery.wrappers import rewrap_ddp_
from surgery_helpers import conv_bn_net

RANKS = 2


def same_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return conv_bn_net(dtype)


def own_batches(rank: int, count: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(4, 3, 8, 8, generator=generator).to(dtype) * (rank + 1) for _ in range(count)]


def expansion(rank: int, arguments: dict, memory_format: torch.memory_format = torch.contiguous_format) -> dict:
    torch.manual_seed(100 + rank)
    model = same_net().to(memory_format=memory_format)
    dyrep.expand_(model, ["0", "3"], **arguments)
    return model.state_dict()


def expand_uncalibrated(rank: int) -> dict:
    return expansion(rank, {})


def expand_calibrated(rank: int) -> dict:
    return expansion(rank, {"calibration": own_batches(rank), "origin_norm": "calibrated"})


def expand_channels_last(rank: int) -> dict:
    return expansion(rank, {"calibration": own_batches(rank)}, torch.channels_last)


def expand_apart(rank: int) -> dict:
    return expansion(rank, {"calibration": own_batches(rank), "distributed": False})


def expand_each_alone(rank: int) -> dict:
    """The statistics of each rank's batches by themselves, over the weights that both ranks share."""
    alone = {}
    for owner in range(RANKS):
        model = same_net()
        generator = torch.Generator().manual_seed(5)
        batches = own_batches(owner)
        dyrep.expand_(model, ["0", "3"], calibration=batches, generator=generator, distributed=False)
        alone[owner] = model.state_dict()
    together = same_net()
    generator = torch.Generator().manual_seed(5)
    dyrep.expand_(together, ["0", "3"], calibration=own_batches(rank), generator=generator)
    return {"alone": alone, "together": together.state_dict()}


def error_of(kind: type[Exception], function) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    return ""


def one_rank_without_batches(rank: int) -> dict:
    model = same_net()
    batches = own_batches(rank) if rank == 0 else []
    message = error_of(CalibrationError, lambda: dyrep.expand_(model, "3", calibration=batches))
    return {"message": message, "kind": type(model[3]).__name__}


def one_rank_with_nan(rank: int) -> dict:
    model = same_net()
    batches = own_batches(rank) if rank == 0 else [torch.full((2, 3, 8, 8), float("nan"))]
    message = error_of(CalibrationError, lambda: dyrep.expand_(model, "3", calibration=batches))
    return {"message": message, "kind": type(model[3]).__name__}


def agreement(rank: int) -> dict:
    device = torch.device("cpu")

    def check(value) -> str:
        return error_of(DesyncError, lambda: ranks.check_agreement(value, "the plan", device))

    return {
        "same": check({"cut": ["1x1"], "scores": [0.5, 1]}),
        "other order": check({"a": 1, "b": 2} if rank == 0 else {"b": 2, "a": 1}),
        "other value": check({"cut": ["1x1"]} if rank == 0 else {"cut": ["1xK"]}),
    }


def synchronized_norm(rank: int) -> dict:
    """One step of a norm over this rank's share of a batch; rank 0 has three examples, rank 1 has five."""
    found = {}
    for shift in (True, False):
        torch.manual_seed(3)
        whole = torch.randn(8, 4, 5, 5, dtype=torch.float64) * torch.arange(1, 5).reshape(-1, 1, 1) + 1
        weights = torch.randn(8, 4, 5, 5, dtype=torch.float64)
        share = slice(0, 3) if rank == 0 else slice(3, 8)
        norm = BranchNorm(4, shift=shift, gamma=0.5, dtype=torch.float64)
        dyrep.sync_norms_(norm)
        x = whole[share].clone().requires_grad_()
        y = norm(x)
        (y * weights[share]).sum().backward()
        gradients = {name: p.grad for name, p in norm.named_parameters()}
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        found[shift] = {
            "y": y.detach(),
            "x.grad": x.grad,
            "gradients": gradients,
            "buffers": dict(norm.named_buffers()),
        }
    return found


def synchronized_norm_with_an_empty_share(rank: int) -> dict:
    torch.manual_seed(4)
    whole = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    norm = BranchNorm(3, shift=True, gamma=0.5, dtype=torch.float64)
    dyrep.sync_norms_(norm)
    x = (whole if rank == 0 else whole[:0]).clone().requires_grad_()
    y = norm(x)
    y.square().sum().backward()
    return {"y": y.detach(), "x.grad": x.grad, "var": norm.running_var}


def sync_batch_norm_flags(rank: int) -> dict:
    group = dist.new_group([0, 1])
    found = {}
    for kind in ("plain", "sync", "sync group"):
        model = same_net()
        if kind != "plain":
            chosen = group if kind == "sync group" else None
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model, process_group=chosen)
        dyrep.expand_(model, "3", origin_norm="reference")
        norms = [m for m in model.modules() if isinstance(m, BranchNorm)]
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        found[kind] = {
            "flags": [norm.synchronized for norm in norms],
            "groups": all(norm.process_group is (group if kind == "sync group" else None) for norm in norms),
            "left alone": [m for m in converted.modules() if isinstance(m, BranchNorm)] == norms,
        }
    return found


def rewrapped(rank: int) -> dict:
    torch.manual_seed(100 + rank)
    model = same_net()
    ddp = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=3)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    batches, alias = own_batches(rank), ddp

    def step(x: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        (ddp(x) - 1).square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        return gradients

    step(batches[0])
    dyrep.expand_(ddp.module, "3", calibration=batches, optimizer=optimizer)
    rewrap_ddp_(ddp)
    grown = step(batches[1])
    expected = {}
    dyrep.cut_(ddp.module, "3", ["1x1"], optimizer=optimizer)
    rewrap_ddp_(ddp)
    shrunk = step(batches[2])
    for name, parameter in model.named_parameters():
        total = parameter.detach().clone()
        dist.all_reduce(total)
        expected[name] = total / RANKS
    return {
        "same object": alias is ddp and ddp.module is model,
        "settings": (ddp.find_unused_parameters, ddp.gradient_as_bucket_view, ddp.bucket_bytes_cap, ddp.training),
        "hooks": len(ddp._comm_hooks),
        "grown": grown,
        "shrunk": shrunk,
        "final": {name: p.detach() for name, p in model.named_parameters()},
        "mean": expected,
    }


def gradients_after_rewrapping(rank: int) -> dict:
    """Gradients by the rewrapped model, and the mean of those that each rank computes by itself."""
    model = same_net()
    torch.manual_seed(7)
    dyrep.expand_(model, "3", calibration=own_batches(0), distributed=False)
    wrapper = DistributedDataParallel(same_net())
    dyrep.expand_(wrapper.module, "3", generator=torch.Generator().manual_seed(8))
    rewrap_ddp_(wrapper)
    wrapper.module.load_state_dict(model.state_dict())
    x = own_batches(rank)[0]
    model(x).square().mean().backward()
    wrapper(x).square().mean().backward()
    mean = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.clone()
        dist.all_reduce(gradient)
        mean[name] = gradient / RANKS
    return {"mean": mean, "wrapped": {name: p.grad for name, p in wrapper.module.named_parameters()}}


SCENARIOS = (
    expand_uncalibrated,
    expand_calibrated,
    expand_channels_last,
    expand_apart,
    expand_each_alone,
    one_rank_without_batches,
    one_rank_with_nan,
    agreement,
    synchronized_norm,
    synchronized_norm_with_an_empty_share,
    sync_batch_norm_flags,
    rewrapped,
    gradients_after_rewrapping,
)


def run_rank(rank: int, folder: str) -> None:
    """Every scenario in turn; after one that fails the ranks are out of step, and the rest are not run."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, timeout=timedelta(seconds=60), rank=rank, world_size=RANKS)
    found: dict = {}
    for scenario in SCENARIOS:
        try:
            found[scenario.__name__] = scenario(rank)
            dist.barrier()
        except Exception:
            found["failure"] = f"{scenario.__name__} on rank {rank}:\n{traceback.format_exc()}"
            break
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> list[dict]:
    """What each of the two ranks found, by scenario; pytest's workers share one run of it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    files = [folder / f"rank{rank}.pt" for rank in range(RANKS)]
    with FileLock(folder / "ranks.lock"):
        if not all(file.exists() for file in files):
            mp.spawn(run_rank, args=(str(folder),), nprocs=RANKS)
    return [torch.load(file, weights_only=True) for file in files]


def results(both: list[dict], scenario) -> list:
    name = scenario.__name__
    assert all(name in found for found in both), "\n".join(found.get("failure", "") for found in both)
    return [found[name] for found in both]


def assert_equal_tensors(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


@pytest.mark.parametrize("scenario", [expand_uncalibrated, expand_calibrated, expand_channels_last])
def test_ranks_with_different_seeds_and_data_end_with_the_same_model(both, scenario):
    first, second = results(both, scenario)
    assert any("branches" in key for key in first)
    assert_equal_tensors(first, second)


def test_ranks_told_to_work_apart_draw_their_own_weights(both):
    first, second = results(both, expand_apart)
    key = "3.branches.1x1.conv.weight"
    assert not torch.equal(first[key], second[key])


def test_statistics_are_the_mean_of_those_of_the_ranks(both):
    for found in results(both, expand_each_alone):
        statistics = [key for key in found["together"] if "branches" in key and "running" in key]
        assert len(statistics) == 13
        for key in statistics:
            first, second = (found["alone"][owner][key] for owner in range(RANKS))
            assert not torch.allclose(first, second)
            torch.testing.assert_close(found["together"][key], (first + second) / 2, rtol=1e-6, atol=0)


def test_rank_without_batches_stops_all_ranks(both):
    for found in results(both, one_rank_without_batches):
        assert found["message"].startswith("calibration got no batches")
        assert found["kind"] == "Conv2d"


def test_rank_with_nan_stops_all_ranks(both):
    for found in results(both, one_rank_with_nan):
        assert "the statistics at layer '3' are not finite" in found["message"]
        assert found["kind"] == "Conv2d"


def test_disagreement_is_raised_on_every_rank_with_its_own_value(both):
    for rank, found in enumerate(results(both, agreement)):
        assert found["same"] == ""
        assert found["other order"] == ""
        branch = ("1x1", "1xK")[rank]
        assert f'the ranks disagree on the plan; rank {rank} has {{"cut": ["{branch}"]}}' in found["other value"]


@pytest.mark.parametrize("shift", [True, False], ids=["shift", "scale only"])
def test_synchronized_norm_equals_one_norm_over_the_whole_batch(both, shift):
    torch.manual_seed(3)
    whole = torch.randn(8, 4, 5, 5, dtype=torch.float64) * torch.arange(1, 5).reshape(-1, 1, 1) + 1
    weights = torch.randn(8, 4, 5, 5, dtype=torch.float64)
    norm = BranchNorm(4, shift=shift, gamma=0.5, dtype=torch.float64)
    x = whole.clone().requires_grad_()
    y = norm(x)
    (y * weights).sum().backward()
    found = [ranked[shift] for ranked in results(both, synchronized_norm)]
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(torch.cat([f["y"] for f in found]), y.detach(), **close)
    torch.testing.assert_close(torch.cat([f["x.grad"] for f in found]), x.grad, **close)
    for ranked in found:
        for name, parameter in norm.named_parameters():
            torch.testing.assert_close(ranked["gradients"][name], parameter.grad, **close)
        for name, buffer in norm.named_buffers():
            torch.testing.assert_close(ranked["buffers"][name], buffer, **close)


def test_synchronized_norm_takes_an_empty_share(both):
    torch.manual_seed(4)
    whole = torch.randn(6, 3, 4, 4, dtype=torch.float64).requires_grad_()
    norm = BranchNorm(3, shift=True, gamma=0.5, dtype=torch.float64)
    y = norm(whole)
    y.square().sum().backward()
    full, empty = results(both, synchronized_norm_with_an_empty_share)
    assert empty["y"].shape == empty["x.grad"].shape == (0, 3, 4, 4)
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(full["y"], y.detach(), **close)
    torch.testing.assert_close(full["x.grad"], whole.grad, **close)
    for found in (full, empty):
        torch.testing.assert_close(found["var"], norm.running_var, **close)


@pytest.mark.parametrize(("kind", "expected"), [("plain", False), ("sync", True), ("sync group", True)])
def test_new_norms_are_synchronized_exactly_where_the_model_has_sync_batch_norm(both, kind, expected):
    for found in results(both, sync_batch_norm_flags):
        assert found[kind]["flags"] == [expected] * 8
        assert found[kind]["groups"]
        assert found[kind]["left alone"]


def test_rewrapped_model_is_the_same_object_with_the_same_settings_and_hooks(both):
    for found in results(both, rewrapped):
        assert found["same object"]
        assert found["settings"] == (True, True, 3 * 2**20, True)
        assert found["hooks"] == 1


def test_gradients_of_new_parameters_are_the_same_on_both_ranks_after_rewrapping(both):
    first, second = results(both, rewrapped)
    assert any("branches" in name for name in first["grown"])
    assert all(gradient.abs().max() > 0 for name, gradient in first["grown"].items() if "branches" in name)
    assert_equal_tensors(first["grown"], second["grown"])
    assert any("branches" in name for name in first["shrunk"])
    assert not any("branches.1x1." in name for name in first["shrunk"])
    assert_equal_tensors(first["shrunk"], second["shrunk"])
    assert_equal_tensors(first["final"], second["final"])
    assert_equal_tensors(first["mean"], first["final"])


def test_gradients_after_rewrapping_are_the_mean_over_the_ranks(both):
    for found in results(both, gradients_after_rewrapping):
        assert found["mean"].keys() == found["wrapped"].keys()
        for name, gradient in found["wrapped"].items():
            torch.testing.assert_close(gradient, found["mean"][name], rtol=1e-5, atol=1e-7)
