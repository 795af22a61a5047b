"""Files that are either there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".part"
"""Ending of files that are being written; one that is left over belongs to a process that was killed."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file atomically: what the body writes to the temporary path replaces ``path`` when it is on the disk.

    After an error, or a kill at any moment, ``path`` is what it was before.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "new" / "note.txt") as temporary:
        ...         _ = temporary.write_text("hello")
        ...     (Path(folder) / "new" / "note.txt").read_text()
        'hello'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=PARTIAL)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _sync(temporary)
        temporary.chmod(0o666 & ~_umask())  # a temporary file is private; this one is not
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)  # the new name, too, has to survive a power cut


def _sync(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # some systems do not open folders
        return
    try:
        os.fsync(handle)
    except OSError:  # nor synchronise them
        if not path.is_dir():
            raise
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
