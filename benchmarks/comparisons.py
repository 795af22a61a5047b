"""What is compared with what: studies of VGG-16 on CIFAR-10, and the rule by which they choose. `arms.py` runs them.

``executions`` (``results/executions.json``) asks whether it costs accuracy to fold blocks while training: seven
branches everywhere from the start, each with a norm of its own, the batch norm after their sum kept. ``table``
(``results/cifar.json``) is the paper's table of CIFAR-10, with its 600 epochs; it takes hours. Both look at the test
set, as nothing is chosen by them.

The others (``results/selection.json``) train on 45,000 images and look at the 5,000 held out; the test set plays no
part. ``starts``, ``rivals``, ``decays``, ``spaces``, ``places``, ``absorbing`` and ``recipes`` choose nothing: the
plain network, trained in other ways too, and blocks from the start are there to compare with. The rest choose defaults:
``gammas``, ``growth``, ``scores``, ``cuts`` and ``folding``, each of which changes one thing about the paper's
settings, and ``limits``, about what these have chosen. The rule, fixed before the runs: of the arms of a study the one
with the largest mean accuracy over at least five paired seeds becomes the default if the 95 % confidence interval of
its paired difference to the present default lies above zero. Otherwise the present default stays, unless an arm is
cheaper by at least a tenth and the interval of its difference reaches no lower than -0.1 points: then that one. Cost is
the average of multiply-adds over training; where blocks are folded, which these do not tell, it is the time of training
alone on the GPU. Their arms may cost half as much again as the plain network, and do not nest blocks. What has been
chosen is put together in `CHOSEN`, for ``table``.

Runs of ``gammas``, and some others, were made when synflow was still added up term by term, as in the published code,
which under autocast is rounding: the layers that grow are chosen by chance there (``--score synflow_summed``).

All but ``gammas``, which was run before this was known, and ``starts``, which is about it, let the learning rate rise
over the first two epochs: without that the plain network ends with a higher training loss, and one that differs far
more from seed to seed. The likely reason is a slow beginning at the paper's rate, which would weigh far more in 40
epochs than in 600.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
        alone: whether the training of one run of each arm is timed once more, alone on the GPU, see `alone.py`.
        epochs: of all other runs.
    """

    title: str
    arms: dict[str, str]
    baseline: str
    usual: int = 6
    held_out: bool = True
    timed: int = 0
    alone: bool = False
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
WARM = " --warmup-epochs 2"
STRONGER_DECAY = " --weight-decay 5e-4"
# The paper's interval of 15 of 600 epochs is one of 40. Without a limit the network grows with every update, to several
# times the plain one's multiply-adds; with one, choices are compared at equal cost.
START = "--method dyrep --interval 1 --macs-limit 1.5 --max-depth 1 --score synflow --origin-norm none"
BY_CHANCE = START.replace("--score synflow", "--score synflow_summed")
# λ is a spread of γ as such: where γ is the origin's σ, it would have branches cut that are weak for a few steps
FULL = " --relative-gamma --gamma 1 --cut none"
PUBLISHED_NORM = START.replace("--origin-norm none", "--origin-norm reference")
CALIBRATED = START.replace("--origin-norm none", "--origin-norm calibrated")
BEGUN = f"{START} --cut none --regrow --start-with 1x1 residual"
POINTWISE = " --branches 1x1 1x1-AVG residual"  # so cheap that the limit lets every layer have them
CHOSEN = BEGUN
CHOSEN_AT_LENGTH = CHOSEN.replace("--interval 1 ", "--interval 15 ")  # of 600 epochs
# branches that are there from the first step, at full strength, and stay, or are absorbed again
KEPT = "--method dyrep --interval 39 --macs-limit 1 --score random --cut none --start-with"
RICH = "--method dyrep --interval 39 --start-with 1x1 1x1-KxK 1x1-AVG 1xK Kx1 residual --absorb-after"
STAGES = ((1, 2), (3, 4), (5, 7), (8, 10), (11, 13))  # of VGG-16, between pools
RIVALS = {
    "origin": "--method origin",
    "RepVGG": "--method repvgg --replace conv",
    "DBB": "--method dbb",
    "seven branches": BLOCKS,
    "DyRep": START,
    "DyRep, our defaults": CHOSEN,
}


def only(first: int, last: int) -> str:
    """Flags for the convolutions from one to another alone."""
    return f"--include {' '.join(f'conv{number}' for number in range(first, last + 1))}"


def early(flags: str) -> str:
    """The same with all updates in the first epoch, which has 351 steps."""
    return flags.replace("--interval 1", "--unit step --interval 20 --stop 400")


