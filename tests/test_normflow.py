import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dyrep.branches import BRANCHES
from dyrep.normflow import NormFlows, has_flow
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
    assert list(flows.means(flows.values(), 1)) == ["7"]
    model[1].train()
    assert list(flows.means(flows.values(), 2)) == ["7"]  # the first step is missing
    flows.reset_()
    model.zero_grad()
    backward(model, torch.float32)
    assert list(flows.means(flows.values(), 1)) == ["1", "7"]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm1d(4), True),
        (nn.SyncBatchNorm(4), True),
        (nn.BatchNorm2d(4, track_running_stats=False), False),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), False),
        (nn.LayerNorm(4), False),
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
    other.sums += other.values()
    assert other.means(other.sums, 2) == flows.means(flows.sums, 1)


def test_nothing_to_watch_is_fine():
    flows = NormFlows({})
    assert flows.values().shape == (0,)
    assert flows.means(flows.sums, 1) == {} == flows.state_dict()
    flows.load_state_dict({})
