"""Which choice pays? VGG-16 on CIFAR-10, several ways to train it against each other with the same seeds.

``python benchmarks/arms.py STUDY [STUDY ...] --data FOLDER --out FILE`` on a machine with a GPU. What the studies are,
and how they choose, is in `comparisons.py`. The file is written after every run, and runs that it holds already are not
repeated, whichever study they were made for: a run is known by its flags. With ``--workers`` above 1 runs share the GPU
(let NVIDIA's multi-process service run beside them); what has to be timed alone comes after them. Where the machine is
lent for a time, ``--minutes`` says until when runs are begun, and ``--timing-minutes`` until when arms are timed; what
has begun is finished.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from alone import minutes_alone
from comparisons import COMPARISONS, Comparison
from runs import ResultFile, paired, run_training, told

from dyrep.records import EVENTS, read_lines
from dyrep.report.history import epoch_seconds
from dyrep.wording import mean_and_spread


class Results(ResultFile):
    """What has been found so far, in a file."""

    def find(self, flags: str, seed: int) -> dict[str, Any] | None:
        """A run, if it is there."""
        return next((run for run in self.data["runs"] if (run["flags"], run["seed"]) == (flags, seed)), None)

    def add(self, run: dict[str, Any]) -> None:
        """Add a run."""
        with self.lock:
            self.data["runs"] = sorted([*self.data["runs"], run], key=lambda run: (run["flags"], run["seed"]))
            self.save()

    def set_time(self, flags: str, seconds: float) -> None:
        """Note the time of an epoch alone on the GPU."""
        self.data["epoch_seconds"][flags] = seconds
        self.save()

    def timed(self, flags: str) -> bool:
        """Whether that time is there."""
        return flags in self.data["epoch_seconds"]

    def show(self, comparison: Comparison) -> None:
        """Print a line for every arm."""
        runs = self.data["runs"]
        for arm, flags in comparison.arms.items():
            found = list(by_seed(runs, comparison.metric, flags).values())
            if not found:
                continue
            line = f"{arm:32s} {mean_and_spread(found)} % ({len(found)})"
            macs = [run["mean_macs"] for run in runs if run["flags"] == flags and "mean_macs" in run]
            if macs:
                line += f"  {statistics.mean(macs) / 1e6:.0f} M"
            if self.timed(flags):
                line += f"  {self.data['epoch_seconds'][flags]:.2f} s per epoch"
            difference = against_baseline(runs, comparison, arm)
            if difference is not None:
                line += f"  {told(difference)} against {comparison.baseline} (95 %)"
            print(line)


def by_seed(runs: list[dict[str, Any]], metric: str, flags: str) -> dict[int, float]:
    """Accuracies of an arm."""
    return {run["seed"]: run[metric] for run in runs if run["flags"] == flags}


def against_baseline(runs: list[dict[str, Any]], comparison: Comparison, arm: str) -> tuple[float, float] | None:
    """Mean difference to the baseline over common seeds, and half the width of its 95 % confidence interval."""
    if arm == comparison.baseline:
        return None
    ours, theirs = (by_seed(runs, comparison.metric, comparison.arms[name]) for name in (arm, comparison.baseline))
    return paired(ours, theirs)


def flags_of(comparison: Comparison, arm: str, seed: int, epochs: int) -> str:
    """What tells a run from others."""
    return f"{comparison.arms[arm]} {comparison.flags} --seed {seed} --epochs {epochs}"


def folder_of(comparison: Comparison, arm: str, seed: int, epochs: int, given: Any, to_time: bool = False) -> Path:
    """The folder of a run, named by its flags."""
    name = "-".join(re.findall(r"[\w.]+", flags_of(comparison, arm, seed, epochs)))
    # a run by which epochs are timed may be as long as the others: in their folder it would find theirs, and be over
    return given.runs / (f"time-{name}" if to_time else name)


def train(
    comparison: Comparison, arm: str, seed: int, epochs: int, given: Any, to_time: bool = False
) -> dict[str, Any]:
    """One run of `dyrep train`, and what it found."""
    out = folder_of(comparison, arm, seed, epochs, given, to_time)
    words = f"{flags_of(comparison, arm, seed, epochs)} --eval-every {epochs} {given.more}".split()
    words += [] if given.data is None else ["--data", str(given.data)]
    summary, rows = run_training(given.recipe, words, out)
    seconds = epoch_seconds(rows)
    print(f"{arm:32s} seed {seed}: {comparison.accuracy(summary):.2f} %, {seconds:.2f} s per epoch", flush=True)
    edits = [edit for event in read_lines(out / EVENTS) for edit in event.get("edits", ())]
    found = {
        "flags": comparison.arms[arm],
        "seed": seed,
        comparison.metric: comparison.accuracy(summary),
        "fold_error": summary["fold_error"],
        "minutes": summary["seconds"] / 60,
        "train_loss": rows[-1]["train_loss"],
        "epoch_seconds": seconds,
        "expanded": [edit["layer"] for edit in edits if edit["kind"] == "expand"],
        "cut": [[edit["layer"], *edit["branches"]] for edit in edits if edit["kind"] == "cut"],
    }
    return found | {key: summary[key] for key in ("mean_macs", "mean_parameters") if key in summary}


def carry_out(wanted: list[tuple[Comparison, str, int]], given: Any, results: Results) -> tuple[list[str], int]:
    """Make runs side by side and add them to the results; says which failed, and how many there was no time for."""
    failed, left = [], 0

    def make(comparison: Comparison, arm: str, seed: int) -> dict[str, Any] | None:
        return train(comparison, arm, seed, given.epochs, given) if time.monotonic() < given.end else None

    with ThreadPoolExecutor(given.workers) as pool:
        for job in as_completed([pool.submit(make, *run) for run in wanted]):
            try:
                run = job.result()
            except RuntimeError as error:  # the others are worth having all the same
                failed.append(str(error))
                continue
            if run is None:
                left += 1
                continue
            if given.workers > 1:
                del run["epoch_seconds"], run["minutes"]
            results.add(run)
    return failed, left


def time_alone(comparison: Comparison, arm: str, given: Any, results: Results) -> None:
    """Note how long the training of an arm takes alone, by the first of its runs that was made on this machine."""
    own = [run for run in results.data["runs"] if run["flags"] == comparison.arms[arm]]
    if any("alone_minutes" in run for run in own):
        return
    for run in own:
        folder = folder_of(comparison, arm, run["seed"], given.epochs, given)
        if folder.exists() and time.monotonic() < given.timing_end:
            run["alone_minutes"] = minutes_alone(folder, given.data)
            results.save()
            print(f"{arm:32s} seed {run['seed']}: {run['alone_minutes']:.2f} minutes alone", flush=True)
            return


def main(command: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=list(COMPARISONS), metavar="study", help=", ".join(COMPARISONS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "arms", help="folder for the runs")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--recipe", default="cifar10-vgg16")
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, help="default: 5 to choose by, otherwise 3")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so long (default: no end)")
    parser.add_argument("--timing-minutes", type=float, default=math.inf, help="time no arm after so long")
    parser.add_argument("--more", default="", help="flags for every run, to try things out")
    given = parser.parse_args(command)
    given.end = time.monotonic() + 60 * given.minutes
    given.timing_end = time.monotonic() + 60 * given.timing_minutes
    comparisons = [COMPARISONS[name] for name in given.studies]
    first = comparisons[0]
    if any((other.held_out, other.epochs) != (first.held_out, first.epochs) for other in comparisons):
        parser.error("these studies do not go into one file: they look at other images, or train for longer")
    given.seeds, given.epochs = given.seeds or (5 if first.held_out else 3), given.epochs or first.epochs
    known = [arm for comparison in comparisons for arm in comparison.arms]
    unknown = [arm for arm in given.arms or () if arm not in known]
    if unknown:
        parser.error(f"there is no arm {unknown[0]!r}; valid are {', '.join(known)}")
    chosen = [
        (comparison, arm)
        for comparison in comparisons
        for arm in given.arms or list(comparison.arms)[: comparison.usual]
        if arm in comparison.arms
    ]
    config = {key: getattr(given, key) for key in ("recipe", "epochs", "more")} | {"flags": first.flags}
    results = Results(given.out, config, {"runs": [], "epoch_seconds": {}})
    wanted = {
        (comparison.arms[arm], seed): (comparison, arm, seed)  # studies share runs
        # one study after the other: to choose by, five seeds of one are worth more than three of all
        for study in comparisons
        for seed in range(given.seeds)
        for comparison, arm in chosen
        if comparison is study and results.find(comparison.arms[arm], seed) is None
    }
    failed, left = carry_out(list(wanted.values()), given, results)
    for comparison, arm in chosen:
        if comparison.timed and not results.timed(comparison.arms[arm]) and time.monotonic() < given.timing_end:
            run = train(comparison, arm, 0, comparison.timed, given, to_time=True)
            results.set_time(comparison.arms[arm], run["epoch_seconds"])
        if comparison.alone:
            time_alone(comparison, arm, given, results)
    for comparison in comparisons:
        results.show(comparison)
    if left:
        print(f"{left} runs were not begun, for want of time")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
