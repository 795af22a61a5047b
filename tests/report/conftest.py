"""Real runs, small ones, that the tests of reports share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from dyrep.engine.running import train
from engine.engine_helpers import settings, small_recipe


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> SimpleNamespace:
    """Folders of runs: DyRep with two seeds, the plain network, DBB, and one that has not ended."""
    root: Path = tmp_path_factory.mktemp("runs")
    found = SimpleNamespace(evolved=root / "evolved", second=root / "second", plain=root / "plain", dbb=root / "dbb")
    train(small_recipe(), settings(found.evolved))
    train(small_recipe(seed=1), settings(found.second))
    train(small_recipe(method="origin"), settings(found.plain))
    train(small_recipe(method="dbb", epochs=2), settings(found.dbb))
    found.unfinished = root / "unfinished"
    train(small_recipe(seed=2), settings(found.unfinished, stop_after=2))
    return found
