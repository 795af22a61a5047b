"""Checkpoints of a run: written whole or not at all, checked when they are read, never unpickled blindly.

A file is one line of text (kind, format, digest and length of what follows) and then a `torch.save` archive of tensors
and plain data. The digest tells a damaged file from a good one; the archive is loaded with ``weights_only=True``.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dyrep.errors import CheckpointError
from dyrep.files import replacing

KIND = b"dyrep-checkpoint"
FORMAT = 1
LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"


def write(path: str | os.PathLike[str], state: Mapping[str, Any]) -> Path:
    """Write a checkpoint atomically.

    Args:
        path: the file, replaced if it exists.
        state: tensors and plain data, nested.

    Raises:
        CheckpointError: there is something else in it, so that it could not be read again; nothing is written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read(write(Path(folder) / "a.ckpt", {"epoch": 3}))
        {'epoch': 3}
    """
    path = Path(path)
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    buffer.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if unsafe:
        raise CheckpointError(
            f"{path} cannot be written: a checkpoint is tensors and plain data, and this one would hold "
            f"{', '.join(sorted(unsafe))}, which cannot be read without running code. Has the model extra state?"
        )
    body = buffer.getbuffer()
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(b"%s %d %s %d\n" % (KIND, FORMAT, hashlib.sha256(body).hexdigest().encode(), len(body)))
        file.write(body)
    return path


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint, with every tensor on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged, not one of ours or from a newer version; message says which.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            header, body = file.readline(256), file.read()
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {error.strerror}") from error
    words = header.split()
    if not _is_header(words):
        raise CheckpointError(f"{path} is not a checkpoint of a dyrep run (it begins with {header[:24]!r})")
    if int(words[1]) > FORMAT:
        raise CheckpointError(
            f"{path} has format {int(words[1])}, and this version of dyrep reads up to {FORMAT}: update dyrep"
        )
    length = int(words[3])
    if len(body) != length:
        what = "truncated" if len(body) < length else "damaged"
        raise CheckpointError(f"{path} is {what}: {len(body)} bytes of {length}")
    if hashlib.sha256(body).hexdigest().encode() != words[2]:
        raise CheckpointError(f"{path} is damaged: its content does not have the digest that was written with it")
    try:
        state = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except Exception as error:  # the digest is right, so it was written like this
        raise CheckpointError(
            f"{path} holds other things than tensors and plain data, which could run code: it was not written by dyrep"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__} instead of the state of a run")
    return state


class CheckpointFolder:
    """The checkpoints of one run: the last, the one before it, and the best.

    Args:
        folder: where they are.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = CheckpointFolder(folder)
        ...     for epoch in range(3):
        ...         checkpoints.save({"epoch": epoch})
        ...     checkpoints.load(), read(Path(folder) / PREVIOUS)
        ({'epoch': 2}, {'epoch': 1})
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    @property
    def exists(self) -> bool:
        """Whether there is anything to continue from."""
        return any((self.folder / name).exists() for name in (LAST, PREVIOUS))

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the last checkpoint; what was the last becomes the previous one, if it is whole."""
        last = self.folder / LAST
        if last.exists() and not _is_damaged(last):
            _link(last, self.folder / PREVIOUS)
        write(last, state)

    def save_best(self, state: Mapping[str, Any]) -> None:
        """Write the best checkpoint."""
        write(self.folder / BEST, state)

    def load(self, *, fallback: bool = False) -> dict[str, Any]:
        """Read the last checkpoint.

        Args:
            fallback: if it cannot be read, read the previous one. The damaged file is kept, under another name.

        Raises:
            CheckpointError: nothing can be read; the message says what to do.
        """
        last, previous = self.folder / LAST, self.folder / PREVIOUS
        try:
            return read(last)
        except CheckpointError as error:
            if not fallback or not previous.exists():
                remedy = (
                    "--fallback continues from the one before it"
                    if previous.exists()
                    else "There is no other checkpoint"
                )
                raise CheckpointError(f"{error}. {remedy}; nothing has been changed") from error
            try:
                state = read(previous)
            except CheckpointError as second:
                raise CheckpointError(f"{error}, and {second}; nothing has been changed") from error
        with suppress(FileNotFoundError):  # it may be what is wrong, or another rank has been faster
            os.replace(last, _free_name(last))
        return state


def _is_header(words: list[bytes]) -> bool:
    """Whether these are the words a checkpoint begins with, of whatever format."""
    return len(words) == 4 and words[0] == KIND and words[1].isdigit() and int(words[1]) > 0 and words[3].isdigit()


def _is_damaged(path: Path) -> bool:
    """Whether a file is visibly not whole; its digest is not computed, which would read all of it at every save."""
    with open(path, "rb") as file:
        words = file.readline(256).split()
        begin = file.tell()
    return not _is_header(words) or path.stat().st_size - begin != int(words[3])


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, atomically; where the file system has no links, copy it."""
    if target.exists() and target.samefile(source):  # a process was killed right after this
        return
    with replacing(target) as temporary:
        temporary.unlink()
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.stem}.damaged{number}{path.suffix}")).exists():
        number += 1
    return free
