"""Save, load and continue must equal never having stopped, bit for bit."""

import copy
import io

import pytest
import torch

import dyrep
from dyrep.errors import DyRepError, OptimizerError, SettingsChangedWarning
from dyrep.surgery.optimizer_state import state_by_name
from training import make_batches, make_net, start, train_epoch

BATCHES = make_batches()
SETTINGS = {"interval": 2, "cut_threshold": 0.0005, "top_k": 1}


def epochs(parts, first, last):
    model, optimizer, controller = parts
    kinds = set()
    for epoch in range(first, last):
        torch.manual_seed(100 + epoch)
        train_epoch(model, optimizer, BATCHES)
        kinds |= {edit.kind for edit in controller.epoch_end(BATCHES)}
    return kinds


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stop", [1, 4, 7, 9])
def test_resuming_equals_never_having_stopped(optimizer, stop):
    settings = {**SETTINGS, "cut_threshold": 0.0005 if optimizer == "sgd" else 0.0001}
    whole = start(optimizer=optimizer, **settings)
    kinds = epochs(whole, 0, 12)
    assert kinds == {"expand", "cut"}

    before = start(optimizer=optimizer, **settings)
    epochs(before, 0, stop)
    saved = through_a_file({"model": before[0].state_dict(), "dyrep": before[2].state_dict()})

    after = start(seed=7, optimizer=optimizer, **settings)
    after[2].load_state_dict(saved["dyrep"])
    after[0].load_state_dict(saved["model"])
    epochs(after, stop, 12)

    assert dyrep.structure(after[0]) == dyrep.structure(whole[0])
    ours, theirs = after[0].state_dict(), whole[0].state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    states = [state_by_name(parts[1], parts[0]) for parts in (after, whole)]
    assert [group["params"] for group in states[0]["groups"]] == [group["params"] for group in states[1]["groups"]]
    for name, values in states[1]["state"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(states[0]["state"][name][key]), torch.as_tensor(value)), (name, key)


@pytest.mark.filterwarnings("ignore::dyrep.errors.SettingsChangedWarning")
def test_a_state_loads_into_a_controller_that_has_evolved_otherwise():
    saved = start(**SETTINGS)
    epochs(saved, 0, 5)
    state = through_a_file({"model": saved[0].state_dict(), "dyrep": saved[2].state_dict()})
    other = start(seed=3, score="random", **{**SETTINGS, "interval": 1})
    epochs(other, 0, 3)
    other[2].load_state_dict(state["dyrep"])
    other[0].load_state_dict(state["model"])
    assert all(torch.equal(value, other[0].state_dict()[key]) for key, value in saved[0].state_dict().items())


def test_other_settings_on_resuming_are_named():
    saved = start(**SETTINGS)
    epochs(saved, 0, 1)
    other = start(**{**SETTINGS, "score": "grad_norm", "gamma": 0.5})
    with pytest.warns(SettingsChangedWarning, match=r"score='snip' is now 'grad_norm', gamma=0.01 is now 0.5"):
        other[2].load_state_dict(saved[2].state_dict())
    assert other[2].scorer.read().steps == 0


def test_a_state_whose_optimizer_does_not_fit_changes_nothing():
    saved = start(**SETTINGS)
    epochs(saved, 0, 3)
    state = saved[2].state_dict()
    state["optimizer"]["groups"][0]["params"].append("nobody")
    other = start(**SETTINGS)
    before = list(other[0].state_dict())
    with pytest.raises(OptimizerError, match=r"not in this optimizer: \['nobody'\]"):
        other[2].load_state_dict(state)
    assert list(other[0].state_dict()) == before
    assert len(other[1].param_groups[0]["params"]) == len(list(other[0].parameters()))


def test_the_state_of_another_kind_of_optimizer_is_refused():
    state = start(**SETTINGS)[2].state_dict()
    model, _, controller = start(optimizer="adamw", **SETTINGS)
    message = "has dampening, momentum, nesterov, and AdamW here has amsgrad, betas"
    with pytest.raises(OptimizerError, match=message):
        controller.load_state_dict(state)
    assert controller.optimizer.param_groups[0]["lr"] == 1e-3
    assert dyrep.structure(model)["blocks"] == {}


