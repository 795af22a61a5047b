"""``dyrep draw``: one block of a run as files."""

import sys

import pytest

from dyrep.cli.main import main
from report.run_folders import ALL, update, write_run

LAYER = "layer1.0.conv1"


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", updates=[update(1, ("expand", LAYER, ALL)), update(2, ("expand", "conv1", ALL))])


def new_files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.suffix.lower() in (".svg", ".png", ".part"))


def test_a_real_run_with_a_block_in_a_block_is_drawn(evolved, tmp_path, capsys):
    main(["draw", str(evolved), "conv6", "-o", str(tmp_path / "conv6")])
    assert capsys.readouterr().out.split() == [str(tmp_path / "conv6.svg"), str(tmp_path / "conv6.png")]
    svg = (tmp_path / "conv6.svg").read_text()
    assert "it has grown 6 branches of its own (conv6.branches.1x1-KxK.conv)" in svg
    assert (tmp_path / "conv6.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_name_both_pictures_go_beside_the_run_and_the_layer_keeps_its_dots(run):
    main(["draw", str(run), LAYER])
    assert new_files(run) == [f"{LAYER}.png", f"{LAYER}.svg"]


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("block.svg", ["block.svg"]),
        ("block.PNG", ["block.PNG"]),
        ("new/folder/block", ["block.png", "block.svg"]),
        ("layer1.0", ["layer1.0.png", "layer1.0.svg"]),
        ("there", [f"{LAYER}.png", f"{LAYER}.svg"]),
    ],
)
def test_the_name_says_what_is_written(out, expected, run, tmp_path):
    folder = tmp_path / "out"
    (folder / "there").mkdir(parents=True)
    main(["draw", str(run), LAYER, "-o", str(folder / out)])
    assert new_files(folder) == sorted(expected)


def test_only_text_files_are_needed_and_only_pictures_written(run):
    before = {path.name for path in run.iterdir()}
    assert not any(name.endswith((".ckpt", ".safetensors")) for name in before)
    main(["draw", str(run), "conv1"])
    assert {path.name for path in run.iterdir()} - before == {"conv1.svg", "conv1.png"}


def test_without_a_layer_those_with_branches_are_listed(run, failing):
    status, message = failing("draw", run)
    assert status == 2
    assert f"name a layer to draw; layers with branches: conv1, {LAYER}" in message


def test_a_wrong_layer_is_told_what_fits(run, failing):
    status, message = failing("draw", run, "0.conv1")
    assert status == 2
    assert f"did you mean {LAYER}?" in message
    assert not new_files(run)


def test_a_run_without_blocks_says_so(tmp_path, failing):
    plain = write_run(tmp_path, method="origin")
    for words in ([], ["conv1"]):
        status, message = failing("draw", plain, *words)
        assert status == 2
        assert "there is no block to draw" in message


def test_a_folder_that_is_no_run(tmp_path, failing):
    status, message = failing("draw", tmp_path, "conv1")
    assert status == 1
    assert "it has neither config.json nor events.jsonl" in message


def test_formats_that_are_not_written(run, tmp_path, failing):
    status, message = failing("draw", run, "conv1", "-o", tmp_path / "block.pdf")
    assert status == 2
    assert "pictures can be .svg or .png, not .pdf" in message
    (tmp_path / "folder.svg").mkdir()
    status, message = failing("draw", run, "conv1", "-o", tmp_path / "folder.svg")
    assert status == 2
    assert "is a folder" in message


def test_a_place_that_cannot_be_written_to(run, tmp_path, failing):
    (tmp_path / "file").write_text("in the way")
    status, message = failing("draw", run, "conv1", "-o", tmp_path / "file" / "block.svg")
    assert status == 1
    assert "cannot be written" in message


def test_without_matplotlib_the_command_says_what_to_install(run, failing, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, message = failing("draw", run, "conv1")
    assert status == 2
    assert 'dyrep draw needs matplotlib, which is not installed: pip install ".[report]"' in message
