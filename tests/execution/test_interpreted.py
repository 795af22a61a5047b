"""Whole blocks with their Triton kernels, run by Triton's interpreter where there is no GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
DRIVER = Path(__file__).with_name("interpreted_driver.py")


@pytest.mark.parametrize("layout", ["channels_last", pytest.param("contiguous_format", marks=pytest.mark.slow)])
def test_blocks_run_by_triton_kernels_equal_eager_ones(layout):
    done = subprocess.run([sys.executable, str(DRIVER), layout], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n").count("the same") == 10
