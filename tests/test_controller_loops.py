"""Updates inside users' loops: loaders, schedules, precision, compilation, averages, wrappers."""

import copy

import pytest
import torch
from torch import nn

import dyrep
from dyrep import DyRep, DyRepConfig
from training import loss_of, make_batches, make_net, start, train_epoch

BATCHES = make_batches()


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


def test_a_one_shot_iterator_serves():
    model, optimizer, controller = start()
    train_epoch(model, optimizer, BATCHES)
    assert controller.update(iter(BATCHES))
    assert controller.events[-1]["batches"] == 3


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
    controller = DyRep(compiled, optimizer, DyRepConfig.paper(interval=1, score="snip", calibration_batches=2))
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
    config = DyRepConfig.paper(interval=1, score="snip", calibration_batches=2)
    controller = DyRep(Wrapper(model), optimizer, config, wrap=Wrapper)
    train_epoch(controller.model, optimizer, BATCHES)
    first = controller.model
    controller.epoch_end(BATCHES)
    assert controller.model is not first
    assert controller.model.keys == list(model.state_dict())


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
    config = DyRepConfig.paper(interval=1, score="snip", calibration_batches=2, cut_threshold=0.0005)
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


def test_a_moving_average_is_rescaled_with_the_model_when_all_is_absorbed():
    """Otherwise it would mix kernels of two lengths with statistics that do not fit their sum."""
    model = make_net()
    dyrep.convert_(model, "dbb7", replace="conv")
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    controller = DyRep(model, optimizer, DyRepConfig.paper(), ema=average)
    train_epoch(model, optimizer, BATCHES)
    average.load_state_dict(model.state_dict())
    folded = dyrep.deploy(model)
    controller.absorb(BATCHES)
    assert not torch.allclose(model[0].weight, folded[0].weight, rtol=0.1)
    torch.testing.assert_close(average.state_dict(), model.state_dict())


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
    controller = DyRep(model, optimizer, DyRepConfig.paper(interval=1, score="snip"))
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
    controller = DyRep(
        model, optimizer, DyRepConfig.paper(interval=1, score=score, calibration_batches=2), loss=loss_of
    )
    for _ in range(2):
        train_epoch(model, optimizer, BATCHES)
        assert controller.epoch_end(BATCHES)
    assert dyrep.verify(model, controller.deploy(), BATCHES[0]).passed


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
