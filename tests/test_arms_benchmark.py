"""The benchmark that compares ways to train: what it measures, and what it does not repeat."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dyrep.cli.flags import parse_training
from dyrep.config import USUAL_START, DyRepConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import arms

THIRTEEN = """
from dyrep.models import small_vgg

def net(num_classes, in_channels):
    return small_vgg(num_classes, in_channels, widths=((4, 4), (4, 4), (4,) * 9))
"""
"""As many convolutions as VGG-16 has, for images of digits."""
FOUND = {"a": (1.0, 2.0, 3.0), "b": (2.0, 3.0, 6.0), "c": (1.0,)}
COMPARISON = arms.Comparison("what is best", {name: f"--{name}" for name in FOUND}, "a")
RUNS = [
    {"flags": f"--{name}", "seed": seed, "val_accuracy": accuracy}
    for name, accuracies in FOUND.items()
    for seed, accuracy in enumerate(accuracies)
]


def test_differences_are_paired_by_seed_with_a_confidence_interval():
    mean, reach = arms.against_baseline(RUNS, COMPARISON, "b")
    assert mean == pytest.approx(5 / 3)
    assert reach == pytest.approx(4.3027 * 1.1547 / 3**0.5, rel=1e-3)  # differences 1, 1, 3
    assert arms.against_baseline(RUNS, COMPARISON, "a") is None
    assert arms.against_baseline(RUNS, COMPARISON, "c") is None


@pytest.mark.parametrize("comparison", arms.COMPARISONS.values(), ids=list(arms.COMPARISONS))
def test_studies_have_at_most_six_arms_and_choose_on_images_held_out(comparison):
    assert comparison.baseline in list(comparison.arms)[: comparison.usual]
    assert comparison.usual <= 6
    assert ("--val-split 5000" in comparison.flags) == comparison.held_out


def test_what_was_chosen_is_the_librarys_default():
    words = arms.COMPARISONS["table"].arms["DyRep, our defaults"].split()
    (chosen, _), ours = parse_training(["cifar10-vgg16", *words]), DyRepConfig()
    assert chosen.dyrep == replace(ours, interval=15, start_with=USUAL_START)
    (by_name, _) = parse_training(["cifar10-vgg16", "--method", "dyrep-default"])
    assert by_name.evolution() == replace(ours, interval=15, total=600)


@pytest.fixture
def trained(monkeypatch):
    found = []

    def train(comparison, arm, seed, epochs, given, to_time=False):
        found.append((arm, seed, epochs))
        about = {"flags": comparison.arms[arm], "seed": seed, comparison.metric: 90.0 + seed}
        return {**about, "epoch_seconds": 1.0, "minutes": 2.0}

    monkeypatch.setattr(arms, "train", train)
    return found


def test_what_is_in_the_file_is_not_trained_again(trained, tmp_path, capsys):
    out = tmp_path / "found.json"
    arms.main(["cuts", "--out", str(out), "--arms", "paper", "never", "--seeds", "1"])
    arms.main(["cuts", "--out", str(out), "--arms", "paper", "never", "--seeds", "2"])
    assert trained == [("paper", 0, 40), ("never", 0, 40), ("paper", 1, 40), ("never", 1, 40)]
    assert [run["val_accuracy"] for run in json.loads(out.read_text())["runs"]] == [90, 91, 90, 91]
    assert "+0.00 ± 0.00 against paper (95 %)" in capsys.readouterr().out


def test_executions_are_timed_alone_at_the_end(trained, tmp_path):
    arms.main(["executions", "--out", str(tmp_path / "found.json"), "--seeds", "1"])
    assert trained[3:] == [(arm, 0, 3) for arm in ("plain", "fused", "folded")]


def test_runs_to_time_epochs_by_are_not_those_that_shared_the_gpu(monkeypatch, tmp_path):
    folders = []

    def run_training(recipe, words, out):
        folders.append(out.name)
        seconds = 1.0 if out.name.startswith("time-") else 9.0
        rows = [{"train_loss": 0.1, "train_seconds": seconds, "update_seconds": 0.0}] * 3
        return {"test_accuracy_folded": 90.0, "fold_error": 0.0, "seconds": 3 * seconds}, rows

    monkeypatch.setattr(arms, "run_training", run_training)
    out = tmp_path / "found.json"
    words = ["--out", str(out), "--runs", str(tmp_path), "--seeds", "1", "--epochs", "3", "--workers", "2"]
    arms.main(["executions", *words, "--arms", "plain"])
    name = "method-origin-seed-0-epochs-3"
    assert sorted(folders) == [name, f"time-{name}"]
    assert json.loads(out.read_text())["epoch_seconds"] == {"--method origin": 1.0}


def test_runs_on_other_images_have_other_folders(monkeypatch, tmp_path):
    folders = []

    def run_training(recipe, words, out):
        folders.append(out)
        rows = [{"train_loss": 0.1, "train_seconds": 1.0, "update_seconds": 0.0}]
        return {"val_accuracy": 90.0, "test_accuracy_folded": 90.0, "fold_error": 0.0, "seconds": 40}, rows

    monkeypatch.setattr(arms, "run_training", run_training)
    for study, arm in (("starts", "origin"), ("executions", "plain")):  # both are the plain network
        out = tmp_path / f"{study}.json"
        arms.main([study, "--out", str(out), "--runs", str(tmp_path), "--arms", arm, "--seeds", "1"])
    assert len(set(folders)) == len(folders) == 3  # the last one to time epochs by


def test_the_table_has_the_epochs_of_the_paper(trained, tmp_path):
    out = tmp_path / "found.json"
    arms.main(["table", "--out", str(out), "--seeds", "1", "--arms", "origin"])
    arms.main(["table", "--out", str(out), "--seeds", "1", "--arms", "origin", "DBB", "--workers", "2"])
    assert trained == [("origin", 0, 600), ("DBB", 0, 600)]
    assert ["minutes" in run for run in json.loads(out.read_text())["runs"]] == [False, True]  # DBB, origin
    assert "--interval 15 " in arms.COMPARISONS["table"].arms["DyRep, our defaults"]


def test_an_arm_is_timed_alone_once_by_a_run_that_was_made_here(trained, monkeypatch, tmp_path):
    timed, out = [], tmp_path / "found.json"
    monkeypatch.setattr(arms, "minutes_alone", lambda folder, data: timed.append(folder.name) or 7.5)
    for seed in (1, 2):  # the others are on another machine
        (tmp_path / f"method-origin-seed-{seed}-epochs-600").mkdir()
    for _ in range(2):
        arms.main(["table", "--out", str(out), "--runs", str(tmp_path), "--seeds", "3", "--arms", "origin", "DBB"])
    assert timed == ["method-origin-seed-1-epochs-600"]
    runs = [run for run in json.loads(out.read_text())["runs"] if run["flags"] == "--method origin"]
    assert [run.get("alone_minutes") for run in runs] == [None, 7.5, None]


def test_studies_share_runs(trained, tmp_path):
    out = tmp_path / "found.json"
    arms.main(["scores", "--out", str(out), "--seeds", "1", "--arms", "synflow"])
    arms.main(["cuts", "--out", str(out), "--seeds", "1", "--arms", "paper", "never"])
    assert trained == [("synflow", 0, 40), ("never", 0, 40)]


def test_several_studies_share_one_pool_and_their_runs(trained, tmp_path, capsys):
    out = tmp_path / "found.json"
    arms.main(["scores", "cuts", "--out", str(out), "--seeds", "1"])
    found = [arm for arm, _, _ in trained]
    assert len(found) == 9  # what cuts begins with is an arm of scores
    assert found[-3:] == ["never", "paper, λ = 0.002", "reference, reference norm"]
    shown = capsys.readouterr().out
    assert "grad_norm" in shown
    assert "never" in shown


def test_a_study_is_finished_before_the_next_one_begins(trained, tmp_path):
    arms.main(["folding", "cuts", "--out", str(tmp_path / "found.json"), "--seeds", "2", "--arms", "folded", "never"])
    assert trained[:4] == [("folded", 0, 40), ("folded", 1, 40), ("never", 0, 40), ("never", 1, 40)]


def test_studies_that_look_at_other_images_do_not_go_into_one_file(trained, tmp_path, capsys):
    with pytest.raises(SystemExit):
        arms.main(["scores", "table", "--out", str(tmp_path / "found.json")])
    assert "do not go into one file" in capsys.readouterr().err
    assert not trained


def test_no_run_is_begun_after_its_time(trained, tmp_path, capsys):
    out = tmp_path / "found.json"
    arms.main(["cuts", "--out", str(out), "--seeds", "2", "--minutes", "0"])
    assert not trained
    assert "8 runs were not begun" in capsys.readouterr().out


def test_nothing_is_timed_after_its_time(trained, monkeypatch, tmp_path):
    def never(folder, data):
        raise AssertionError(f"{folder} was timed")

    monkeypatch.setattr(arms, "minutes_alone", never)
    (tmp_path / "method-origin-seed-0-epochs-600").mkdir()
    for study, arm in (("folding", "folded"), ("table", "origin")):
        words = [
            study,
            "--out",
            str(tmp_path / f"{study}.json"),
            "--runs",
            str(tmp_path),
            "--seeds",
            "1",
            "--arms",
            arm,
        ]
        arms.main([*words, "--minutes", "0", "--timing-minutes", "0"])
    assert not trained


def test_another_setup_is_refused(trained, tmp_path):
    out = tmp_path / "found.json"
    arms.main(["cuts", "--out", str(out), "--seeds", "1"])
    with pytest.raises(SystemExit, match="holds results of another setup"):
        arms.main(["cuts", "--out", str(out), "--seeds", "1", "--epochs", "60"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in arms.COMPARISONS if name != "executions"])
def test_every_arm_trains(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "thirteen.py").write_text(THIRTEEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # enough for all that is absorbed, with nothing that grows until then
    length = "--epochs 21" if name == "absorbing" else "--epochs 3 --interval 1"
    more = f"--device cpu --val-split 400 --batch-size 500 --calibration-batches 2 {length}"
    more += " --model thirteen:net" if name == "places" else ""
    words = ["--recipe", "digits", "--seeds", "1", "--more", more, "--out", str(tmp_path / "found.json")]
    arms.main([name, *words, "--runs", str(tmp_path)])
    found = json.loads((tmp_path / "found.json").read_text())
    comparison = arms.COMPARISONS[name]
    assert {run["flags"] for run in found["runs"]} == set(list(comparison.arms.values())[: comparison.usual])
    assert all(run["mean_macs"] > 0 for run in found["runs"])
