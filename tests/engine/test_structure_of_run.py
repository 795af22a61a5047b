"""The structure that a run had after an epoch, and runs that train it again from the start."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache

import pytest
from engine_helpers import STEPS, assert_same, lines, result, settings, small_recipe, train_some

import dyrep
from dyrep.cli.main import main
from dyrep.engine import checkpoints
from dyrep.engine.rundir import RunDirectory
from dyrep.engine.running import load_run, structure_of_run, train
from dyrep.errors import CheckpointError, ConfigError

CASES = {
    "dyrep": small_recipe(epochs=4),
    "rare": small_recipe(epochs=5, evolution={"interval": 2}),
    "begun": small_recipe(epochs=3, evolution={"interval": 2, "start_with": ("1x1",), "regrow": True}),
    "steps": small_recipe(epochs=4, evolution={"unit": "step", "interval": 4}),
    "dbb": small_recipe(method="dbb"),
    "origin": small_recipe(method="origin", epochs=2),
    "repnas": small_recipe(method="repnas", lr=0.03),
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """The folder of a run that was trained to its end, once."""

    @cache
    def run(case):
        folder = tmp_path_factory.mktemp("runs") / case
        train(CASES[case], settings(folder))
        return folder

    return run


def updates(folder):
    return {event["epoch"]: event["structure"] for event in lines(folder / "events.jsonl") if event["type"] == "update"}


def branches(structure):
    return sum(len(block["branches"]) for block in structure["blocks"].values())


def blocks_of(reference):
    return structure_of_run(str(reference))["blocks"]


# -- which structure it is --------------------------------------------------------------------------------------


def test_an_epoch_gives_the_structure_after_the_update_that_followed_it(run_of):
    run, found = run_of("dyrep"), updates(run_of("dyrep"))
    assert sorted(found) == [1, 2, 3]
    assert len({json.dumps(structure) for structure in found.values()}) == 3
    for epoch, structure in found.items():
        assert structure_of_run(f"{run}@{epoch}") == {**structure, "source": f"{run}@{epoch}"}


def test_without_an_epoch_it_is_the_last_structure(run_of):
    run = run_of("dyrep")
    expected = dyrep.structure(load_run(run)[0])
    assert structure_of_run(str(run)) == {**expected, "source": str(run)}
    assert blocks_of(f"{run}@4") == blocks_of(run) == updates(run)[3]["blocks"]


def test_between_updates_it_is_the_structure_of_the_last_one(run_of):
    run, found = run_of("rare"), updates(run_of("rare"))
    assert sorted(found) == [2, 4]
    assert found[2] != found[4]
    assert blocks_of(f"{run}@2") == blocks_of(f"{run}@3") == found[2]["blocks"]
    assert blocks_of(f"{run}@4") == blocks_of(f"{run}@5") == found[4]["blocks"]


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_updates_in_the_middle_of_the_next_epoch_do_not_count(epoch, run_of):
    """An epoch's row of metrics tells how many branches there were at its end."""
    run = run_of("steps")
    rows = lines(run / "metrics.jsonl")
    assert rows[epoch - 1]["branches"] != rows[epoch]["branches"]
    assert branches(structure_of_run(f"{run}@{epoch}")) == rows[epoch - 1]["branches"]


def test_before_the_first_update_it_is_what_the_run_began_with(run_of):
    run = run_of("begun")
    assert blocks_of(f"{run}@0") == blocks_of(f"{run}@1")
    assert {layer: block["branches"] for layer, block in blocks_of(f"{run}@1").items()} == {
        f"conv{number}": ["1x1"] for number in range(1, 7)
    }
    assert branches(structure_of_run(f"{run}@2")) > 6


def test_before_anything_was_trained_a_run_that_updates_after_steps_was_plain(run_of):
    with pytest.raises(ConfigError, match="at epoch 0 the network has no branches"):
        structure_of_run(f"{run_of('steps')}@0")


@pytest.mark.parametrize("epoch", ["@0", "@1", "@2", "@3", ""])
def test_a_method_that_never_updates_has_the_same_structure_at_any_epoch(epoch, run_of):
    run = run_of("dbb")
    summary = json.loads((run / "summary.json").read_text())
    assert structure_of_run(f"{run}{epoch}") == {**summary["structure"], "source": f"{run}{epoch}"}
    assert blocks_of(f"{run}{epoch}")["conv2"]["replaces"] == "norm2"


@pytest.mark.parametrize("epoch", ["@2", "@3", ""])
def test_after_a_search_it_is_the_structure_that_was_found(epoch, run_of):
    run = run_of("repnas")
    (found,) = updates(run).values()
    assert blocks_of(f"{run}{epoch}") == found["blocks"]
    assert not all(block.get("origin", True) for block in found["blocks"].values())


def test_within_a_search_it_does_not_matter_whether_the_run_has_gone_on(run_of, tmp_path):
    train(CASES["repnas"], settings(tmp_path / "stopped", stop_after=1))
    outcomes = []
    for run in (tmp_path / "stopped", run_of("repnas")):
        try:
            outcomes.append(blocks_of(f"{run}@1"))
        except ConfigError as error:
            outcomes.append(str(error).replace(str(run), "RUN"))
    assert outcomes[0] == outcomes[1]


