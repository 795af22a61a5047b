"""The benchmark of downstream tasks: which runs it makes of which, and that all of them work."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from downstream_data import write_masks, write_voc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import downstream
import runs
import tables


@pytest.fixture
def trained(monkeypatch):
    """What would be trained: folder, method, and backbone of every run."""
    found = []

    def train(self, task, part, out, method, seed, backbone=None):
        found.append((out.name, method, backbone))
        summary = {f"test_{task.metric}_folded": 50.0 + seed, "fold_error": 1e-7, "mean_macs": 2e9, "macs_plain": 1e9}
        rows = [{"train_seconds": 2.0, "update_seconds": 1.0}] * 3
        return {**summary, "seconds": 9.0}, rows

    monkeypatch.setattr(downstream.Bench, "_train", train)
    return found


def test_rows_are_those_of_the_paper(trained, tmp_path, capsys):
    out = tmp_path / "found.json"
    downstream.main(["--data", str(tmp_path), "--out", str(out), "--seeds", "0", "1"])
    backbones = [run for run in trained if run[0].startswith("backbone")]
    assert [(name, method) for name, method, _ in backbones] == [
        ("backbone-origin-0", "origin"),
        ("backbone-dbb-0", "dbb"),
        ("backbone-dyrep-0", "dyrep"),
        ("backbone-origin-1", "origin"),
        ("backbone-dbb-1", "dbb"),
        ("backbone-dyrep-1", "dyrep"),
    ]
    detection = {name: (method, backbone) for name, method, backbone in trained if name.startswith("detection")}
    assert len(detection) == 10
    assert detection["detection-DBB-C-1"] == ("origin", ("dbb", 1))
    assert detection["detection-DyRep-D-0"] == ("dyrep", ("origin", 0))
    assert detection["detection-DyRep-C+D-0"] == ("dyrep", ("dyrep", 0))
    saved = json.loads(out.read_text())
    assert len(saved["runs"]) == 20
    assert saved["runs"][0]["arm"] == "origin"
    assert "against origin (95 %)" in capsys.readouterr().out
    count = len(trained)
    downstream.main(["--data", str(tmp_path), "--out", str(out), "--seeds", "0", "1"])
    assert len(trained) == count


def test_parts_are_done_one_by_one_and_times_alone(trained, tmp_path):
    words = ["--data", str(tmp_path), "--out", str(tmp_path / "found.json"), "--seeds", "0", "--workers", "2"]
    downstream.main([*words, "--parts", "backbones"])
    assert len(trained) == 3
    downstream.main([*words, "--parts", "segmentation"])
    assert {name.split("-")[0] for name, *_ in trained[3:]} == {"segmentation"}
    downstream.main([*words, "--parts", "times"])
    assert [name for name, *_ in trained[8:]] == [
        *("time-detection-origin", "time-detection-dyrep", "time-segmentation-origin", "time-segmentation-dyrep")
    ]
    times = json.loads((tmp_path / "found.json").read_text())["epoch_seconds"]
    assert times["detection"]["dyrep"] == 3


def test_the_results_that_are_there_are_gone_on_with(trained, tmp_path, monkeypatch):
    text = (Path(downstream.__file__).parent.parent / "results" / "downstream.json").read_text()
    saved = json.loads(text)
    for what in ("hardware", "versions"):
        monkeypatch.setattr(runs, what, lambda what=what: saved[what])
    out = tmp_path / "downstream.json"
    out.write_text(text)
    downstream.main(["--data", str(tmp_path), "--out", str(out), "--parts", "backbones", "detection"])
    assert not trained
    assert {run["arm"] for run in saved["runs"]} == set(list(downstream.ARMS)[:5])


def test_another_setup_is_refused(trained, tmp_path):
    words = ["--data", str(tmp_path), "--out", str(tmp_path / "found.json"), "--seeds", "0", "--parts", "backbones"]
    downstream.main(words)
    with pytest.raises(SystemExit, match="holds results of another setup"):
        downstream.main([*words, "--backbone-epochs", "9"])
    for package, version, refused in (("onnx", "1.0", False), ("torch", "1.0", True)):
        saved = json.loads((tmp_path / "found.json").read_text())
        saved["versions"][package] = version
        (tmp_path / "found.json").write_text(json.dumps(saved))
        with pytest.raises(SystemExit) if refused else nullcontext():
            downstream.main(words)


def test_the_table_of_the_documentation_is_made_from_the_file(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.downstream_table().startswith("Not measured yet")
    words = ["--data", str(tmp_path), "--out", str(tmp_path / "results" / "downstream.json"), "--workers", "2"]
    downstream.main([*words, "--seeds", "0", "1", "--parts", "backbones", "detection"])
    assert "CamVid" not in tables.downstream_table()  # before there are runs
    assert len({line.count("|") for line in tables.downstream_table().splitlines()[:7]}) == 1
    assert "times of detection while up to 2 runs shared the GPU" in tables.downstream_table()  # until measured alone
    saved = tmp_path / "results" / "downstream.json"
    some = json.loads(saved.read_text()) | {"epoch_seconds": {"detection": {"origin": 99.0}}}  # stopped in between
    saved.write_text(json.dumps(some))
    assert "99.00" not in tables.downstream_table()
    assert "times of detection while" in tables.downstream_table()
    saved.write_text(json.dumps(some | {"epoch_seconds": {}}))
    downstream.main([*words, "--seeds", "0", "1"])
    lines = tables.downstream_table().splitlines()
    assert "shared the GPU" not in lines[-1]
    assert lines[2] == "| origin | 50.50 ± 0.71 | 50.50 ± 0.71 |  | 3.00 | 50.50 ± 0.71 |  | 3.00 |"
    assert (
        lines[3] == "| DBB-C | 50.50 ± 0.71 | 50.50 ± 0.71 | +0.00 ± 0.00 | 3.00 | 50.50 ± 0.71 | +0.00 ± 0.00 | 3.00 |"
    )
    assert [line.split(" | ")[0] for line in lines[3:7]] == ["| DBB-C", "| DyRep-C", "| DyRep-D", "| DyRep-C+D"]


@pytest.mark.slow
def test_everything_runs_on_generated_data(tmp_path, capsys):
    data = tmp_path / "data"
    write_voc(data / "BCCD", vary=False)
    write_masks(data / "CamVid", ignored=11)
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("a", "b"):
            (data / "tiny-imagenet-100" / split / name).mkdir(parents=True)
            for number in range(8):
                pixels = generator.integers(0, 255, (16, 16, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(data / "tiny-imagenet-100" / split / name / f"{number}.png")
    words = ["--smoke", "--data", str(data), "--out", str(tmp_path / "found.json"), "--runs", str(tmp_path / "runs")]
    arms = ["origin", "DyRep-D", "DyRep-C+D"]
    downstream.main([*words, "--seeds", "0", "--more", "--device cpu", "--arms", *arms])
    saved = json.loads((tmp_path / "found.json").read_text())
    assert len(saved["runs"]) == 6
    assert all(run["fold_error"] < 1e-4 for run in saved["runs"])
    grown = {run["arm"] for run in saved["runs"] if run["macs"] > 1}
    assert grown == {"DyRep-D", "DyRep-C+D"}
    assert (tmp_path / "runs" / "detection-DyRep-D-0" / "predictions.png").exists()
