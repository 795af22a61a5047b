"""``dyrep bench`` prints what was found, writes it, and says in words what it means."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import dyrep
from dyrep.cli import benching
from dyrep.cli.benching import verdict
from dyrep.cli.main import main
from dyrep.engine.bench import ARMS, Bench, BenchSettings, StepTime
from dyrep.surgery.timing import LayerTimes

SMALL = ["bench", "small_vgg", "--size", "8", "--batch", "2", "--steps", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a whole run prints, line by line, and what it writes."""
    file = tmp_path_factory.mktemp("bench") / "new" / "found.json"
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda text="", **_: lines.extend(str(text).split("\n")))
        main([*SMALL, "--json", str(file)])
    return SimpleNamespace(lines=lines, data=json.loads(file.read_text()), files=list(file.parent.iterdir()))


def test_the_heading_says_what_is_timed_and_where(told):
    assert told.lines[0].startswith("small_vgg, 2 images of 8x8, fp32 on cpu: ")
    assert told.lines[1] == "6 blocks with 33 branches"


def test_there_is_a_line_for_each_arm_with_its_figures(told):
    assert told.lines[3].split() == ["training", "step", "ms", "x", "plain"]
    for line, row in zip(told.lines[4:8], told.data["steps"], strict=True):
        assert line.split()[:3] == [row["arm"], f"{row['ms']:.2f}", f"{row['ratio']:.2f}"]
    assert [row["arm"] for row in told.data["steps"]] == list(ARMS)
    assert told.lines[6].endswith("the same as eager on a CPU")
    assert len({line.index(".") for line in told.lines[4:8]}) == 1  # aligned


def test_there_is_a_line_for_each_layer_in_columns(told):
    header, *lines = told.lines[9:16]
    assert header.split("  ")[0] == "layer"
    titles = ["input", "branches", "auto"]
    starts = [header.index(title) for title in titles]
    for line, layer in zip(lines, told.data["layers"], strict=True):
        assert line.split()[0] == layer["layer"]
        shape, branches, auto = (line[start:] for start in starts)
        assert shape.startswith("x".join(map(str, layer["input_shape"])) + " ")
        assert branches.startswith(" ".join(layer["branches"]) + " ")
        assert auto == layer["auto"] == "eager"
        figures = [
            f"{layer[key]:.3f}" if key == "plain_ms" else f"{layer['ms'][key]:.3f}" for key in ("plain_ms", "eager")
        ]
        assert line.split()[-6:] == [*figures, "=", "eager", f"{layer['ms']['folded']:.3f}", "eager"]


def test_it_ends_with_what_all_this_means(told):
    assert told.lines[17].startswith("On this CPU auto runs blocks eagerly: ")
    assert "it estimates σ, here from at least 2 of 2 images" in told.lines[17]
    assert told.data["verdict"] == told.lines[17]
    assert len(told.lines) == 18


def test_the_file_is_whole_and_says_what_it_was_found_with(told):
    assert [file.name for file in told.files] == ["found.json"]
    assert told.data["versions"]["dyrep"] == dyrep.__version__
    assert told.data["settings"]["size"] == 8


