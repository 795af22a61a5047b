"""Runs the command ``dyrep`` in processes that get a signal at a chosen moment.

This process imports everything once. For every line of its standard input, a JSON object with ``arguments``, ``plan``,
``after`` and ``output``, it forks one that runs the command, and answers with its exit status: starting Python anew for
each would take seconds.

A plan is a list of ``[signal, moment, file, count]``: at the ``count``-th time that the moment comes, the process sends
itself the signal. Moments are

- ``expanded``: right after a convolution was given branches, in the middle of a structure update; the file is "".
- ``half written``: with half of what is being written to the file on the disk. A checkpoint is written in two parts.
- ``before rename`` and ``after rename``: of the temporary file that becomes the file; after is before the folder is
  synchronised.
- ``linked``: the last checkpoint has got its second name, but not as the previous one yet.

``after`` is a number of seconds after which the process is killed from outside, or null.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from dyrep import files, records, updating
from dyrep.cli.flags import parse_training
from dyrep.cli.main import main
from dyrep.engine import checkpoints
from dyrep.engine.setup import make_data
from dyrep.engine.world import World


class Moment:
    """Counts how often a moment has come, and sends the signal when it is time."""

    def __init__(self, number: str, moment: str, file: str, count: int) -> None:
        self._number, self._left = signal.Signals[number], count
        self._file = file
        getattr(self, "_patch_" + moment.replace(" ", "_"))()

    def _concerns(self, path: object) -> bool:
        return os.path.basename(os.fspath(path)).startswith(self._file)  # a temporary name begins with the final one

    def _come(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._number)

    def _patch_expanded(self) -> None:
        real = updating.expand_

        def expand_(*args, **kwargs):
            edits = real(*args, **kwargs)
            self._come()
            return edits

        updating.expand_ = expand_

    def _patch_half_written(self) -> None:
        moment = self

        class Torn:
            def __init__(self, file):
                self._real = file

            def __enter__(self):
                self._real.__enter__()
                return self

            def __exit__(self, *error):
                return self._real.__exit__(*error)

            def write(self, data):
                half = len(data) // 2
                self._real.write(data[:half])
                self._real.flush()
                moment._come()
                self._real.write(data[half:])

        for module in (checkpoints, records):
            opened = getattr(module, "open", open)
            module.open = lambda path, mode, *args, real=opened, **kwargs: (
                Torn(real(path, mode, *args, **kwargs))
                if moment._concerns(path) and mode in ("a", "wb")
                else real(path, mode, *args, **kwargs)
            )

    def _patch_before_rename(self) -> None:
        real = os.replace
        files.os.replace = lambda source, target: (
            self._come() if self._concerns(target) else None,
            real(source, target),
        )

    def _patch_after_rename(self) -> None:
        real = os.replace
        files.os.replace = lambda source, target: (
            real(source, target),
            self._come() if self._concerns(target) else None,
        )

    def _patch_linked(self) -> None:
        real = os.link
        checkpoints.os.link = lambda source, target: (real(source, target), self._come())


def run(arguments: list[str], plan: list, output: str) -> None:
    """In the forked process: run the command and end as Python would."""
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    status = 0
    try:
        for entry in plan:
            Moment(*entry)
        main(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def wait(child: int, after: float | None) -> int:
    """The exit status of a process, minus the signal if it died of one; it is killed if it takes too long."""
    end = time.monotonic() + (120 if after is None else after)
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.001)


def import_everything() -> None:
    """Import what a run imports when it is needed."""
    parsed = parse_training([])
    assert parsed is not None
    make_data(*parsed, World(torch.device("cpu")))
    torch.optim.SGD([torch.zeros(1)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    import_everything()
    for line in sys.stdin:
        request = json.loads(line)
        Path(request["output"]).parent.mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if child == 0:
            run(request["arguments"], request["plan"], request["output"])
        print(wait(child, request["after"]), flush=True)
