"""What an update does when something is wrong."""

import copy
import warnings

import pytest
import torch
from torch import nn

import dyrep
from dyrep import DyRep, DyRepConfig
from dyrep.errors import (
    CalibrationError,
    CheckpointError,
    ConfigError,
    DyRepError,
    EditRolledBackWarning,
    IneligibleLayerError,
    NoUpdateWarning,
    OptimizerError,
    StructureError,
    UnmeasuredEditWarning,
    WrappedModelError,
)
from dyrep.guard import EditGuard
from training import loss_of, make_batches, make_net, start, train_epoch

BATCHES = make_batches()


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


def test_what_is_frozen_after_an_update_grows_no_more_and_training_goes_on():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    assert controller.epoch_end(BATCHES)
    for module in list(model)[:-1]:
        module.requires_grad_(False)
    train_epoch(model, optimizer, BATCHES)
    before = dyrep.structure(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert controller.epoch_end(BATCHES) == []
    assert dyrep.structure(model) == before


def test_convolutions_that_no_loss_depends_on_are_told_of():
    model, optimizer, controller = start()
    features = model[:-1](BATCHES[0][0]).detach()
    nn.functional.cross_entropy(model[-1](features), BATCHES[0][1]).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="had a gradient in any step"):
        assert controller.epoch_end() == []


class ReadsWeight(nn.Module):
    """Uses a convolution's weight in a place the branches do not reach."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        x = self.conv(x) + nn.functional.conv_transpose2d(x, self.conv.weight, padding=1)
        return self.head(x.mean((2, 3)))


def start_reading_weights():
    torch.manual_seed(0)
    model = ReadsWeight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    controller = DyRep(model, optimizer, DyRepConfig.paper(interval=1, score="snip"))
    train_epoch(model, optimizer, BATCHES)
    return model, optimizer, controller


def test_an_edit_that_changes_the_function_is_rolled_back_reported_and_training_goes_on():
    model, optimizer, controller = start_reading_weights()
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


def test_without_batches_nothing_is_measured_and_the_edit_is_made():
    _, _, controller = start_reading_weights()
    (edit,) = controller.epoch_end()
    assert edit.layer == "conv"
    assert not {"drift", "train_drift"} & set(edit.detail)


class Deciding(nn.Module):
    """Gives class numbers in eval mode, which do not tell how far an edit moves what they are decided by."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, x):
        return self.net(x) if self.training else self.net(x).argmax(1)


def test_edits_of_a_model_whose_eval_output_cannot_be_compared_are_made_with_a_warning_and_no_figure():
    model = Deciding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    controller = DyRep(model, optimizer, DyRepConfig.paper(interval=1, score="snip"))
    train_epoch(model, optimizer, BATCHES)
    with pytest.warns(UnmeasuredEditWarning, match="no floating-point tensor .*, so edits are made unmeasured"):
        (edit,) = controller.epoch_end(BATCHES)
    assert "drift" not in edit.detail
    assert edit.detail["train_drift"] < 0.1


def test_an_update_in_inference_mode_is_refused_and_changes_nothing():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    with torch.inference_mode(), pytest.raises(DyRepError, match=r"inside torch.inference_mode\(\) cannot be trained"):
        controller.update(BATCHES)
    train_epoch(model, optimizer, BATCHES)
    assert controller.update(BATCHES)


def test_empty_batches_are_an_error_and_change_nothing():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    before = list(model.state_dict())
    with pytest.raises(CalibrationError, match="no batches"):
        controller.update([])
    assert list(model.state_dict()) == before


