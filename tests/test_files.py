"""A file is there whole or not at all, whatever goes wrong while it is written."""

import os
import signal
import stat
import subprocess
import sys

import pytest

from dyrep import files
from dyrep.files import PARTIAL, replacing


@pytest.fixture
def old(tmp_path):
    file = tmp_path / "note.txt"
    file.write_text("old")
    return file


def test_the_new_content_replaces_the_old(old):
    with replacing(old) as temporary:
        temporary.write_text("new")
        assert old.read_text() == "old"
    assert old.read_text() == "new"
    assert os.listdir(old.parent) == ["note.txt"]


def test_folders_are_made(tmp_path):
    with replacing(tmp_path / "a" / "b" / "note.txt") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "a" / "b" / "note.txt").read_text() == "new"


def test_the_temporary_file_is_beside_the_final_one_and_named_as_unfinished(old):
    with replacing(old) as temporary:
        assert temporary.parent == old.parent
        assert temporary.name.startswith("note.txt")
        assert temporary.suffix == PARTIAL


def test_content_reaches_the_disk_before_the_name_and_the_name_before_the_end(old, monkeypatch):
    order = []
    real = os.fsync, os.replace

    def fsync(handle):
        order.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        real[0](handle)

    def replace(source, target):
        order.append(("replace", os.fspath(target)))
        real[1](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    with replacing(old) as temporary:
        temporary.write_text("new")
    assert order == [("fsync", str(temporary)), ("replace", str(old)), ("fsync", str(old.parent))]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_old_file_and_no_litter(old, step, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="no space left"), replacing(old) as temporary:
        temporary.write_text("new")
    assert old.read_text() == "old"
    assert os.listdir(old.parent) == ["note.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_or_interruption_while_writing_leaves_the_old_file_and_no_litter(old, error):
    def write(temporary):
        temporary.write_text("ne")
        raise error

    with pytest.raises(error), replacing(old) as temporary:
        write(temporary)
    assert old.read_text() == "old"
    assert os.listdir(old.parent) == ["note.txt"]


def test_a_file_system_that_does_not_synchronise_folders_is_good_enough(old, monkeypatch):
    real = os.fsync

    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError("invalid argument")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with replacing(old) as temporary:
        temporary.write_text("new")
    assert old.read_text() == "new"


def test_the_file_has_the_permissions_of_any_other(tmp_path):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "note.txt") as temporary:
            temporary.write_text("new")
        assert stat.S_IMODE((tmp_path / "note.txt").stat().st_mode) == 0o640
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("place", "content", "litter"),
    [("while writing", "old", 1), ("os.fsync", "old", 1), ("os.replace", "old", 1), ("after os.replace", "new", 0)],
)
def test_a_kill_leaves_the_old_file_whole_or_the_new_one(old, place, content, litter):
    """The module needs nothing of the package, so a process of its own starts at once."""
    script = f"""
import os, runpy, signal, sys
replacing = runpy.run_path({files.__file__!r})["replacing"]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
real = os.replace
place = {place!r}
if place == "after os.replace":
    os.replace = lambda *names: (real(*names), die())
elif place != "while writing":
    setattr(os, place[3:], die)
with replacing({str(old)!r}) as temporary:
    temporary.write_text("ne" if place == "while writing" else "new")
    if place == "while writing":
        die()
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert old.read_text() == content
    left = sorted(name for name in os.listdir(old.parent) if name != "note.txt")
    assert len(left) == litter
    assert all(name.startswith("note.txt") and name.endswith(PARTIAL) for name in left)
