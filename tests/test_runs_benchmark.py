"""What benchmarks of several runs share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import digits
import runs


def test_a_run_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="there is no recipe 'nothing'"):
        runs.run_training("nothing", [], tmp_path / "run")


def test_variables_of_the_environment_are_added_to_ours(tmp_path, monkeypatch):
    seen = {}

    class Done:
        returncode, stdout, stderr = 1, "", "enough"

    monkeypatch.setattr(runs.subprocess, "run", lambda command, env, **options: seen.update(env) or Done)
    monkeypatch.setenv("OURS", "kept")
    with pytest.raises(RuntimeError, match="enough"):
        runs.run_training("digits", [], tmp_path / "run", env={"OMP_NUM_THREADS": "1"})
    assert (seen["OURS"], seen["OMP_NUM_THREADS"]) == ("kept", "1")


def test_a_method_learns_digits(tmp_path, capsys):
    found = digits.train("dbb", 3, tmp_path, "--epochs 1 --batch-size 128")
    assert found.keys() == {"seed", *digits.KEPT}
    assert found["seed"] == 3
    assert found["fold_passed"]
    assert "dbb                  seed 3: " in capsys.readouterr().out
