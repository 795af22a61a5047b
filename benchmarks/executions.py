"""Does it cost accuracy to fold blocks while training? VGG-16 on CIFAR-10, seven branches everywhere from the start.

``python benchmarks/executions.py --data FOLDER --out results/executions.json`` on a machine with a GPU trains the plain
network and one whose every convolution has all seven branches (each with a norm of its own, the batch norm after their
sum kept), fused and folded, with the same recipe and several seeds each. With ``--workers`` above 1 runs share the GPU;
times per epoch are then measured afterwards, in short runs that have it alone. The file is written after every run,
and runs that it holds already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import Any

from dyrep.engine.rundir import hardware, versions
from dyrep.files import replacing

BLOCKS = "--method dbb7 --replace conv"
ARMS = {
    "plain": "--method origin",
    "fused": f"{BLOCKS} --execution fused",
    "folded": f"{BLOCKS} --execution folded",
    "folded, measured in every step": f"{BLOCKS} --execution folded --sigma-every 1",
    "folded, σ differentiated": f"{BLOCKS} --execution folded --sigma-gradient weights --sigma-every 1",
}
DEFAULT_ARMS = ("plain", "fused", "folded")
TIMED_EPOCHS = 3


class Results:
    """What has been found so far, in a file."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self._path, self._lock = path, Lock()
        self._data = {"config": config, "versions": versions(), "hardware": hardware(), "runs": [], "epoch_seconds": {}}
        if path.exists():
            found = json.loads(path.read_text())
            if all(found[key] == self._data[key] for key in ("config", "versions", "hardware")):
                self._data = found
            else:
                sys.exit(f"{path} holds results of another setup; choose another --out, or delete it")

    def has(self, arm: str, seed: int) -> bool:
        """Whether a run is there."""
        return any((run["arm"], run["seed"]) == (arm, seed) for run in self._data["runs"])

    def add(self, run: dict[str, Any]) -> None:
        """Add a run."""
        with self._lock:
            self._data["runs"] = sorted([*self._data["runs"], run], key=lambda run: (run["arm"], run["seed"]))
            self._save()

    def set_time(self, arm: str, seconds: float) -> None:
        """Note the time of an epoch alone on the GPU."""
        self._data["epoch_seconds"][arm] = seconds
        self._save()

    def timed(self, arm: str) -> bool:
        """Whether that time is there."""
        return arm in self._data["epoch_seconds"]

    def _save(self) -> None:
        with replacing(self._path) as temporary:
            temporary.write_text(json.dumps(self._data, indent=1, ensure_ascii=False) + "\n")

    def show(self) -> None:
        """Print a line for every arm."""
        for arm in dict.fromkeys(run["arm"] for run in self._data["runs"]):
            found = [run["test_accuracy"] for run in self._data["runs"] if run["arm"] == arm]
            spread = statistics.stdev(found) if len(found) > 1 else float("nan")
            seconds = self._data["epoch_seconds"].get(arm, float("nan"))
            print(f"{arm:32s} {statistics.mean(found):.2f} ± {spread:.2f} %  {seconds:.2f} s per epoch")


def train(arm: str, seed: int, epochs: int, given: Any) -> dict[str, Any]:
    """One run of `dyrep train`, and what it found."""
    out = given.runs / f"{arm.replace(' ', '-').replace(',', '')}-{seed}-{epochs}"
    words = f"{ARMS[arm]} --seed {seed} --epochs {epochs} --eval-every {epochs} --progress False {given.more}".split()
    command = [sys.executable, "-m", "dyrep", "train", given.recipe, *words, "--out", str(out)]
    if given.data is not None:
        command += ["--data", str(given.data)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    summary = json.loads((out / "summary.json").read_text())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    # the first epochs compile and capture; afterwards all are alike
    seconds = statistics.median(row["train_seconds"] for row in rows[1:] or rows)
    print(f"{arm:32s} seed {seed}: {summary['test_accuracy_folded']:.2f} %, {seconds:.2f} s per epoch", flush=True)
    return {
        "arm": arm,
        "seed": seed,
        "test_accuracy": summary["test_accuracy_folded"],
        "fold_error": summary["fold_error"],
        "train_loss": rows[-1]["train_loss"],
        "epoch_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/executions"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--recipe", default="cifar10-vgg16")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(DEFAULT_ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--more", default="", help="flags for every run, to try things out")
    given = parser.parse_args()
    config = {key: getattr(given, key) for key in ("recipe", "epochs", "more")} | {"flags": ARMS}
    results = Results(given.out, config)
    wanted = [(arm, seed) for seed in range(given.seeds) for arm in given.arms if not results.has(arm, seed)]
    with ThreadPoolExecutor(given.workers) as pool:
        jobs = [pool.submit(train, arm, seed, given.epochs, given) for arm, seed in wanted]
        for job in as_completed(jobs):
            run = job.result()
            if given.workers > 1:
                del run["epoch_seconds"]
            results.add(run)
    for arm in given.arms:
        if not results.timed(arm):
            results.set_time(arm, train(arm, 0, TIMED_EPOCHS, given)["epoch_seconds"])
    results.show()


if __name__ == "__main__":
    main()
