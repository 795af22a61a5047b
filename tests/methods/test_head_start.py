"""Kernels as blocks fold to them, before training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dyrep
from dyrep.errors import CalibrationError, ConfigError, DyRepError
from dyrep.methods import METHODS
from dyrep.models import small_vgg


def batches(count: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 1, 8, 8, generator=generator) for _ in range(count)]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


WITH_BLOCKS = [name for name, method in METHODS.items() if method.builds_blocks and name != "repnas"]


@pytest.mark.parametrize("method", WITH_BLOCKS)
def test_kernels_are_those_the_blocks_fold_to_as_long_as_they_were(method):
    model, blocks = small_vgg(), small_vgg()
    blocks.load_state_dict(model.state_dict())
    lengths = {name: p.detach().norm() for name, p in model.named_parameters()}
    dyrep.convert_(blocks, method, replace="conv", generator=generator())
    dyrep.update_norms_(blocks, batches())
    folded = dyrep.deploy(blocks)
    started = dyrep.start_as_(model, method, batches(), generator=generator())
    assert started == [name for name, module in blocks.named_modules() if getattr(module, "branches", None)]
    for name in started:
        ours, theirs = (net.get_submodule(name).weight for net in (model, folded))
        length = lengths[f"{name}.weight"]
        assert torch.allclose(ours.norm(), length)
        assert torch.allclose(ours, theirs * (length / theirs.norm()), atol=1e-6)
    assert type(model.conv2) is nn.Conv2d


def test_all_but_the_kernels_stays():
    model = small_vgg().train()
    model.norm1.running_mean.fill_(3)
    model.norm2.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    started = dyrep.start_as_(model, "repvgg", batches(), exclude=["conv3"])
    assert "conv3" not in started
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {f"{name}.weight" for name in started}
    assert model.training
    assert not model.norm2.training


def test_the_residual_is_there():
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
    dyrep.start_as_(model, "repvgg", [torch.randn(16, 8, 8, 8)])
    centre = model[0].weight[:, :, 1, 1]
    others = centre - torch.diag(centre.diagonal())
    assert centre.diagonal().mean() > 2 * others.std()


def test_biases_are_as_long_as_their_kernels():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
    inputs = torch.randn(16, 3, 8, 8) + 1
    dyrep.start_as_(model, "repvgg", [inputs])
    # norms inside the block take the mean out, and the folded bias does so too
    assert model[0](inputs).mean((0, 2, 3)).abs().max() < 0.1 * model[0](inputs).std()


@pytest.mark.parametrize("method", ["origin", "dyrep", "repnas", "fixed"])
def test_methods_without_blocks_from_the_start_are_refused(method):
    with pytest.raises(ConfigError, match=f"cannot start as method '{method}': choose one with blocks"):
        dyrep.start_as_(small_vgg(), method, batches())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], CalibrationError, "no batches"),
        ([torch.full((4, 1, 8, 8), float("nan"))], CalibrationError, "layer 'conv1' is not finite"),
    ],
)
def test_batches_that_cannot_be_measured_on_change_nothing(given, error, message):
    model = small_vgg()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        dyrep.start_as_(model, "repvgg", given)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_network_without_convolutions_is_refused():
    with pytest.raises(DyRepError, match="finds nothing to convert"):
        dyrep.start_as_(nn.Linear(3, 3), "repvgg", [torch.randn(4, 3)])
