"""Every setting of the method, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dyrep.branches import BRANCHES, GAMMA
from dyrep.checking import LayerPatterns, is_number, is_whole, read_settings, require, require_whole
from dyrep.errors import ConfigError
from dyrep.policy import CUT_RULES
from dyrep.scoring import SCORES
from dyrep.surgery.calibration import CALIBRATION_BATCHES
from dyrep.surgery.edits import ORIGIN_NORMS, check_growth

UNITS = ("epoch", "step")
PAPER: dict[str, Any] = {
    "score": "synflow",
    "score_every": 1,
    "top_k": 1,
    "branches": None,
    "gamma": 0.01,
    "relative_gamma": False,
    "origin_norm": "none",
    "width": 1,
    "calibration_batches": 20,
    "cut": "paper",
    "cut_threshold": 0.02,
    "max_depth": None,
    "regrow": False,
    "per_mac": False,
    "macs_limit": None,
    "absorb_after": None,
    "start_with": (),
}
"""What the paper says, whatever the defaults are."""
USUAL_START = ("1x1", "residual")
"""What a network that has learnt nothing yet begins with, unless told otherwise."""


@dataclass(frozen=True)
class DyRepConfig:
    """How `DyRep` evolves a model.

    Attributes:
        interval: epochs (or steps) between updates, the paper's t: 15 on CIFAR, 5 on ImageNet.
        unit: what `interval`, `start`, `stop` and the like count: ``"epoch"`` or ``"step"``.
        start: no update up to here; intervals are counted from here.
        stop: no update after this (default: never stop).
        total: length of the training, if known; then there is no update at its very end, where it could not pay.
        score: which operation to expand, by ``"synflow"``, ``"synflow_summed"``, ``"snip"``, ``"grad_norm"``,
            ``"grasp"``, ``"vote"``, ``"invariant"`` or ``"random"``; what they are says `dyrep.scoring`.
        score_every: score every n-th optimizer step; 1 scores all of them, as the paper does.
        top_k: operations to expand per update.
        branches: which branches to add, of 1x1, 1x1-KxK, 1x1-AVG, 1xK, Kx1 and residual (default: all that fit the
            convolution).
        gamma: initial γ of new branches.
        relative_gamma: measure γ in standard deviations of the origin's output.
        origin_norm: norm on the original kernel: ``"none"``, ``"calibrated"`` or ``"reference"``.
        width: inner channels of ``1x1-KxK`` per input channel.
        calibration_batches: batches for the statistics of new norms.
        cut: rule for cutting branches: ``"paper"``, ``"reference"`` or ``"none"``.
        cut_threshold: λ, the spread of importances above which branches are cut.
        max_depth: deepest nesting: 1 expands the model's own convolutions alone, None sets no limit.
        square_only: expand only kernels with equal sides.
        regrow: let a block grow what it lacks: branches that were cut, or that it did not begin with. Its origin no
            longer has a scale-free weight, so its score is not comparable with those of other convolutions under every
            metric.
        per_mac: rank operations by score per added multiply-add.
        macs_limit: up to which cost in multiply-adds the network may grow, as a multiple of the plain model's, counted
            on the batches given at updates; what it begins with is not held to it (None: no limit).
        absorb_after: absorb every branch after so many epochs (or steps); the rest of training is that of the plain
            network, at its cost (default: never).
        start_with: branches that every square convolution up to 5x5 has from the first step, at full strength beside a
            norm on its own kernel; this does not preserve the function, so it is for a network that has learnt
            nothing yet. None: if the statistics of its norms show that it is one, 1x1 and residual as far as `branches`
            has them, on convolutions right before a batch norm; nothing otherwise. An empty tuple starts plain.
        include: expand only layers that match one of these patterns (``"backbone.*"``).
        exclude: never expand layers that match one of these.
        grasp_batches: batches for the second-order score.
        drift_tolerance: an edit that changes eval outputs by more than this (relative, in the largest norm) is undone
            (default by the parameters' dtype: 1e-3, and 5e-2 for float16 and bfloat16).
        seed: of branch weights and random scores.

    Example:
        >>> DyRepConfig(interval=15, score="snip").interval
        15
    """

    interval: int = 5
    unit: str = "epoch"
    start: int = 0
    stop: int | None = None
    total: int | None = None
    score: str = "synflow"
    score_every: int = 1
    top_k: int = 1
    branches: tuple[str, ...] | None = None
    gamma: float = GAMMA
    relative_gamma: bool = False
    origin_norm: str = "none"
    width: int = 1
    calibration_batches: int = CALIBRATION_BATCHES
    cut: str = "none"
    cut_threshold: float = 0.02
    max_depth: int | None = 1
    square_only: bool = True
    regrow: bool = True
    per_mac: bool = False
    macs_limit: float | None = 1.5
    absorb_after: int | None = None
    start_with: tuple[str, ...] | None = None
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    grasp_batches: int = 1
    drift_tolerance: float | None = None
    seed: int = 0

    @classmethod
    def paper(cls, **changes: Any) -> DyRepConfig:
        """The paper's settings: a plain start, synflow, γ = 0.01, λ = 0.02, 20 calibration batches, no limits.

        The defaults are others, most of which the studies of ``docs/results.md`` have chosen.

        Example:
            >>> DyRepConfig.paper(interval=15).score
            'synflow'
        """
        return cls.from_dict({**PAPER, **changes})

    @classmethod
    def reference(cls, **changes: Any) -> DyRepConfig:
        """The published code's choices: a fresh norm on the origin, its cut rule, nesting of at most two blocks."""
        published = {"origin_norm": "reference", "cut": "reference", "max_depth": 2}
        return cls.from_dict({**PAPER, **published, **changes})

    def with_defaults(self) -> DyRepConfig:
        """The same with the defaults in place of what is as in the paper; what differs from the paper stays.

        Example:
            >>> DyRepConfig.paper(macs_limit=2.0).with_defaults() == DyRepConfig(macs_limit=2.0)
            True
        """
        usual = DyRepConfig()
        return replace(self, **{name: getattr(usual, name) for name in PAPER if getattr(self, name) == PAPER[name]})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DyRepConfig:
        """Read what `to_dict` wrote; unknown settings are refused."""
        return read_settings(cls, data)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-able data."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def is_due(self, count: int) -> bool:
        """Whether an update belongs after this many epochs (or steps)."""
        if count <= self.start or (count - self.start) % self.interval:
            return False
        ends = [end for end in (self.total, self.absorb_after) if end is not None]
        return (self.stop is None or count <= self.stop) and all(count < end for end in ends)

    @property
    def grows(self) -> bool:
        """Whether there will ever be an update.

        Example:
            >>> DyRepConfig(interval=5).grows, DyRepConfig(interval=5, absorb_after=3).grows
            (True, False)
        """
        return self.is_due(self.start + self.interval)

    @property
    def patterns(self) -> LayerPatterns:
        """Which convolutions may be expanded."""
        return LayerPatterns(self.include, self.exclude)

    def __post_init__(self) -> None:
        for name in ("interval", "score_every", "top_k", "calibration_batches", "grasp_batches"):
            require_whole(name, getattr(self, name), 1)
        for name in ("start", "seed"):
            require_whole(name, getattr(self, name), 0)
        for name in ("stop", "total", "max_depth", "absorb_after"):
            value = getattr(self, name)
            require(name, value, "None or a whole number of at least 1", value is None or is_whole(value, 1))
        for name, valid in (
            ("unit", UNITS),
            ("score", SCORES),
            ("origin_norm", ORIGIN_NORMS),
            ("cut", CUT_RULES),
        ):
            require(name, getattr(self, name), f"one of {', '.join(valid)}", getattr(self, name) in valid)
        for name in ("relative_gamma", "square_only", "regrow", "per_mac"):
            require(name, getattr(self, name), "True or False", isinstance(getattr(self, name), bool))
        check_growth(self.gamma, self.width)
        tolerance = self.drift_tolerance
        fine = tolerance is None or (is_number(tolerance) and tolerance > 0)
        require("drift_tolerance", tolerance, "None or a positive number", fine)
        require("cut_threshold", self.cut_threshold, "a number of at least 0", is_number(self.cut_threshold, 0))
        limit = self.macs_limit
        require("macs_limit", limit, "None or a number of at least 1", limit is None or is_number(limit, 1))
        self._check_branches()
        patterns = self.patterns  # which checks them
        object.__setattr__(self, "include", tuple(patterns.include))
        object.__setattr__(self, "exclude", tuple(patterns.exclude))
        if self.absorb_after is not None and self.total is not None and self.absorb_after >= self.total:
            raise ConfigError(
                f"absorb_after={self.absorb_after} leaves nothing to train, as total={self.total}: give a smaller one, "
                "or None to keep branches to the end"
            )
        ends = [end for end in (self.stop, None if self.total is None else self.total - 1) if end is not None]
        # without `start_with`, branches may be there from the start
        if self.absorb_after is None and ends and not self.grows and self.start_with == ():
            raise ConfigError(
                f"no update would ever be due: the first comes after {self.start + self.interval} {self.unit}s, and "
                f"none may come after {min(ends)} (interval={self.interval}, start={self.start}, stop={self.stop}, "
                f"total={self.total}): give a smaller interval or start, or train for longer"
            )
        if self.cut == "reference" and self.origin_norm == "none":
            raise ConfigError(
                "cut='reference' compares branches with the origin's γ: set origin_norm='reference' or 'calibrated', "
                "or cut='paper'"
            )

    def _check_branches(self) -> None:
        valid = ", ".join(BRANCHES)
        if self.branches is not None and (isinstance(self.branches, str) or not self.branches):
            raise ConfigError(f"branches={self.branches!r}: give a tuple from {valid}, or None for all")
        if isinstance(self.start_with, str):
            raise ConfigError(f"start_with={self.start_with!r}: give a tuple from {valid}, () to start plain, or None")
        for name in ("branches", "start_with"):
            chosen = getattr(self, name)
            if chosen is not None:
                object.__setattr__(self, name, tuple(dict.fromkeys(chosen)))
            unknown = [branch for branch in chosen or () if branch not in BRANCHES]
            if unknown:
                raise ConfigError(f"{name}={chosen!r}: {unknown[0]!r} is unknown; valid are {valid}")
