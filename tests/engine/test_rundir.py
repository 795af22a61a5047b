"""The folder of a run: what is in it, and what starting again in it does."""

import json
import math
import re
from contextlib import contextmanager

import pytest
from engine_helpers import STEPS, assert_same, lines, make_trainer, picture, result, settings, small_recipe, train_some

import dyrep
from dyrep.cli.main import main
from dyrep.engine import checkpoints, rundir
from dyrep.engine.recipe import Recipe
from dyrep.engine.rundir import RunDirectory
from dyrep.engine.running import load_run, train
from dyrep.errors import CheckpointError, ConfigError
from dyrep.models import small_vgg
from dyrep.records import ROWS, SESSIONS, read_lines
from dyrep.report.runs import read_run


def command(out, *more):
    words = ["train", "--out", str(out), "--device", "cpu", "--epochs", "2", "--batch-size", "64", "--interval", "1"]
    main([*words, "--val-split", "1000", *more])


def refused(capsys, out, *more):
    """The status and message of a command that fails."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        command(out, *more)
    return ended.value.code, capsys.readouterr().err


@pytest.fixture
def stopped(tmp_path, monkeypatch, capsys):
    """A run that was stopped after one of its two epochs."""
    command(tmp_path / "run", "--stop-after", "1")
    return tmp_path / "run"


def test_the_same_command_on_a_finished_run_trains_nothing_and_says_so(tmp_path, capsys):
    command(tmp_path)
    before = picture(tmp_path)
    capsys.readouterr()
    command(tmp_path)
    assert capsys.readouterr().out == f"the run in {tmp_path} is complete; give another --out to train again\n"
    assert picture(tmp_path) == before


def test_no_resume_refuses_an_existing_run_and_changes_nothing(stopped, capsys):
    (stopped / "last.ckptabc.part").write_bytes(b"half")
    before = picture(stopped)
    status, message = refused(capsys, stopped, "--no-resume")
    assert status == 1
    assert f"there is a run in {stopped} already" in message
    assert picture(stopped) == before


def test_no_resume_starts_a_run_where_there_is_none(tmp_path):
    command(tmp_path, "--no-resume")
    assert (tmp_path / "summary.json").exists()


def test_another_recipe_is_refused_by_name_and_changes_nothing(stopped, capsys):
    (stopped / "last.ckptabc.part").write_bytes(b"half")
    before = picture(stopped)
    status, message = refused(capsys, stopped, "--lr", "0.05", "--gamma", "0.5")
    assert status == 2
    assert "lr: 0.1 against 0.05; dyrep.gamma: 0.01 against 0.5" in message
    assert "--change-settings" in message
    assert picture(stopped) == before
    events = [event["type"] for event in dyrep.read_events(stopped / "events.jsonl")]
    assert events == ["started", "update"]


@pytest.mark.filterwarnings("ignore::dyrep.errors.SettingsChangedWarning")
def test_another_recipe_is_accepted_when_asked_for(stopped, capsys):
    command(stopped, "--lr", "0.05", "--change-settings")
    rows = lines(stopped / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[1]["lr"] < 0.05
    assert checkpoints.read(stopped / checkpoints.LAST)["recipe"]["lr"] == 0.05
    capsys.readouterr()
    command(stopped, "--lr", "0.05")
    assert "is complete" in capsys.readouterr().out
    status, message = refused(capsys, stopped)
    assert status == 2
    assert "lr: 0.05 against 0.1" in message


@pytest.mark.filterwarnings("ignore::dyrep.errors.SettingsChangedWarning")
def test_a_finished_run_can_be_made_longer(tmp_path, capsys):
    command(tmp_path)
    command(tmp_path, "--epochs", "3", "--change-settings")
    assert [row["epoch"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((tmp_path / "summary.json").read_text())["recipe"]["epochs"] == 3


@pytest.mark.parametrize("change", [("--ema", "0.9"), ("--batch-size", "32"), ("--precision", "bf16")])
def test_a_run_goes_on_with_what_its_checkpoint_did_not_have(change, stopped):
    command(stopped, *change, "--change-settings")
    assert [row["epoch"] for row in lines(stopped / "metrics.jsonl")] == [1, 2]
    assert (stopped / "summary.json").exists()


def test_an_average_that_begins_late_begins_with_the_weights_of_the_checkpoint(tmp_path, monkeypatch):
    train_some(small_recipe(), settings(tmp_path), STEPS + 1, monkeypatch)
    trainer = make_trainer(small_recipe(ema=0.5), tmp_path, change_settings=True)
    trainer.resume()
    saved = checkpoints.read(tmp_path / checkpoints.LAST)["model"]
    assert_same(dict(trainer.average.module.state_dict()), dict(saved))


def wide_net(num_classes, in_channels):
    return small_vgg(num_classes, in_channels, widths=((24, 24), (32, 32), (64, 64)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("--model", "noisy_net:build"), "which this model does not have"),
        (
            ("--model", f"{__name__}:wide_net"),
            "the weights in .* do not fit the model: .*size mismatch for conv1.weight",
        ),
        (("--no-decay-norms",), "the saved optimizer state does not fit: 1 group saved, 2 here"),
    ],
)
def test_what_cannot_continue_a_run_says_so_and_changes_nothing(change, reason, stopped, noisy_net, capsys):
    before = picture(stopped)
    status, message = refused(capsys, stopped, *change, "--change-settings")
    assert status == 1
    assert re.search(reason, message)
    assert picture(stopped) == before


def test_the_plain_method_cannot_continue_a_network_with_branches(stopped, capsys):
    before = picture(stopped)
    status, message = refused(capsys, stopped, "--method", "origin", "--change-settings")
    assert status == 1
    assert "has branches already, so --method origin cannot continue it" in message
    assert picture(stopped) == before


@pytest.mark.filterwarnings("ignore::dyrep.errors.SettingsChangedWarning")
@pytest.mark.parametrize("methods", [("dyrep", "origin"), ("origin", "dyrep")])
def test_the_method_can_change_before_branches_have_grown(methods, tmp_path, monkeypatch):
    before, after = (small_recipe(method=method) for method in methods)
    train_some(before, settings(tmp_path), 3, monkeypatch)
    momentum = {
        "dyrep": lambda state: state["controller"]["optimizer"]["state"],
        "origin": lambda state: state["optimizer"]["state"],
    }[before.method](checkpoints.read(tmp_path / checkpoints.LAST))
    trainer = make_trainer(after, tmp_path, change_settings=True)
    trainer.resume()
    ours = dyrep.surgery.optimizer_state.state_by_name(trainer.optimizer, trainer.model)["state"]
    assert_same(ours, momentum)
    train(after, settings(tmp_path, change_settings=True))
    kinds = [event["type"] for event in dyrep.read_events(tmp_path / "events.jsonl")]
    assert kinds == (["started", "update", "update"] if after.method == "dyrep" else ["started"])


@pytest.mark.filterwarnings("ignore::dyrep.errors.SettingsChangedWarning")
def test_a_complete_run_that_goes_on_with_other_settings_tells_of_these(tmp_path, monkeypatch):
    longer = small_recipe(epochs=3, lr=0.05)
    train(small_recipe(epochs=2), settings(tmp_path))
    assert read_run(tmp_path).summary["recipe"]["epochs"] == 2
    assert not train_some(longer, settings(tmp_path, change_settings=True), 2, monkeypatch)
    run = read_run(tmp_path)
    assert (run.recipe["epochs"], run.recipe["lr"], run.summary) == (3, 0.05, None)
    assert not (tmp_path / "plain.safetensors").exists()
    train(longer, settings(tmp_path))
    run = read_run(tmp_path)
    assert (run.recipe["epochs"], run.summary["recipe"]["epochs"], len(run.rows)) == (3, 3, 3)


def test_a_run_that_another_process_started_meanwhile_is_left_alone(tmp_path, monkeypatch):
    recipe, locked = small_recipe(), RunDirectory.locked

    @contextmanager
    def slowly(run):
        monkeypatch.setattr(RunDirectory, "locked", locked)
        train_some(recipe, settings(tmp_path), 2, monkeypatch)  # the other one, which was there first
        with locked(run):
            yield

    monkeypatch.setattr(RunDirectory, "locked", slowly)
    with pytest.raises(CheckpointError, match=r"has just started the run in .*: give the command again"):
        train(recipe, settings(tmp_path))
    assert checkpoints.read(tmp_path / checkpoints.LAST)["step"] == 2


def test_checkpoints_without_a_config_are_refused(stopped, capsys):
    (stopped / "config.json").unlink()
    before = picture(stopped)
    for more in ((), ("--no-resume",)):
        status, message = refused(capsys, stopped, *more)
        assert status == 1
        assert f"{stopped} has checkpoints but no config.json" in message
        assert picture(stopped) == before


def test_what_killed_processes_left_half_written_is_removed(stopped, capsys):
    for name in ("last.ckptabc.part", "metrics.jsonlx.part", "plain.safetensorsy.part"):
        (stopped / name).write_bytes(b"half")
    (stopped / "notes.txt").write_text("mine")
    command(stopped)
    assert not list(stopped.glob("*.part"))
    assert (stopped / "notes.txt").read_text() == "mine"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an uninterrupted run comes to."""
    folder = tmp_path_factory.mktemp("whole")
    train(small_recipe(), settings(folder))
    return result(folder)


