"""A DistributedDataParallel wrapper that is initialised again stays the user's, with all its settings."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dyrep
from dyrep.surgery.wrappers import find_ddp, rewrap_ddp_
from training import loss_of, make_batches, make_net, member

ACCEPTED = inspect.signature(DistributedDataParallel.__init__).parameters
SETTINGS = {
    "broadcast_buffers": False,
    "forward_sync_buffers": False,
    "bucket_cap_mb": 3,
    "find_unused_parameters": True,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "skip_all_reduce_unused_params": True,
    "bucket_cap_mb_list": [1, 0.5, 2],
    "batched_grad_copy": True,
    "lazy_bucket_allocation": True,
}
"""Every setting that is not about devices, at another value than usual."""


@pytest.fixture
def group(tmp_path):
    """This process alone, as a group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def settings_of(wrapper):
    """What a wrapper has stored of its settings, and what of them reaches its reducer."""
    stored = ("bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default", "process_group", "dim")
    return {name: getattr(wrapper, name, None) for name in (*ACCEPTED, *stored) if name not in ("self", "module")}


def rewrapped_quietly(wrapper):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        rewrap_ddp_(wrapper)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", [None, *SETTINGS])
def test_every_setting_is_carried_over_without_a_warning(group, name):
    if name is not None and name not in ACCEPTED:
        pytest.skip(f"this torch has no {name}")
    wrapper = DistributedDataParallel(make_net(), **({} if name is None else {name: SETTINGS[name]}))
    before = settings_of(wrapper)
    for _ in range(2):
        dyrep.expand_(wrapper.module, "0", ["1x1"])
        rewrapped_quietly(wrapper)
        assert settings_of(wrapper) == before
        loss_of(wrapper, make_batches()[0]).backward()
        dyrep.cut_(wrapper.module, "0")


def test_what_is_stored_on_a_wrapper_stays(group):
    wrapper = DistributedDataParallel(make_net())
    wrapper.note, wrapper.extra, wrapper.forward = 1, nn.Linear(2, 2), wrapper.forward
    wrapper.register_buffer("count", torch.ones(()), persistent=False)
    calls = []
    handle = wrapper.register_forward_hook(lambda *_: calls.append("forward"))
    wrapper.register_full_backward_hook(lambda *_: calls.append("backward"))
    wrapper.require_backward_grad_sync = False
    wrapper.eval()
    kept = {name: wrapper.__dict__[name] for name in ("note", "forward")}
    keys = list(wrapper.state_dict())
    rewrapped_quietly(wrapper)
    assert all(wrapper.__dict__[name] == value for name, value in kept.items())
    assert list(wrapper.state_dict()) == keys
    assert wrapper.count == 1
    assert not wrapper.training
    assert not wrapper.require_backward_grad_sync
    images = make_batches()[0][0].requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a full hook that has become a plain one would be warned about
        wrapper(images).sum().backward()
    assert calls == ["forward", "backward"]
    handle.remove()
    wrapper(images)
    assert calls == ["forward", "backward"]


class Labelled(DistributedDataParallel):
    """A wrapper with an argument of its own."""

    def __init__(self, module, label):
        super().__init__(module)
        self.label = label


def test_a_subclass_keeps_what_its_own_arguments_made(group):
    wrapper = Labelled(make_net(), "mine")
    rewrapped_quietly(wrapper)
    assert (type(wrapper), wrapper.label) == (Labelled, "mine")


def test_a_wrapper_that_cannot_be_initialised_is_as_it_was(group):
    wrapper = DistributedDataParallel(make_net())
    before = dict(wrapper.__dict__)
    wrapper.module.requires_grad_(False)
    with pytest.raises(RuntimeError, match="not needed"):
        rewrap_ddp_(wrapper)
    assert wrapper.__dict__ == before


def delay_on_rank(rank, init_file, out):
    with member(rank, init_file):
        plain = make_net()
        named = list(plain[10].named_parameters(prefix="10"))
        wrapper = DistributedDataParallel(
            plain, delay_all_reduce_named_params=named, param_to_hook_all_reduce=plain[0].weight
        )
        batch = make_batches(seed=rank)[0]
        loss_of(wrapper, batch).backward()
        for _ in range(2):
            rewrapped_quietly(wrapper)
        assert [id(p) for p in wrapper._delay_all_reduce_params] == [id(p) for _, p in named]
        assert len(plain[0].weight._backward_hooks) == 1
        wrapper.zero_grad(set_to_none=False)  # gradients stay where they are, which has to be the new buffer
        loss_of(wrapper, batch).backward()
        dist.barrier()  # torch begins to reduce these and waits for nothing
        torch.save({name: p.grad.clone() for name, p in plain.named_parameters()}, f"{out}/{rank}.pt")


def test_gradients_that_are_reduced_late_still_are(tmp_path):
    mp.spawn(delay_on_rank, args=(tmp_path / "init", str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    model = make_net()
    wanted = [
        torch.autograd.grad(loss_of(model, make_batches(seed=rank)[0]), list(model.parameters())) for rank in range(2)
    ]
    for (name, ours), *theirs in zip(first.items(), *wanted, strict=True):
        torch.testing.assert_close(ours, sum(theirs) / 2)
        assert torch.equal(ours, second[name])


def keep_buffers_on_rank(rank, init_file):
    with member(rank, init_file):
        plain = make_net()
        name = "forward_sync_buffers" if "forward_sync_buffers" in ACCEPTED else "broadcast_buffers"
        wrapper = DistributedDataParallel(plain, **{name: False})
        plain[1].running_mean.fill_(rank + 1.0)
        rewrapped_quietly(wrapper)
        assert plain[1].running_mean.eq(rank + 1.0).all()


def test_buffers_that_each_rank_has_for_itself_stay_so(tmp_path):
    mp.spawn(keep_buffers_on_rank, args=(tmp_path / "init",), nprocs=2)


def test_no_wrapper_is_found_around_a_plain_model():
    assert find_ddp(make_net()) is None
