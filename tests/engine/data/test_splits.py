"""Examples that are held out of a split, and whether a split is kept in memory."""

import pytest
import torch

from dyrep.engine.data import ImageArrays, ImageFiles, hold_out, splits
from dyrep.engine.data.splits import fits, held_out_places
from dyrep.errors import ConfigError


def numbered(labels):
    """A split whose first pixels say which example it is."""
    labels = torch.as_tensor(labels)
    return ImageArrays(torch.arange(len(labels), dtype=torch.uint8).reshape(-1, 1, 1, 1), labels)


def test_examples_are_held_out_of_every_class_alike():
    split = numbered([0, 1, 2] * 30)
    train, val = hold_out(split, 31)
    assert sorted(torch.bincount(val.labels).tolist()) == [10, 10, 11]
    both = torch.cat([train.images, val.images]).flatten()
    assert both.sort().values.tolist() == list(range(90))
    for part in (train, val):
        index = part.images.flatten().long()
        assert torch.equal(index, index.sort().values)
        assert torch.equal(part.labels, split.labels[index])


def test_unequal_classes_are_held_out_in_proportion():
    train, val = hold_out(numbered([0] * 60 + [1] * 30 + [3] * 10), 10)
    assert torch.bincount(val.labels).tolist() == [6, 3, 0, 1]
    assert torch.bincount(train.labels).tolist() == [54, 27, 0, 9]


def test_what_is_held_out_depends_on_no_seed():
    split = numbered([0, 1] * 50)
    torch.manual_seed(1)
    first = hold_out(split, 20)[1].images
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(hold_out(split, 20)[1].images, first)
    assert torch.equal(torch.get_rng_state(), state)


def test_files_and_arrays_are_held_out_alike():
    labels = torch.arange(40) % 4
    files = ImageFiles(tuple(str(index) for index in range(40)), labels)
    for ours, theirs in zip(hold_out(files, 8), hold_out(numbered(labels), 8), strict=True):
        assert [int(path) for path in ours.paths] == theirs.images.flatten().tolist()
        assert torch.equal(ours.labels, theirs.labels)


@pytest.mark.parametrize("count", [-1, 0, 40, 41])
def test_impossible_numbers_to_hold_out_are_refused(count):
    for refused in (lambda: hold_out(numbered([0, 1] * 20), count), lambda: held_out_places(count, 40)):
        with pytest.raises(ConfigError, match=f"cannot hold out {count} of 40 examples: give a number from 1 to 39"):
            refused()


def test_no_class_is_held_out_entirely():
    with pytest.raises(ConfigError, match="class 1, which has 1, would be left without any"):
        hold_out(numbered([0] * 9 + [1]), 9)


def test_places_that_are_held_out_depend_on_no_seed():
    torch.manual_seed(1)
    rest, held = held_out_places(3, 10)
    assert sorted([*rest.tolist(), *held.tolist()]) == list(range(10))
    torch.manual_seed(2)
    assert torch.equal(held, held_out_places(3, 10)[1])


def test_images_are_kept_if_they_fit_or_if_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(splits, "RESIDENT_LIMIT", 100)
    assert fits(100, None)
    assert not fits(101, None)
    assert fits(101, True)
    assert not fits(100, False)