def test_a_start_without_a_checkpoint_leaves_nothing_of_the_one_before(whole, tmp_path):
    case = small_recipe()
    train(case, settings(tmp_path, stop_after=1))
    for name in (checkpoints.LAST, checkpoints.BEST):
        (tmp_path / name).unlink()
    train(case, settings(tmp_path))
    assert_same(result(tmp_path), whole)


def test_the_files_for_people_may_be_damaged_without_harm(whole, tmp_path, monkeypatch):
    for name in ("events.jsonl", "metrics.jsonl"):
        folder = tmp_path / name
        train_some(small_recipe(), settings(folder), STEPS + 2, monkeypatch)
        with open(folder / name, "r+b") as file:  # as a power cut may leave it
            file.truncate(300)
            file.seek(0, 2)
            file.write(bytes(200) + b'\n{"seq": 1, "type": "upd\nrubbish')
        train(small_recipe(), settings(folder))
        assert_same(result(folder), whole)


def test_a_run_of_more_processes_is_not_continued_by_one_unless_asked(tmp_path, monkeypatch):
    train_some(small_recipe(method="origin"), settings(tmp_path), 2, monkeypatch)
    state = checkpoints.read(tmp_path / checkpoints.LAST)
    checkpoints.write(tmp_path / checkpoints.LAST, {**state, "world": 2, "random": state["random"] * 2})
    with pytest.raises(ConfigError, match="processes: 2 against 1"):
        make_trainer(small_recipe(method="origin"), tmp_path).resume()
    make_trainer(small_recipe(method="origin"), tmp_path, change_settings=True).resume()


