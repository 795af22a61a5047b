"""A run that was stopped and resumed must equal one that was never stopped, bit for bit."""

import json
from functools import cache

import pytest
import torch
from engine_helpers import STEPS, assert_same, make_trainer, result, settings, small_recipe, train_some

from dyrep.engine import checkpoints
from dyrep.engine.running import train

EVERY_FEW_STEPS = {"unit": "step", "interval": 4, "score_every": 2}
CASES = {
    "dyrep": small_recipe(),
    "origin": small_recipe(method="origin"),
    "average": small_recipe(ema=0.8, label_smoothing=0.1, warmup_epochs=1, decay_norms=False, nesterov=True),
    "steps": small_recipe(evolution=EVERY_FEW_STEPS, eval_every=2),
    "steps, average": small_recipe(evolution=EVERY_FEW_STEPS, ema=0.8, val_split=0.7),
    "votes": small_recipe(evolution={"score": "vote", "origin_norm": "calibrated", "relative_gamma": True}),
    "random": small_recipe(evolution={"score": "random", "top_k": 2, "regrow": True}, precision="bf16"),
    "noisy": small_recipe(model="noisy_net:build", ema=0.8),
    "noisy, steps": small_recipe(model="noisy_net:build", evolution=EVERY_FEW_STEPS),
    "noisy origin": small_recipe(model="noisy_net:build", method="origin", val_split=0.7),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, noisy_net):
    """What uninterrupted runs come to."""

    @cache
    def run(case):
        folder = tmp_path_factory.mktemp("whole")
        train(CASES[case], settings(folder))
        return result(folder)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_stopping_after_every_single_step_changes_nothing(case, whole, tmp_path, monkeypatch):
    starts = 0
    while not train_some(CASES[case], settings(tmp_path), 1, monkeypatch):
        starts += 1
        state = checkpoints.read(tmp_path / checkpoints.LAST)
        assert state["epoch"] * STEPS + state["step"] == starts
    assert starts == 3 * STEPS - 1
    assert_same(result(tmp_path), whole(case))


@pytest.mark.parametrize("case", ["dyrep", "steps, average", "noisy"])
@pytest.mark.parametrize("places", [(6,), (5, 9), (7, 1, 9)])
def test_stopping_anywhere_changes_nothing(case, places, whole, tmp_path, monkeypatch):
    for steps in places:
        assert not train_some(CASES[case], settings(tmp_path), steps, monkeypatch)
    train(CASES[case], settings(tmp_path))
    assert_same(result(tmp_path), whole(case))


def test_the_cases_grow_and_cut_branches_within_epochs_and_after_them(whole):
    def edits(case):
        updates = [event for event in whole(case)["events"] if event["type"] == "update"]
        return [(event["epoch"], event["step"], {edit["kind"] for edit in event["edits"]}) for event in updates]

    assert edits("dyrep") == [(1, 0, {"expand"}), (2, 0, {"expand", "cut"})]
    assert [(epoch, step) for epoch, step, _ in edits("steps")] == [(0, 4), (1, 8), (1, 12), (2, 16)]
    assert set().union(*(kinds for _, _, kinds in edits("steps"))) == {"expand", "cut"}
    assert edits("origin") == []
    assert all(whole(case)["metrics"][0]["branches"] == 0 for case in ("dyrep", "origin", "noisy"))
    assert whole("steps")["metrics"][0]["branches"] > 0


def test_the_noisy_network_shows_when_a_generator_is_not_restored(noisy_net, whole, tmp_path, monkeypatch):
    for kind in ("torch", "python", "numpy"):
        folder = tmp_path / kind
        train_some(CASES["noisy origin"], settings(folder), 8, monkeypatch)
        state = checkpoints.read(folder / checkpoints.LAST)
        if kind == "torch":
            state["random"][0]["torch"] = torch.Generator().manual_seed(0).get_state()
        else:
            state["random"][0][kind][:624] = state["random"][0][kind][:624].flip(0)
        checkpoints.write(folder / checkpoints.LAST, state)
        train(CASES["noisy origin"], settings(folder))
        assert result(folder)["metrics"] != whole("noisy origin")["metrics"], kind


@pytest.mark.parametrize("case", ["dyrep", "noisy"])
def test_writing_checkpoints_changes_nothing(case, whole, tmp_path):
    train(CASES[case], settings(tmp_path, checkpoint_minutes=0))
    assert_same(result(tmp_path), whole(case))


def test_stopping_after_an_epoch_by_request_and_continuing_changes_nothing(whole, tmp_path):
    assert train(CASES["dyrep"], settings(tmp_path, stop_after=1)) == {}
    assert checkpoints.read(tmp_path / checkpoints.LAST)["epoch"] == 1
    assert train(CASES["dyrep"], settings(tmp_path, stop_after=1)) == {}
    summary = train(CASES["dyrep"], settings(tmp_path))
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert_same(result(tmp_path), whole("dyrep"))


def test_a_checkpoint_holds_everything_that_the_rest_of_the_run_depends_on(noisy_net, tmp_path, monkeypatch):
    case = CASES["noisy"]
    train_some(case, settings(tmp_path), STEPS + 4, monkeypatch)
    state = checkpoints.read(tmp_path / checkpoints.LAST)
    assert (state["epoch"], state["step"], state["world"]) == (1, 4, 1)
    assert state["recipe"] == case.to_dict()
    assert state["structure"]["blocks"]
    assert state["structure"] == state["controller"]["structure"]
    names = [name for group in state["controller"]["optimizer"]["groups"] for name in group["params"]]
    assert set(names) <= set(state["model"])
    assert all("momentum_buffer" in values for values in state["controller"]["optimizer"]["state"].values())
    assert list(state["average"]) == list(state["model"])
    assert not torch.equal(state["average"]["0.weight"], state["model"]["0.weight"])
    assert state["scaler"] == {}
    assert [set(rank) for rank in state["random"]] == [{"torch", "cuda", "python", "numpy", "rest"}]
    assert state["controller"]["scorer"]["counts"].tolist() == [4, 0]
    assert state["controller"]["scorer"]["sums"].count_nonzero() > 0
    loss, correct, examples, steps = state["sums"][0]["totals"].tolist()
    assert loss > 0
    assert 0 < correct <= examples == 4 * case.batch_size
    assert steps == 4
    assert [row["epoch"] for row in state["rows"]] == [1]
    assert [event["type"] for event in state["events"]] == ["started", "update"]
    assert state["best"]["epoch"] == 1


def test_the_scaler_of_float16_continues_and_one_that_was_not_there_starts_anew(tmp_path, monkeypatch):
    train_some(CASES["origin"], settings(tmp_path), 2, monkeypatch)
    state = checkpoints.read(tmp_path / checkpoints.LAST)
    for saved, scale in (({"scale": 8.0, "_growth_tracker": 3}, 8.0), ({}, 1024.0)):
        full = torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()
        checkpoints.write(tmp_path / checkpoints.LAST, {**state, "scaler": {**full, **saved} if saved else {}})
        trainer = make_trainer(CASES["origin"], tmp_path)
        trainer._learner.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        trainer.resume()
        assert trainer._learner.scaler.get_scale() == scale
