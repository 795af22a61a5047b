"""The folder of a run: what it was, what happened, and how to go on.

==================  ===========================================================================
``config.json``     the recipe and the settings of the start, or of when they were last changed
``sessions.jsonl``  one line per start: when, from where, versions, hardware, settings
``events.jsonl``    every structure update, see `dyrep.read_events`
``metrics.jsonl``   one line per epoch
``last.ckpt``       to go on from; ``previous.ckpt`` is the one before, ``best.ckpt`` the best model
``summary.json``    written at the end, as are the weights in ``plain.safetensors`` and, of detectors and segmentation
                    networks, ``predictions.png``
==================  ===========================================================================
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from dyrep.engine.checkpoints import BEST, LAST, CheckpointFolder, read
from dyrep.engine.recipe import Recipe
from dyrep.errors import CheckpointError, DyRepError
from dyrep.files import PARTIAL
from dyrep.records import (
    CONFIG,
    FORMAT,
    ROWS,
    SESSIONS,
    append_line,
    read_config,
    read_json,
    write_json,
    write_lines,
)

Which = Literal["last", "best"]
"""Which of a run's models: that after the last epoch, or the best one."""
_LOCK_SECONDS = 8
DOWNSTREAM = ("torchmetrics", "faster-coco-eval", "pycocotools", "segmentation-models-pytorch")
VERSIONED = ("torch", "torchvision", "timm", "numpy", "safetensors", "scikit-learn", *DOWNSTREAM)


class RunDirectory:
    """Reads and writes the files of a run.

    Args:
        path: the folder; created when something is written.

    Attributes:
        path: the folder.
        checkpoints: its checkpoints.
        rows: the metrics so far, one dict per epoch.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.checkpoints = CheckpointFolder(self.path)
        self.rows: list[dict[str, Any]] = []

    @property
    def exists(self) -> bool:
        """Whether a run has been started here."""
        return (self.path / CONFIG).exists()

    def create(self, recipe: Recipe, settings: dict[str, Any]) -> None:
        """Start a run that has no checkpoint yet."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(recipe, settings)
        self.restore_rows([])

    def write_config(self, recipe: Recipe, settings: dict[str, Any]) -> None:
        """Note what the run is."""
        self.write_json(CONFIG, {"format": FORMAT, "recipe": recipe.to_dict(), "settings": settings})

    @property
    def readable(self) -> bool:
        """Whether what the run was started with can be read."""
        try:
            self.recipe()
        except DyRepError:
            return False
        return True

    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return Recipe.from_dict(read_config(self.path)["recipe"])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from working on the same run; a lock ends with its process, however that ends."""
        try:
            import fcntl
        except ImportError:  # not on this system
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDONLY)
        try:
            for attempt in range(_LOCK_SECONDS + 1):
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:  # perhaps by workers that have not yet noticed their parent's death
                    if attempt == _LOCK_SECONDS:
                        raise CheckpointError(
                            f"another process is working on the run in {self.path}: wait for it, stop it, or give "
                            "another --out"
                        ) from error
                    time.sleep(1)
                except OSError:  # a file system without locks
                    break
            yield
        finally:
            os.close(handle)

    def clean(self) -> None:
        """Remove what a killed process left half written."""
        for leftover in self.path.glob(f"*{PARTIAL}"):
            leftover.unlink(missing_ok=True)

    def add_session(self, **about: Any) -> None:
        """Note that a process has started to work on this run."""
        session = {"time": round(time.time(), 3), **about, "versions": versions(), "hardware": hardware()}
        append_line(self.path / SESSIONS, session)

    def add_row(self, row: dict[str, Any]) -> None:
        """Add the metrics of an epoch."""
        self.rows.append(row)
        append_line(self.path / ROWS, row)

    def restore_rows(self, rows: list[dict[str, Any]]) -> None:
        """Go back to these metrics; the file is replaced."""
        self.rows = list(rows)
        write_lines(self.path / ROWS, rows)

    def write_json(self, name: str, data: dict[str, Any]) -> None:
        """Write a JSON file of the run, see `dyrep.records.write_json`."""
        write_json(self.path / name, data)

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the run, see `dyrep.records.read_json`."""
        return read_json(self.path / name)

    def model_state(self, which: str = "last") -> dict[str, Any]:
        """What it takes to rebuild a trained model: recipe, shape of the data, structure, weights and epoch.

        Args:
            which: ``"last"`` or ``"best"``; if the run keeps a moving average of the weights, that is meant.
        """
        read_config(self.path)  # says so if this is not a run
        name = {"last": LAST, "best": BEST}[which]
        if not (self.path / name).exists():
            raise CheckpointError(f"{self.path} has no {name} yet: it is written while the run trains")
        state = read(self.path / name)
        if state.get("average") is not None:
            state["model"] = state["average"]
        return state


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    from dyrep import __version__

    found = {"python": platform.python_version(), "dyrep": __version__}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def hardware() -> str:
    """The machine in a few words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