# -- the folder itself ------------------------------------------------------------------------------------------


def test_a_folder_tells_what_the_run_was(tmp_path):
    recipe = small_recipe(ema=0.5)
    train(recipe, settings(tmp_path, checkpoint_minutes=3))
    run = RunDirectory(tmp_path)
    assert run.exists
    assert run.recipe() == recipe
    assert run.read_json("config.json")["settings"]["checkpoint_minutes"] == 3
    assert [row["epoch"] for row in read_lines(tmp_path / ROWS)] == [1, 2, 3]
    (session,) = lines(tmp_path / "sessions.jsonl")
    assert (session["epoch"], session["step"], session["processes"], session["device"]) == (0, 0, 1, "cpu")
    assert {"python", "torch", "numpy", "dyrep"} <= set(session["versions"])
    assert session["settings"]["out"] == str(tmp_path)


def test_every_start_is_noted_with_its_place_even_after_a_half_written_line(tmp_path, monkeypatch):
    for steps in (2, 3):
        train_some(small_recipe(), settings(tmp_path), steps, monkeypatch)
        with open(tmp_path / "sessions.jsonl", "a") as file:
            file.write('{"time": 17')
    train(small_recipe(), settings(tmp_path))
    assert [(start["epoch"], start["step"]) for start in read_lines(tmp_path / SESSIONS)] == [(0, 0), (0, 2), (0, 5)]
    assert len(read_run(tmp_path).sessions) == 3


def test_rows_are_appended_as_they_come_and_replaced_on_going_back(tmp_path):
    run = RunDirectory(tmp_path)
    run.create(Recipe(), {})
    run.add_row({"epoch": 1})
    run.add_row({"epoch": 2})
    assert read_lines(tmp_path / ROWS) == run.rows == [{"epoch": 1}, {"epoch": 2}]
    run.restore_rows([{"epoch": 1}])
    run.add_row({"epoch": 2, "again": True})
    assert read_lines(tmp_path / ROWS) == run.rows == [{"epoch": 1}, {"epoch": 2, "again": True}]


