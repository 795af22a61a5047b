"""Runs of every method go on where they were stopped, on several processes too, and are refused what does not fit."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from engine_helpers import STEPS, assert_same, picture, result, settings, small_recipe, train_some
from launching import torchrun
from method_cases import CASES, NESTED, easy, edits_of, events_of

from dyrep.config import DyRepConfig
from dyrep.engine import checkpoints
from dyrep.engine.running import train
from dyrep.errors import CheckpointError, ConfigError

AVERAGED = {"ema": 0.8, "label_smoothing": 0.1, "warmup_epochs": 1, "decay_norms": False, "nesterov": True}
RESUMED = {
    **{
        f"{name}{', average' if changes else ''}": small_recipe(method=name, **changes)
        for name in ("dbb", "orepa", "repnas")
        for changes in ({}, AVERAGED)
    },
    "from the start": small_recipe(evolution={"start_with": ("1x1", "residual"), "regrow": True, "absorb_after": 2}),
    "from the start, average": small_recipe(evolution={"start_with": ("1xK",), "absorb_after": 1}, **AVERAGED),
    "mobileone": small_recipe(method="mobileone", replace="conv"),
    "mobileone, average": small_recipe(method="mobileone", replace="conv", **AVERAGED),
    "fixed": small_recipe(method="fixed", structure=NESTED),
    "fixed, average": small_recipe(method="fixed", structure=NESTED, **AVERAGED),
    "repnas, conv, average": small_recipe(method="repnas", replace="conv", ema=0.8),
}
PLACES = {"random part": (3,), "search": (STEPS + 3,), "after the search": (2 * STEPS + 3,), "everywhere": (4, 5, 6)}
"""Of RepNAS, in steps: the random part takes an epoch, the search another."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What uninterrupted runs come to."""

    @cache
    def run(case):
        folder = tmp_path_factory.mktemp("whole")
        train(RESUMED[case], settings(folder))
        return result(folder)

    return run


@pytest.mark.parametrize("case", [case for case in RESUMED if "repnas" not in case])
@pytest.mark.parametrize("places", [(3,), pytest.param((STEPS, 4), marks=pytest.mark.slow)], ids=str)
def test_a_run_of_blocks_stopped_and_continued_equals_one_that_was_not(case, places, whole, tmp_path, monkeypatch):
    for steps in places:
        assert not train_some(RESUMED[case], settings(tmp_path), steps, monkeypatch)
    train(RESUMED[case], settings(tmp_path))
    assert_same(result(tmp_path), whole(case))


@pytest.mark.parametrize("case", [case for case in RESUMED if "repnas" in case])
@pytest.mark.parametrize(
    "place", [*list(PLACES)[:1], *(pytest.param(place, marks=pytest.mark.slow) for place in list(PLACES)[1:])]
)
def test_a_search_stopped_and_continued_equals_one_that_was_not(case, place, whole, tmp_path, monkeypatch):
    for steps in PLACES[place]:
        assert not train_some(RESUMED[case], settings(tmp_path), steps, monkeypatch)
    train(RESUMED[case], settings(tmp_path))
    assert_same(result(tmp_path), whole(case))


@pytest.mark.parametrize("case", ["dbb", "orepa, average", "repnas, average"])
def test_writing_checkpoints_of_blocks_changes_nothing(case, whole, tmp_path):
    train(RESUMED[case], settings(tmp_path, checkpoint_minutes=0))
    assert_same(result(tmp_path), whole(case))


def test_the_search_is_where_the_places_say(tmp_path, monkeypatch):
    found, before = {}, 0
    for place in ("random part", "search", "after the search"):
        train_some(RESUMED["repnas"], settings(tmp_path), PLACES[place][0] - before, monkeypatch)
        saved, before = checkpoints.read(tmp_path / checkpoints.LAST), PLACES[place][0]
        assert saved["epoch"] * STEPS + saved["step"] == before
        state = saved["controller"]
        found[place] = (state["kept"] is None, state["learner"] is not None, bool(state["strengths"].count_nonzero()))
    assert found == {
        "random part": (True, False, False),
        "search": (True, True, True),
        "after the search": (False, False, True),
    }


