"""Running statistics measured anew."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import dyrep
from dyrep.errors import CalibrationError
from dyrep.norm import BranchNorm


def grown():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
    )
    dyrep.expand_(model, ["0", "3"], gamma=0.5)
    return model


def make_batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [(2 + 3 * torch.randn(8, 3, 6, 6, generator=generator), torch.zeros(8)) for _ in range(count)]


def statistics(model):
    return {name: value.clone() for name, value in model.state_dict().items() if "running" in name}


def test_statistics_are_means_over_the_batches_whatever_they_were_before():
    first, second = grown(), grown()
    for norm in second.modules():
        if isinstance(norm, (BranchNorm, nn.BatchNorm2d)):
            norm.running_var.fill_(7.0)
    assert dyrep.update_norms_(first, make_batches()) == 3
    dyrep.update_norms_(second, make_batches())
    for (name, ours), theirs in zip(statistics(first).items(), statistics(second).values(), strict=True):
        assert torch.equal(ours, theirs), name
    # the 1x1 of the first convolution sees the batches as they are
    branch = first[0].branches["1x1"]
    outputs = [branch.conv(x) for x, _ in make_batches()]
    expected = torch.stack([y.var(dim=(0, 2, 3)) for y in outputs]).mean(0)
    assert torch.allclose(branch.norm.running_var, expected, rtol=1e-5)


def test_a_plain_model_gets_what_torch_would_give_it():
    ours = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.0))
    theirs = copy.deepcopy(ours)
    dyrep.update_norms_(ours, make_batches())
    update_bn(make_batches(), theirs)
    for name, value in statistics(theirs).items():
        assert torch.equal(statistics(ours)[name], value), name
    assert ours[1].momentum == 0.1


def test_an_average_is_looked_through_and_modes_stay():
    model = grown()
    average = AveragedModel(model).eval()
    dyrep.update_norms_(average, make_batches())
    assert not any(module.training for module in average.modules())
    dyrep.update_norms_(model, make_batches())
    for name, value in statistics(model).items():
        assert torch.equal(statistics(average.module)[name], value), name


def test_frozen_norms_stay():
    model = grown().train()
    model[1].eval()
    model[3].branches["1x1"].eval()
    before = statistics(model)
    dyrep.update_norms_(model, make_batches())
    changed = {name for name, value in statistics(model).items() if not torch.equal(value, before[name])}
    assert "0.branches.1x1.norm.running_var" in changed
    assert not any(name.startswith(("1.", "3.branches.1x1.")) for name in changed)
    assert not model[1].training


@pytest.mark.parametrize("batches", [[], [(torch.full((8, 3, 6, 6), 1.0),), "nonsense"]])
def test_after_an_error_everything_is_as_it_was(batches):
    model = grown().eval()
    before = statistics(model)
    with pytest.raises((CalibrationError, TypeError, AttributeError)):
        dyrep.update_norms_(model, batches)
    for name, value in statistics(model).items():
        assert torch.equal(value, before[name]), name
    assert model[1].momentum == 0.1
    assert not any(module.training for module in model.modules())


def test_what_no_batch_reaches_keeps_its_statistics():
    model = nn.ModuleDict({"used": nn.BatchNorm2d(3), "unused": nn.BatchNorm2d(3)})
    model["unused"].running_var.fill_(5.0)
    dyrep.update_norms_(model, make_batches(), forward=lambda model, batch: model["used"](batch[0]))
    assert (model["unused"].running_var == 5).all()
    assert (model["used"].running_var > 8).all()


def test_an_error_leaves_what_only_watches_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
    dyrep.convert_(model, "dbb", example_input=torch.randn(2, 3, 6, 6))
    before = copy.deepcopy(model.state_dict())
    broken = [*make_batches(1), (torch.zeros(1, 2, 6, 6), torch.zeros(1))]
    with pytest.raises(RuntimeError):
        dyrep.update_norms_(model, broken)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
