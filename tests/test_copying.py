"""A copy of a model is that of `copy.deepcopy`, whatever the last training step has left in the model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import dyrep
from dyrep.copying import copied
from dyrep.models.chain import fold_norms


@dataclass
class Kept:
    value: Tensor


class Keeping(nn.Module):
    """Two convolutions; what the first one computes is kept under several names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.same = self.second
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        self.feature = self.first(x)
        self.nested = {"list": [self.feature, (self.feature * 2, None)], "object": Kept(self.feature + 1)}
        self.average = self.feature.mean((0, 2, 3))
        return self.second(self.feature)


def trained(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    return model


def test_tensors_that_autograd_computed_are_detached_in_the_copy_and_stay_in_the_model():
    model = trained(Keeping())
    twin = copied(model)
    assert not model.feature.is_leaf
    assert not model.average.is_leaf
    for ours, theirs in [
        (model.feature, twin.feature),
        (model.average, twin.average),
        (model.nested["list"][1][0], twin.nested["list"][1][0]),
        (model.nested["object"].value, twin.nested["object"].value),
    ]:
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()
        assert not theirs.requires_grad
    assert twin.nested["list"][0] is twin.feature


def test_everything_else_is_as_in_a_deep_copy():
    model, calls = trained(Keeping()), []
    model.first.weight.requires_grad_(False)
    model.itself = [model]
    model.register_forward_hook(lambda *_: calls.append(1))
    twin = copied(model)
    assert twin.same is twin.second
    assert twin.itself[0] is twin
    assert list(twin.state_dict()) == list(model.state_dict())
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours is not theirs, name
        assert torch.equal(ours, theirs), name
        assert (ours.requires_grad, type(ours)) == (theirs.requires_grad, type(theirs)), name
    twin(torch.randn(1, 3, 8, 8))
    assert calls == [1]


def test_what_the_memo_replaces_is_not_copied():
    model = Keeping()
    model.shared = object()
    replaced = object()
    assert copied(model, {id(model.shared): replaced}).shared is replaced


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "compute", [nn.utils.weight_norm, nn.utils.spectral_norm, lambda conv: prune.l1_unstructured(conv, "weight", 0.5)]
)
def test_model_is_deployed_loaded_and_exported_right_after_a_training_step(compute, tmp_path):
    model = Keeping()
    dyrep.expand_(model, "second", gamma=0.5)
    compute(model.first)
    trained(model)
    x = torch.randn(2, 3, 8, 8)
    plain = dyrep.deploy(model)
    assert type(plain.second) is nn.Conv2d
    torch.testing.assert_close(plain.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    path, saved = dyrep.save(model, tmp_path / "model.safetensors"), model.second.weight.clone()
    trained(model)
    assert not torch.equal(model.second.weight, saved)
    assert torch.equal(dyrep.load(path, model).second.weight, saved)
    trained(model.train())
    assert dyrep.export(model, tmp_path / "model.pt2", x).blocks == 1


def test_layers_that_keep_activations_are_timed_followed_and_folded():
    class KeepingConv(nn.Conv2d):
        def forward(self, x):
            self.kept = super().forward(x)
            return self.kept

    chain = trained(nn.Sequential(KeepingConv(3, 4, 3), nn.ReLU()))
    assert not fold_norms(chain)[0].kept.requires_grad

    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
    average = copied(model)
    dyrep.expand_(model, "0", ["1x1"])
    model[0].branches["1x1"].register_forward_hook(lambda branch, _, output: setattr(branch, "kept", output))
    trained(model)
    assert list(dyrep.follow_(average, model)[0].branches) == ["1x1"]
    assert len(dyrep.measure_executions(model, torch.randn(2, 3, 8, 8), repeats=1, executions=["eager"])) == 1


def test_a_traced_model_is_copied_in_the_modes_it_has():
    from torchvision.models import resnet18
    from torchvision.models.feature_extraction import create_feature_extractor

    torch.manual_seed(0)
    model = create_feature_extractor(resnet18(num_classes=4), ["layer1"]).eval()
    x = torch.randn(2, 3, 32, 32)
    dyrep.expand_(model, "layer1.0.conv1", gamma=0.5)
    plain = dyrep.deploy(model)
    assert not any(module.training for module in plain.modules())
    assert torch.allclose(plain(x)["layer1"], model(x)["layer1"], atol=1e-4)
