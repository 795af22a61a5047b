"""What the README and the documentation show must run, and their figures must be those of the result files."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dyrep

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_on_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text())
    if page.name in ("README.md", "guide.md"):
        assert blocks
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_on_the_page_exist(page):
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text()):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), f"{link}#{anchor}"


def headings(page):
    """Anchors of a page as GitHub makes them: lower case, hyphens for spaces, no punctuation."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_tables_are_those_of_the_result_files():
    subprocess.run([sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], check=True)


@pytest.mark.parametrize("name", [m.name for m in pkgutil.walk_packages(dyrep.__path__, "dyrep.")])
def test_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_everything_public_has_an_example():
    for name in dyrep.__all__:
        thing = getattr(dyrep, name)
        if callable(thing) and not (isinstance(thing, type) and issubclass(thing, (Exception, Warning))):
            assert ">>>" in (thing.__doc__ or ""), name


def test_importing_the_package_needs_nothing_beyond_its_core_dependencies():
    code = "import sys, dyrep; print([m for m in ('torchvision', 'timm', 'sklearn', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
