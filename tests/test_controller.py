import copy
import dataclasses
import json
import warnings

import pytest
import torch
from torch import nn

import dyrep
from dyrep import DyRep, DyRepConfig, scoring
from dyrep.errors import (
    CalibrationError,
    CheckpointError,
    ConfigError,
    DyRepError,
    EditRolledBackWarning,
    IneligibleLayerError,
    OptimizerError,
    ScoreNoiseWarning,
    WrappedModelError,
)
from training import loss_of, make_batches, make_net, start, train_epoch

BATCHES = make_batches()


def weaken(model, layer, branch, value=0.0):
    """Make a branch look unimportant, and the others important, so that the cut rule sees a spread."""
    block = model.get_submodule(layer)
    for name, module in block.branches.items():
        module.norm.weight.data.fill_(value if name == branch else 0.2)


def test_an_update_expands_the_operation_with_the_largest_score():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    scores = controller._scorer.read().means["snip"]
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


def test_scores_start_over_after_an_update():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    controller.epoch_end(BATCHES)
    assert controller._scorer.read().steps == 0


def test_an_update_without_any_step_says_so_and_changes_nothing():
    model, _, controller = start()
    with pytest.raises(DyRepError, match="no optimizer step was seen"):
        controller.update(BATCHES)
    assert dyrep.structure(model)["blocks"] == {}


def test_an_update_after_nothing_but_bad_steps_warns_and_expands_nothing():
    model, optimizer, controller = start()
    optimizer.zero_grad()
    loss_of(model, BATCHES[0]).backward()
    model[0].weight.grad.fill_(float("nan"))
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    with pytest.warns(UserWarning, match="not finite"):
        assert controller.epoch_end() == []
    assert controller.events[-1]["skipped_steps"] == 1


