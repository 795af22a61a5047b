"""What benchmarks of several runs share: a file that grows with every run, `dyrep train`, and paired differences."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from dyrep.engine.rundir import hardware, versions
from dyrep.files import replacing
from dyrep.records import ROWS, SUMMARY, read_json, read_lines


class ResultFile:
    """Results in a JSON file, beside the setup that they belong to.

    Args:
        path: the file; if it is there, its results are gone on with.
        config: settings that all results have in common.
        empty: what the file holds before the first result.

    Attributes:
        data: everything in the file; whoever changes it saves it.
        lock: to be held while changing it, if runs are made side by side.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], empty: Mapping[str, Any]) -> None:
        self._path, self.lock = path, Lock()
        setup = {"config": dict(config), "versions": versions(), "hardware": hardware()}
        self.data: dict[str, Any] = {**setup, **empty}
        if path.exists():
            found = read_json(path)
            if not _same_setup(found, setup):
                sys.exit(f"{path} holds results of another setup; choose another --out, or delete it")
            self.data = found

    def save(self) -> None:
        """Write the file."""
        with replacing(self._path) as temporary:
            temporary.write_text(json.dumps(self.data, indent=1, ensure_ascii=False) + "\n")


def _same_setup(found: Mapping[str, Any], setup: Mapping[str, Any]) -> bool:
    """Whether results can stand side by side; packages that only one of the two had installed were not used by both."""
    ours, theirs = setup["versions"], found["versions"]
    same = all(found[key] == setup[key] for key in ("config", "hardware"))
    return same and all(ours[package] == theirs[package] for package in ours.keys() & theirs.keys())


def run_training(
    recipe: str, words: Sequence[str], out: Path, env: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One run of `dyrep train`: its summary and its rows of metrics. A run that is complete is not repeated.

    Args:
        recipe: what to train.
        words: flags.
        out: folder of the run.
        env: environment variables beyond our own.

    Raises:
        RuntimeError: it failed; the message has what it printed.
    """
    command = [sys.executable, "-m", "dyrep", "train", recipe, *words, "--progress", "False", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return read_json(out / SUMMARY), read_lines(out / ROWS)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, float] | None:
    """Mean difference over common seeds, and half the width of its 95 % confidence interval."""
    from scipy import stats

    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if len(differences) < 2:
        return None
    reach = stats.t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / len(differences) ** 0.5
    return statistics.mean(differences), float(reach)


def told(difference: tuple[float, float] | None) -> str:
    """A paired difference for a table; nothing where there is none."""
    return "" if difference is None else f"{difference[0]:+.2f} ± {difference[1]:.2f}"


def short(count: float) -> str:
    """A number of multiply-adds or parameters for a table."""
    return f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.1f} M"
