"""``dyrep reproduce`` as people call it."""

from __future__ import annotations

import json

import pytest

from dyrep.cli.main import main
from dyrep.engine.running import Stopped
from dyrep.reproduce import STUDIES


def run(tmp_path, *words):
    main(["reproduce", *words, "--scale", "smoke", "--device", "cpu", "--out", str(tmp_path)])


def test_the_list_has_everything(capsys):
    main(["reproduce", "--list"])
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == list(STUDIES)
    assert "Table 2" in told[2]
    assert "8 runs at scale short" in told[2]


def test_a_study_prints_and_saves_its_table(tmp_path, capsys):
    run(tmp_path, "operation-spaces")
    told = capsys.readouterr().out
    assert "Table 1: What every method may add to a convolution" in told
    saved = json.loads((tmp_path / "smoke" / "operation-spaces.json").read_text())
    assert [row["ours"]["branches"] for row in saved["rows"]] == [[3], [4], [7], [7]]
    assert saved["versions"]["torch"]
    assert "| DBB | 4 | 4 | counted |" in (tmp_path / "smoke" / "operation-spaces.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cifra"], "there is no study 'cifra'; valid are operation-spaces"),
        ([], "no study given"),
        (["all", "cifra"], "there is no study 'cifra'"),
        (["cifar", "--seeds", "0"], "seeds=0: must be at least 1"),
    ],
)
def test_what_is_not_understood_is_said(tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, *words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_reasons_stand_below_the_table_each_of_them_once(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["reproduce", "cifar", "--out", str(tmp_path), "--device", "cpu"])
    table = capsys.readouterr().out.partition("Table 2")[2]
    assert max(map(len, table.splitlines())) <= 112
    assert table.count("[1]") == 5
    assert table.count("the data set 'cifar10' needs its folder") == 1
    assert "CIFAR-10, DyRep  " in table
    run(tmp_path, "cifar", "--no-train")  # the networks of this scale are others, and counted when they are trained
    assert "728    –" in capsys.readouterr().out


def test_a_study_of_which_nothing_could_be_trained_fails(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["reproduce", "cifar", "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path), "--device", "cpu"])
    assert stopped.value.code == 1
    told = capsys.readouterr()
    assert "not run" in told.out
    assert "nothing could be trained for\ncifar: " in told.err
    main(["reproduce", "cifar", "--out", str(tmp_path), "--no-train"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dyrep.errors.ScoreNoiseWarning")  # the paper's score, on networks with norms
def test_everything_runs_at_the_smallest_scale(tmp_path, capsys):
    run(tmp_path, "all")
    for study in STUDIES.values():
        saved = json.loads((tmp_path / "smoke" / f"{study.name}.json").read_text())
        for row in saved["rows"]:
            large = row["training"] is None or row["training"].startswith("imagenet")
            assert study.name != "downstream" or set(row["ours"]) == {"accuracy", "mAP", "mIoU"}
            assert row["state"] in (
                ("counted", "not run") if large or study.name == "operation-spaces" else ("done",)
            ), row
    assert (tmp_path / "smoke" / "stages.png").exists()
    assert (tmp_path / "smoke" / "accuracy-against-cost.png").exists()
    capsys.readouterr()
    run(tmp_path, "cifar")
    assert "epoch 1/3" not in capsys.readouterr().out  # nothing is trained again


def test_stopping_it_ends_as_shells_expect(tmp_path, monkeypatch):
    def stopped(*args):
        raise Stopped("Ctrl-C")

    monkeypatch.setattr("dyrep.reproduce.outcomes.train", stopped)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, "dep")
    assert ended.value.code == 130
