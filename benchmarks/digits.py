"""Every method on scikit-learn's digits with the same recipe, side by side, on the CPU.

``python benchmarks/digits.py --out results/digits.json`` (``make digits``) gives the second table of docs/methods.md.
The data is so small and so easy that the table shows that every method trains and deploys, not which is best.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runs import run_training

from dyrep.engine.rundir import hardware, versions
from dyrep.records import write_json

RUNS = {
    "origin": "--method origin",
    "repvgg": "--method repvgg",
    "acnet": "--method acnet",
    "dbb": "--method dbb",
    "dbb, norms kept": "--method dbb --replace conv",
    "dbb7": "--method dbb7",
    "mobileone": "--method mobileone",
    "orepa": "--method orepa",
    "repnas": "--method repnas",
    "repnas, norms kept": "--method repnas --replace conv",
    "dyrep": "--method dyrep",
    "dyrep-default": "--method dyrep-default",
    "dyrep4": "--method dyrep4",
    "dyrep-nodep": "--method dyrep-nodep",
    "dyrep-12": "--method dyrep-12",
}
KEPT = (
    "test_accuracy",
    "test_accuracy_folded",
    "fold_error",
    "fold_passed",
    "mean_macs",
    "mean_parameters",
    "structure",
)


def train(name: str, seed: int, folder: Path, more: str) -> dict[str, Any]:
    words = f"{RUNS[name]} --seed {seed} --device cpu {more}".split()
    summary, _ = run_training("digits", words, folder / f"{name}-{seed}", env={"OMP_NUM_THREADS": "1"})
    print(f"{name:20s} seed {seed}: {summary['test_accuracy_folded']:.2f} %", flush=True)
    return {"seed": seed, **{key: summary[key] for key in KEPT}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/digits.json"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    parser.add_argument("--more", default="", help="flags for every run, to try things out")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.workers) as pool:
        jobs = {
            name: [pool.submit(train, name, seed, Path(folder), given.more) for seed in range(given.seeds)]
            for name in RUNS
        }
        found = {name: [job.result() for job in each] for name, each in jobs.items()}
    rows = {}
    for name, runs in found.items():
        accuracies = [run["test_accuracy_folded"] for run in runs]
        rows[name] = {
            "flags": RUNS[name],
            "accuracy": statistics.mean(accuracies),
            "accuracy_sd": statistics.stdev(accuracies) if len(runs) > 1 else 0.0,
            "runs": runs,
        }
    setup = {
        "command": "make digits",
        "flags": given.more,
        "seeds": given.seeds,
        "hardware": f"CPU of: {hardware()}",
        "versions": versions(),
    }
    write_json(given.out, {"setup": setup, "rows": rows})


if __name__ == "__main__":
    main()
