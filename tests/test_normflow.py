import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dyrep.branches import BRANCHES
from dyrep.normflow import NormFlows, has_flow
from dyrep.surgery import ranks
from dyrep.surgery.edits import expand_


def chain(eps=1e-3):
    """Three convolutions with norms, whose running variances follow the last batch at once."""
    torch.manual_seed(0)
    parts = []
    for channels in (3, 6, 6):
        parts += [nn.Conv2d(channels, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, eps=eps, momentum=1.0), nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(6 * 64, 4))


def backward(model, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(32, 3, 8, 8, generator=generator).to(dtype)
    F.cross_entropy(model(images), torch.randint(4, (32,), generator=generator)).backward()


def summed(conv):
    return float((conv.weight.detach() * conv.weight.grad).sum())


def flow(norm):
    flows = NormFlows({"norm": norm})
    return flows.means(flows.values(), 1)["norm"]


def test_flow_is_the_sum_over_the_kernel_before_the_norm():
    model = chain().double()
    backward(model)
    for conv, norm in ((model[0], model[1]), (model[3], model[4]), (model[6], model[7])):
        norm.running_var *= (32 * 64 - 1) / (32 * 64)  # the batch's own, which the norm has divided by
        assert flow(norm) == pytest.approx(summed(conv), rel=1e-5)  # flows are in float32


def test_flow_of_a_branch_is_the_sum_over_its_kernel():
    model = chain().double()
    expand_(model, "3", BRANCHES, gamma=0.5, calibration=[torch.randn(8, 3, 8, 8).double()])
    block = model[3]
    for branch in block.branches.values():
        branch.norm.momentum, branch.norm.eps = 1.0, 1e-3
    backward(model)
    for name in ("1xK", "Kx1", "1x1-KxK"):
        norm = block.branches[name].norm
        norm.running_var *= (32 * 64 - 1) / (32 * 64)
        assert flow(norm) == pytest.approx(summed(block.branches[name].conv), rel=1e-5), name


def test_autocast_leaves_the_flow_and_nothing_of_the_sum():
    model = chain(eps=1e-5)
    exact = copy.deepcopy(model).double()
    backward(exact)
    with torch.autocast("cpu", torch.bfloat16):
        backward(model, torch.float32)
    for conv, norm in ((0, 1), (3, 4), (6, 7)):
        true = summed(exact[conv])
        assert flow(model[norm]) == pytest.approx(true, rel=0.2)
        assert abs(summed(model[conv]) - true) > 2 * abs(true)


def test_norms_that_do_not_learn_from_batches_have_no_flow():
    model = chain()
    model[1].eval()
    model[4].weight.requires_grad_(False)
    backward(model, torch.float32)
    flows = NormFlows({name: model.get_submodule(name) for name in ("1", "4", "7")})
    flows.sums += flows.values()
    assert list(flows.means(flows.sums, 1)) == ["7"]
    model[1].train()
    flows.sums += flows.values()
    assert list(flows.means(flows.sums, 2)) == ["7"]  # the first step is missing
    flows.reset_()
    flows.sums += flows.values()
    assert list(flows.means(flows.sums, 1)) == ["1", "7"]


def test_a_step_that_a_norm_had_no_part_in_adds_nothing():
    model = chain()
    backward(model, torch.float32)
    flows = NormFlows({"7": model[7]})
    flows.sums += flows.values()
    before = flows.means(flows.sums, 1)["7"]
    model.zero_grad()
    flows.sums += flows.values()
    assert flows.means(flows.sums, 2)["7"] == pytest.approx(before / 2)


def drift(model, weight=1.5):
    """A step that changes all variances."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(weight)
    model.zero_grad()
    backward(model)


@pytest.mark.parametrize("momentum", [0.01, 0.1])
def test_the_variance_is_that_of_the_batch_although_the_running_one_lags(momentum):
    model = chain().double()
    for number in (1, 4, 7):
        model[number].momentum = momentum
    flows = NormFlows({name: model.get_submodule(name) for name in ("1", "4", "7")})
    drift(model)
    flows.values()
    drift(model)
    found = flows.means(flows.values(), 1)
    for conv, norm in (("0", "1"), ("3", "4"), ("6", "7")):
        assert found[norm] == pytest.approx(summed(model.get_submodule(conv)), rel=5e-3)


@pytest.mark.parametrize("why", ["two batches", "momentum", "ranks"])
def test_where_the_batch_cannot_be_told_the_running_variance_stands_in(why, monkeypatch):
    model = chain().double()
    norm = model[7]
    norm.momentum = None if why == "momentum" else 0.1
    monkeypatch.setattr(ranks, "distributed", lambda: why == "ranks")
    flows = NormFlows({"7": norm})
    drift(model)
    flows.values()
    for _ in range(2 if why == "two batches" else 1):
        backward(model)
    expected = (norm.weight * norm.weight.grad * norm.eps / (norm.running_var + norm.eps)).sum()
    assert flows.means(flows.values(), 1)["7"] == pytest.approx(float(expected.detach()), rel=1e-5)


def test_scaled_gradients_are_unscaled_and_steps_are_not():
    model = chain()
    backward(model, torch.float32)
    flows = NormFlows({"7": model[7]})
    plain, scaled = flows.values(), flows.values(torch.tensor(4.0))
    assert flows.means(scaled, 1)["7"] == pytest.approx(flows.means(plain, 1)["7"] / 4)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm1d(4), True),
        (nn.SyncBatchNorm(4), True),
        (nn.BatchNorm2d(4, track_running_stats=False), False),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), False),
        (nn.LayerNorm(4), False),
        (nn.LazyBatchNorm2d(), False),
        (nn.Conv2d(4, 4, 3), False),
    ],
)
def test_only_norms_over_batches_have_a_flow(module, expected):
    assert has_flow(module) is expected


def test_saved_sums_are_gone_on_with_and_what_has_none_is_left_out():
    model = chain()
    backward(model, torch.float32)
    norms = {name: model.get_submodule(name) for name in ("1", "4")}
    flows = NormFlows(norms)
    flows.sums += flows.values()
    other = NormFlows({**norms, "7": model[7]})
    other.load_state_dict(flows.state_dict())
    assert other.means(other.sums, 1) == flows.means(flows.sums, 1)
    backward(model, torch.float32)
    ours, theirs = other.values(), flows.values()
    assert torch.equal(ours[:12], theirs[:12])
    other.sums += ours
    assert list(other.means(other.sums, 2)) == ["1", "4"]


def test_sums_of_a_norm_of_another_size_are_not_taken_over():
    flows, other = (NormFlows({"norm": nn.BatchNorm2d(channels)}) for channels in (4, 6))
    other.load_state_dict(flows.state_dict())
    assert other.means(other.sums, 1) == {}


def test_norms_are_known_by_name_and_identity():
    norm = nn.BatchNorm2d(4)
    flows = NormFlows({"norm": norm})
    assert flows.watches({"norm": norm})
    assert not flows.watches({"other": norm})
    assert not flows.watches({"norm": nn.BatchNorm2d(4)})


def test_nothing_to_watch_is_fine():
    flows = NormFlows({})
    assert flows.values().shape == (0,)
    assert flows.means(flows.sums, 1) == {} == flows.state_dict()
    flows.load_state_dict({})