def test_layers_can_be_left_out(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(Bench, "_time", lambda self, arm: StepTime(arm, 2.0))
    main([*SMALL, "--no-layers", "--branches", "1x1", "residual", "--json", str(tmp_path / "found.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "6 blocks with 9 branches"
    assert len(lines) == 10
    assert lines[9].startswith("On this CPU")
    assert json.loads((tmp_path / "found.json").read_text())["layers"] == []


def test_figures_that_are_missing_leave_the_rest_where_it_is(capsys, monkeypatch):
    rows = [
        StepTime("plain", 10.0, 1.0, 2.0, 1.0, graph=True),
        StepTime("eager", error="it does not fit into memory"),
        StepTime("fused", 15.0, 1.5, 3.0, 1.5),
        StepTime("folded", 12.0, None, 2.5, None, graph=True),
    ]
    for row in rows:
        print(benching._step(row))
    plain, eager, fused, folded = capsys.readouterr().out.splitlines()
    assert plain.split() == ["plain", "10.00", "1.00", "2.00", "1.00", "in", "a", "CUDA", "graph"]
    assert eager == f"{'eager':14}  it does not fit into memory"
    assert "without a graph" in fused
    assert folded.split()[:5] == ["folded", "12.00", "-", "2.50", "-"]
    assert plain.index("in a CUDA") == folded.index("in a CUDA") == fused.index("without")


def test_layers_that_cannot_be_timed_do_not_spoil_the_rest(capsys, monkeypatch):
    monkeypatch.setattr(Bench, "_time", lambda self, arm: StepTime(arm, 2.0))

    def layers(self, timed):
        raise dyrep.DyRepError("layer 'conv1' cannot be run folded")

    monkeypatch.setattr(Bench, "layers", layers)
    main(SMALL)
    lines = capsys.readouterr().out.splitlines()
    assert lines[9] == "layers could not be timed: layer 'conv1' cannot be run folded"
    assert lines[11].startswith("On this CPU")


# In words -----------------------------------------------------------------------------------------------------------


def steps(eager=40.0, fused=20.0, folded=12.0, plain=10.0, error="it does not fit"):
    times = {"plain": plain, "eager": eager, "fused": fused, "folded": folded}
    return [StepTime(a, ms, ms / plain) if ms else StepTime(a, error=error) for a, ms in times.items()]


def layers(*ways):
    reason = {"fused": "exact", "eager": "its norms differ in ε"}
    return [LayerTimes(str(k), (1,), (), 1.0, {}, {}, way, reason[way]) for k, way in enumerate(ways)]


def words(rows, found, device="cuda:0"):
    return verdict(rows, found, BenchSettings("small_vgg", device=device))


def test_what_auto_does_is_told_with_the_reason():
    told = words(steps(), layers("fused", "fused"))
    assert told.startswith(
        "auto runs all blocks fused, which computes what running them eagerly does. A training step "
    )
    assert "then takes 2.00 x as long as a plain one, run eagerly 4.00 x" in told
    assert words(steps(), layers("fused", "eager", "eager")).startswith(
        "auto runs 1 of 3 blocks fused, and the others eagerly (its norms differ in ε)."
    )
    assert words(steps(), layers("eager")).startswith("auto runs all blocks eagerly (its norms differ in ε).")
    assert words(steps(), []).startswith("auto runs blocks fused where they can be")


def test_on_a_cpu_auto_is_what_eager_takes():
    told = words(steps(), layers("eager"), device="cpu")
    assert told.startswith("On this CPU auto runs blocks eagerly: ")
    assert "takes 4.00 x as long as a plain one. Folded would save 70% of that (1.20 x" in told


def test_what_folding_would_save_is_told_with_what_it_costs():
    told = words(steps(), layers("fused"))
    assert told.endswith(
        "Folded would save 40% of that (1.20 x as long as a plain one), but is not exact: it estimates σ, here from at "
        "least 16 of 64 images."
    )
    told = words(steps(folded=19.9), layers("fused"))
    assert "Folded takes 1.99 x as long as a plain one, and is not exact" in told


@pytest.mark.parametrize("missing", ["plain", "eager", "fused", "folded"])
def test_what_could_not_be_measured_is_not_claimed(missing):
    rows = [StepTime(row.arm, error="no") if row.arm == missing else row for row in steps()]
    if missing == "plain":
        rows = [StepTime(row.arm, row.ms, error=row.error) for row in rows]
    told = words(rows, layers("fused"))
    assert "None" not in told
    assert ("takes 20.00 ms" in told) == (missing == "plain")
    assert ("run eagerly" in told) == (missing != "eager" and missing != "fused")
    assert ("How long a step then takes could not be measured" in told) == (missing == "fused")
    assert ("What folding would save could not be measured" in told) == (missing == "folded")
    assert ("would save" in told) == (missing != "fused")


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["resnet81"], "there is no model 'resnet81' (did you mean resnet18"),
        (["small_vgg", "--size", "0"], "size=0: must be at least 1\n"),
        (["small_vgg", "--batch", "0"], "batch=0: must be at least 1\n"),
        (["small_vgg", "--size", "4"], "model 'small_vgg' cannot be trained on 64 images of 4x4 at a time"),
        (["small_vgg", "--branches", "7x7"], "unknown branch '7x7'"),
        (["small_vgg", "--precision", "fp16", "--device", "cpu"], "precision='fp16' needs a GPU"),
        (["small_vgg", "--json", "."], "--json . is a folder; name a file\n"),
    ],
)
def test_bad_wishes_are_answered_in_a_line(flags, message, failing):
    status, told = failing("bench", *flags)
    assert status == 2
    assert told.startswith(f"dyrep: {message}")
    assert told.count("\n") == 1


def test_a_file_that_cannot_be_written_is_named(failing, monkeypatch, tmp_path):
    monkeypatch.setattr(Bench, "_time", lambda self, arm: StepTime(arm, 2.0))
    (tmp_path / "file").write_text("")
    status, told = failing(*SMALL, "--no-layers", "--json", tmp_path / "file" / "found.json")
    assert status == 1
    assert f"{tmp_path / 'file' / 'found.json'} cannot be written: " in told


def test_it_needs_a_model(failing):
    assert failing("bench")[0] == 2