# -- another method on the same run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("dbb", "repvgg", "other branches"),
        ("dbb", "origin", "branches already"),
        ("dbb", "dyrep4", "branches already"),
        ("dbb", "repnas", "other branches"),
        ("dbb", "dbb7", "other branches"),
        ("repnas", "dbb7", "other branches"),
        ("repnas", "dyrep4", "branches already"),
        ("orepa", "dbb", "other branches"),
        ("mobileone", "mobileone, conv", "other branches"),
        ("origin", "dbb", "branches"),
        ("fixed", "dbb", "other branches"),
        ("dbb", "fixed", "other branches"),
        ("origin", "fixed", "branches"),
        ("fixed", "dyrep4", "branches already"),
    ],
)
def test_a_method_with_other_branches_cannot_continue_a_run(before, after, words, tmp_path, monkeypatch):
    train_some(CASES[before], settings(tmp_path), 2, monkeypatch)
    files = picture(tmp_path)
    with pytest.raises(CheckpointError, match=f"{words}, so --method {CASES[after].method} cannot continue it"):
        train(CASES[after], settings(tmp_path, change_settings=True))
    assert picture(tmp_path) == files


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        ("dbb", "repvgg", "method: 'dbb' against 'repvgg'"),
        ("mobileone", "mobileone, conv", "replace: None against 'conv'"),
        ("fixed", "dbb", "method: 'fixed' against 'dbb'"),
        ("origin", "fixed", "method: 'origin' against 'fixed'"),
    ],
)
def test_another_method_is_refused_by_name_unless_a_change_was_asked_for(before, after, differs, tmp_path, monkeypatch):
    train_some(CASES[before], settings(tmp_path), 2, monkeypatch)
    with pytest.raises(ConfigError) as refused:
        train(CASES[after], settings(tmp_path))
    assert differs in str(refused.value)
    assert "--change-settings" in str(refused.value)


def test_another_structure_is_refused_as_a_change_of_the_recipe(tmp_path, monkeypatch):
    train_some(CASES["fixed"], settings(tmp_path), 2, monkeypatch)
    for layer in ("conv5", "conv6"):
        blocks = {layer: {"branches": ["1x1"], "origin_norm": False, "width": 1}}
        recipe = easy(method="fixed", structure={"format": 1, "blocks": blocks})
        with pytest.raises(ConfigError, match=r"was started with other settings \(.*structure"):
            train(recipe, settings(tmp_path))


def test_a_search_does_not_go_on_if_other_norms_are_to_be_replaced(tmp_path, monkeypatch):
    train_some(CASES["repnas"], settings(tmp_path), 3, monkeypatch)
    changed = easy(method="repnas", epochs=6, replace="conv")
    with pytest.raises(CheckpointError, match="other blocks, so these cannot continue it"):
        train(changed, settings(tmp_path, change_settings=True))


@pytest.mark.filterwarnings("ignore::dyrep.errors.SettingsChangedWarning")
def test_a_plain_run_can_go_on_with_dyrep_and_grows_then(tmp_path, monkeypatch):
    train_some(CASES["origin"], settings(tmp_path), STEPS - 1, monkeypatch)
    summary = train(CASES["dyrep4"], settings(tmp_path, change_settings=True))
    assert summary["fold_passed"]
    assert [event["epoch"] for event in events_of(tmp_path, "update")] == [1, 2]
    assert summary["structure"]["blocks"]


@pytest.mark.parametrize("start_with", [None, ("1x1",)])
def test_a_network_that_has_been_trained_plain_begins_with_nothing(start_with, tmp_path, monkeypatch):
    train_some(CASES["origin"], settings(tmp_path), STEPS + 1, monkeypatch)
    config = DyRepConfig(interval=1, score="snip", start_with=start_with)
    recipe = replace(CASES["origin"], method="dyrep", dyrep=config)
    summary = train(recipe, settings(tmp_path, change_settings=True))
    assert not events_of(tmp_path, "converted")
    assert {edit["layer"] for edit in edits_of(tmp_path, "expand")} == set(summary["structure"]["blocks"])
    assert summary["fold_passed"]


@pytest.mark.filterwarnings("ignore::dyrep.errors.SettingsChangedWarning")
def test_dyrep_can_go_on_as_a_variant_after_it_has_grown(tmp_path, monkeypatch):
    train_some(small_recipe(), settings(tmp_path), STEPS + 2, monkeypatch)
    before = checkpoints.read(tmp_path / checkpoints.LAST)["structure"]["blocks"]
    assert before
    summary = train(small_recipe(method="dyrep-nodep"), settings(tmp_path, change_settings=True))
    assert not edits_of(tmp_path, "cut")
    assert before.items() <= summary["structure"]["blocks"].items()


# -- several processes ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dbb", "repnas"])
def test_two_processes_train_blocks_and_end_with_the_same_weights(name, tmp_path):
    done = torchrun(tmp_path, tmp_path / "run", "--method", name)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert_same(second, first)
    assert first["structure"]["blocks"]
    assert first["summary"]["fold_passed"]
    assert first["summary"]["processes"] == 2
    assert first["summary"]["test_accuracy"] > 40
    assert any("branches" in key for key in first["parameters"])
    assert any("branches" in key for key in first["optimizer"])
    assert not all(torch.equal(first["average"][key], value) for key, value in first["parameters"].items())
    (converted,) = events_of(tmp_path / "run", "converted")
    assert converted["method"] == name
    assert len(events_of(tmp_path / "run", "update")) == (name == "repnas")
