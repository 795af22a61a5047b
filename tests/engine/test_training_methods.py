"""Every method trains through the same engine: to its end, with its settings, and from given weights."""

import json
from functools import cache

import pytest
import torch
from engine_helpers import assert_same, lines, make_trainer, settings, small_recipe
from method_cases import CASES, NESTED, easy, edits_of, events_of
from safetensors.torch import load_file
from torch import nn

import dyrep
from dyrep.block import RepConv
from dyrep.engine import running
from dyrep.engine.running import load_run, train
from dyrep.errors import ConfigError
from dyrep.models import build
from dyrep.passing import PassedNorm
from dyrep.records import PLAIN

BRANCHES = {
    "repvgg": ["1x1", "residual"],
    "acnet": ["1xK", "Kx1"],
    "dbb": ["1x1-KxK", "1x1-AVG", "1x1"],
    "dbb7": ["1x1", "1x1-KxK", "1x1-AVG", "1xK", "Kx1", "residual"],
    "mobileone": ["KxK-2", "KxK-3", "KxK-4", "1x1", "residual"],
    "mobileone, conv": ["KxK-2", "KxK-3", "KxK-4", "1x1", "residual"],
    "orepa": ["1x1-AVG", "1x1-DCT", "1x1-KxK", "1x1", "DW-1x1"],
}
"""Of conv2, which has as many channels before as after it."""
CONVS = [f"conv{number}" for number in range(1, 7)]
REPLACING = ("repvgg", "acnet", "dbb", "dbb7", "mobileone", "repnas")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train a case to its end, once; gives the folder of the run and the trainer as it was in the end."""
    kept = []

    def keep(trainer, reporter):
        kept.append(trainer)
        return finish(trainer, reporter)

    finish = running._finish

    @cache
    def run(case):
        folder = tmp_path_factory.mktemp("finished")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(running, "_finish", keep)
            train(CASES[case], settings(folder))
        return folder, kept.pop()

    return run


def eval_outputs(model):
    images = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model.eval()(images)


# -- to the end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_method_learns_and_folds_into_the_plain_network(case, finished):
    folder, trainer = finished(case)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["fold_passed"]
    assert summary["fold_error"] < 1e-4
    rows = lines(folder / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == list(range(1, CASES[case].epochs + 1))
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert rows[-1]["train_accuracy"] > 40
    plain = build("small_vgg", num_classes=10, in_channels=1)
    plain.load_state_dict(load_file(folder / PLAIN), strict=True)
    assert summary["parameters_plain"] == sum(p.numel() for p in plain.parameters())
    assert trainer.score("test", plain)["accuracy"] == summary["test_accuracy_folded"]
    assert summary["test_accuracy_folded"] == pytest.approx(summary["test_accuracy"], abs=0.6)


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_every_method_is_loaded_as_it_was(case, finished):
    folder, trainer = finished(case)
    model, state = load_run(folder)
    assert state["epoch"] == CASES[case].epochs
    assert dyrep.structure(model) == dyrep.structure(trainer.model)
    assert list(model.state_dict()) == list(trainer.model.state_dict())
    assert torch.equal(eval_outputs(model), eval_outputs(trainer.evaluated))


@pytest.mark.parametrize("case", CASES)
def test_the_summary_and_the_metrics_tell_of_the_structure(case, finished):
    folder, trainer = finished(case)
    found = json.loads((folder / "summary.json").read_text())["structure"]
    assert found == dyrep.structure(trainer.model)
    rows, blocks = lines(folder / "metrics.jsonl"), found["blocks"]
    assert rows[-1]["branches"] == sum(len(block["branches"]) for block in blocks.values())
    if case in BRANCHES:
        assert list(blocks) == CONVS
        assert blocks["conv2"]["branches"] == BRANCHES[case]
        assert len({row["branches"] for row in rows}) == 1
    if case == "origin":
        assert blocks == {}
    if case == "fixed":
        assert found == NESTED


@pytest.mark.parametrize("case", [*BRANCHES, "repnas", "fixed"])
def test_blocks_built_before_training_are_logged_with_the_norms_they_replace(case, finished):
    folder, _ = finished(case)
    (event,) = events_of(folder, "converted")
    assert event["method"] == CASES[case].method
    assert {edit["kind"] for edit in event["edits"]} == {"expand"}
    built = {edit["layer"]: edit for edit in event["edits"]}
    if case == "fixed":
        assert {layer: edit["branches"] for layer, edit in built.items()} == {
            layer: block["branches"] for layer, block in NESTED["blocks"].items()
        }
        return
    assert list(built) == CONVS
    norms = {layer: {"replaces": f"norm{layer[-1]}"} if case in REPLACING else {} for layer in CONVS}
    assert {layer: edit["detail"] for layer, edit in built.items()} == norms
    assert built["conv2"]["branches"] == BRANCHES.get(case, BRANCHES["dbb7"])
    if case != "repnas":
        summary = json.loads((folder / "summary.json").read_text())
        assert {layer: block.get("replaces") for layer, block in summary["structure"]["blocks"].items()} == {
            layer: norm.get("replaces") for layer, norm in norms.items()
        }


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        ("origin", []),
        ("dbb", ["converted"]),
        ("orepa", ["converted"]),
        ("fixed", ["converted"]),
        ("repnas", ["started", "converted", "search", "update"]),
        ("dyrep4", ["started", "update", "update"]),
    ],
)
def test_the_log_holds_what_the_method_does(case, kinds, finished):
    folder, _ = finished(case)
    assert [event["type"] for event in lines(folder / "events.jsonl")] == kinds
    assert [event["seq"] for event in lines(folder / "events.jsonl")] == list(range(len(kinds)))


def test_a_search_ends_with_the_branches_it_kept(finished):
    folder, trainer = finished("repnas")
    (update,) = events_of(folder, "update")
    assert update["epoch"] == 2
    started = lines(folder / "events.jsonl")[0]
    blocks = {name: module for name, module in trainer.model.named_modules() if isinstance(module, RepConv)}
    for layer, kept in update["kept"].items():
        block = blocks[layer]
        assert [*([] if block.origin_off else ["KxK"]), *block.branches] == kept
    assert any(block.origin_off for block in blocks.values())
    total = sum(map(len, update["kept"].values()))
    assert started["kept"] <= total < started["gates"] / 2
    assert {strength for layer in update["strengths"].values() for strength in layer.values()} != {0.0}
    (search,) = events_of(folder, "search")
    assert search["epoch"] == 1
    assert {strength for layer in search["strengths"].values() for strength in layer.values()} == {0.0}
    branches = [row["branches"] for row in lines(folder / "metrics.jsonl")]
    assert branches[0] == branches[1] > branches[2] == sum(len(block.branches) for block in blocks.values())
    assert set(branches[2:]) == {branches[2]}


@pytest.mark.parametrize("ema", [None, 0.8])
def test_during_a_search_the_strongest_branches_are_what_is_evaluated(ema, tmp_path, monkeypatch):
    """The average has no strengths of its own, so it goes by those that the model has at that time."""
    recipe, seen = small_recipe(method="repnas", ema=ema), []

    class Watching(running.Trainer):
        def score(self, split, model=None):
            found = super().score(split, model)
            if self.controller.gates is not None:
                gates = {
                    (layer, name): float(norm.gate)
                    for layer, block in self.evaluated.named_modules()
                    if isinstance(block, RepConv)
                    for name, norm in {
                        "KxK": block.origin_norm,
                        **{key: branch.norm for key, branch in block.branch_modules().items()},
                    }.items()
                }
                ranked = self.controller.gates.ranked(self.controller.strengths.detach()).tolist()
                seen.append((gates, dict(zip(self.controller.gates.names, ranked, strict=True))))
            return found

    monkeypatch.setattr(running, "Trainer", Watching)
    train(recipe, settings(tmp_path))
    assert len(seen) == 2  # after the random part, and at the end of the search
    for gates, ranked in seen:
        assert gates == ranked
    assert seen[0][1] != seen[1][1]


# -- settings ---------------------------------------------------------------------------------------------------


def test_dyrep_with_a_number_makes_no_update_after_that_epoch(finished):
    folder, _ = finished("dyrep-2")
    assert [event["epoch"] for event in events_of(folder, "update")] == [1, 2]
    branches = [row["branches"] for row in lines(folder / "metrics.jsonl")]
    assert branches[0] == 0 < branches[1] < branches[2] == branches[3] == branches[4]


def test_by_default_branches_from_the_start_are_logged_and_others_grow_beside_them(finished):
    folder, trainer = finished("dyrep-default")
    (event,) = events_of(folder, "converted")
    assert {edit["layer"]: edit["branches"] for edit in event["edits"]} == {
        layer: BRANCHES["repvgg"][: 2 if layer in ("conv2", "conv4", "conv6") else 1] for layer in CONVS
    }
    grown = edits_of(folder, "expand")
    assert len(grown) == 2
    assert all("1x1-AVG" in edit["branches"] and "1x1" not in edit["branches"] for edit in grown)
    assert all(block["origin_norm"] for block in dyrep.structure(trainer.model)["blocks"].values())
    last = events_of(folder, "update")[-1]
    assert last["plain_macs"] < last["macs"] <= 1.5 * last["plain_macs"]


def test_a_run_whose_branches_were_absorbed_ends_plain(finished):
    folder, _ = finished("absorbed")
    assert [row["branches"] for row in lines(folder / "metrics.jsonl")] == [6, 6, 0, 0]
    assert [event["epoch"] for event in events_of(folder, "update")] == [2]
    assert [edit["layer"] for edit in edits_of(folder, "cut")] == CONVS


def test_dyrep_without_cutting_never_cuts_where_dyrep_does(finished, tmp_path):
    folder, _ = finished("dyrep-nodep")
    assert len(events_of(folder, "update")) == 3
    assert edits_of(folder, "expand")
    assert not edits_of(folder, "cut")
    train(easy(epochs=4, evolution={"cut_threshold": 0}), settings(tmp_path))
    assert edits_of(tmp_path, "cut")


def test_dyrep4_grows_nothing_that_dbb_does_not_have(finished, tmp_path):
    folder, _ = finished("dyrep4")
    grown = {branch for edit in edits_of(folder, "expand") for branch in edit["branches"]}
    assert grown == {"1x1", "1x1-KxK", "1x1-AVG"}
    train(easy(), settings(tmp_path))
    assert {"1xK", "residual"} <= {branch for edit in edits_of(tmp_path, "expand") for branch in edit["branches"]}


@pytest.mark.parametrize("name", ["dbb", "repnas", "repvgg"])
@pytest.mark.parametrize("replace", [None, "conv", "conv+norm"])
def test_norms_are_kept_if_that_is_asked_for(name, replace, tmp_path):
    trainer = make_trainer(small_recipe(method=name, replace=replace), tmp_path)
    norms = [module for key, module in trainer.model.named_modules() if key.startswith("norm")]
    assert len(norms) == 6
    assert {type(norm) for norm in norms} == {nn.BatchNorm2d if replace == "conv" else PassedNorm}
    blocks = dyrep.structure(trainer.model)["blocks"].values()
    assert {"replaces" in block for block in blocks} == {replace != "conv"}


def test_the_norm_after_a_block_of_orepa_cannot_be_replaced(tmp_path):
    with pytest.raises(ConfigError, match="method='orepa' has no norms of its own"):
        make_trainer(small_recipe(method="orepa", replace="conv+norm"), tmp_path)


@pytest.mark.parametrize("name", ["acnet", "repnas"])
def test_patterns_choose_the_layers_to_convert(name, tmp_path):
    evolution = {"include": ("conv[2-5]",), "exclude": ("conv4", "*5")}
    trainer = make_trainer(small_recipe(method=name, evolution=evolution), tmp_path)
    assert list(dyrep.structure(trainer.model)["blocks"]) == ["conv2", "conv3"]


def large_kernels(num_classes, in_channels):
    kernels = {"3": (in_channels, 4), "5": (4, 4), "7": (4, 4)}
    layers = {f"k{k}": nn.Conv2d(*channels, int(k), padding=int(k) // 2) for k, channels in kernels.items()}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    model.add_module("pool", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    model.add_module("classifier", nn.Linear(4, num_classes))
    return model


@pytest.mark.parametrize(("largest", "converted"), [(3, 1), (5, 2), (6, 2), (7, 3), (None, 3)])
def test_kernels_that_are_too_large_are_not_converted(largest, converted, tmp_path):
    recipe = small_recipe(method="dbb", model=f"{__name__}:large_kernels", max_kernel=largest)
    trainer = make_trainer(recipe, tmp_path)
    assert list(dyrep.structure(trainer.model)["blocks"]) == ["k3", "k5", "k7"][:converted]


@pytest.mark.parametrize("copies", [1, 3])
def test_as_many_copies_are_made_as_asked_for(copies, tmp_path):
    trainer = make_trainer(small_recipe(method="mobileone", copies=copies), tmp_path)
    expected = [*(f"KxK-{number}" for number in range(2, copies + 1)), "1x1", "residual"]
    assert dyrep.structure(trainer.model)["blocks"]["conv2"]["branches"] == expected


def test_a_search_takes_its_settings_from_the_recipe(tmp_path):
    search = dyrep.RepNASConfig(keep=0.5, random_share=0.2, search_share=0.6, strength_lr=0.7)
    trainer = make_trainer(small_recipe(method="repnas", epochs=10, repnas=search), tmp_path)
    assert trainer.controller.config == dyrep.RepNASConfig(10, 0.5, 0.2, 0.6, 0.7)
    assert trainer.controller.config.ends == (2, 6)
    assert trainer.controller.gates.kept == len(trainer.controller.gates.names) // 2


def test_a_training_too_short_to_search_in_is_refused():
    with pytest.raises(ConfigError, match="total=2: must be at least 3"):
        small_recipe(method="repnas", epochs=2)


def test_the_same_seed_builds_the_same_blocks_and_another_seed_others(tmp_path):
    first, same, other = (
        make_trainer(small_recipe(method="dbb", seed=seed), tmp_path / str(number)).model.state_dict()
        for number, seed in enumerate((0, 0, 1))
    )
    assert_same(dict(same), dict(first))
    key = "conv2.branches.1x1.conv.weight"
    assert not torch.equal(first[key], other[key])


# -- weights that have been trained already ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "replace"),
    [
        *((name, replace) for name in ("dbb", "repvgg", "acnet", "dbb7", "mobileone") for replace in (None, "conv")),
        ("fixed", None),
    ],
)
def test_blocks_start_from_the_very_function_of_given_weights(name, replace, finished, tmp_path):
    weights = finished("origin")[0] / PLAIN
    plain = build("small_vgg", num_classes=10, in_channels=1)
    plain.load_state_dict(load_file(weights))
    structure = NESTED if name == "fixed" else None
    recipe = small_recipe(method=name, replace=replace, weights=str(weights), structure=structure, ema=0.8)
    trainer = make_trainer(recipe, tmp_path)
    assert dyrep.structure(trainer.model)["blocks"]
    expected = eval_outputs(plain)
    for model in (trainer.model, trainer.average.module):
        torch.testing.assert_close(eval_outputs(model), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_blocks_on_given_weights_begin_with_the_gamma_of_the_recipe(finished, tmp_path):
    weights = str(finished("origin")[0] / PLAIN)
    recipe = small_recipe(method="dbb", weights=weights, evolution={"gamma": 0.25})
    block = make_trainer(recipe, tmp_path).model.conv2
    assert {name: float(value) for name, value in block.importances().items()} == dict.fromkeys(BRANCHES["dbb"], 0.25)


def test_without_given_weights_blocks_begin_at_full_strength(tmp_path):
    block = make_trainer(small_recipe(method="dbb"), tmp_path).model.conv2
    assert {name: float(value) for name, value in block.importances().items()} == dict.fromkeys(BRANCHES["dbb"], 1.0)


def test_orepa_cannot_start_from_given_weights_and_says_which_settings_clash(finished, tmp_path):
    weights = str(finished("origin")[0] / PLAIN)
    with pytest.raises(ConfigError) as refused:
        train(small_recipe(method="orepa", weights=weights), settings(tmp_path / "run"))
    assert f"method=orepa cannot start from weights={weights}" in str(refused.value)
    assert "leave --weights out" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_training_from_given_weights_starts_where_they_were(finished, tmp_path):
    weights = str(finished("origin")[0] / PLAIN)
    before = json.loads((finished("origin")[0] / "summary.json").read_text())["test_accuracy"]
    recipe = easy(method="dbb", weights=weights, lr=1e-6, epochs=1)
    summary = train(recipe, settings(tmp_path))
    assert summary["fold_passed"]
    assert summary["test_accuracy"] > before - 10


# -- captured steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["synflow", "invariant"])
@pytest.mark.parametrize(("limit", "expected"), [(1.0, 0), (None, 2)])
def test_steps_are_captured_again_only_if_something_has_changed(score, limit, expected, tmp_path, monkeypatch):
    evolution = {"interval": 1, "macs_limit": limit, "score": score}
    trainer = make_trainer(small_recipe(epochs=3, evolution=evolution), tmp_path / "run")
    captured = []
    monkeypatch.setattr(trainer._train_on, "recapture", lambda: captured.append(trainer.epoch))
    assert trainer.train()
    assert trainer.controller.updates == 2
    assert len(captured) == expected
