"""Which choice pays? VGG-16 on CIFAR-10, several ways to train it against each other with the same seeds.

``python benchmarks/arms.py STUDY [STUDY ...] --data FOLDER --out FILE`` on a machine with a GPU. The file is written
after every run, and runs that it holds already are not repeated, whichever study they were made for: a run is known by
its flags. With ``--workers`` above 1 runs share the GPU (let NVIDIA's multi-process service run beside them).

``executions`` (``results/executions.json``) asks whether it costs accuracy to fold blocks while training: seven
branches everywhere from the start, each with a norm of its own, the batch norm after their sum kept. ``table``
(``results/cifar.json``) is the paper's table of CIFAR-10, with its 600 epochs; it takes hours, and its times only
count if a run has the GPU alone. Both look at the test set, as nothing is chosen by them.

The others (``results/selection.json``) train on 45,000 images and look at the 5,000 held out; the test set plays no
part. ``starts``, ``rivals`` and ``decays`` choose nothing: the plain network and blocks from the start are there to
compare with. The rest choose defaults. The rule, fixed before the runs: of the arms of a study the one with the largest
mean accuracy over at least five paired seeds becomes the default if the 95 % confidence interval of its paired
difference to the present default lies above zero. Otherwise the present default stays, unless an arm is cheaper by at
least a tenth and the interval of its difference reaches no lower than -0.1 points: then that one. Cost is the average
of multiply-adds over training; for ``folding``, where these are the same, it is the time of an epoch alone on the GPU.
All arms but those of ``limits`` may cost half as much again as the plain network, and do not nest blocks. The studies
are run in the order gammas, growth, scores, cuts, limits, folding, each with what the ones before have chosen
(`CHOSEN`). ``growth`` asks three things at once, because they depend on each other: a large γ does harm where the
original kernel has no norm, and may pay where it has one.

All but ``gammas``, which was run before this was known, and ``starts``, which is about it, let the learning rate rise
over the first two epochs. At the paper's rate a VGG-16 hardly learns in the first epochs, for longer with some seeds
than with others. Of 600 epochs that is nothing; of 40 it would decide comparisons, in favour of what shortens it.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs import ResultFile, paired, run_training, told

from dyrep.records import EVENTS, read_lines
from dyrep.report.history import epoch_seconds
from dyrep.wording import mean_and_spread


@dataclass(frozen=True)
class Comparison:
    """What a study compares: ways to train, with the same seeds.

    Attributes:
        title: what it is about, to be told in a sentence.
        arms: flags of `dyrep train` by name; all that are run unless told otherwise come first.
        baseline: the arm that others are compared with.
        usual: how many arms are run unless told otherwise.
        held_out: whether it looks at images held out of the training set rather than at the test set.
        timed: epochs of the runs, alone on the GPU, by which epochs are timed (0: they are not).
        epochs: of all other runs.
    """

    title: str
    arms: dict[str, str]
    baseline: str
    usual: int = 6
    held_out: bool = True
    timed: int = 0
    epochs: int = 40

    @property
    def flags(self) -> str:
        """Flags of all runs."""
        return "--val-split 5000" if self.held_out else ""

    @property
    def metric(self) -> str:
        """What is looked at, as it is called in the results."""
        return "val_accuracy" if self.held_out else "test_accuracy"

    def accuracy(self, summary: dict[str, Any]) -> float:
        """That of a run; on the test set, of the folded network."""
        return float(summary["val_accuracy" if self.held_out else "test_accuracy_folded"])


BLOCKS = "--method dbb7 --replace conv"
RIVALS = {
    "origin": "--method origin",
    "RepVGG": "--method repvgg --replace conv",
    "DBB": "--method dbb",
    "seven branches": BLOCKS,
}
WARM = " --warmup-epochs 2"
# The paper's interval of 15 of 600 epochs is one of 40. Without a limit the network grows with every update, to several
# times the plain one's multiply-adds; with one, choices are compared at equal cost.
START = "--method dyrep --interval 1 --macs-limit 1.5 --max-depth 1 --score synflow --origin-norm none"
# λ is a spread of γ as such: where γ is the origin's σ, it would have branches cut that are weak for a few steps
STRONG = START.replace("--origin-norm none", "--origin-norm calibrated --relative-gamma --gamma 1 --cut none")
EARLY = STRONG.replace("--interval 1", "--unit step --interval 20 --stop 400")  # an epoch has 351 steps
POINTWISE = " --branches 1x1 1x1-AVG residual"  # so cheap that the limit lets every layer have them
CHOSEN = {"growth": START, "score": "synflow", "cut": "", "execution": ""}
SCORED = CHOSEN["growth"].replace("--score synflow", f"--score {CHOSEN['score']}")
CUT = f"{SCORED}{CHOSEN['cut']}"


def warmed(arms: dict[str, str]) -> dict[str, str]:
    """The same arms with a rising learning rate at the start."""
    return {arm: f"{flags}{WARM}" for arm, flags in arms.items()}


COMPARISONS = {
    "executions": Comparison(
        "whether folding while training costs accuracy",
        {
            "plain": "--method origin",
            "fused": f"{BLOCKS} --execution fused",
            "folded": f"{BLOCKS} --execution folded",
            "folded, measured in every step": f"{BLOCKS} --execution folded --sigma-every 1",
            "folded, σ differentiated": f"{BLOCKS} --execution folded --sigma-gradient weights --sigma-every 1",
        },
        "fused",
        usual=3,
        held_out=False,
        timed=3,
    ),
    "table": Comparison(
        "the table of CIFAR-10, 600 epochs",
        {
            "origin": "--method origin",
            "DBB": "--method dbb",
            "DyRep, as in the paper": "--method dyrep",
            "DyRep, our defaults": f"{CUT.replace('--interval 1 ', '--interval 15 ')}{CHOSEN['execution']}",
        },
        "origin",
        held_out=False,
        epochs=600,
    ),
    "gammas": Comparison(
        "the γ that new branches start with",
        {
            "0.01": START,
            "0.1": f"{START} --gamma 0.1",
            "0.1 of the origin's σ": f"{START} --relative-gamma --gamma 0.1",
            "the origin's σ": f"{START} --relative-gamma --gamma 1",
        },
        "0.01",
    ),
    "growth": Comparison(
        "a norm on the original kernel, the γ of new branches, and when they grow",
        warmed(
            {
                "no norm, γ = 0.01": START,
                "calibrated norm, γ = 0.01": START.replace("--origin-norm none", "--origin-norm calibrated"),
                "reference norm, γ = 0.01": START.replace("--origin-norm none", "--origin-norm reference"),
                "calibrated norm, γ = σ, nothing cut": STRONG,
                "calibrated norm, γ = σ, nothing cut, in the first epoch": EARLY,
                "calibrated norm, γ = σ, nothing cut, in the first epoch, pointwise": f"{EARLY}{POINTWISE}",
                "no norm, γ = σ, nothing cut, in the first epoch, pointwise": EARLY.replace(
                    "--origin-norm calibrated", "--origin-norm none"
                )
                + POINTWISE,
            }
        ),
        "no norm, γ = 0.01",
    ),
    "scores": Comparison(
        "what to expand",
        warmed(
            {
                name: CHOSEN["growth"].replace("--score synflow", f"--score {score}")
                for name, score in {
                    **{score: score for score in ("synflow", "snip", "grad_norm", "invariant", "random")},
                    "invariant per multiply-add": "invariant --per-mac",
                }.items()
            }
        ),
        "synflow",
    ),
    "cuts": Comparison(
        "when to cut",
        warmed(
            {
                "paper": SCORED,
                "never": f"{SCORED} --cut none",
                "paper, λ = 0.002": f"{SCORED} --cut-threshold 0.002",
            }
        ),
        "paper",
    ),
    "limits": Comparison(
        "how much to grow",
        warmed(
            {
                "1.5 × plain": CUT,
                "1.5 × plain, nested": CUT.replace("--max-depth 1", "--max-depth 3"),
                "2 × plain": CUT.replace("--macs-limit 1.5", "--macs-limit 2"),
                "3 × plain": CUT.replace("--macs-limit 1.5", "--macs-limit 3"),
                "no limit, nested": CUT.replace(" --macs-limit 1.5 --max-depth 1", ""),
            }
        ),
        "1.5 × plain",
        usual=4,
    ),
    "folding": Comparison(
        "blocks run exactly or folded",
        warmed({"fused": CUT, "folded": f"{CUT} --execution folded"}),
        "fused",
        timed=40,  # all of them: the structure grows
    ),
    "starts": Comparison(
        "what a better start gives",
        {
            "origin": "--method origin",
            "origin, warm-up": f"--method origin{WARM}",
            "origin, started as RepVGG": "--method origin --start-as repvgg",
            "seven branches": BLOCKS,
            "seven branches, warm-up": f"{BLOCKS}{WARM}",
        },
        "origin",
    ),
    "rivals": Comparison(
        "DyRep against blocks from the start",
        warmed({**RIVALS, "DyRep": CUT}),
        "origin",
    ),
    "decays": Comparison(
        "the same with five times the paper's weight decay",
        warmed({arm: f"{flags} --weight-decay 5e-4" for arm, flags in {**RIVALS, "DyRep": CUT}.items()}),
        "origin",
    ),
}
"""Studies by the name to type. (`dyrep.reproduce.STUDIES` are others: the paper's.)"""


class Results(ResultFile):
    """What has been found so far, in a file."""

    def has(self, flags: str, seed: int) -> bool:
        """Whether a run is there."""
        return any((run["flags"], run["seed"]) == (flags, seed) for run in self.data["runs"])

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


def train(
    comparison: Comparison, arm: str, seed: int, epochs: int, given: Any, to_time: bool = False
) -> dict[str, Any]:
    """One run of `dyrep train`, and what it found."""
    name = "-".join([*re.findall(r"[\w.]+", comparison.arms[arm]), str(seed), str(epochs)])
    # a run by which epochs are timed may be as long as the others: in their folder it would find theirs, and be over
    out = given.runs / (f"time-{name}" if to_time else name)
    words = f"{comparison.arms[arm]} {comparison.flags} --seed {seed} --epochs {epochs} --eval-every {epochs}".split()
    words += [*given.more.split(), *([] if given.data is None else ["--data", str(given.data)])]
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
    parser.add_argument("--more", default="", help="flags for every run, to try things out")
    given = parser.parse_args(command)
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
        for seed in range(given.seeds)
        for comparison, arm in chosen
        if not results.has(comparison.arms[arm], seed)
    }
    with ThreadPoolExecutor(given.workers) as pool:
        jobs = [pool.submit(train, *run, given.epochs, given) for run in wanted.values()]
        failed = []
        for job in as_completed(jobs):
            try:
                run = job.result()
            except RuntimeError as error:  # the others are worth having all the same
                failed.append(str(error))
                continue
            if given.workers > 1:
                del run["epoch_seconds"], run["minutes"]
            results.add(run)
    for comparison, arm in chosen:
        if comparison.timed and not results.timed(comparison.arms[arm]):
            run = train(comparison, arm, 0, comparison.timed, given, to_time=True)
            results.set_time(comparison.arms[arm], run["epoch_seconds"])
    for comparison in comparisons:
        results.show(comparison)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
