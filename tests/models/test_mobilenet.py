import pytest
import torch
from torch import nn

from dyrep.errors import ConfigError
from dyrep.models import mobilenet_v1


def test_mobilenet_alternates_depthwise_and_pointwise_convs():
    convs = {name: m for name, m in mobilenet_v1(width=0.25).named_children() if isinstance(m, nn.Conv2d)}
    expected = ["conv0"]
    for number in range(1, 14):
        expected += [f"conv{number}_depthwise", f"conv{number}_pointwise"]
    assert list(convs) == expected
    for name, conv in convs.items():
        assert conv.groups == (conv.in_channels if "depthwise" in name else 1)
        assert conv.kernel_size == ((1, 1) if "pointwise" in name else (3, 3))
        assert conv.bias is None


def test_mobilenet_shrinks_the_image_thirty_two_fold_and_ends_in_1024_channels():
    with torch.device("meta"):
        model, x = mobilenet_v1(), torch.empty(1, 3, 224, 224)
    for name, layer in model.named_children():
        if name == "average":
            break
        x = layer(x)
    assert x.shape == (1, 1024, 7, 7)


def test_mobilenet_runs_and_trains_with_other_channels_and_classes():
    model = mobilenet_v1(num_classes=5, in_channels=1, width=0.25)
    model.train()(torch.randn(2, 1, 64, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.eval()(torch.randn(1, 1, 32, 32)).shape == (1, 5)


def test_mobilenet_draws_depthwise_kernels_no_smaller_than_their_fan_out_asks_for():
    kernel = mobilenet_v1().conv13_depthwise.weight
    assert abs(float(kernel.std().detach()) / (2 / 9) ** 0.5 - 1) < 0.05


def test_a_width_without_channels_is_refused():
    with pytest.raises(ConfigError, match=r"width=0\.01 has no channels left; use at least 1/32"):
        mobilenet_v1(width=0.01)