def warmed(arms: dict[str, str], more: str = "") -> dict[str, str]:
    """The same arms with a rising learning rate at the start, and more flags."""
    return {arm: f"{flags}{more}{WARM}" for arm, flags in arms.items()}


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
            "origin, weight decay 5e-4": f"--method origin{STRONGER_DECAY}",
            "DBB": "--method dbb",
            "DyRep, as in the paper": "--method dyrep",
            "DyRep, our defaults": CHOSEN_AT_LENGTH,
            # candidates that may keep to half as much time again; chosen by no accuracy of this table
            "DyRep, as in the paper, folded": "--method dyrep --execution folded",
            "DyRep, our defaults, folded": f"{CHOSEN_AT_LENGTH} --execution folded",
            "seven branches, until epoch 90": f"{RICH} 90".replace("--interval 39", "--interval 599"),
        },
        "origin",
        usual=5,
        held_out=False,
        alone=True,
        epochs=600,
    ),
    "starts": Comparison(
        "what a better start gives",
        {
            "origin": "--method origin",
            "origin, warm-up": f"--method origin{WARM}",
            "seven branches": BLOCKS,
            "seven branches, warm-up": f"{BLOCKS}{WARM}",
        },
        "origin",
    ),
    "rivals": Comparison(
        "DyRep against blocks from the start",
        warmed(RIVALS),
        "origin",
    ),
    "decays": Comparison(
        "DyRep against blocks from the start, all with five times the paper's weight decay",
        warmed(RIVALS, STRONGER_DECAY),
        "origin",
    ),
    "spaces": Comparison(
        "which branches to have from the start, all with five times the paper's weight decay",
        warmed(
            {
                "origin": "--method origin",
                "residual": f"{KEPT} residual",
                "1x1 and residual": f"{KEPT} 1x1 residual",
                "1x1 and residual, folded": f"{KEPT} 1x1 residual --execution folded",
                "all but 1x1-KxK, folded": f"{KEPT} 1x1 1x1-AVG 1xK Kx1 residual --execution folded",
                "seven branches": BLOCKS,
            },
            STRONGER_DECAY,
        ),
        "origin",
    ),
    "absorbing": Comparison(
        "whether branches from the start can be absorbed again, all with five times the paper's weight decay",
        warmed(
            {
                "origin": "--method origin",
                "seven branches": BLOCKS,
                "seven branches, until epoch 6": f"{RICH} 6",  # about what half as much time again allows
                "seven branches, until epoch 20": f"{RICH} 20",
            },
            STRONGER_DECAY,
        ),
        "origin",
    ),
    "places": Comparison(
        "seven branches on the convolutions of one stage alone, all with five times the paper's weight decay",
        warmed(
            {
                "origin": "--method origin",
                **{f"convolutions {first} to {last}": f"{BLOCKS} {only(first, last)}" for first, last in STAGES},
            },
            STRONGER_DECAY,
        ),
        "origin",
    ),
    "recipes": Comparison(
        "the plain network with other settings of SGD",
        warmed(
            {
                "lr 0.1, weight decay 1e-4": "--method origin",
                "lr 0.05": "--method origin --lr 0.05",
                "lr 0.2": "--method origin --lr 0.2",
                "weight decay 5e-4": "--method origin --weight-decay 5e-4",
                "weight decay 1e-3": "--method origin --weight-decay 1e-3",
                "weight decay 2e-3": "--method origin --weight-decay 2e-3",
            }
        ),
        "lr 0.1, weight decay 1e-4",
    ),
    "gammas": Comparison(
        "the γ that new branches start with",
        {
            "0.01": BY_CHANCE,
            "0.1": f"{BY_CHANCE} --gamma 0.1",
            "0.1 of the origin's σ": f"{BY_CHANCE} --relative-gamma --gamma 0.1",
            "the origin's σ": f"{BY_CHANCE} --relative-gamma --gamma 1",
        },
        "0.01",
    ),
    "growth": Comparison(
        "a norm on the original kernel, the γ of new branches, and when they grow",
        warmed(
            {
                "no norm, γ = 0.01": START,
                "calibrated norm, γ = 0.01": CALIBRATED,
                "reference norm, γ = 0.01": PUBLISHED_NORM,
                "calibrated norm, γ = σ, nothing cut": CALIBRATED + FULL,
                "1x1 and residual from the start, nothing cut": BEGUN,
                "no norm, γ = σ, nothing cut, in the first epoch, pointwise, by chance": early(
                    f"{BY_CHANCE}{FULL}{POINTWISE}"
                ),
            }
        ),
        "no norm, γ = 0.01",
        usual=5,
        alone=True,
    ),
    "scores": Comparison(
        "what to expand",
        warmed(
            {
                name: START.replace("--score synflow", f"--score {score}")
                for name, score in {
                    **{score: score for score in ("synflow", "snip", "grad_norm", "invariant", "random")},
                    "invariant per multiply-add": "invariant --per-mac",
                    "synflow, added up term by term": "synflow_summed",
                }.items()
            }
        ),
        "synflow",
    ),
    "cuts": Comparison(
        "when to cut",
        warmed(
            {
                "paper": START,
                "never": f"{START} --cut none",
                "paper, λ = 0.002": f"{START} --cut-threshold 0.002",
                # which compares branches with the norm of the kernel, so that there has to be one
                "reference, reference norm": f"{PUBLISHED_NORM} --cut reference",
            }
        ),
        "paper",
    ),
    "limits": Comparison(
        "how much our defaults grow, and what less costs",
        warmed(
            {
                "1.5 × plain": CHOSEN,
                # in time a block costs more than in multiply-adds
                "1.2 × plain": CHOSEN.replace("--macs-limit 1.5", "--macs-limit 1.2"),
                "as it begins": CHOSEN.replace("--macs-limit 1.5", "--macs-limit 1"),
                "1.5 × plain, folded": f"{CHOSEN} --execution folded",
                "as it begins, folded": CHOSEN.replace("--macs-limit 1.5", "--macs-limit 1 --execution folded"),
                "as in the paper, no limit": START.replace(" --macs-limit 1.5 --max-depth 1", ""),
            }
        ),
        "1.5 × plain",
        usual=5,
        alone=True,
    ),
    "folding": Comparison(
        "blocks run exactly or folded",
        warmed({"fused": START, "folded": f"{START} --execution folded"}),
        "fused",
        alone=True,
    ),
}
"""Studies by the name to type. (`dyrep.reproduce.STUDIES` are others: the paper's.)"""
