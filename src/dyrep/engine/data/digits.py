"""The data set that comes with scikit-learn."""

from __future__ import annotations

import torch

from dyrep.engine.data.splits import ImageArrays, Source
from dyrep.extras import needed


def read_digits() -> Source:
    """scikit-learn's 8x8 digits, which come with the package: four fifths to train and one fifth to test.

    Example:
        >>> digits = read_digits()
        >>> tuple(digits.train.images.shape), len(digits.test.labels)
        ((1437, 1, 8, 8), 360)
    """
    data = needed("sklearn.datasets", "the data set digits").load_digits()
    brightest = 16
    images = (torch.tensor(data.images) * 255 / brightest).round().to(torch.uint8).unsqueeze(1)
    everything = ImageArrays(images, torch.tensor(data.target))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    cut = len(images) * 4 // 5
    names = tuple(str(name) for name in data.target_names)
    return Source(everything.take(order[:cut]), everything.take(order[cut:]), names, mean=(0.5,), std=(0.5,))