def test_synflow_warns_where_it_is_noise():
    model = nn.Sequential(
        *(m for _ in range(3) for m in (nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU())),
        nn.Flatten(),
        nn.Linear(192, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = DyRep(model, optimizer, DyRepConfig(interval=1))
    train_epoch(model, optimizer, BATCHES)
    with pytest.warns(ScoreNoiseWarning, match=r"3 of 3 convolutions.*score='invariant'"):
        assert controller.epoch_end(BATCHES)


def test_synflow_is_quiet_where_it_means_something():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = DyRep(model, optimizer, DyRepConfig(interval=1))
    train_epoch(model, optimizer, BATCHES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert controller.epoch_end(BATCHES)


class ReadsWeight(nn.Module):
    """Uses a convolution's weight in a place the branches do not reach."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        x = self.conv(x) + nn.functional.conv_transpose2d(x, self.conv.weight, padding=1)
        return self.head(x.mean((2, 3)))


def test_an_edit_that_changes_the_function_is_rolled_back_reported_and_training_goes_on():
    torch.manual_seed(0)
    model = ReadsWeight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    controller = DyRep(model, optimizer, DyRepConfig(interval=1, score="snip"))
    train_epoch(model, optimizer, BATCHES)
    before = copy.deepcopy(model.state_dict())
    params = list(optimizer.param_groups[0]["params"])
    with pytest.warns(EditRolledBackWarning, match=r"expand conv.*was undone"):
        assert controller.epoch_end(BATCHES) == []
    assert type(model.conv) is nn.Conv2d
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(a is b for a, b in zip(params, optimizer.param_groups[0]["params"], strict=True))
    assert controller.events[-1]["rolled_back"][0]["layer"] == "conv"
    assert controller.events[-1]["rolled_back"][0]["detail"]["drift"] > 1e-3
    train_epoch(model, optimizer, BATCHES)


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


def test_updates_disturb_neither_random_numbers_nor_the_loader():
    data = torch.utils.data.TensorDataset(torch.randn(24, 3, 8, 8), torch.randint(4, (24,)))

    def run(update):
        model, optimizer, controller = start(interval=1 if update else 10)
        loader = torch.utils.data.DataLoader(
            data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3)
        )
        torch.manual_seed(11)
        orders = []
        for _ in range(3):
            for images, labels in loader:
                orders.append(images[:, 0, 0, 0])
                train_epoch(model, optimizer, [(images, labels)])
            controller.epoch_end(loader)
        return torch.cat(orders), torch.rand(4)

    for with_updates, without in zip(run(True), run(False), strict=True):
        assert torch.equal(with_updates, without)


def test_without_batches_eval_is_still_exact():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    before = model.eval()(BATCHES[0][0])
    assert controller.update()
    torch.testing.assert_close(model(BATCHES[0][0]), before, rtol=1e-5, atol=1e-5)
    assert controller.events[-1]["macs"] is None


def test_empty_batches_are_an_error_and_change_nothing():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    before = list(model.state_dict())
    with pytest.raises(CalibrationError, match="no batches"):
        controller.update([])
    assert list(model.state_dict()) == before


def test_a_one_shot_iterator_serves():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    assert controller.update(iter(BATCHES))
    assert controller.events[-1]["batches"] == 3


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
        controller._scorer.watch(controller._candidates.operations())
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


def test_learning_rate_schedules_go_on_across_updates():
    model, optimizer, controller = start()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
    reference = torch.optim.lr_scheduler.OneCycleLR(
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05, momentum=0.9), max_lr=0.1, total_steps=9
    )
    for _ in range(3):
        for batch in BATCHES:
            train_epoch(model, optimizer, [batch])
            schedule.step()
            reference.optimizer.step()
            reference.step()
        controller.epoch_end(BATCHES)
    assert schedule.get_last_lr() == reference.get_last_lr()


def test_a_compiled_model_evolves_and_recompiles():
    model = make_net()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.05)
    controller = DyRep(compiled, optimizer, DyRepConfig(interval=1, score="snip", calibration_batches=2))
    for _ in range(2):
        train_epoch(compiled, optimizer, BATCHES)
        assert controller.epoch_end(BATCHES)
    compiled.eval()
    torch.testing.assert_close(compiled(BATCHES[0][0]), model(BATCHES[0][0]))
    assert dyrep.verify(compiled, controller.deploy(), BATCHES[0]).passed


def test_wrap_gives_the_model_to_train_next():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._orig_mod = module
            self.keys = list(module.state_dict())

        def forward(self, x):
            return self._orig_mod(x)

    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = DyRepConfig(interval=1, score="snip", calibration_batches=2)
    controller = DyRep(Wrapper(model), optimizer, config, wrap=Wrapper)
    train_epoch(controller.model, optimizer, BATCHES)
    first = controller.model
    controller.epoch_end(BATCHES)
    assert controller.model is not first
    assert controller.model.keys == list(model.state_dict())


def test_closing_stops_scoring():
    model, optimizer, controller = start()
    controller.close()
    train_epoch(model, optimizer, BATCHES)
    assert controller._scorer.read().steps == 0


def test_refusals_name_the_reason_and_the_remedy():
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"score='grasp' differentiates the loss: pass loss="):
        DyRep(model, optimizer, DyRepConfig(score="grasp"))
    with pytest.raises(IneligibleLayerError, match=r"no convolution .* \(it has none\)"):
        DyRep(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(IneligibleLayerError, match="0: its weight is not in the optimizer"):
        DyRep(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match=r"not a torch\.optim\.Optimizer"):
        DyRep(model, object())
    with pytest.raises(WrappedModelError, match="DataParallel"):
        DyRep(nn.DataParallel(model), optimizer)
    with pytest.raises(CheckpointError, match="not a DyRep state"):
        DyRep(model, optimizer).load_state_dict({"epoch": 3})


@pytest.mark.parametrize("kind", ["averaged", "timm", "copy"])
def test_a_moving_average_follows_every_edit_and_keeps_its_own_function(kind):
    model = make_net()
    if kind == "averaged":
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        follow, inner = average.update_parameters, average.module
    elif kind == "timm":
        average = pytest.importorskip("timm.utils").ModelEmaV3(model, decay=0.5)
        follow, inner = average.update, average.module
    else:
        average = inner = copy.deepcopy(model)

        def follow(source):
            for ours, theirs in zip(average.state_dict().values(), source.state_dict().values(), strict=True):
                ours.copy_((ours + theirs) / 2)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = DyRepConfig(interval=1, score="snip", calibration_batches=2, cut_threshold=0.0005)
    controller = DyRep(model, optimizer, config, ema=average)
    kinds = set()
    for _ in range(5):
        train_epoch(model, optimizer, BATCHES)
        with torch.no_grad():
            follow(model)
        before = inner.eval()(BATCHES[0][0])
        kinds |= {edit.kind for edit in controller.epoch_end(BATCHES)}
        torch.testing.assert_close(inner(BATCHES[0][0]), before, rtol=1e-5, atol=1e-5)
        assert list(inner.state_dict()) == list(model.state_dict())
    assert kinds == {"expand", "cut"}
    assert dyrep.verify(inner, dyrep.deploy(inner), BATCHES[0]).passed


@pytest.mark.parametrize("whole_epoch", [False, True])
def test_updates_inside_an_autocast_context_are_made_and_measured_in_full_precision(whole_epoch):
    model, optimizer, controller = start(score="invariant")
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=whole_epoch):
            train_epoch(model, optimizer, BATCHES)
            with torch.autocast("cpu", torch.bfloat16):
                edits = controller.epoch_end(BATCHES)
        assert edits
        assert all(edit.detail["drift"] < 1e-5 for edit in edits)


def test_a_model_with_bfloat16_parameters_evolves():
    model = make_net().to(torch.bfloat16)
    batches = [(images.to(torch.bfloat16), labels) for images, labels in BATCHES]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    controller = DyRep(model, optimizer, DyRepConfig(interval=1, score="snip"))
    train_epoch(model, optimizer, batches)
    assert controller.epoch_end(batches)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_update_in_the_middle_of_an_epoch_leaves_a_loader_with_workers_alone(persistent):
    data = torch.utils.data.TensorDataset(torch.randn(40, 3, 8, 8), torch.randint(4, (40,)), torch.arange(40))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=1, persistent_workers=persistent)
    model, optimizer, controller = start(unit="step", interval=2)
    seen = []
    for images, labels, index in loader:
        seen += index.tolist()
        train_epoch(model, optimizer, [(images, labels)])
        controller.step_end(loader)
        assert len(seen) <= 40
    assert sorted(seen) == list(range(40))
    assert controller.updates == 2


@pytest.mark.parametrize("form", ["in place", "inside"])
@pytest.mark.parametrize("score", ["snip", "grasp"])
def test_models_compiled_in_place_or_in_part_evolve(form, score):
    torch.compiler.reset()
    model = nn.Sequential(make_net())
    if form == "in place":
        model.compile(backend="aot_eager")
    else:
        model[0] = torch.compile(model[0], backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    controller = DyRep(model, optimizer, DyRepConfig(interval=1, score=score, calibration_batches=2), loss=loss_of)
    for _ in range(2):
        train_epoch(model, optimizer, BATCHES)
        assert controller.epoch_end(BATCHES)
    assert dyrep.verify(model, controller.deploy(), BATCHES[0]).passed


class HalfBroken(ReadsWeight):
    """Has a convolution that cannot be expanded without harm, one that is never called, and a good one."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Conv2d(3, 3, 3, padding=1)
        self.good = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return super().forward(self.good(x) + nn.functional.conv2d(x, self.unused.weight, padding=1))


@pytest.mark.filterwarnings("ignore::dyrep.errors.EditRolledBackWarning")
def test_layers_that_cannot_be_expanded_are_passed_over_and_the_next_best_is_taken():
    torch.manual_seed(0)
    model = HalfBroken()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    controller = DyRep(model, optimizer, DyRepConfig(interval=1, score="snip", top_k=3, max_depth=1, cut="none"))
    train_epoch(model, optimizer, BATCHES)
    edits = controller.epoch_end(BATCHES)
    assert [edit.layer for edit in edits] == ["good"]
    assert controller.ignored["conv"] == "expanding it changed the network's output"
    assert "never reached 'unused'" in controller.ignored["unused"]
    assert set(controller.events[-1]["rejected"]) == {"conv", "unused"}
    train_epoch(model, optimizer, BATCHES)
    assert controller.epoch_end(BATCHES) == []
    twin = HalfBroken()
    resumed = DyRep(twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9), controller.config)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.ignored == controller.ignored


def test_an_error_in_the_middle_of_an_update_undoes_all_of_it():
    model, optimizer, controller = start(top_k=2)
    train_epoch(model, optimizer, BATCHES)
    before = copy.deepcopy(model.state_dict())
    params = list(optimizer.param_groups[0]["params"])
    calls = []

    def failing(module, batch):
        calls.append(1)
        if sum(".branches." in name for name, _ in module.named_parameters()) > 20:  # after the second expansion
            raise MemoryError
        return module(batch[0])

    controller._forward = failing
    with pytest.raises(MemoryError):
        controller.epoch_end(BATCHES)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(a is b for a, b in zip(params, optimizer.param_groups[0]["params"], strict=True))


def test_a_model_whose_output_is_not_finite_is_left_alone_with_the_reason():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    model[10].bias.data[0] = float("nan")
    with pytest.warns(UserWarning, match="output is not finite"):
        assert controller.epoch_end(BATCHES) == []
    assert dyrep.structure(model)["blocks"] == {}


def test_cuts_inside_a_branch_that_is_cut_too_are_left_out_whatever_the_branch():
    model, optimizer, controller = start(square_only=False, include=("3",))
    dyrep.expand_(model, "3", ["1x1", "1xK"], optimizer=optimizer)
    dyrep.expand_(model, "3.branches.1xK.conv", ["1x1", "residual"], optimizer=optimizer)
    controller._scorer.watch(controller._candidates.operations())
    train_epoch(model, optimizer, BATCHES)
    model[3].branches["1x1"].norm.weight.data.fill_(1)
    model[3].branches["1xK"].conv.branches["1x1"].norm.weight.data.fill_(1)
    edits = controller.epoch_end(BATCHES)
    assert [(edit.layer, edit.branches) for edit in edits if edit.kind == "cut"] == [("3", ("1xK",))]


def test_voting_goes_on_when_a_layer_is_frozen_meanwhile():
    model, optimizer, controller = start(score="vote")
    train_epoch(model, optimizer, BATCHES)
    model[0].weight.requires_grad_(False)
    assert controller.epoch_end(BATCHES)[0].layer != "0"


def test_a_budget_is_kept_without_padding_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(), nn.LazyLinear(4))
    model(BATCHES[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    controller = DyRep(model, optimizer, DyRepConfig(interval=1, score="snip", macs_limit=3.0, cut="none"))
    for _ in range(5):
        train_epoch(model, optimizer, BATCHES)
        controller.epoch_end(BATCHES)
    assert 1.0 < controller.events[-1]["macs"] / controller.events[-1]["plain_macs"] <= 3.0


def test_multiply_adds_cannot_be_counted_without_batches():
    model, optimizer, controller = start(macs_limit=2.0)
    train_epoch(model, optimizer, BATCHES)
    with pytest.raises(ConfigError, match="per_mac and macs_limit have to run the model"):
        controller.update()


def test_deploying_a_copy_does_not_make_the_model_compile_again():
    torch.compiler.reset()
    compilations = []

    def backend(graph, _):
        compilations.append(1)
        return graph.forward

    model, _, controller = start()
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        compiled.eval()(BATCHES[0][0])
        controller.deploy()
    assert len(compilations) == 1
