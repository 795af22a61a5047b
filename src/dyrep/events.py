"""What happened, as an append-only log with one JSON object per line."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dyrep.errors import CheckpointError
from dyrep.files import replacing
from dyrep.surgery import ranks


class EventLog:
    """Keeps events in memory and, given a path, appends each to a file as it happens.

    Only the main rank writes. A line is written by one call, so a crash can at worst leave a partial last line, which
    `read_events` passes over and the next line repairs.

    Args:
        path: file to append to; its folder is created.

    Example:
        >>> log = EventLog()
        >>> log.write("update", layer="conv1")["seq"]
        0
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.events: list[dict[str, Any]] = []
        self.next_seq = 0
        if self.path is not None and ranks.is_main_rank():
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, **data: Any) -> dict[str, Any]:
        """Add an event."""
        event = {"seq": self.next_seq, "type": kind, "time": round(time.time(), 3), **jsonable(data)}
        self.next_seq += 1
        self.events.append(event)
        if self.path is not None and ranks.is_main_rank():
            append_line(self.path, json.dumps(event, allow_nan=False))
        return event

    def restore(self, events: list[dict[str, Any]]) -> None:
        """Continue from exactly these events: the file, whatever it holds, is replaced by them, atomically."""
        self.events = list(events)
        self.next_seq = events[-1]["seq"] + 1 if events else 0
        if self.path is not None and ranks.is_main_rank():
            write_lines(self.path, (json.dumps(event, allow_nan=False) for event in events))

    def move_to(self, path: str | os.PathLike[str]) -> None:
        """Keep the log in this file from now on; whatever it holds is replaced by the events so far, atomically."""
        self.path = Path(path)
        self.restore(self.events)

    def resume(self, seq: int, **data: Any) -> None:
        """Continue from an earlier point: what was logged after it did not happen in the run that goes on."""
        self.events = [event for event in self.events if event["seq"] < seq]
        self.next_seq = seq
        self.write("resumed", **data)
        if self.path is not None and ranks.is_main_rank():
            self.events = read_events(self.path)


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    r"""Read a log: the events of the run that was completed in the end, without those undone by resuming.

    Raises:
        CheckpointError: the file is missing, or a line is damaged that was not the last of its process.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "events.jsonl"
        ...     _ = path.write_text('{"type": "started", "seq": 0}\n{"type": "update", "seq": 1}\n')
        ...     [event["type"] for event in read_events(path)]
        ['started', 'update']
    """
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"no event log at {file}")
    lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    parsed = [_parse(line) for line in lines]
    before: list[dict[str, Any]] = []  # events of processes that went before
    events: list[dict[str, Any]] = []
    for number, event in enumerate(parsed):
        if event is None:
            # processes that were killed one after the other may have left a partial line each
            following = next((later for later in parsed[number + 1 :] if later is not None), None)
            if following is not None and following["type"] != "started":
                raise CheckpointError(f"line {number + 1} of {file} is damaged: {lines[number][:80]!r}")
        elif event["type"] == "started":
            before, events = events, [event]
        elif event["type"] == "resumed":
            history = before if len(events) == 1 else events
            events = [*(earlier for earlier in history if earlier["seq"] < event["seq"]), event]
        else:
            events.append(event)
    return events


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace a text file by these lines, atomically."""
    with replacing(path) as temporary:
        temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and {"type", "seq"} <= event.keys() else None


def append_line(path: Path, line: str) -> None:
    """Add a line to a text file; a partial one that a killed process left is ended first."""
    broken = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
    with open(path, "a", encoding="utf-8") as file:
        file.write(("\n" if broken else "") + line + "\n")


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


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
