"""What happened, as an append-only log with one JSON object per line."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from dyrep.errors import CheckpointError
from dyrep.records import append_line, damaged, jsonable, scan_lines, write_lines
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
            append_line(self.path, event)
        return event

    def restore(self, events: list[dict[str, Any]]) -> None:
        """Continue from exactly these events: the file, whatever it holds, is replaced by them, atomically."""
        self.events = list(events)
        self.next_seq = events[-1]["seq"] + 1 if events else 0
        if self.path is not None and ranks.is_main_rank():
            write_lines(self.path, events)

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
    lines = scan_lines(file)
    parsed = [line.data if line.data is not None and {"type", "seq"} <= line.data.keys() else None for line in lines]
    processes: list[list[dict[str, Any]]] = []  # what each of them has left of the run, one after the other
    for place, event in enumerate(parsed):
        if event is None:
            # logs of earlier versions keep the partial line of every process that was killed
            following = next((later for later in parsed[place + 1 :] if later is not None), None)
            if following is not None and following["type"] != "started":
                raise damaged(file, lines[place])
        elif event["type"] == "started" or not processes:
            processes.append([event])
        elif event["type"] == "resumed":
            *before, current = processes
            new = all(earlier["type"] in ("started", "converted") for earlier in current)
            history = _continued(before, event["seq"]) if before and new else current
            processes[-1] = [*(earlier for earlier in history if earlier["seq"] < event["seq"]), event]
        else:
            processes[-1].append(event)
    return processes[-1] if processes else []


def _continued(before: list[list[dict[str, Any]]], seq: int) -> list[dict[str, Any]]:
    """What goes on of what came before: the last that has reached this number, or else what has come the furthest.

    A process in between may have stopped before it could go on, and then has left no more than its beginning.
    """
    return max(reversed(before), key=lambda events: min(events[-1]["seq"] + 1, seq))