def test_refusals_name_the_reason_and_the_remedy():
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"score='grasp' differentiates the loss: pass loss="):
        DyRep(model, optimizer, DyRepConfig.paper(score="grasp"))
    with pytest.raises(IneligibleLayerError, match=r"no convolution .* \(it has none\)"):
        DyRep(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(IneligibleLayerError, match="0: its weight is not in the optimizer"):
        DyRep(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match=r"not a torch\.optim\.Optimizer"):
        DyRep(model, object())
    with pytest.raises(WrappedModelError, match="DataParallel"):
        DyRep(nn.DataParallel(model), optimizer)
    for nothing in (None, "model", model.state_dict()):
        with pytest.raises(WrappedModelError, match=r"is not a torch\.nn\.Module: pass the model itself"):
            DyRep(nothing, optimizer)
    with pytest.raises(ConfigError, match=r"config is a dict: pass DyRepConfig\(\*\*settings\), or .*from_dict"):
        DyRep(model, optimizer, {"interval": 1})
    with pytest.raises(ConfigError, match="config is a int: pass a DyRepConfig"):
        DyRep(model, optimizer, 5)
    with pytest.raises(CheckpointError, match="not a DyRep state"):
        DyRep(model, optimizer).load_state_dict({"epoch": 3})


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
    controller = DyRep(model, optimizer, DyRepConfig.paper(interval=1, score="snip", top_k=3, max_depth=1, cut="none"))
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

    controller._updater._forward = failing
    with pytest.raises(MemoryError):
        controller.epoch_end(BATCHES)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(a is b for a, b in zip(params, optimizer.param_groups[0]["params"], strict=True))


def test_a_model_whose_output_is_not_finite_is_left_alone_with_the_reason():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    model[6].running_var[0] = float("nan")
    told = r"not finite: it began, in eval mode, with the output of layer '6' \(BatchNorm2d\), from finite inputs"
    with pytest.warns(UserWarning, match=told):
        assert controller.epoch_end(BATCHES) == []
    assert dyrep.structure(model)["blocks"] == {}


def test_what_forward_makes_of_sound_outputs_is_blamed_on_forward():
    told = "it began, in eval mode, with what forward= returns: all weights and outputs of layers are finite"
    guard = EditGuard(make_net(), None, BATCHES[0], forward=lambda model, batch: model(batch[0]) / 0.0)
    assert guard.find_origin() == told


@pytest.mark.parametrize("several", [False, True], ids=["alone", "among ranks"])
def test_what_is_not_finite_in_training_mode_is_looked_for_only_where_no_rank_waits_for_another(several, monkeypatch):
    """Norms that synchronise wait for all ranks, and the others may have found theirs in eval mode already."""
    model = make_net()
    model[6].register_forward_hook(lambda norm, _, output: output * float("nan") if norm.training else None)
    monkeypatch.setattr("dyrep.surgery.ranks.distributed", lambda wanted=None: several)
    monkeypatch.setattr("dyrep.surgery.ranks.smallest", lambda value, _: value)
    found = EditGuard(model, None, BATCHES[0]).find_origin()
    layer = "it began, in training mode, with the output of layer '6' (BatchNorm2d), from finite inputs and weights"
    assert found == ("on this rank, in training mode alone" if several else layer)


def test_voting_goes_on_when_a_layer_is_frozen_meanwhile():
    model, optimizer, controller = start(score="vote")
    train_epoch(model, optimizer, BATCHES)
    model[0].weight.requires_grad_(False)
    assert controller.epoch_end(BATCHES)[0].layer != "0"


def test_multiply_adds_cannot_be_counted_without_batches():
    model, optimizer, controller = start(macs_limit=2.0)
    train_epoch(model, optimizer, BATCHES)
    with pytest.raises(ConfigError, match=r"^macs_limit=2.0 needs batches, .* pass the training loader"):
        controller.update()


def everything(model, optimizer, average):
    """What an update must not leave changed after an error."""
    states = {**model.state_dict(), **{f"average.{key}": value for key, value in average.state_dict().items()}}
    params = [id(p) for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy(states), params, [type(m) for m in (*model.modules(), *average.modules())]


def assert_unchanged(before, model, optimizer, average):
    states, params, types = everything(model, optimizer, average)
    assert list(states) == list(before[0])
    assert all(torch.equal(value, states[key]) for key, value in before[0].items())
    assert (params, types) == before[1:]


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("culprit", ["average", "wrap"])
def test_an_error_while_a_change_spreads_undoes_the_update_and_what_followed_it(culprit, grown):
    model, optimizer, first = start()
    first.close()
    average = torch.optim.swa_utils.AveragedModel(model)
    settings = DyRepConfig.paper(interval=1, score="snip", calibration_batches=2)
    failing = []

    def wrap(bare):
        if culprit in failing:
            raise MemoryError
        return bare

    second = copy.deepcopy(model)
    controller = DyRep(model, optimizer, settings, ema=[average, second], wrap=wrap)
    if grown:
        train_epoch(model, optimizer, BATCHES)
        assert controller.epoch_end(BATCHES)
    train_epoch(model, optimizer, BATCHES)
    failing.append(culprit)
    strides = {conv: conv.stride for conv in second if isinstance(conv, nn.Conv2d)}
    if culprit == "average":  # the first one has followed by then
        for conv in strides:
            del conv.stride
    before, updates = everything(model, optimizer, average), controller.updates
    with pytest.raises(MemoryError if culprit == "wrap" else AttributeError):
        controller.epoch_end(BATCHES)
    assert_unchanged(before, model, optimizer, average)
    assert controller.updates == updates
    failing.clear()
    for conv, stride in strides.items():
        conv.stride = stride
    assert controller.update(BATCHES)  # what was scored is still there
    train_epoch(model, optimizer, BATCHES)


def test_an_average_that_is_none_of_this_model_is_refused_by_name():
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in (None, 3, "ema", [model.state_dict()], {"ema": copy.deepcopy(model)}):
        with pytest.raises(ConfigError, match=r"ema.*give a moving average of the model"):
            DyRep(model, optimizer, ema=wrong)
    short = torch.optim.swa_utils.AveragedModel(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False)))
    with pytest.raises(StructureError, match=r"ema: layer '3' of the copy does not exist.*make the copy from"):
        DyRep(model, optimizer, ema=short)
    other = copy.deepcopy(model)
    other[3] = nn.Linear(8, 8)
    with pytest.raises(StructureError, match=r"layer '3' of the copy is a Linear, and the model's is a convolution"):
        DyRep(model, optimizer, ema=other)
    for key, different in {
        "stride": nn.Conv2d(8, 8, 3, 2, 1),
        "bias": nn.Conv2d(8, 8, 3, padding=1, bias=False),
    }.items():
        other[3] = different
        with pytest.raises(StructureError, match=rf"layer '3' of the copy has {key}="):
            DyRep(model, optimizer, ema=[copy.deepcopy(model), other])
    assert dyrep.structure(model)["blocks"] == {}


