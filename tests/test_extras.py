"""Packages that not everyone has: the table of them, and what is said where one is missing."""

import pickle
import re
import sys
from pathlib import Path

import pytest

from dyrep.errors import DyRepError, MissingPackageError
from dyrep.extras import EXTRAS, extra_of, missing, needed

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_the_table_is_that_of_the_extras():
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    del extras["dev"]
    packages = {extra: {re.match(r"[\w-]+", entry)[0] for entry in entries} for extra, entries in extras.items()}
    assert {extra: set(modules.values()) for extra, modules in EXTRAS.items()} == packages


@pytest.mark.parametrize("module", sorted({module for modules in EXTRAS.values() for module in modules}))
def test_modules_are_called_as_in_the_table(module):
    assert needed(module, "a test").__name__ == module


def test_everything_that_is_asked_for_is_in_the_table():
    asked = {name for path in SOURCES for name in re.findall(r'(?:needed|missing)\(f?"(\w+)', path.read_text())}
    assert {"PIL", "sklearn", "torchvision", "torchmetrics", "rich", "tensorboard"} <= asked
    assert [name for name in asked if extra_of(name) is None] == []


def test_a_package_that_is_not_there_is_named_with_what_needs_it_and_the_ways_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingPackageError) as caught:
        needed("PIL", "drawing", "words do without")
    told = 'drawing needs pillow, which is not installed: pip install ".[train]" (or just pillow); words do without'
    assert str(caught.value) == told
    assert caught.value.name == "PIL"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_package_that_is_there_and_cannot_be_imported_is_told_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "onnxscript.py").write_text("import a_module_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxscript", raising=False)
    with pytest.raises(MissingPackageError, match=r"cannot be imported \(No module named 'a_module_that_nobody_has'\)"):
        needed("onnxscript", "an ONNX file")


def test_the_error_is_one_of_ours_and_one_of_pythons_and_reaches_other_processes():
    error = missing("timm", "a model")
    assert isinstance(error, DyRepError)
    assert isinstance(error, ImportError)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.name) == (MissingPackageError, str(error), "timm")
