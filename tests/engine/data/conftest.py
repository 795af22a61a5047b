"""Small data sets, made up on the spot."""

import numpy as np
import pytest
from PIL import Image

from dyrep.engine.data import cifar


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def image_folder(tmp_path):
    """Makes train/CLASS and val/CLASS with noise of a size (width, height)."""

    def make(name="images", train=4, val=2, size=(8, 8), classes=("ant", "bee", "cow"), suffix="png"):
        root = tmp_path / name
        for split, count in (("train", train), ("val", val)):
            for label, title in enumerate(classes):
                folder = root / split / title
                folder.mkdir(parents=True)
                for index in range(count):
                    pixels = noise(size[1], size[0], 3, seed=100 * label + index + 10_000 * (split == "val"))
                    Image.fromarray(pixels).save(folder / f"{index}.{suffix}")
        return root

    return make


@pytest.fixture
def small_cifar(monkeypatch):
    """CIFAR of 200 and 100 images, a whole number of sheets."""
    monkeypatch.setattr(cifar, "COUNTS", {"train": 200, "test": 100})
    return {
        "train_images": noise(200, 32, 32, 3, seed=1),
        "train_labels": np.arange(200) % 10,
        "test_images": noise(100, 32, 32, 3, seed=2),
        "test_labels": np.arange(100) % 10,
    }