def test_an_average_with_other_branches_or_without_a_head_will_do():
    model = make_net()
    dyrep.expand_(model, "0", ["1x1"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    average = make_net()
    dyrep.expand_(average, "3", ["1x1"])
    headless = make_net()[:-1]
    controller = DyRep(
        model, optimizer, DyRepConfig.paper(interval=1, score="snip", max_depth=1), ema=(average, headless)
    )
    train_epoch(model, optimizer, BATCHES)
    assert controller.epoch_end(BATCHES)
    assert dyrep.structure(average) == dyrep.structure(headless) == dyrep.structure(model)


def test_epochs_that_end_while_steps_should_count_warn_once():
    model, optimizer, controller = start(unit="step", interval=2)
    train_epoch(model, optimizer, BATCHES)
    with pytest.warns(NoUpdateWarning, match=r"call step_end\(loader\) after every .* or set unit='epoch'"):
        assert controller.epoch_end(BATCHES) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        controller.epoch_end(BATCHES)


def test_loops_that_call_both_are_not_warned():
    for unit in ("step", "epoch"):
        model, optimizer, controller = start(unit=unit, interval=100)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                train_epoch(model, optimizer, BATCHES)
                controller.step_end(BATCHES)
                controller.epoch_end(BATCHES)
        resumed = start(unit=unit, interval=100)[2]
        resumed.load_state_dict(controller.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed.epoch_end(BATCHES)
