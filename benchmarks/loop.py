"""How fast the training loop is: VGG-16 on images of CIFAR's shape, captured and eager, with scoring and updates.

``python benchmarks/loop.py --out results/loop.json`` (``make loop``) on a machine with a GPU gives the table of speeds
in docs/training.md. The images are random; what they show does not matter for speed. Times are medians over epochs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyrep.engine.progress import SilentReporter
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.recipes import recipe
from dyrep.engine.rundir import RunDirectory, hardware, versions
from dyrep.engine.signals import StopRequest
from dyrep.engine.trainer import Trainer
from dyrep.engine.world import World, pick_device
from dyrep.records import write_json


def make_images(folder: Path) -> None:
    """Random images in the layout of CIFAR-10."""
    random = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 50_000), ("test", 10_000)):
        arrays[f"{split}_images"] = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"{split}_labels"] = random.integers(0, 10, count)
    np.savez(folder / "cifar10.npz", **arrays)


def run(chosen: Recipe, data: Path, device: str | None, graph: bool | None = None) -> list[dict[str, Any]]:
    """Train and return the metrics of every epoch."""
    with tempfile.TemporaryDirectory() as folder:
        settings = RunSettings(out=Path(folder), data=data, graph=graph, checkpoint_minutes=1e9)
        directory = RunDirectory(folder)
        directory.create(chosen, {})
        trainer = Trainer(chosen, settings, World(pick_device(device)), directory, SilentReporter(), StopRequest())
        trainer.train()
        return directory.rows


def seconds(rows: list[dict[str, Any]]) -> float:
    """Time of an epoch of training once everything is captured."""
    return statistics.median(row["train_seconds"] for row in rows[2:])


def measure(data: Path, device: str | None, epochs: int, held_out: int) -> dict[str, Any]:
    # evaluation is not what is measured here; it is made once, at the end
    base = replace(recipe("cifar10-vgg16"), method="origin", epochs=epochs, eval_every=epochs, val_split=held_out)
    found: dict[str, Any] = {"plain": seconds(run(base, data, device))}
    found["plain, eager"] = seconds(run(base, data, device, graph=False))
    for score in ("synflow", "invariant"):
        for every in (1, 10):
            # never due, so that the structure stays plain and scoring is all that is added
            evolution = replace(base.dyrep, interval=epochs - 1, score=score, score_every=every)
            rows = run(replace(base, method="dyrep", dyrep=evolution), data, device)[:-1]
            found[f"{score}, every {every}"] = seconds(rows)
    found["plain, again"] = seconds(run(base, data, device))
    evolution = replace(base.dyrep, interval=3, score="invariant")
    rows = run(replace(base, method="dyrep", epochs=4 * 3 + 1, dyrep=evolution), data, device)
    updates = []
    for row in rows:
        if row["epoch"] % 3 == 0 and row["epoch"] < len(rows) - 1:
            first, *steady = (later["train_seconds"] for later in rows[row["epoch"] : row["epoch"] + 3])
            recapture = max(first - statistics.median(steady), 0.0)
            update = {"epoch": row["epoch"], "update": row["update_seconds"], "recapture": round(recapture, 3)}
            updates.append({**update, "branches": rows[row["epoch"]]["branches"]})
    found["updates"] = updates
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--hold-out", type=int, default=0, help="training images to leave out, to try this quickly")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder))
        found = measure(Path(folder), arguments.device, arguments.epochs, arguments.hold_out)
    setup = {
        "command": "python benchmarks/loop.py --out results/loop.json",
        "recipe": "cifar10-vgg16, bf16, channels_last, fused SGD, random images",
        "epochs": arguments.epochs,
        "hardware": hardware(),
        "versions": versions(),
        "seconds": round(time.perf_counter() - began, 1),
    }
    write_json(arguments.out, {"setup": setup, **found})
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