DAMAGES = {
    "the DyRep state lacks 'config'": lambda state: [state.pop(key) for key in [*state][1:]],
    "the DyRep state lacks 'scorer'": lambda state: state.pop("scorer"),
    "'counters' of the DyRep state lacks 'step'": lambda state: state["counters"].pop("step"),
    "'optimizer' of the DyRep state must be a dict, got list": lambda state: state.update(optimizer=[]),
    "'next_event' of the DyRep state must be a whole number": lambda state: state.update(next_event="3"),
    "'epoch' of the DyRep state must be a whole number": lambda state: state["counters"].update(epoch=None),
    "not a structure of format 1": lambda state: state["structure"].update(blocks=[]),
    "names layer '99', which this model does not have": lambda state: state["structure"]["blocks"].update(
        {"99": {"branches": ["1x1"]}}
    ),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_state_says_where_and_changes_nothing(message):
    saved = start(**SETTINGS)
    epochs(saved, 0, 3)
    state = copy.deepcopy(saved[2].state_dict())
    DAMAGES[message](state)
    model, optimizer, controller = start(**SETTINGS)
    before = list(model.state_dict())
    with pytest.raises(DyRepError, match=message):
        controller.load_state_dict(state)
    assert list(model.state_dict()) == before
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    assert controller.epoch == 0


def test_a_state_that_an_average_cannot_follow_changes_nothing():
    saved = start(**SETTINGS)
    epochs(saved, 0, 3)
    model, optimizer, first = start(**SETTINGS)
    first.close()
    average = copy.deepcopy(model)
    controller = dyrep.DyRep(model, optimizer, saved[2].config, ema=average)
    del average[3].stride, average[5].stride, average[0].stride
    state = saved[2].state_dict()
    state["optimizer"]["groups"][0]["options"]["lr"] = 7.0
    before = list(model.state_dict())
    with pytest.raises(AttributeError):
        controller.load_state_dict(state)
    assert list(model.state_dict()) == list(average.state_dict()) == before
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def test_the_users_own_optimizer_state_dict_loads_after_the_controllers():
    saved = start(**SETTINGS)
    epochs(saved, 0, 5)
    state = through_a_file({"dyrep": saved[2].state_dict(), "optimizer": saved[1].state_dict()})
    other = start(seed=3, **SETTINGS)
    other[2].load_state_dict(state["dyrep"])
    other[1].load_state_dict(state["optimizer"])
    ours, theirs = (state_by_name(parts[1], parts[0])["state"] for parts in (other, saved))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name]["momentum_buffer"], theirs[name]["momentum_buffer"]) for name in theirs)


def test_the_event_log_of_a_resumed_run_reads_as_one(tmp_path):
    first = start(log=tmp_path / "events.jsonl", **SETTINGS)
    epochs(first, 0, 4)
    state, weights = first[2].state_dict(), copy.deepcopy(first[0].state_dict())
    epochs(first, 4, 6)
    second = start(log=tmp_path / "events.jsonl", **SETTINGS)
    second[2].load_state_dict(state)
    second[0].load_state_dict(weights)
    epochs(second, 4, 8)
    updates = [event["epoch"] for event in dyrep.read_events(tmp_path / "events.jsonl") if event["type"] == "update"]
    assert updates == [2, 4, 6, 8]


def test_folded_blocks_measure_in_the_same_steps_after_resuming():
    def make():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        config = dyrep.DyRepConfig.paper(interval=2, score="snip", calibration_batches=2)
        return model, optimizer, dyrep.DyRep(model, optimizer, config, execution={"execution": "folded", "every": 4})

    whole = make()
    epochs(whole, 0, 11)  # more steps than all of which measure
    saved = through_a_file({"model": whole[0].state_dict(), "dyrep": whole[2].state_dict()})
    after = make()
    after[2].load_state_dict(saved["dyrep"])
    after[0].load_state_dict(saved["model"])
    for parts in (whole, after):
        epochs(parts, 11, 12)
    ours, theirs = after[0].state_dict(), whole[0].state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_two_optimizers_of_one_model_are_resumed_each_by_its_own_controller():
    def make():
        model = make_net()
        optimizers = torch.optim.SGD(model[:3].parameters(), 0.05, 0.9), torch.optim.AdamW(model[3:].parameters(), 1e-3)
        config = dyrep.DyRepConfig.paper(interval=1, score="snip", calibration_batches=2)
        return model, optimizers, [dyrep.DyRep(model, optimizer, config) for optimizer in optimizers]

    def train(model, optimizers, controllers):
        for images, labels in BATCHES:
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            for optimizer in optimizers:
                optimizer.step()
        for controller in controllers:
            controller.epoch_end(BATCHES)

    whole = make()
    train(*whole)
    train(*whole)
    saved = through_a_file([whole[0].state_dict(), *(controller.state_dict() for controller in whole[2])])
    after = make()
    for controller, state in zip(after[2], saved[1:], strict=True):
        controller.load_state_dict(state)
    after[0].load_state_dict(saved[0])
    for parts in (whole, after):
        train(*parts)
    ours, theirs = after[0].state_dict(), whole[0].state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
