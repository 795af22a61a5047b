"""``dyrep report`` as people call it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dyrep.cli.main import main
from report.run_folders import write_run


def test_it_writes_the_page_and_says_where(tmp_path, capsys):
    runs = [write_run(tmp_path / f"run{seed}", seed=seed) for seed in (0, 1)]
    main(["report", *map(str, runs), "-o", str(tmp_path / "page.html")])
    told = capsys.readouterr().out
    assert (tmp_path / "page.html").exists()
    assert "page.html" in told
    assert "2 figures as PNG" in told


def test_a_folder_without_a_run_is_an_error_of_one_line(tmp_path):
    done = subprocess.run([sys.executable, "-m", "dyrep", "report", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"dyrep: {tmp_path} is not the folder of a run: it has neither config.json nor events.jsonl\n"


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(write_run(tmp_path / "run")), "-o", str(tmp_path / "page.html")])
    assert stopped.value.code == 2
    assert 'matplotlib, which is not installed: pip install ".[report]"' in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
