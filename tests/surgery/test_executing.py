"""`set_execution_`: how all blocks of a model are run, and nothing else about it."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dyrep
from dyrep.block import RepConv
from dyrep.errors import ConfigError, WrappedModelError
from dyrep.execution import EXECUTIONS, SIGMA_GRADIENTS, Clock
from dyrep.execution.settings import SETTLING_STEPS
from surgery_helpers import conv_bn_net, images, picture
from training import eval_output, loss_of, make_batches, make_net, train_epoch

BATCHES = make_batches()
INNER = "3.branches.1x1-KxK.conv"


def grown_net(nested=True):
    model = make_net()
    dyrep.expand_(model, ["0", "3", "5"], calibration=BATCHES, gamma=0.3)
    if nested:
        dyrep.expand_(model, INNER, calibration=BATCHES, gamma=0.3)
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def settings_of(model):
    return {name: module.execution for name, module in model.named_modules() if isinstance(module, RepConv)}


def losses(model, batches):
    model.train()
    with torch.no_grad():
        return [float(loss_of(copy.deepcopy(model), batch)) for batch in batches]


# What is set --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXECUTIONS)
def test_every_block_is_set_nested_ones_too(name):
    model = grown_net()
    dyrep.set_execution_(model, name, images=5, values=70, gradient="weights", every=3)
    found = settings_of(model)
    assert list(found) == ["0", "3", INNER, "5"]
    for settings in found.values():
        assert (settings.name, settings.images, settings.values, settings.gradient) == (name, 5, 70, "weights")
        assert settings.clock.every == 3
    assert len({id(settings.clock) for settings in found.values()}) == 4


def test_all_blocks_can_go_by_the_same_clock():
    model, clock = grown_net(), Clock(every=5, managed=True)
    dyrep.set_execution_(model, "folded", clock=clock)
    assert all(settings.clock is clock for settings in settings_of(model).values())
    loss_of(model.train(), BATCHES[0])
    assert clock.step == 0


def test_blocks_are_auto_until_told_otherwise_and_again_by_default():
    model = grown_net()
    assert {settings.name for settings in settings_of(model).values()} == {"auto"}
    dyrep.set_execution_(model, "folded")
    dyrep.set_execution_(model)
    assert {settings.name for settings in settings_of(model).values()} == {"auto"}


def test_blocks_that_grow_later_are_auto():
    model = make_net()
    dyrep.expand_(model, "3")
    dyrep.set_execution_(model, "folded")
    dyrep.expand_(model, "5")
    assert {name: settings.name for name, settings in settings_of(model).items()} == {"3": "folded", "5": "auto"}


def test_a_model_without_blocks_has_nothing_to_set():
    model = make_net()
    before = [sorted(vars(module)) for module in model.modules()]
    dyrep.set_execution_(model, "folded")
    assert [sorted(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"execution": "quick"}, f"execution='quick' is unknown; valid are {', '.join(EXECUTIONS)}"),
        ({"gradient": "half"}, f"gradient='half' is unknown; valid are {', '.join(SIGMA_GRADIENTS)}"),
        ({"images": 0}, "images=0: must be a whole number of at least 1"),
        ({"images": 2.5}, "images=2.5: must be a whole number"),
        ({"values": 0}, "values=0: must be a whole number of at least 1"),
        ({"every": 0}, "every=0: must be a whole number of at least 1"),
        ({"every": True}, "every=True: must be a whole number"),
    ],
)
def test_a_wrong_value_is_named_and_changes_nothing(arguments, message):
    model = grown_net(nested=False)
    dyrep.set_execution_(model, "eager")
    before = settings_of(model)
    with pytest.raises(ConfigError, match=message):
        dyrep.set_execution_(model, **{"execution": "folded", **arguments})
    assert all(settings is before[name] for name, settings in settings_of(model).items())


def test_parameters_keys_modes_and_optimizer_stay_what_they_are():
    model = grown_net()
    optimizer = sgd(model)
    train_epoch(model, optimizer, BATCHES)
    before = picture(model, optimizer)
    dyrep.set_execution_(model, "folded", images=2)
    after = picture(model, optimizer)
    for what in before.keys() - {"attributes", "values", "state"}:
        assert after[what] == before[what], what
    for what in ("values", "state"):
        assert list(after[what]) == list(before[what])
        assert all(torch.equal(after[what][key], value) for key, value in before[what].items())


# Wrapped, copied, deployed ------------------------------------------------------------------------------------------


def test_a_compiled_model_is_looked_through():
    model = grown_net()
    dyrep.set_execution_(torch.compile(model, backend="eager"), "folded")
    assert {settings.name for settings in settings_of(model).values()} == {"folded"}


def test_a_distributed_model_is_looked_through(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/together", rank=0, world_size=1)
    try:
        model = grown_net()
        wrapped = DistributedDataParallel(model)
        dyrep.set_execution_(wrapped, "folded", images=4, values=1)
        assert {settings.name for settings in settings_of(model).values()} == {"folded"}
        loss_of(wrapped.train(), BATCHES[0]).backward()
    finally:
        dist.destroy_process_group()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_wrapper_that_cannot_be_looked_through_is_refused():
    model = grown_net(nested=False)
    with pytest.raises(WrappedModelError, match="DataParallel"):
        dyrep.set_execution_(nn.DataParallel(model), "folded")
    assert {settings.name for settings in settings_of(model).values()} == {"auto"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_the_setting_and_have_a_clock_of_their_own(copied):
    model = grown_net()
    dyrep.set_execution_(model, "folded", images=3, values=1, every=4)
    loss_of(model.train(), BATCHES[0])
    twin = copied(model)
    assert settings_of(twin) == settings_of(model)
    for batch in BATCHES:
        assert torch.equal(loss_of(twin, batch), loss_of(model, batch))
    for name, settings in settings_of(twin).items():
        assert settings.clock is not settings_of(model)[name].clock
        assert (settings.clock.step, settings.clock.every) == (0 if name == INNER else 4, 4)


def test_a_state_dict_knows_nothing_of_it():
    model, twin = grown_net(), make_net()
    dyrep.set_execution_(model, "folded")
    dyrep.restructure_(twin, dyrep.structure(model)).load_state_dict(model.state_dict())
    assert {settings.name for settings in settings_of(twin).values()} == {"auto"}


def test_a_model_trained_folded_is_deployed_with_the_function_it_has_in_eval_mode():
    model = grown_net()
    dyrep.set_execution_(model, "folded", images=4, values=1)
    train_epoch(model, sgd(model), BATCHES)
    assert dyrep.verify(model, dyrep.deploy(model), BATCHES[0]).error < 1e-5
    expected = eval_output(model, BATCHES[0][0])
    deployed = dyrep.deploy(model)
    torch.testing.assert_close(eval_output(deployed, BATCHES[0][0]), expected, rtol=1e-4, atol=1e-5)
    assert not any("execution" in vars(module) for module in deployed.modules())
    assert {settings.name for settings in settings_of(model).values()} == {"folded"}


def test_eval_mode_is_the_same_function_in_every_execution():
    model = grown_net()
    found = {}
    for name in EXECUTIONS:
        dyrep.set_execution_(model, name)
        found[name] = eval_output(model, BATCHES[0][0])
    for output in found.values():
        torch.testing.assert_close(output, found["eager"], rtol=1e-4, atol=1e-5)


# Training -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"gradient": gradient} for gradient in SIGMA_GRADIENTS] + [{"every": 3}], ids=str)
def test_training_folded_learns(options):
    model = grown_net()
    dyrep.set_execution_(model, "folded", images=4, values=1, **options)
    before = sum(losses(model, BATCHES))
    optimizer = sgd(model)
    for _ in range(12):
        train_epoch(model, optimizer, BATCHES)
    assert sum(losses(model, BATCHES)) < 0.6 * before
    assert dyrep.verify(model, dyrep.deploy(model), BATCHES[0]).error < 1e-4


def test_the_execution_can_change_in_the_middle_of_training():
    model = grown_net()
    optimizer = sgd(model)
    seen = [sum(losses(model, BATCHES))]
    for name in ("eager", "folded", "auto", "folded", "eager"):
        dyrep.set_execution_(model, name, images=8, gradient="full")
        for _ in range(4):
            train_epoch(model, optimizer, BATCHES)
        seen.append(sum(losses(model, BATCHES)))
    assert all(after < before * 1.05 for before, after in itertools.pairwise(seen))
    assert seen[-1] < 0.6 * seen[0]


def test_with_the_whole_batch_and_full_gradients_training_is_the_same():
    trained = []
    for name in ("eager", "folded"):
        model = grown_net().double()
        dyrep.set_execution_(model, name, images=8, gradient="full")
        train_epoch(model, sgd(model), [(x.double(), labels) for x, labels in BATCHES])
        trained.append(model.state_dict())
    for (name, value), other in zip(trained[0].items(), trained[1].values(), strict=True):
        torch.testing.assert_close(other, value, rtol=1e-6, atol=1e-8, msg=name)


# Measuring now and then ---------------------------------------------------------------------------------------------


def measured_in(model, steps):
    """In which of these steps every block measures σ."""
    found = {name: [] for name, block in model.named_modules() if isinstance(block, RepConv) and block.branches}
    norms = {name: next(iter(model.get_submodule(name).branch_modules().values())).norm for name in found}
    for name in found:
        model.get_submodule(name).execution.clock.step = steps[0]
    for number in steps:
        before = {name: norm.running_var.clone() for name, norm in norms.items()}
        model.train()(images(1)[0])
        for name, norm in norms.items():
            if not torch.equal(norm.running_var, before[name]):
                found[name].append(number)
    return found


def two_blocks(every):
    model = conv_bn_net()
    dyrep.expand_(model, ["0", "3"], ["1x1"])
    dyrep.set_execution_(model, "folded", every=every)
    return model


def test_all_blocks_measure_in_the_same_steps():
    assert measured_in(two_blocks(every=3), range(30, 38)) == {"0": [30, 33, 36], "3": [30, 33, 36]}


def test_at_first_all_blocks_measure_in_every_step():
    settling = list(range(SETTLING_STEPS))
    expected = {"0": [*settling, 50], "3": [*settling, 50]}
    assert measured_in(two_blocks(every=50), range(SETTLING_STEPS + 35)) == expected


def test_blocks_go_on_measuring_when_others_are_cut():
    model = two_blocks(every=3)
    model(images(1)[0])
    dyrep.cut_(model, "0")
    assert measured_in(model, range(31, 38)) == {"3": [33, 36]}


def test_blocks_go_on_measuring_beside_those_that_have_no_norms():
    model = conv_bn_net()
    dyrep.convert_(model, "orepa", include=["0"])
    dyrep.expand_(model, "3", ["1x1"])
    dyrep.set_execution_(model, "folded", every=3)
    model.train()(images(1)[0])
    assert settings_of(model)["3"].clock.step == 1


def test_a_clock_is_always_due_where_every_step_measures():
    clock = Clock()
    assert all(clock.due for clock.step in range(50))
    assert clock.span == 1
