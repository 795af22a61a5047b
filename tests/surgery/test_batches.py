"""What is read of a loader, and what is none."""

import pytest
import torch
import torch.multiprocessing as mp

from dyrep.errors import CalibrationError, DesyncError
from dyrep.surgery.batches import read_batches
from training import make_batches, member, start, train_epoch

BATCHES = make_batches()
CPU = torch.device("cpu")


def test_no_more_is_read_than_is_wanted():
    loader = iter(BATCHES)
    assert read_batches(loader, 2, CPU) == BATCHES[:2]
    assert next(loader) is BATCHES[2]
    assert read_batches(None, 2, CPU) is None


@pytest.mark.parametrize("settings", [{}, {"start_with": ("1x1",), "absorb_after": 1}], ids=["update", "absorb"])
def test_a_loader_without_batches_is_refused_and_nothing_has_changed(settings):
    """Also where branches are absorbed, which without batches goes by no measurement."""
    model, optimizer, controller = start(**settings)
    used = iter(BATCHES)
    train_epoch(model, optimizer, used)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CalibrationError, match=r"no batches in what was given \(empty, or used up\)"):
        controller.epoch_end(used)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert controller.update(BATCHES) or controller.absorb(BATCHES)


def broken():
    yield BATCHES[0]
    raise FileNotFoundError("images/17.jpg")


def update_on_rank(rank, init_file, given):
    with member(rank, init_file):
        model, optimizer, controller = start()
        train_epoch(model, optimizer, BATCHES)
        theirs = {"none": None, "empty": [], "broken": broken()}[given]
        errors = {"none": DesyncError, "empty": CalibrationError, "broken": FileNotFoundError}
        with pytest.raises(errors[given] if rank else DesyncError):
            controller.epoch_end(theirs if rank else BATCHES)


@pytest.mark.parametrize("given", ["none", "empty", "broken"])
def test_a_rank_without_batches_does_not_leave_the_others_waiting(given, tmp_path):
    mp.spawn(update_on_rank, args=(tmp_path / "init", given), nprocs=2)
