"""What a block consists of, from the files of a run, and what is said of layers that are none."""

import json

import pytest

from dyrep.errors import ConfigError
from dyrep.report.block_tree import read_block
from dyrep.report.runs import read_run
from report.run_folders import ALL, update, write_run

NESTED = "conv.branches.1x1-KxK.conv"
UPDATES = [
    update(1, ("expand", "conv", ALL)),
    update(2, ("expand", NESTED, ALL)),
    update(3, ("expand", "conv.branches.1xK.conv", ["1x1"]), ("cut", "conv", ["Kx1"])),
    update(4, ("cut", NESTED, ["residual", "1xK"])),
]


def test_a_branch_that_was_grown_again_has_none_of_what_was_in_it_before(tmp_path):
    again = [
        update(1, ("expand", "conv", ["1x1", "1x1-KxK"])),
        update(2, ("expand", NESTED, ["Kx1"])),
        update(3, ("cut", "conv", ["1x1-KxK"])),
        update(4, ("expand", "conv", ["1x1-KxK"])),
        update(5, ("expand", NESTED, ["1xK"])),
    ]
    block = read_block(read_run(write_run(tmp_path, updates=again)), "conv")
    _, _, branch = block.lanes
    assert (branch.branch, branch.fate, branch.cut) == ("1x1-KxK", "grown at epoch 4", "")
    assert [lane.branch for lane in branch.parts[2].block.lanes] == ["KxK", "1xK"]


def test_a_layer_without_a_block_is_an_error_that_names_those_with_one(tmp_path):
    updates = [update(1, ("expand", "layer1.conv2", ["1x1"])), update(2, ("expand", "conv10", ["1x1"]))]
    run = read_run(write_run(tmp_path, updates=updates))
    with pytest.raises(ConfigError, match=r"'conv1'.*layers with branches: conv10, layer1.conv2; did you mean conv10"):
        read_block(run, "conv1")
    with pytest.raises(ConfigError, match=r"did you mean layer1\.conv2\?"):
        read_block(run, "conv2")


def test_a_layer_that_was_cut_says_when(tmp_path):
    updates = [
        update(1, ("expand", "a", ["1x1"])),
        update(2, ("expand", "b", ["1x1"])),
        update(3, ("cut", "a", ["1x1"])),
    ]
    with pytest.raises(ConfigError, match="'a' has no branches since epoch 3"):
        read_block(read_run(write_run(tmp_path, updates=updates)), "a")


def test_a_plain_network_has_nothing_to_draw(tmp_path):
    with pytest.raises(ConfigError, match="is plain, as its method says"):
        read_block(read_run(write_run(tmp_path / "plain", method="origin")), "conv")
    with pytest.raises(ConfigError, match="has grown no branches yet after epoch 2"):
        read_block(read_run(write_run(tmp_path / "young", trained=2, finished=False)), "conv")


def test_made_up_runs_have_the_files_of_real_ones(tmp_path):
    folder = write_run(tmp_path, updates=UPDATES)
    assert json.loads((folder / "summary.json").read_text())["structure"]["blocks"]["conv"]["branches"] == [
        branch for branch in ALL if branch != "Kx1"
    ]
    run = read_run(folder)
    assert [event["epoch"] for event in run.updates] == [1, 2, 3, 4]
    assert run.rows[-1]["branches"] == sum(
        len(block["branches"]) for block in run.summary["structure"]["blocks"].values()
    )
