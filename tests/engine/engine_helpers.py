"""Small runs that the tests of the training engine share, and what has to be equal for two runs to be the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dyrep.engine import checkpoints, running
from dyrep.engine.progress import SilentReporter
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.recipes import DIGITS
from dyrep.engine.rundir import RunDirectory
from dyrep.engine.signals import StopRequest
from dyrep.engine.trainer import Trainer
from dyrep.engine.world import World
from dyrep.records import EVENTS, PLAIN, ROWS, SUMMARY, read_json

STEPS = 6
"""Steps per epoch of `small_recipe`."""

NOISY_NET = '''
"""A network that draws from every global random generator at every training step."""

import random

import numpy as np
import torch
from torch import nn


class Noise(nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        return x * (1 + 0.1 * random.gauss(0, 1) + 0.1 * float(np.random.standard_normal()) + 0.1 * torch.randn(()))


def build(num_classes, in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.ReLU(),
        Noise(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )
'''


def small_recipe(*, evolution: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """Three epochs of six steps, augmented, with a held-out split; branches are grown and cut after every epoch."""
    method = replace(DIGITS.dyrep, **{"interval": 1, "cut_threshold": 0.0005, **(evolution or {})})
    base = {
        "epochs": 3,
        "batch_size": 64,
        "val_split": 1000,
        "crop": "pad",
        "crop_padding": 1,
        "flip": True,
        "cutout": 2,
    }
    return replace(DIGITS, dyrep=method, **{**base, **changes})


def settings(out: Path, **changes: Any) -> RunSettings:
    return RunSettings(out=out, device="cpu", progress=False, **changes)


class StopAfter(StopRequest):
    """Asks to stop after so many steps: the trainer looks once per step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def __bool__(self) -> bool:
        self._left -= 1
        if self._left <= 0:
            self.reason = "SIGTERM"
        return bool(self.reason)


def train_some(recipe: Recipe, options: RunSettings, steps: int, monkeypatch) -> bool:
    """Start or continue a run and stop it after some steps; whether it was complete before."""

    @contextmanager
    def request():
        yield StopAfter(steps)

    with monkeypatch.context() as patch:
        patch.setattr(running, "stop_request", request)
        try:
            running.train(recipe, options)
        except running.Stopped:
            return False
    return True


def make_trainer(recipe: Recipe, folder: Path, stop: StopRequest | None = None, **changes: Any) -> Trainer:
    world = World(torch.device("cpu"))
    options = settings(folder, **changes)
    return Trainer(recipe, options, world, RunDirectory(folder), SilentReporter(), stop or StopRequest())


def result(run: Path) -> dict[str, Any]:
    """All that a run has to show in the end, less what time it took."""
    with safe_open(run / PLAIN, framework="pt") as file:
        plain = {key: file.get_tensor(key) for key in sorted(file.keys())}
        about = dict(sorted(file.metadata().items()))  # in any order in the file
    shown = {
        "last": checkpoints.read(run / checkpoints.LAST),
        "best": checkpoints.read(run / checkpoints.BEST),
        "plain": {"tensors": plain, "about": about},
        "metrics": lines(run / ROWS),
        "events": lines(run / EVENTS),
        "summary": read_json(run / SUMMARY),
        "files": sorted(set(os.listdir(run)) - {checkpoints.PREVIOUS}),
    }
    return without_times(shown)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if not _is_a_time(key)}
    return [without_times(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_a_time(key: Any) -> bool:
    return key in ("time", "images_per_second") or str(key).endswith("seconds")


def assert_same(ours: Any, theirs: Any, place: str = "run") -> None:
    """Fail, naming the place, unless two nested values are the same, bit for bit and in the same order."""
    assert type(ours) is type(theirs), place
    if isinstance(ours, dict):
        assert list(ours) == list(theirs), place
        for key in ours:
            assert_same(ours[key], theirs[key], f"{place}[{key!r}]")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), f"{place}: {ours} against {theirs}"
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{place}[{index}]")
    elif isinstance(ours, Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), place
        assert torch.equal(_bits(ours), _bits(theirs)), place
    else:
        assert ours == theirs, f"{place}: {ours!r} against {theirs!r}"


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def picture(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder with its content and the time it was written."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


# -- commands in processes of their own -------------------------------------------------------------------------

FLAGS = "--device cpu --batch-size 64 --val-split 1000 --interval 1 --cut-threshold 0.0005 --crop pad --crop-padding 1"
SMALL = f"{FLAGS} --epochs 3 --ema 0.5 --model noisy_net:build"
"""Three epochs of six steps."""
EVERY_STEP = f"{SMALL} --checkpoint-minutes 0"
"""With a checkpoint at every step: the tenth is that after the fourth step of the second epoch."""


class Driver:
    """Runs commands in processes that are killed, see kill_driver.py."""

    def __init__(self, folder):
        script = Path(__file__).with_name("kill_driver.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(script)], cwd=folder, env=environment, text=True, stdin=-1, stdout=-1
        )
        self.output = folder / "output.txt"

    def __call__(self, flags, out, *plan, after=None):
        """The exit status of ``dyrep train`` with these flags, minus the signal if it died of one."""
        arguments = ["train", *flags.split(), "--out", str(out)]
        request = {"arguments": arguments, "plan": plan, "after": after, "output": str(self.output)}
        self.output.unlink(missing_ok=True)
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    @property
    def said(self):
        """What the last command printed."""
        return self.output.read_text()

    def close(self):
        self._process.stdin.close()
        self._process.wait(60)


def start(flags, out, folder):
    """The real command, in a process of its own."""
    words = [sys.executable, "-m", "dyrep", "train", *flags.split(), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    return subprocess.Popen(words, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_until(process, condition):
    """Wait until something is so; whether it was before the process had ended, which it may do only if all is well."""
    end = time.monotonic() + 60
    while not condition():
        if process.poll() is not None:
            assert process.returncode == 0, process.stdout.read().decode()
            return False
        assert time.monotonic() < end
        time.sleep(0.005)
    return True
