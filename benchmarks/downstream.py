"""Does evolution carry over to other tasks? The paper's Table 5 on small data: backbones (C), tasks (D), both (C+D).

``python benchmarks/downstream.py --data FOLDER --out results/downstream.json`` on a machine with a GPU, where FOLDER
holds ``tiny-imagenet-100``, ``BCCD`` and ``CamVid``. ResNet-18 backbones are trained on Tiny-ImageNet (100 classes) as
they are, with DBB blocks and with DyRep, and folded. Then detectors (Faster R-CNN with FPN, BCCD) and segmentation
networks (PSPNet, CamVid) are trained from them, plain or with DyRep. The file is written after every run, and runs that
it holds already are not repeated; runs that were stopped go on.

``--parts backbones``, ``detection``, ``segmentation`` and ``times`` do one part of it, in this order, so that each fits
into a few minutes. With ``--workers`` above 1 runs share the GPU; then times per epoch are measured in the
part ``times``, in runs that have it alone.

Nothing is chosen by these runs, so they look at the test sets. A seed is that of the backbone and of the task: every
run of a row starts from a backbone of its own, and rows are compared seed by seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runs import ResultFile, paired, run_training, told

from dyrep.report.history import epoch_seconds
from dyrep.reproduce import STUDIES
from dyrep.reproduce.scales import DRAWN
from dyrep.wording import mean_and_spread

PAPER = STUDIES["downstream"].rows
ARMS = {
    **{row.label.replace(", ", "-"): (row.training.method, row.tasks["mAP"].method) for row in PAPER},
    "from scratch": (None, "origin"),
}
"""Method of the backbone and of the task, by the name of a row; those of the paper come first."""
PARTS = ("backbones", "detection", "segmentation", "times")


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        recipe: of `dyrep train`.
        metric: key of its metric in the summary of a run.
        smoke: flags that make it tiny, on the same data (the settings in `DRAWN` are for drawn pictures).
    """

    recipe: str
    metric: str
    smoke: str

    @property
    def folder(self) -> str:
        """Of its data, in the folder of all data."""
        return DRAWN[self.recipe][0]


BACKBONE = Task(
    "tiny-imagenet-resnet18",
    "accuracy",
    "--image-size 16 --crop-padding 2 --batch-size 8 --lr 0.01 --calibration-batches 1",
)
TASKS = {
    "detection": Task(
        "bccd-fasterrcnn",
        "map",
        "--image-size 64 --batch-size 4 --lr 0.005 --warmup-epochs 0 --boxes-per-image 8 --calibration-batches 1",
    ),
    "segmentation": Task("camvid-pspnet", "miou", "--image-size 32 --batch-size 4 --lr 0.01 --calibration-batches 1"),
}
EPOCHS = {"backbones": (20, 2), "detection": (24, 3), "segmentation": (80, 8)}
"""Epochs, and epochs between updates."""
SMOKE = (2, 1)


class Results(ResultFile):
    """What has been found so far, in a file."""

    def has(self, part: str, **about: Any) -> bool:
        """Whether there is a run like this."""
        return any(all(run[key] == value for key, value in about.items()) for run in self.data[part])

    def add(self, part: str, run: dict[str, Any]) -> None:
        """Add a run."""
        with self.lock:
            self.data[part] = sorted([*self.data[part], run], key=_place)
            self.save()

    def set_time(self, task: str, method: str, seconds: float) -> None:
        """Note the time of an epoch of a task, alone on the GPU."""
        self.data["epoch_seconds"].setdefault(task, {})[method] = seconds
        self.save()


def _place(run: dict[str, Any]) -> tuple[Any, ...]:
    return (
        run.get("task", ""),
        list(ARMS).index(run["arm"]) if "arm" in run else 0,
        run.get("method", ""),
        run["seed"],
    )


