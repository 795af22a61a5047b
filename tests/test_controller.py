"""What an update decides, does and logs."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import dyrep
from dyrep import DyRep, DyRepConfig, scoring
from dyrep.block import RepConv
from dyrep.errors import (
    CalibrationError,
    EditRolledBackWarning,
    NoUpdateWarning,
    SettingsChangedWarning,
)
from dyrep.surgery.lengths import turning_scale
from training import make_batches, start, train_epoch

BATCHES = make_batches()


def weaken(model, layer, branch, value=0.0):
    """Make a branch look unimportant, and the others important, so that the cut rule sees a spread."""
    block = model.get_submodule(layer)
    for name, module in block.branches.items():
        module.norm.weight.data.fill_(value if name == branch else 0.2)


def test_an_update_expands_the_operation_with_the_largest_score():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    scores = controller.scorer.read().means["snip"]
    (edit,) = controller.epoch_end(BATCHES)
    assert (edit.kind, edit.layer) == ("expand", max(scores, key=scores.get))
    assert edit.detail["score"] == scores[edit.layer]
    assert list(dyrep.structure(model)["blocks"]) == [edit.layer]


@pytest.mark.parametrize("score", scoring.SCORES)
@pytest.mark.filterwarnings("ignore::dyrep.errors.ScoreNoiseWarning")
def test_every_score_runs_and_nested_blocks_appear(score):
    model, optimizer, controller = start(score=score)
    for _ in range(5):
        train_epoch(model, optimizer, BATCHES)
        assert len(controller.epoch_end(BATCHES)) >= 1
    assert any(".branches." in name for name in dyrep.structure(model)["blocks"])
    assert dyrep.verify(model, controller.deploy(), BATCHES[0]).passed


def test_every_edit_keeps_the_function_and_logs_its_drift():
    model, optimizer, controller = start(cut_threshold=0.0)
    for _ in range(4):
        train_epoch(model, optimizer, BATCHES)
        model.eval()
        before = model(BATCHES[0][0])
        edits = controller.epoch_end(BATCHES)
        assert edits
        assert not model.training
        torch.testing.assert_close(model(BATCHES[0][0]), before, rtol=1e-5, atol=1e-5)
        assert all(edit.detail["drift"] < 1e-5 and edit.detail["train_drift"] < 1e-2 for edit in edits)
    assert any(edit["kind"] == "cut" for event in controller.events[1:] for edit in event["edits"])


def test_weak_branches_are_cut_after_growth_and_the_strong_stay():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    layer = controller.epoch_end(BATCHES)[0].layer
    weaken(model, layer, "1xK")
    train_epoch(model, optimizer, BATCHES)
    weaken(model, layer, "1xK")
    edits = controller.epoch_end(BATCHES)
    assert [edit.kind for edit in edits] == ["expand", "cut"]
    assert (edits[1].layer, edits[1].branches) == (layer, ("1xK",))
    assert edits[1].detail["importances"] == {"1xK": 0.0}
    assert "1xK" not in model.get_submodule(layer).branches


def test_nothing_happens_between_updates_and_at_the_very_end():
    model, optimizer, controller = start(interval=2, total=4)
    happened = []
    for _ in range(4):
        train_epoch(model, optimizer, BATCHES)
        happened.append(len(controller.epoch_end(BATCHES)))
    assert happened == [0, 1, 0, 0]


def test_steps_can_be_the_unit():
    model, optimizer, controller = start(unit="step", interval=4)
    happened = []
    for _ in range(3):
        for batch in BATCHES:
            train_epoch(model, optimizer, [batch])
            happened.append(len(controller.step_end(BATCHES)))
        assert controller.epoch_end(BATCHES) == []
    assert [i + 1 for i, n in enumerate(happened) if n] == [4, 8]


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_all_branches_are_absorbed_on_time_and_training_goes_on_plain(unit):
    after = 5 if unit == "epoch" else 2 * len(BATCHES)
    model, optimizer, controller = start(unit=unit, absorb_after=after, cut="none", origin_norm="calibrated")
    plain, edits = {id(p) for p in model.parameters()}, []
    for _ in range(6):
        model.train()
        for batch in BATCHES:
            train_epoch(model, optimizer, [batch])
            edits.append(controller.step_end(BATCHES))
        edits.append(controller.epoch_end(BATCHES))
    edits = [made for made in edits if made]
    assert all(edit.kind == "expand" for made in edits[:-1] for edit in made)
    assert any(".branches." in edit.layer for made in edits[:-1] for edit in made)
    assert [edit.kind for edit in edits[-1]] == ["cut"] * 3  # once for every layer, with what is nested in it
    assert all(edit.detail["drift"] < 1e-5 and edit.detail["importances"] for edit in edits[-1])
    assert dyrep.structure(model)["blocks"] == {}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == plain
    assert all("momentum_buffer" in optimizer.state[p] for p in model.parameters())
    assert controller.events[-1]["macs"] == controller.events[-1]["plain_macs"]
    assert controller.scorer.read().steps == 0  # nothing is scored any more, as nothing will grow


@pytest.mark.parametrize("training", [True, False])
def test_absorbed_kernels_learn_as_fast_as_their_blocks_where_a_norm_follows(training):
    model, optimizer, controller = start(top_k=3, max_depth=1, gamma=1.0, origin_norm="calibrated")
    train_epoch(model, optimizer, BATCHES)
    assert len(controller.update(BATCHES)) == 3
    blocks = {name: model.get_submodule(name) for name in ("0", "3", "5")}
    scales = {name: turning_scale(block, torch.Generator().manual_seed(0)) for name, block in blocks.items()}
    folded = {name: dyrep.deploy(model).get_submodule(name).weight for name in blocks}
    model.train(training)  # many evaluate before they call epoch_end
    controller.absorb(BATCHES)
    for name, conv in blocks.items():
        scale = 1 if name == "3" else scales[name].float()  # no norm reads what 3 puts out
        torch.testing.assert_close(conv.weight, folded[name] * scale)
    assert all(float(scale) < 0.9 for scale in scales.values())


def test_without_batches_absorbing_is_exact_too():
    model, optimizer, controller = start(origin_norm="calibrated")
    train_epoch(model, optimizer, BATCHES)
    controller.update(BATCHES)
    before = model.eval()(BATCHES[0][0])
    assert len(controller.absorb()) == 1
    torch.testing.assert_close(model(BATCHES[0][0]), before, rtol=1e-5, atol=1e-5)


def test_absorbing_a_plain_network_changes_nothing():
    model, _, controller = start()
    before = [parameter.clone() for parameter in model.parameters()]
    assert controller.absorb(BATCHES) == []
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_scores_start_over_after_an_update():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    controller.epoch_end(BATCHES)
    assert controller.scorer.read().steps == 0


def test_the_log_tells_the_whole_story(tmp_path):
    model, optimizer, controller = start(log=tmp_path / "events.jsonl")
    plain = dyrep.costs(model, BATCHES[0])
    for _ in range(2):
        train_epoch(model, optimizer, BATCHES)
        controller.epoch_end(BATCHES)
    events = dyrep.read_events(tmp_path / "events.jsonl")
    assert events == json.loads(json.dumps(controller.events))
    assert events[0]["type"] == "started"
    assert DyRepConfig.from_dict(events[0]["config"]) == controller.config
    last = events[-1]
    now = dyrep.costs(model, BATCHES[0])
    assert (last["update"], last["epoch"], last["scored_steps"], last["skipped_steps"]) == (2, 2, 3, 0)
    assert (last["macs"], last["plain_macs"], last["parameters"]) == (now.macs, plain.macs, now.parameters)
    assert last["batches"] == 3
    assert last["edits"][0]["layer"] in last["importances"]
    assert set(last["scores"]) >= {last["edits"][0]["layer"]}


def test_without_batches_eval_is_still_exact():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    before = model.eval()(BATCHES[0][0])
    assert controller.update()
    torch.testing.assert_close(model(BATCHES[0][0]), before, rtol=1e-5, atol=1e-5)
    assert controller.events[-1]["macs"] is None


def test_several_operations_per_update():
    model, optimizer, controller = start(top_k=2)
    train_epoch(model, optimizer, BATCHES)
    edits = controller.epoch_end(BATCHES)
    assert len({edit.layer for edit in edits if edit.kind == "expand"}) == 2


def test_max_depth_keeps_to_the_models_own_convolutions():
    model, optimizer, controller = start(max_depth=1, cut="none")
    happened = []
    for _ in range(5):
        train_epoch(model, optimizer, BATCHES)
        happened += controller.epoch_end(BATCHES)
    assert sorted(edit.layer for edit in happened) == ["0", "3", "5"]


def test_a_block_that_lost_branches_grows_them_again_only_with_regrow():
    for regrow in (False, True):
        model, optimizer, controller = start(include=("3",), exclude=("*.branches.*",), regrow=regrow)
        train_epoch(model, optimizer, BATCHES)
        controller.epoch_end(BATCHES)
        dyrep.cut_(model, "3", ["1x1"], optimizer=optimizer)
        controller.scorer.watch(controller._candidates.operations())
        train_epoch(model, optimizer, BATCHES)
        edits = controller.epoch_end(BATCHES)
        assert [edit.branches for edit in edits] == ([("1x1",)] if regrow else [])


def test_patterns_limit_what_grows():
    model, optimizer, controller = start(include=("3", "5"), exclude=("5",))
    assert controller.ignored == {
        "0": "excluded by the configuration's include and exclude patterns",
        "5": "excluded by the configuration's include and exclude patterns",
    }
    train_epoch(model, optimizer, BATCHES)
    assert controller.epoch_end(BATCHES)[0].layer == "3"


def test_a_budget_of_multiply_adds_is_kept():
    model, optimizer, controller = start(macs_limit=2.0, cut="none")
    for _ in range(6):
        train_epoch(model, optimizer, BATCHES)
        controller.epoch_end(BATCHES)
    assert 1.0 < controller.events[-1]["macs"] / controller.events[-1]["plain_macs"] <= 2.0


def test_the_chosen_branches_are_added_where_they_fit():
    model, optimizer, controller = start(branches=("residual", "1x1"), top_k=3)
    train_epoch(model, optimizer, BATCHES)
    grown = {edit.layer: edit.branches for edit in controller.epoch_end(BATCHES)}
    assert grown == {"0": ("1x1",), "3": ("residual", "1x1"), "5": ("1x1",)}


def test_branch_weights_depend_on_the_seed_alone():
    def branch_weights(seed, noise):
        model, optimizer, controller = start(include=("0",))
        controller.config = dataclasses.replace(controller.config, seed=seed)
        train_epoch(model, optimizer, BATCHES)
        torch.manual_seed(noise)
        controller.epoch_end(BATCHES)
        return model[0].branches["1x1"].conv.weight.detach()

    assert torch.equal(branch_weights(1, noise=5), branch_weights(1, noise=6))
    assert not torch.equal(branch_weights(1, noise=5), branch_weights(2, noise=5))


def test_closing_stops_scoring():
    model, optimizer, controller = start()
    controller.close()
    train_epoch(model, optimizer, BATCHES)
    assert controller.scorer.read().steps == 0


def test_cuts_inside_a_branch_that_is_cut_too_are_left_out_whatever_the_branch():
    model, optimizer, controller = start(square_only=False, include=("3",))
    dyrep.expand_(model, "3", ["1x1", "1xK"], optimizer=optimizer)
    dyrep.expand_(model, "3.branches.1xK.conv", ["1x1", "residual"], optimizer=optimizer)
    controller.scorer.watch(controller._candidates.operations())
    train_epoch(model, optimizer, BATCHES)
    model[3].branches["1x1"].norm.weight.data.fill_(1)
    model[3].branches["1xK"].conv.branches["1x1"].norm.weight.data.fill_(1)
    edits = controller.epoch_end(BATCHES)
    assert [(edit.layer, edit.branches) for edit in edits if edit.kind == "cut"] == [("3", ("1xK",))]


def test_a_budget_is_kept_without_padding_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(), nn.LazyLinear(4))
    model(BATCHES[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    controller = DyRep(model, optimizer, DyRepConfig.paper(interval=1, score="snip", macs_limit=3.0, cut="none"))
    for _ in range(5):
        train_epoch(model, optimizer, BATCHES)
        controller.epoch_end(BATCHES)
    assert 1.0 < controller.events[-1]["macs"] / controller.events[-1]["plain_macs"] <= 3.0


def test_what_could_not_be_absorbed_on_time_is_absorbed_later():
    model, optimizer, controller = start(top_k=3, max_depth=1, absorb_after=2)
    train_epoch(model, optimizer, BATCHES)
    assert len(controller.epoch_end(BATCHES)) == 3
    spoiled = [(torch.full_like(images, float("nan")), labels) for images, labels in BATCHES]
    with pytest.warns(UserWarning, match="not finite"):
        assert controller.epoch_end(spoiled) == []
    with pytest.raises(CalibrationError):
        controller.epoch_end([object()])
    assert len(controller.epoch_end(BATCHES)) == 3
    assert dyrep.structure(model)["blocks"] == {}
    made = controller.updates
    assert controller.epoch_end(BATCHES) == []
    assert controller.updates == made


def test_a_run_resumed_with_an_earlier_end_of_its_branches_absorbs_them_at_once():
    model, optimizer, controller = start(top_k=3, max_depth=1)
    for _ in range(3):
        train_epoch(model, optimizer, BATCHES)
        controller.epoch_end(BATCHES)
    state, weights = controller.state_dict(), model.state_dict()
    model, optimizer, controller = start(top_k=3, max_depth=1, absorb_after=2)
    with pytest.warns(SettingsChangedWarning, match="absorb_after"):
        controller.load_state_dict(state)
    model.load_state_dict(weights)
    assert [edit.kind for edit in controller.epoch_end(BATCHES)] == ["cut"] * 3
    assert controller.epoch_end(BATCHES) == []


def test_an_edit_that_had_to_be_undone_is_not_tried_over_and_over():
    model, optimizer, controller = start(top_k=3, max_depth=1, absorb_after=2, drift_tolerance=1e-3)
    train_epoch(model, optimizer, BATCHES)
    controller.epoch_end(BATCHES)
    conv = model[3]
    conv.register_forward_hook(lambda conv, _, output: output if isinstance(conv, RepConv) else 2 * output)
    with pytest.warns(EditRolledBackWarning, match="cut 3"):
        assert [edit.layer for edit in controller.epoch_end(BATCHES)] == ["0", "5"]
    assert controller.epoch_end(BATCHES) == []
    assert list(dyrep.structure(model)["blocks"]) == ["3"]


def test_nothing_to_absorb_because_nothing_has_grown_is_said():
    _, _, controller = start(interval=5, absorb_after=2)
    assert controller.epoch_end(BATCHES) == []
    with pytest.warns(NoUpdateWarning, match=r"no branches to absorb after 2 epochs \(absorb_after\)"):
        controller.epoch_end(BATCHES)
