"""Numbers and what they measure in words, the same wherever they are told."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

METRICS = {"accuracy": "accuracy", "map": "mAP", "miou": "mIoU"}
"""What tells how good a network is, by its key in the files of a run, and how it is called; all are in percent."""
MISSING = "–"
"""What stands in a table where there is no figure."""


def metric_of(*tables: Mapping[str, object]) -> str:
    """The key of the metric that tables of metrics hold, whichever images it was measured on.

    Example:
        >>> metric_of({"epoch": 1, "val_map": 31.0}), metric_of({"epoch": 1}), METRICS[metric_of({"test_miou": 1.0})]
        ('map', 'accuracy', 'mIoU')
    """
    held = {key for table in tables for key in table}
    return next((key for key in METRICS if held & {f"val_{key}", f"test_{key}"}), "accuracy")


def mean_and_spread(values: Sequence[float], form: str = ".2f") -> str:
    """Mean ± sample standard deviation, as far as there are any.

    Example:
        >>> mean_and_spread([94.0, 95.0]), mean_and_spread([94.0]), mean_and_spread([]), mean_and_spread([1, 3], ".0f")
        ('94.50 ± 0.71', '94.00', '–', '2 ± 1')
    """
    if not values:
        return MISSING
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}"


def duration(seconds: float) -> str:
    """A time in words.

    Example:
        >>> duration(3.2), duration(75), duration(7300)
        ('3 s', '1 min 15 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def large(number: float) -> str:
    """A large number in thousands, millions or billions.

    Example:
        >>> large(1_222_032), large(640)
        ('1.22 M', '640')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:g}"


def counted(number: int, thing: str, plural: str = "s") -> str:
    """So many things.

    Example:
        >>> counted(1, "block"), counted(1200, "branch", "es")
        ('1 block', '1,200 branches')
    """
    return f"{number:,} {thing}{'' if number == 1 else plural}"


def beginning(error: BaseException, lines: int = 1) -> str:
    r"""The first lines of an error's message, in one; the name of its class if it has none.

    Example:
        >>> beginning(ValueError("no such file\ntrace")), beginning(KeyboardInterrupt())
        ('no such file', 'KeyboardInterrupt')
    """
    told = [line.strip() for line in str(error).strip().splitlines()[:lines]]
    return " ".join(told) or type(error).__name__