class Bench:
    """Trains what is missing.

    Args:
        given: the command line.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.epochs = {part: SMOKE if given.smoke else EPOCHS[part] for part in EPOCHS}
        if given.backbone_epochs:
            self.epochs["backbones"] = (given.backbone_epochs, self.epochs["backbones"][1])
        epochs = {part: list(found) for part, found in self.epochs.items()}
        config = {"smoke": given.smoke, "more": given.more, "epochs": epochs}
        self.results = Results(given.out, config, {"backbones": [], "runs": [], "epoch_seconds": {}})

    def backbones(self) -> None:
        """Train the classifiers of all methods and seeds."""
        methods = [method for method in dict.fromkeys(ARMS[arm][0] for arm in self.given.arms) if method is not None]
        self._side_by_side(
            partial(self._classifier, method, seed)
            for seed in self.given.seeds
            for method in methods
            if not self.results.has("backbones", method=method, seed=seed)
        )

    def tasks(self, names: Sequence[str]) -> None:
        """Train all rows and seeds of tasks."""
        self._side_by_side(
            partial(self._arm, name, arm, seed)
            for name in names
            for seed in self.given.seeds
            for arm in self.given.arms
            if not self.results.has("runs", task=name, arm=arm, seed=seed)
        )

    def _side_by_side(self, runs: Iterable[Callable[[], None]]) -> None:
        failed = []
        with ThreadPoolExecutor(self.given.workers) as pool:
            for job in as_completed([pool.submit(run) for run in runs]):
                try:
                    job.result()
                except RuntimeError as error:  # the others are worth having all the same
                    failed.append(str(error))
        if failed:
            sys.exit("\n".join(failed))

    def times(self) -> None:
        """Measure an epoch of every task and method alone; with one worker the runs themselves have shown it."""
        seed = self.given.seeds[0]
        for name, task in TASKS.items():
            for method in dict.fromkeys(ARMS[arm][1] for arm in self.given.arms):
                if method in self.results.data["epoch_seconds"].get(name, {}):
                    continue
                out = self.given.runs / f"time-{name}-{method}"
                _, rows = self._train(task, name, out, method, seed, backbone=("origin", seed))
                self.results.set_time(name, method, epoch_seconds(rows))
                print(f"{name}, {method}: {epoch_seconds(rows):.2f} s per epoch", flush=True)

    def _classifier(self, method: str, seed: int) -> None:
        summary, rows = self._train(BACKBONE, "backbones", self._backbone(method, seed), method, seed)
        about = {"method": method, "seed": seed, "shared_by": self.given.workers}
        self.results.add("backbones", {**about, **_found(BACKBONE, summary, rows)})
        self._say(f"backbone {method}, seed {seed}", BACKBONE, summary)

    def _arm(self, name: str, arm: str, seed: int) -> None:
        before, method = ARMS[arm]
        backbone = None if before is None else (before, seed)
        out = self.given.runs / f"{name}-{arm.replace(' ', '-')}-{seed}"
        summary, rows = self._train(TASKS[name], name, out, method, seed, backbone=backbone)
        about = {"task": name, "arm": arm, "seed": seed, "shared_by": self.given.workers}
        self.results.add("runs", {**about, **_found(TASKS[name], summary, rows)})
        self._say(f"{name}, {arm}, seed {seed}", TASKS[name], summary)

    def _train(
        self,
        task: Task,
        part: str,
        out: Path,
        method: str,
        seed: int,
        backbone: tuple[str, int] | None = None,
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """One run of `dyrep train`, and what it found; a run that is complete is not repeated."""
        given = self.given
        epochs, interval = self.epochs[part]
        words = ["--method", method, "--seed", str(seed), "--epochs", str(epochs), "--eval-every", str(epochs)]
        words += ["--interval", str(min(interval, max(epochs - 1, 1))), "--score", "invariant"]
        words += [*(task.smoke.split() if given.smoke else ()), *given.more.split()]
        if backbone is not None:
            words += ["--backbone", str(self._backbone(*backbone))]
        return run_training(task.recipe, [*words, "--data", str(given.data / task.folder)], out)

    def _backbone(self, method: str, seed: int) -> Path:
        return self.given.runs / f"backbone-{method}-{seed}"

    def _say(self, what: str, task: Task, summary: dict[str, Any]) -> None:
        print(f"{what}: {float(summary[f'test_{task.metric}_folded']):.2f} %, {summary['seconds']:.0f} s", flush=True)

    def show(self) -> None:
        """Print a line for every row of the table."""
        for name, task in TASKS.items():
            own = [run for run in self.results.data["runs"] if run["task"] == name]
            for arm in dict.fromkeys(run["arm"] for run in own):
                found = [run[task.metric] for run in own if run["arm"] == arm]
                line = f"{name:14s}{arm:14s}{mean_and_spread(found)} %"
                difference = against_origin(own, task.metric, arm)
                if difference is not None:
                    line += f"  {told(difference)} against origin (95 %)"
                print(line)


def against_origin(found: list[dict[str, Any]], metric: str, arm: str) -> tuple[float, float] | None:
    """Mean difference to the row origin over common seeds, and half the width of its 95 % confidence interval."""
    if arm == "origin":
        return None
    return paired(*({run["seed"]: run[metric] for run in found if run["arm"] == name} for name in (arm, "origin")))


def _found(task: Task, summary: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        task.metric: float(summary[f"test_{task.metric}_folded"]),
        "fold_error": summary["fold_error"],
        "macs": summary["mean_macs"] / summary["macs_plain"],
        "seconds": summary["seconds"],
        "epoch_seconds": epoch_seconds(rows),
    }


def main(command: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "downstream", help="folder for the runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS)[: len(PAPER)])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--backbone-epochs", type=int)
    parser.add_argument("--workers", type=int, default=1, help="runs that share the GPU")
    parser.add_argument("--more", default="", help="flags for every run, to try things out")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that everything works")
    given = parser.parse_args(command)
    bench = Bench(given)
    if "backbones" in given.parts:
        bench.backbones()
    bench.tasks([part for part in given.parts if part in TASKS])
    if "times" in given.parts and (given.workers > 1 or given.parts == ["times"]):
        bench.times()
    bench.show()


if __name__ == "__main__":
    main()
