"""Settings of the augmentation, and the arithmetic that ends it."""

import pytest
import torch

from dyrep.engine.data import Augmentation
from dyrep.engine.data.augment import Finish
from dyrep.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": "centre"}, "crop='centre': must be one of none, pad, resized"),
        ({"padding": -1}, "padding=-1: must be a whole number"),
        ({"padding": 1.5}, "padding=1.5: must be a whole number"),
        ({"cutout": -2}, "cutout=-2: must be a whole number"),
        ({"cutout": True}, "cutout=True: must be a whole number"),
        ({"flip": 1}, "flip=1: must be True or False"),
        ({"color_jitter": -0.1}, "color_jitter=-0.1: must be a number"),
        ({"color_jitter": float("nan")}, "color_jitter=nan: must be a number"),
        ({"auto_augment": "imagenet"}, "auto_augment='imagenet': must be True or False"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Augmentation(**settings)


def test_settings_that_need_files_are_named():
    assert Augmentation(crop="pad", flip=True, cutout=8).files_only() == ()
    everything = Augmentation(crop="resized", color_jitter=0.4, auto_augment=True)
    assert everything.files_only() == ("crop='resized'", "color_jitter=0.4", "auto_augment=True")


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_pixels_become_images_of_the_wanted_layout(channels_last, contiguous):
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
    pixels = torch.randint(0, 256, (2, 4, 5, 3), dtype=torch.uint8)
    finish = Finish(mean, std, height=4, width=5, cutout=0, device="cpu", channels_last=channels_last)
    given = pixels if contiguous else pixels.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    images = finish(given, None)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=layout)
    expected = (pixels.double() / 255 - torch.tensor(mean)) / torch.tensor(std)
    assert torch.allclose(images.double(), expected.permute(0, 3, 1, 2), atol=1e-6)