def test_a_run_that_was_stopped_in_an_epoch_gives_what_it_has(run_of, tmp_path, monkeypatch):
    train_some(CASES["dyrep"], settings(tmp_path), 2 * STEPS + 3, monkeypatch)
    found = updates(run_of("dyrep"))
    assert blocks_of(tmp_path) == blocks_of(f"{tmp_path}@2") == found[2]["blocks"]
    assert blocks_of(f"{tmp_path}@1") == found[1]["blocks"]
    with pytest.raises(ConfigError, match="the run has been trained for 2 epochs so far"):
        structure_of_run(f"{tmp_path}@3")


def test_updates_since_the_last_epoch_count_only_for_the_last_structure(run_of, tmp_path, monkeypatch):
    train_some(CASES["steps"], settings(tmp_path), STEPS + 3, monkeypatch)  # the second update was two steps later
    rows, events = lines(run_of("steps") / "metrics.jsonl"), lines(tmp_path / "events.jsonl")
    assert [event["step"] for event in events if event["type"] == "update"] == [4, 8]
    assert blocks_of(tmp_path) == events[-1]["structure"]["blocks"]
    assert branches(structure_of_run(f"{tmp_path}@1")) == rows[0]["branches"] < branches(events[-1]["structure"])


def test_a_folder_may_have_an_at_in_its_name(run_of, tmp_path):
    run = tmp_path / "me@home"
    shutil.copytree(run_of("dyrep"), run)
    assert blocks_of(f"{run}@1") == updates(run)[1]["blocks"]


# -- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "epoch", "words"),
    [
        ("dyrep", "@0", "at epoch 0 the network has no branches"),
        ("rare", "@1", "at epoch 1 the network has no branches"),
        ("origin", "", "at epoch 2 the network has no branches"),
        ("origin", "@1", "at epoch 1 the network has no branches"),
        ("dyrep", "@5", "the run has been trained for 4 epochs so far"),
        ("dbb", "@99", "the run has been trained for 3 epochs so far"),
        ("dyrep", "@", "after the @ comes the number of an epoch, as in runs/x@40"),
        ("dyrep", "@last", "after the @ comes the number of an epoch"),
        ("dyrep", "@-1", "after the @ comes the number of an epoch"),
        ("dyrep", "@1.5", "after the @ comes the number of an epoch"),
        ("dyrep", "@²", "after the @ comes the number of an epoch"),
    ],
)
def test_an_epoch_that_has_no_structure_is_refused_with_the_reason(case, epoch, words, run_of):
    reference = f"{run_of(case)}{epoch}"
    with pytest.raises(ConfigError) as refused:
        structure_of_run(reference)
    assert str(refused.value).startswith(f"structure={reference!r}: {words}")


def test_what_is_not_a_run_is_named(tmp_path):
    for reference in (f"{tmp_path}", f"{tmp_path}@2", f"{tmp_path / 'none'}@2"):
        folder = reference.removesuffix("@2")
        with pytest.raises(CheckpointError, match=f"{re.escape(folder)} is not the folder of a run: it has no config"):
            structure_of_run(reference)
    RunDirectory(tmp_path).create(CASES["dyrep"], {})
    with pytest.raises(CheckpointError, match=r"has no last\.ckpt yet"):
        structure_of_run(str(tmp_path))


# -- trained again ----------------------------------------------------------------------------------------------


def command(out, *more, epochs=2):
    words = ["train", "--out", str(out), "--device", "cpu", "--epochs", str(epochs), "--batch-size", "64"]
    main([*words, "--val-split", "1000", *map(str, more)])