def test_the_files_of_a_run_that_cannot_be_read_are_named(tmp_path):
    run = RunDirectory(tmp_path)
    with pytest.raises(CheckpointError, match=r"is not the folder of a run: it has no config\.json"):
        run.model_state()
    run.create(Recipe(), {})
    with pytest.raises(CheckpointError, match=r"has no last\.ckpt yet"):
        run.model_state()
    run.write_json("config.json", {"format": 2})
    with pytest.raises(CheckpointError, match=r"config\.json has format 2, this version of dyrep reads 1"):
        run.recipe()
    run.write_json("config.json", {"format": 1, "recipe": Recipe().to_dict(), "settings": {}})
    with pytest.raises(CheckpointError, match=r"there is no file .*summary\.json"):
        run.read_json("summary.json")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"format": 1,', "is damaged: Expecting"),
        ('["format", 1]', "is damaged: it holds no JSON object"),
        (b"\xff\xfe\x00", "is damaged: 'utf"),
        ('{"format": 2, "recipe": {}, "settings": {}}', "has format 2, this version of dyrep reads 1"),
        ('{"recipe": {}}', "has format None, this version of dyrep reads 1"),
        ('{"format": 1, "settings": {}}', "is damaged: it has no recipe"),
        ('{"format": 1, "recipe": [], "settings": {}}', "is damaged: it has no recipe"),
        ('{"format": 1, "recipe": {}}', "is damaged: it has no settings"),
    ],
)
def test_a_malformed_config_is_refused_in_the_same_words_by_training_and_report(content, reason, tmp_path):
    run = RunDirectory(tmp_path)
    run.create(Recipe(), {})
    run.add_row({"epoch": 1})
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    told = set()
    for read in (run.recipe, run.model_state, lambda: load_run(tmp_path), lambda: read_run(tmp_path)):
        with pytest.raises(CheckpointError) as refused:
            read()
        told.add(str(refused.value))
    (words,) = told
    assert words.startswith(f"{tmp_path / 'config.json'} {reason}")


def test_no_file_of_a_run_has_a_number_that_json_has_no_word_for(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    run = RunDirectory(tmp_path)
    run.create(Recipe(), {"checkpoint_minutes": math.inf})
    run.add_session(settings={"checkpoint_minutes": math.inf})
    run.add_row({"epoch": 1, "val_map": math.nan})
    run.write_json("summary.json", {"test_map": math.nan, "best": {"map": -math.inf}, "fold_error": [math.nan, 1.0]})
    for file in tmp_path.iterdir():
        for text in [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines():
            json.loads(text, parse_constant=refuse)
    found = {"test_map": "nan", "best": {"map": "-inf"}, "fold_error": ["nan", 1.0]}
    assert run.read_json("summary.json") == found


def test_a_line_of_metrics_that_was_cut_off_is_passed_over_and_gives_way_to_the_next(tmp_path):
    run = RunDirectory(tmp_path)
    run.create(Recipe(), {})
    run.add_row({"epoch": 1})
    with open(tmp_path / ROWS, "a") as file:
        file.write('{"epoch": 2, "train_')
    assert read_lines(tmp_path / ROWS) == read_run(tmp_path).rows == [{"epoch": 1}]
    run.add_row({"epoch": 2})
    assert read_lines(tmp_path / ROWS) == read_run(tmp_path).rows == [{"epoch": 1}, {"epoch": 2}]


@pytest.mark.parametrize("ema", [None, 0.8])
def test_the_model_of_a_run_that_was_stopped_in_an_epoch_can_be_loaded(ema, tmp_path, monkeypatch):
    train_some(small_recipe(ema=ema), settings(tmp_path), STEPS + 2, monkeypatch)
    model, state = load_run(tmp_path)
    assert (state["epoch"], state["step"]) == (1, 2)
    saved = checkpoints.read(tmp_path / checkpoints.LAST)
    assert_same(dict(model.state_dict()), dict(saved["model" if ema is None else "average"]))
    best, state = load_run(tmp_path, "best")
    assert state["epoch"] == 1
    assert dyrep.structure(best)["blocks"] == {}


def test_two_processes_do_not_work_on_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "_LOCK_SECONDS", 0)
    with RunDirectory(tmp_path).locked():
        with pytest.raises(CheckpointError, match=r"another process is working on the run in .*another --out"):
            train(small_recipe(), settings(tmp_path))
        assert list(tmp_path.iterdir()) == []
    assert train(small_recipe(), settings(tmp_path))["fold_passed"]
