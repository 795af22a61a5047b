"""Stop at the end of a step when asked to, instead of anywhere."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopRequest:
    """Whether somebody wants the run to end; a second Ctrl-C ends it at once.

    Attributes:
        reason: the signal's name, or "" if nobody does.
    """

    def __init__(self) -> None:
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Note SIGTERM and SIGINT (and SIGUSR1, which batch systems send before their time limit) instead of dying of them.

    Outside the main thread Python delivers no signals, and nothing is changed.

    Example:
        >>> with stop_request() as request:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     request.reason
        'SIGTERM'
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before: dict[int, Any] = {}
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            number = getattr(signal, name)
            before[number] = signal.signal(number, request._receive)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