def refused(capsys, out, *more, **changes):
    """The status and message of a command that fails, and writes nothing."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        command(out, *more, **changes)
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize("method", [(), ("--method", "fixed")])
def test_the_structure_of_a_run_is_trained_from_the_start_and_never_changed(method, run_of, tmp_path):
    reference = f"{run_of('dyrep')}@2"
    command(tmp_path, "--structure", reference, "--interval", "1", *method)
    expected = updates(run_of("dyrep"))[2]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["fold_passed"]
    assert summary["recipe"]["method"] == "fixed"
    assert summary["recipe"]["structure"] == {**expected, "source": reference}
    assert summary["structure"] == expected
    assert [event["type"] for event in lines(tmp_path / "events.jsonl")] == ["converted"]
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["branches"] for row in rows] == [branches(expected)] * 2
    assert rows[1]["train_loss"] < rows[0]["train_loss"]
    last, source = (checkpoints.read(folder / checkpoints.LAST)["model"] for folder in (tmp_path, run_of("dyrep")))
    assert not (last["conv1.weight"] == source["conv1.weight"]).any()  # its structure alone, not its weights


@pytest.mark.parametrize("case", ["dbb", "repnas"])
def test_structures_of_other_methods_can_be_trained_again(case, run_of, tmp_path):
    command(tmp_path, "--structure", run_of(case), "--lr", "0.03", epochs=4)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["fold_passed"]
    assert summary["structure"] == json.loads((run_of(case) / "summary.json").read_text())["structure"]
    rows = lines(tmp_path / "metrics.jsonl")
    assert rows[-1]["train_loss"] < 0.9 * rows[0]["train_loss"]
    assert rows[-1]["train_accuracy"] > 40


def test_it_goes_on_after_the_source_is_gone(run_of, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(run_of("dyrep"), source)
    flags = ("--structure", f"{source}@3")
    command(tmp_path / "whole", *flags)
    command(tmp_path / "run", *flags, "--stop-after", "1")
    shutil.rmtree(source)
    command(tmp_path / "run", *flags)
    assert_same(result(tmp_path / "run"), result(tmp_path / "whole"))
    capsys.readouterr()
    command(tmp_path / "run", *flags)
    assert "is complete" in capsys.readouterr().out
    status, message = refused(capsys, tmp_path / "other", *flags)
    assert status == 1
    assert f"{source} is not the folder of a run" in message


def test_it_goes_on_with_what_it_started_with_though_the_source_has_changed(run_of, tmp_path):
    source = tmp_path / "source"
    train(CASES["dyrep"], settings(source, stop_after=1))
    before = blocks_of(source)
    command(tmp_path / "run", "--structure", source, "--stop-after", "1")
    train(CASES["dyrep"], settings(source))
    assert blocks_of(source) != before
    command(tmp_path / "run", "--structure", source)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["structure"]["blocks"] == before


def test_another_epoch_of_the_source_does_not_continue_the_run(run_of, tmp_path, capsys):
    command(tmp_path, "--structure", f"{run_of('dyrep')}@1", "--stop-after", "1")
    status, message = refused(capsys, tmp_path, "--structure", f"{run_of('dyrep')}@3")
    assert status == 2
    assert "was started with other settings" in message
    assert "structure" in message
    status, message = refused(capsys, tmp_path, "--structure", f"{run_of('dyrep')}@3", "--change-settings")
    assert status == 1
    assert "has other branches, so --method fixed cannot continue it" in message


def test_a_run_is_not_continued_by_its_own_structure(run_of, tmp_path, capsys):
    shutil.copytree(run_of("dyrep"), tmp_path / "run")
    status, message = refused(capsys, tmp_path / "run", "--structure", f"{tmp_path / 'run'}@1")
    assert status == 2
    assert "method: 'dyrep' against 'fixed'" in message


@pytest.mark.parametrize("more", [("--method", "dbb"), ("--method", "repnas", "--epochs", "3"), ("--method", "origin")])
def test_a_structure_belongs_to_the_method_fixed(more, run_of, tmp_path, capsys):
    status, message = refused(capsys, tmp_path / "run", "--structure", f"{run_of('dyrep')}@1", *more)
    assert status == 2
    assert "method=fixed and a structure belong together" in message
    assert not (tmp_path / "run").exists()


def test_the_method_fixed_needs_a_structure(tmp_path, capsys):
    status, message = refused(capsys, tmp_path / "run", "--method", "fixed")
    assert status == 2
    assert "--method fixed --structure RUN@EPOCH" in message


def test_a_structure_of_another_network_is_refused_by_the_layer_that_is_missing(run_of, noisy_net, tmp_path, capsys):
    flags = ("--structure", f"{run_of('dyrep')}@1", "--model", "noisy_net:build")
    status, message = refused(capsys, tmp_path / "run", *flags)
    assert status == 1
    assert "which this model does not have: is it the same architecture?" in message
    assert not (tmp_path / "run").exists()


def test_mistakes_in_the_reference_are_answered_before_anything_is_written(run_of, tmp_path, capsys):
    for reference, code, words in (
        (f"{run_of('dyrep')}@x", 2, "after the @ comes the number of an epoch"),
        (f"{run_of('dyrep')}@9", 2, "has been trained for 4 epochs so far"),
        (f"{tmp_path}@1", 1, "is not the folder of a run"),
    ):
        status, message = refused(capsys, tmp_path / "run", "--structure", reference)
        assert (status, words in message) == (code, True), message
    assert not (tmp_path / "run").exists()


def test_the_configuration_shows_the_structure(run_of, tmp_path, capsys):
    reference = f"{run_of('dyrep')}@1"
    capsys.readouterr()  # of that run
    command(tmp_path / "run", "--structure", reference, "--print-config")
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert recipe["method"] == "fixed"
    assert recipe["structure"] == {**updates(run_of("dyrep"))[1], "source": reference}


def test_the_seed_decides_where_a_structure_starts(run_of, tmp_path):
    structure = structure_of_run(f"{run_of('dyrep')}@1")
    base = small_recipe(method="fixed", structure=structure, epochs=1)
    for name, recipe in (("first", base), ("same", base), ("other", replace(base, seed=1))):
        train(recipe, settings(tmp_path / name))
    first, same, other = (result(tmp_path / name) for name in ("first", "same", "other"))
    assert_same(same["last"]["model"], first["last"]["model"])
    assert other["metrics"] != first["metrics"]
