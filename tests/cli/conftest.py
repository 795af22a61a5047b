"""Runs that the tests of the command share, each trained once."""

import io
from contextlib import redirect_stdout
from functools import cache

import pytest

from dyrep.cli.main import main


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Train with some flags more, and give the folder of the run."""

    @cache
    def train(*flags):
        folder = tmp_path_factory.mktemp("runs") / "run"
        with redirect_stdout(io.StringIO()):
            main(["train", "digits", "--batch-size", "64", "--out", str(folder), "--device", "cpu", *flags])
        return folder

    return train


@pytest.fixture
def evolved(trained):
    """A run with blocks inside of branches: one convolution alone may grow, so the second time its branch does."""
    return trained("--epochs", "3", "--interval", "1", "--include", "conv6")


@pytest.fixture
def averaged(trained):
    """A run of which the moving average of the weights counts."""
    return trained("--epochs", "2", "--interval", "1", "--ema", "0.9", "--val-split", "0.1")


@pytest.fixture
def plain(trained):
    """A run of the plain method."""
    return trained("--epochs", "1", "--method", "origin")


@pytest.fixture
def failing(capsys):
    """Run a command that fails, and give its status and what it says."""

    def run(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in words])
        return stopped.value.code, capsys.readouterr().err

    return run
