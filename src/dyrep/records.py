"""What is written down as JSON, and how it is read again: the text files of a run, logs, and results.

JSON has no word for NaN and infinities. Whoever writes goes through `jsonable`, which makes text of them, and whoever
reads numbers that may be such goes through `finite`, or through ``float``, which understands that text.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dyrep.errors import CheckpointError, DyRepError
from dyrep.files import replacing

FORMAT = 1
"""Version of the folder of a run."""

CONFIG = "config.json"
SESSIONS = "sessions.jsonl"
EVENTS = "events.jsonl"
ROWS = "metrics.jsonl"
SUMMARY = "summary.json"
PLAIN = "plain.safetensors"
PREDICTIONS = "predictions.png"


class Line(NamedTuple):
    """A line of a file of JSON objects.

    Attributes:
        number: its place in the file, from 1.
        text: what it says.
        data: the object that this is; None if it is none.
    """

    number: int
    text: str
    data: dict[str, Any] | None


# -- reading ----------------------------------------------------------------------------------------------------


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: it is not there, or it is damaged.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_json(Path(folder) / SUMMARY, {"test_map": math.nan})
        ...     read_json(Path(folder) / SUMMARY)
        {'test_map': 'nan'}
    """
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"there is no file {file}")
    try:
        data = json.loads(file.read_bytes())
    except ValueError as error:  # no JSON, or not even text
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} is damaged: it holds no JSON object")
    return data


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What the run in a folder was started with: its ``recipe`` and its ``settings``.

    Raises:
        CheckpointError: there is no run, or what it was started with is damaged or of another version.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_json(Path(folder) / CONFIG, {"format": FORMAT, "recipe": {"lr": 0.1}, "settings": {}})
        ...     read_config(folder)["recipe"]
        {'lr': 0.1}
    """
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{folder} is not the folder of a run: it has no {CONFIG}")
    config = read_json(file)
    if config.get("format") != FORMAT:
        raise CheckpointError(f"{file} has format {config.get('format')!r}, this version of dyrep reads {FORMAT}")
    for part in ("recipe", "settings"):
        if not isinstance(config.get(part), dict):
            raise CheckpointError(f"{file} is damaged: it has no {part}")
    return config


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    r"""Read a file of one JSON object per line; of a file that is not there, nothing.

    A last line that is broken was cut off when its process was killed, and is passed over.

    Raises:
        CheckpointError: a line before the last is damaged.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / ROWS).write_text('{"epoch": 1}\n{"epo')
        ...     read_lines(Path(folder) / ROWS)
        [{'epoch': 1}]
    """
    lines = scan_lines(path) if Path(path).is_file() else []
    for line in lines[:-1]:
        if line.data is None:
            raise damaged(path, line)
    return [line.data for line in lines if line.data is not None]


def scan_lines(path: str | os.PathLike[str]) -> list[Line]:
    r"""All lines of a file that are not empty, broken ones too, for readers that know which of these may be.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / EVENTS).write_text('{"seq": 0}\n\n{"se')
        ...     scan_lines(Path(folder) / EVENTS)
        [Line(number=1, text='{"seq": 0}', data={'seq': 0}), Line(number=3, text='{"se', data=None)]
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")  # a character, too, can be cut off
    return [Line(number, line, _parsed(line)) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def damaged(path: str | os.PathLike[str], line: Line) -> CheckpointError:
    """The error that says which line of which file is broken, to be raised.

    Example:
        >>> damaged("metrics.jsonl", Line(2, "rubbish", None))
        CheckpointError("line 2 of metrics.jsonl is damaged: 'rubbish'")
    """
    return CheckpointError(f"line {line.number} of {path} is damaged: {line.text[:80]!r}")


def finite(value: Any) -> float | None:
    """A number as it was written down; None where there is none, and for NaN and infinities in either form.

    Example:
        >>> finite(31.5), finite("nan"), finite(math.inf), finite(None)
        (31.5, None, None, None)
    """
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


# -- writing ----------------------------------------------------------------------------------------------------


def jsonable(value: Any) -> Any:
    """Data without the numbers that JSON has no word for, which become text.

    Example:
        >>> jsonable({"map": math.nan, "loss": 1.0})
        {'map': 'nan', 'loss': 1.0}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value


def write_json(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Write a JSON file, atomically; its folder is made if need be.

    Raises:
        DyRepError: it cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_json(Path(folder) / "new" / "found.json", {"rows": [1, 2]})
        ...     read_json(Path(folder) / "new" / "found.json")
        {'rows': [1, 2]}
    """
    write_text(path, json.dumps(jsonable(dict(data)), indent=2, allow_nan=False) + "\n")


def write_lines(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by one JSON object per line, atomically.

    Raises:
        DyRepError: it cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_lines(Path(folder) / ROWS, [{"epoch": 1}, {"epoch": 2}])
        ...     read_lines(Path(folder) / ROWS)
        [{'epoch': 1}, {'epoch': 2}]
    """
    write_text(path, "".join(_line(row) for row in rows))


def append_line(path: str | os.PathLike[str], row: Mapping[str, Any]) -> None:
    r"""Add a JSON object to a file of one per line; a partial line that a killed process left gives way to it.

    Raises:
        DyRepError: it cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / ROWS).write_text('{"epoch": 1}\n{"epo')
        ...     append_line(Path(folder) / ROWS, {"epoch": 2})
        ...     read_lines(Path(folder) / ROWS)
        [{'epoch': 1}, {'epoch': 2}]
    """
    with _writing(path):
        unended = _mend(Path(path))
        with open(path, "a", encoding="utf-8") as file:
            file.write(("\n" if unended else "") + _line(row))  # one call, so that a kill spoils one line at most


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file, atomically; its folder is made if need be.

    Raises:
        DyRepError: it cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_text(Path(folder) / "note.md", "hello")
        ...     (Path(folder) / "note.md").read_text()
        'hello'
    """
    with _writing(path), replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def _writing(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DyRepError(f"{path} cannot be written: {error}") from error


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(jsonable(dict(row)), allow_nan=False) + "\n"


def _mend(path: Path) -> bool:
    """Whether the last line is whole but has no end; one that is not whole is taken away.

    Left in its place it would soon be a broken line in the middle, which readers take for damage.
    """
    if not path.exists() or not path.stat().st_size:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return False
        file.seek(0)
        content = file.read()
    start = content.rfind(b"\n") + 1
    if _parsed(content[start:].decode(errors="replace")) is not None:
        return True
    os.truncate(path, start)
    return False
