import pytest
import torch
from torch import nn

from dyrep.models import small_vgg, vgg16


def test_small_vgg_keeps_the_names_that_checkpoints_hold():
    keys = list(small_vgg().state_dict())
    assert keys[:3] == ["conv1.weight", "norm1.weight", "norm1.bias"]
    assert {key.split(".")[0] for key in keys} == {
        *(f"{kind}{number}" for kind in ("conv", "norm") for number in range(1, 7)),
        "classifier",
    }
    pools = [name for name, layer in small_vgg().named_children() if isinstance(layer, nn.MaxPool2d)]
    assert pools == ["pool2", "pool4", "pool6"]


@pytest.mark.parametrize("size", [8, 9, 16, 28])
def test_small_vgg_takes_images_of_any_size_from_eight_pixels(size):
    model = small_vgg(num_classes=7, in_channels=2)
    assert model.train()(torch.randn(3, 2, size, size)).shape == (3, 7)
    assert model.eval()(torch.randn(1, 2, size, size)).shape == (1, 7)


def test_small_vgg_has_the_stages_it_is_given():
    model = small_vgg(widths=((4,), (6, 8)))
    assert [m.out_channels for m in model if isinstance(m, nn.Conv2d)] == [4, 6, 8]
    assert model(torch.randn(2, 1, 4, 4)).shape == (2, 10)


def test_vgg16_has_thirteen_convs_without_bias_and_two_linear_layers():
    model = vgg16(num_classes=100)
    convs = [m for m in model if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convs] == [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    assert all(m.bias is None for m in convs)
    assert [(m.in_features, m.out_features) for m in model if isinstance(m, nn.Linear)] == [(512, 512), (512, 100)]
    assert list(model.state_dict())[-4:] == ["hidden.weight", "hidden.bias", "classifier.weight", "classifier.bias"]
    pools = [name for name, layer in model.named_children() if isinstance(layer, nn.MaxPool2d)]
    assert pools == ["pool2", "pool4", "pool7", "pool10", "pool13"]


def test_vgg16_runs_and_trains():
    model = vgg16()
    model.train()(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 10)


def test_vgg16_convs_are_drawn_as_kaiming_does():
    kernel = vgg16().conv8.weight
    expected = (2 / (512 * 9)) ** 0.5
    assert abs(float(kernel.std().detach()) / expected - 1) < 0.01
