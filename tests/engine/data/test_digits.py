"""The data set that comes with scikit-learn."""

import torch
from sklearn.datasets import load_digits

from dyrep.engine.data import read_digits


def test_digits_are_those_of_scikit_learn_up_to_rounding_each_once():
    source, given = read_digits(), load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    splits = (source.train, order[:1437]), (source.test, order[1437:])
    for split, chosen in splits:
        assert split.images.shape == (len(chosen), 1, 8, 8)
        theirs = torch.tensor(given.images)[chosen]
        assert (split.images[:, 0] / 255 * 16 - theirs).abs().max() <= 16 / 255 / 2 + 1e-6
        assert torch.equal(split.labels, torch.tensor(given.target)[chosen])
    assert source.classes == tuple("0123456789")
