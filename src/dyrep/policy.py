"""Decisions as pure functions: from scores and structure to what should be expanded and cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dyrep.errors import ConfigError
from dyrep.surgery.targets import is_inside

CUT_RULES = ("paper", "reference", "none")
REFERENCE_CEILING = 0.1


@dataclass(frozen=True)
class Candidate:
    """A convolution that could be expanded.

    Attributes:
        name: its name.
        score: how much it matters.
        added_macs: multiply-adds its branches would add; 0 if unknown.
    """

    name: str
    score: float
    added_macs: int = 0


@dataclass(frozen=True)
class BlockState:
    """What a cut rule looks at.

    Attributes:
        importances: mean |γ| of every branch.
        origin: mean |γ| of the origin's norm, if it has one.
    """

    importances: Mapping[str, float]
    origin: float | None = None


def choose_growth(
    candidates: Sequence[Candidate],
    *,
    top_k: int = 1,
    per_mac: bool = False,
    spare_macs: float = math.inf,
) -> list[str]:
    """Choose the operations with the largest scores.

    Args:
        candidates: what could be expanded.
        top_k: how many to choose at most.
        per_mac: rank by score per added multiply-add.
        spare_macs: multiply-adds that may be added in all; what does not fit is passed over.

    Returns:
        Names, best first; ties go to the earlier candidate.

    Example:
        >>> choose_growth([Candidate("a", 1.0), Candidate("b", 3.0), Candidate("c", 2.0)], top_k=2)
        ['b', 'c']
    """
    scored = [c for c in candidates if math.isfinite(c.score)]
    chosen: list[str] = []
    for c in sorted(scored, key=lambda c: c.score / max(c.added_macs, 1) if per_mac else c.score, reverse=True):
        if len(chosen) < top_k and c.added_macs <= spare_macs:
            chosen.append(c.name)
            spare_macs -= c.added_macs
    return chosen


def choose_cuts(
    blocks: Mapping[str, BlockState], *, rule: str = "paper", threshold: float = 0.02
) -> dict[str, list[str]]:
    """Choose the branches to absorb (de-parameterization, section 4.2 of the paper).

    Args:
        blocks: importances by layer.
        rule: ``"paper"`` cuts every branch below the mean importance of its block, once their (population) standard
            deviation exceeds the threshold; ``"reference"``, as published, does so with importances relative to the
            origin's γ and only below 0.1; ``"none"`` cuts nothing.
        threshold: λ.

    Returns:
        Branches to cut, by layer. A lone branch has no spread, so it is never cut.

    Example:
        >>> choose_cuts({"conv": BlockState({"1x1": 0.30, "1xK": 0.02, "Kx1": 0.28})})
        {'conv': ['1xK']}
    """
    if rule not in CUT_RULES:
        raise ConfigError(f"cut rule {rule!r} is unknown; valid are {', '.join(CUT_RULES)}")
    cuts: dict[str, list[str]] = {}
    for layer, block in blocks.items() if rule != "none" else ():
        values = dict(block.importances)
        if rule == "reference":
            if not block.origin:
                raise ConfigError(
                    f"layer {layer!r} has no norm on its origin to compare with: cut='reference' needs "
                    "origin_norm='reference' or 'calibrated'"
                )
            values = {branch: value / block.origin for branch, value in values.items()}
        mean = sum(values.values()) / max(len(values), 1)
        spread = math.sqrt(sum((v - mean) ** 2 for v in values.values()) / max(len(values), 1))
        ceiling = min(mean, REFERENCE_CEILING) if rule == "reference" else mean
        weak = [branch for branch, value in values.items() if value < ceiling]
        if spread > threshold and weak:
            cuts[layer] = weak
    gone = [(layer, branch) for layer, weak in cuts.items() for branch in weak]  # with all that is nested inside
    return {layer: weak for layer, weak in cuts.items() if not any(is_inside(layer, *one) for one in gone)}
