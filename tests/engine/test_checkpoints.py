"""Checkpoints are whole or not there, tell when they are not to be trusted, and run no code."""

import hashlib
import io
import os
import pickle
import random
from functools import partial

import numpy as np
import pytest
import torch
from engine_helpers import STEPS, assert_same, make_trainer, picture, result, settings, small_recipe, train_some

from dyrep.engine import checkpoints
from dyrep.engine.checkpoints import BEST, FORMAT, KIND, LAST, PREVIOUS, CheckpointFolder, read, write
from dyrep.engine.running import train
from dyrep.errors import CheckpointError

STATE = {"epoch": 3, "model": {"weight": torch.arange(600.0).view(20, 30)}, "rows": [{"loss": 0.5}], "best": None}


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of three epochs."""
    made = CheckpointFolder(tmp_path)
    for epoch in range(3):
        made.save({**STATE, "epoch": epoch})
    made.save_best({**STATE, "epoch": 1})
    return made


def with_body(body, kind=KIND, number=FORMAT):
    """A file whose digest and length are right, whatever it holds."""
    return b"%s %d %s %d\n" % (kind, number, hashlib.sha256(body).hexdigest().encode(), len(body)) + body


def saved_by_torch(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_state_comes_back_as_it_was(tmp_path):
    assert_same(read(write(tmp_path / "a.ckpt", STATE)), STATE)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_views_and_other_dtypes_come_back_bit_for_bit(tmp_path):
    base = torch.tensor([[float("nan"), -0.0], [float("inf"), 1e-45]])
    state = {"view": base.t(), "half": base.bfloat16(), "count": torch.tensor(3), "bytes": torch.get_rng_state()}
    assert_same(read(write(tmp_path / "a.ckpt", state)), state)


def test_the_last_the_previous_and_the_best_are_kept(folder):
    assert {name: read(folder.folder / name)["epoch"] for name in (LAST, PREVIOUS, BEST)} == {
        LAST: 2,
        PREVIOUS: 1,
        BEST: 1,
    }
    assert sorted(os.listdir(folder.folder)) == sorted([LAST, PREVIOUS, BEST])
    assert_same(folder.load(), {**STATE, "epoch": 2})


def test_there_is_something_to_continue_from_if_one_of_two_is_there(tmp_path, folder):
    assert folder.exists
    assert not CheckpointFolder(tmp_path / "other").exists
    (folder.folder / LAST).unlink()
    assert folder.exists
    (folder.folder / PREVIOUS).unlink()
    assert not folder.exists


# -- files that are not to be trusted ---------------------------------------------------------------------------


def foreign_files(good):
    noise = random.Random(0).randbytes(5000)
    return {
        "empty": (b"", r"is not a checkpoint of a dyrep run \(it begins with b''\)"),
        "noise": (noise, "is not a checkpoint of a dyrep run"),
        "saved by torch": (saved_by_torch(STATE), r"is not a checkpoint of a dyrep run \(it begins with b'PK"),
        "text": (b"four words of text\n", "is not a checkpoint of a dyrep run"),
        "truncated by a byte": (good[:-1], r"is truncated: (\d+) bytes of (\d+)"),
        "truncated in the middle": (good[: len(good) // 2], r"is truncated: \d+ bytes of \d+"),
        "truncated in the first line": (good[:40], "is not a checkpoint of a dyrep run"),
        "first line alone": (good[: good.index(b"\n") + 1], r"is truncated: 0 bytes of \d+"),
        "too long": (good + b"x", r"is damaged: \d+ bytes of \d+"),
        "zeros": (bytes(len(good)), "is not a checkpoint of a dyrep run"),
        "zeros at the end": (good[:-1000] + bytes(1000), "is damaged: its content does not have the digest"),
        "newer": (
            with_body(b"who knows", number=FORMAT + 1),
            rf"has format {FORMAT + 1}, .* up to {FORMAT}: update dyrep",
        ),
        "format zero": (with_body(saved_by_torch(STATE), number=0), "is not a checkpoint of a dyrep run"),
        "no archive": (with_body(b"rubbish"), "holds other things than tensors and plain data"),
        "a list": (with_body(saved_by_torch([1])), "holds a list instead of the state of a run"),
    }


KINDS = list(foreign_files(b"\n" * 10_000))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_not_a_good_checkpoint_is_refused_by_name(kind, folder):
    last = folder.folder / LAST
    content, message = foreign_files(last.read_bytes())[kind]
    last.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"last\.ckpt {message}"):
        read(last)


@pytest.mark.parametrize("kind", KINDS)
def test_without_fallback_nothing_changes_and_with_it_nothing_is_overwritten(kind, folder):
    last = folder.folder / LAST
    content, _ = foreign_files(last.read_bytes())[kind]
    last.write_bytes(content)
    before = picture(folder.folder)
    with pytest.raises(CheckpointError, match="--fallback continues from the one before it; nothing has been changed"):
        folder.load()
    assert picture(folder.folder) == before
    assert folder.load(fallback=True)["epoch"] == 1
    after = picture(folder.folder)
    assert after == {("last.damaged1.ckpt" if name == LAST else name): kept for name, kept in before.items()}


def test_every_flipped_bit_of_the_first_line_and_many_of_the_rest_are_noticed(folder):
    last = folder.folder / LAST
    good = last.read_bytes()
    begin = good.index(b"\n") + 1
    draw = random.Random(0)
    places = [*range(8 * begin), *(draw.randrange(8 * begin, 8 * len(good)) for _ in range(200)), 8 * len(good) - 1]
    for place in places:
        flipped = bytearray(good)
        flipped[place // 8] ^= 1 << place % 8
        last.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"last\.ckpt (is|has)"):
            read(last)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read checkpoint .*none\.ckpt: No such file"):
        read(tmp_path / "none.ckpt")
    with pytest.raises(CheckpointError, match=r"cannot read checkpoint .*: Is a directory"):
        read(tmp_path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("disguise", ["pickle", "torch archive", "old torch format"])
def test_code_in_a_checkpoint_is_never_run(disguise, tmp_path):
    trap = tmp_path / "trap"
    buffer = io.BytesIO()
    if disguise == "pickle":
        pickle.dump(Payload(trap), buffer)
    else:
        torch.save({"model": Payload(trap)}, buffer, _use_new_zipfile_serialization=disguise == "torch archive")
    file = tmp_path / LAST
    file.write_bytes(with_body(buffer.getvalue()))
    with pytest.raises(CheckpointError, match=r"last\.ckpt holds other things than tensors and plain data"):
        read(file)
    assert not trap.exists()
    with pytest.raises(CheckpointError):
        CheckpointFolder(tmp_path).load()
    unpickle = pickle.load if disguise == "pickle" else partial(torch.load, weights_only=False)
    buffer.seek(0)
    unpickle(buffer)
    assert trap.exists()  # so the trap was set


def test_a_state_that_could_not_be_read_again_is_not_written_over_a_good_one(folder):
    """What is no plain data is found when it is written, not when it is needed."""
    before = picture(folder.folder)
    for odd in (Payload("nowhere"), np.float64(0.5)):
        with pytest.raises(
            CheckpointError, match=r"last\.ckpt cannot be written: .* this one would hold .*(mkdir|numpy)"
        ):
            folder.save({**STATE, "odd": odd})
    assert picture(folder.folder)[LAST] == before[LAST]


# -- falling back -----------------------------------------------------------------------------------------------


def test_several_damaged_files_are_all_kept(folder):
    last = folder.folder / LAST
    for number in (1, 2, 3):
        last.write_bytes(b"damaged %d" % number)
        assert folder.load(fallback=True)["epoch"] == 1
        assert not last.exists()
    assert [(folder.folder / f"last.damaged{n}.ckpt").read_bytes() for n in (1, 2, 3)] == [
        b"damaged 1",
        b"damaged 2",
        b"damaged 3",
    ]
    assert read(folder.folder / PREVIOUS)["epoch"] == 1
    folder.save({**STATE, "epoch": 9})
    assert (folder.load()["epoch"], read(folder.folder / PREVIOUS)["epoch"]) == (9, 1)


def test_a_damaged_last_never_becomes_the_previous_one(folder):
    for damage in (b"", b"rubbish", (folder.folder / LAST).read_bytes()[:-1], KIND + b" 1 abc 1x\n"):
        (folder.folder / LAST).write_bytes(damage)
        folder.save({**STATE, "epoch": 9})
        assert (folder.load()["epoch"], read(folder.folder / PREVIOUS)["epoch"]) == (9, 1)


def test_if_both_are_damaged_both_are_named_and_nothing_changes(folder):
    (folder.folder / LAST).write_bytes(b"")
    (folder.folder / PREVIOUS).write_bytes(b"rubbish")
    before = picture(folder.folder)
    with pytest.raises(CheckpointError, match=r"last\.ckpt is not .*previous\.ckpt is not .*nothing has been changed"):
        folder.load(fallback=True)
    assert picture(folder.folder) == before


@pytest.mark.parametrize("fallback", [False, True])
def test_if_there_is_no_other_that_is_said(tmp_path, fallback):
    (tmp_path / LAST).write_bytes(b"")
    with pytest.raises(CheckpointError, match="There is no other checkpoint; nothing has been changed"):
        CheckpointFolder(tmp_path).load(fallback=fallback)
    assert os.listdir(tmp_path) == [LAST]


def test_ranks_that_fall_back_together_do_not_hinder_each_other(folder, monkeypatch):
    (folder.folder / LAST).write_bytes(b"damaged")
    real = os.replace

    def slower(source, target):
        real(source, target)  # another rank was faster
        real(source, target)

    monkeypatch.setattr(os, "replace", slower)
    assert folder.load(fallback=True)["epoch"] == 1
    assert (folder.folder / "last.damaged1.ckpt").read_bytes() == b"damaged"


# -- failures while writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_disk_that_fails_in_a_save_leaves_a_last_and_a_previous_checkpoint(step, call, folder, monkeypatch):
    calls = []
    real = getattr(os, step)

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            raise OSError("no space left on device")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        try:
            folder.save({**STATE, "epoch": 3})
            failed = False
        except OSError:
            failed = True
    if step == "fsync":  # of the second name, of the folder (which may fail), of the new file, of the folder again
        assert (len(calls) >= call, failed) == (True, call in (1, 3))
    else:
        assert (len(calls), failed) == (min(call, 2), call <= 2)
    assert read(folder.folder / LAST)["epoch"] == (2 if failed else 3)
    assert read(folder.folder / PREVIOUS)["epoch"] in (1, 2)
    assert not list(folder.folder.glob("*.part"))
    folder.save({**STATE, "epoch": 4})
    assert read(folder.folder / LAST)["epoch"] == 4
    assert read(folder.folder / PREVIOUS)["epoch"] == (2 if failed else 3)
    assert not list(folder.folder.glob("*.part"))


def test_a_second_attempt_after_a_kill_between_the_two_names_leaves_no_litter(folder):
    os.remove(folder.folder / PREVIOUS)
    os.link(folder.folder / LAST, folder.folder / PREVIOUS)  # and there the process was killed
    folder.save({**STATE, "epoch": 3})
    assert (folder.load()["epoch"], read(folder.folder / PREVIOUS)["epoch"]) == (3, 2)
    assert sorted(os.listdir(folder.folder)) == sorted([LAST, PREVIOUS, BEST])


def test_without_links_the_previous_checkpoint_is_a_copy(folder, monkeypatch):
    def no_links(*_):
        raise OSError("operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    folder.save({**STATE, "epoch": 3})
    assert (folder.load()["epoch"], read(folder.folder / PREVIOUS)["epoch"]) == (3, 2)
    assert not (folder.folder / LAST).samefile(folder.folder / PREVIOUS)


def test_a_run_whose_disk_fails_goes_on_from_its_last_checkpoint(tmp_path, monkeypatch):
    recipe = small_recipe()
    train(recipe, settings(tmp_path / "whole"))
    real, calls = checkpoints.write, []

    def fail(path, state):
        calls.append(path)
        if len(calls) == 9:
            raise OSError("no space left on device")
        return real(path, state)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write", fail)
        with pytest.raises(OSError, match="no space left"):
            train(recipe, settings(tmp_path / "run", checkpoint_minutes=0))
    train(recipe, settings(tmp_path / "run"))
    assert_same(result(tmp_path / "run"), result(tmp_path / "whole"))


# -- runs with a damaged checkpoint -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(small_recipe(), settings(folder))
    return result(folder)


@pytest.fixture
def damaged(tmp_path, monkeypatch):
    """A run whose last checkpoint lacks its end."""
    train_some(small_recipe(), settings(tmp_path, checkpoint_minutes=0), STEPS + 2, monkeypatch)
    last = tmp_path / LAST
    last.write_bytes(last.read_bytes()[:-10])
    return tmp_path


def test_a_run_with_a_damaged_checkpoint_refuses_to_go_on_and_nothing_changes(damaged):
    before = picture(damaged)
    with pytest.raises(CheckpointError, match=r"last\.ckpt is truncated: .*--fallback .*; nothing has been changed"):
        train(small_recipe(), settings(damaged))
    assert picture(damaged) == before


def test_falling_back_goes_on_from_the_checkpoint_before_and_keeps_the_damaged_one(damaged, whole):
    broken = (damaged / LAST).read_bytes()
    train(small_recipe(), settings(damaged, fallback=True))
    assert (damaged / "last.damaged1.ckpt").read_bytes() == broken
    (damaged / "last.damaged1.ckpt").unlink()
    assert_same(result(damaged), whole)


def test_falling_back_is_not_forgotten_when_the_run_is_killed_before_its_next_checkpoint(damaged, whole):
    make_trainer(small_recipe(), damaged, fallback=True).resume()  # and is killed
    previous = (damaged / PREVIOUS).read_bytes()
    with pytest.raises(CheckpointError, match=r"last\.ckpt: No such file.*--fallback continues from the one before it"):
        train(small_recipe(), settings(damaged))
    assert (damaged / PREVIOUS).read_bytes() == previous
    train(small_recipe(), settings(damaged, fallback=True))
    (damaged / "last.damaged1.ckpt").unlink()
    assert_same(result(damaged), whole)
