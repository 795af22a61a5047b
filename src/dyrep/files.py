"""Files that are either there whole or not at all."""

from __future__ import annotations

import os
import secrets
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
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "new" / "note.txt") as temporary:
        ...         _ = temporary.write_text("hello")
        ...     (Path(folder) / "new" / "note.txt").read_text()
        'hello'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    temporary.touch(exist_ok=False)
    try:
        yield temporary
        _sync(temporary)
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
