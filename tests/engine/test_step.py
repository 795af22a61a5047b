"""The training step on a CPU does what a loop by hand does."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dyrep
from dyrep.engine.averages import WeightAverage
from dyrep.engine.data import Augmentation, ImageArrays, Loading, ResidentLoader
from dyrep.engine.recipe import Recipe
from dyrep.engine.setup import make_optimizer
from dyrep.engine.step import TrainStep
from dyrep.engine.tasks.classification import learn_labels
from dyrep.engine.world import World
from dyrep.execution import Clock
from dyrep.execution.settings import SETTLING_STEPS
from dyrep.models import small_vgg

CPU = torch.device("cpu")
RECIPE = Recipe(method="origin", lr=0.05, weight_decay=1e-3, nesterov=True)


def make_loader():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (96, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (96,), generator=generator)
    augmentation = Augmentation(crop="pad", padding=1, flip=True, cutout=2)
    arrays = ImageArrays(images, labels)
    return ResidentLoader(
        arrays, Loading(CPU), batch_size=16, mean=(0.5,), std=(0.25,), augmentation=augmentation, shuffle=True
    )


def make_model():
    torch.manual_seed(0)
    return small_vgg(widths=((4,), (8, 8)))


def make_step(model, loader, *, precision=torch.float32, label_smoothing=0.0, ema=None):
    return TrainStep(
        model,
        make_optimizer(model, RECIPE, CPU),
        loader,
        precision=precision,
        learn=partial(learn_labels, label_smoothing=label_smoothing),
        average=None if ema is None else WeightAverage(model, ema),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        graph=False,
        message=pytest.fail,
    )


def by_hand(model, loader, loss_of, epochs=1):
    """Sums of losses and hits over epochs of plain training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True)
    losses = hits = 0.0
    for epoch in range(epochs):
        for raw in loader.batches(epoch):
            images, labels = loader.prepare(raw)
            logits = model(images)
            loss = loss_of(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += loss.item() * len(labels)
            hits += (logits.argmax(1) == labels).sum().item()
    return losses, hits


def smoothed(share):
    """Cross entropy against labels of which a share is spread over all classes, written out."""

    def loss(logits, labels):
        targets = torch.full_like(logits, share / logits.shape[1])
        targets[torch.arange(len(labels)), labels] += 1 - share
        return -(targets * logits.log_softmax(1)).sum(1).mean()

    return loss


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_totals_and_weights_equal_those_of_a_loop_by_hand(share):
    loader, ours, theirs = make_loader(), make_model(), make_model()
    step = make_step(ours, loader, label_smoothing=share)
    for epoch in range(3):
        for raw in loader.batches(epoch):
            step(raw)
    losses, hits = by_hand(theirs, loader, smoothed(share), epochs=3)
    totals = step.read()
    assert totals.loss == pytest.approx(losses, rel=1e-4)
    assert totals.correct == hits
    assert (totals.examples, totals.steps, totals.diverged) == (3 * 96, 3 * 6, False)
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-3, atol=1e-5, msg=key)


def test_label_smoothing_changes_what_is_learnt():
    found = []
    for share in (0.0, 0.3):
        model, loader = make_model(), make_loader()
        step = make_step(model, loader, label_smoothing=share)
        for raw in loader.batches(0):
            step(raw)
        found.append(model.classifier.weight.detach().clone())
    assert not torch.allclose(*found)


def test_sums_start_over_and_continue_from_saved_ones():
    loader = make_loader()
    step = make_step(make_model(), loader)
    raws = list(loader.batches(0))
    for raw in raws[:2]:
        step(raw)
    saved, seen = step.gathered(World(CPU)), step.read()
    step.reset()
    assert (step.read().loss, step.read().examples, step.read().steps) == (0, 0, 0)
    step(raws[2])
    step.take_over(saved, World(CPU))
    assert step.read() == seen
    step(raws[3])
    assert step.read().examples == 48
    assert saved[0]["totals"].tolist()[2] == 32  # a copy


def test_as_many_ranks_continue_each_from_its_own_sums():
    saved = [{"totals": torch.tensor(own, dtype=torch.float64)} for own in ([5, 3, 32, 2], [7, 1, 30, 2])]
    for rank, expected in enumerate([(5, 3, 32, 2), (7, 1, 30, 2)]):
        step = make_step(make_model(), make_loader())
        step.take_over(saved, World(CPU, rank, 2))
        totals = step.read()
        assert (totals.loss, totals.correct, totals.examples, totals.steps) == expected


@pytest.mark.parametrize("size", [1, 3])
def test_with_another_number_of_ranks_the_main_one_takes_over_all_sums_and_every_one_the_steps(size):
    saved = [{"totals": torch.tensor(own, dtype=torch.float64)} for own in ([5, 3, 32, 2], [7, 1, 30, 2])]
    for rank in range(size):
        step = make_step(make_model(), make_loader())
        step.take_over(saved, World(CPU, rank, size))
        totals = step.read()
        assert (totals.loss, totals.correct, totals.examples) == ((12, 4, 62) if rank == 0 else (0, 0, 0))
        assert totals.steps == 2


def test_the_moving_average_follows_every_step():
    model, loader = make_model(), make_loader()
    step = make_step(model, loader, ema=0.75)
    expected = model.conv1.weight.detach().clone()
    for raw in loader.batches(0):
        step(raw)
        expected = 0.75 * expected + 0.25 * model.conv1.weight.detach()
    average = step._average.module
    torch.testing.assert_close(average.conv1.weight, expected)
    assert not torch.allclose(average.conv1.weight, model.conv1.weight)
    assert torch.equal(average.norm1.running_mean, model.norm1.running_mean)


def test_bfloat16_runs_on_a_cpu_with_weights_and_loss_in_full_precision():
    model, loader, dtypes = make_model(), make_loader(), []
    model.conv1.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    step = make_step(model, loader, precision=torch.bfloat16)
    losses = []
    for epoch in range(10):
        step.reset()
        for raw in loader.batches(epoch):
            step(raw)
        losses.append(step.read().loss)
    assert set(dtypes) == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert losses[-1] < losses[0]
    assert not step.read().diverged


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_after_a_loss_that_is_not_finite_nothing_changes_any_more(bad):
    class Fails(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * bad if self.calls == 3 else x  # once alone

    loader = make_loader()
    model = nn.Sequential(make_model(), Fails())
    step = make_step(model, loader, ema=0.9)
    raws = list(loader.batches(0))
    for raw in raws[:2]:
        step(raw)
    good = {key: value.clone() for key, value in model.named_parameters()}
    average = {key: value.clone() for key, value in step._average.module.named_parameters()}
    loss = step.read().loss
    for raw in raws[2:]:
        step(raw)
    totals = step.read()
    assert totals.diverged
    assert (totals.steps, totals.loss) == (2, loss)
    assert all(torch.equal(value, good[key]) for key, value in model.named_parameters())
    assert all(torch.equal(value, average[key]) for key, value in step._average.module.named_parameters())
    step.reset()
    assert step.read().diverged  # it does not pass


def test_a_change_of_structure_between_steps_is_trained_too():
    model, loader = make_model(), make_loader()
    step = make_step(model, loader)
    raws = list(loader.batches(0))
    for raw in raws[:3]:
        step(raw)
    dyrep.expand_(model, "conv3", optimizer=step._optimizer, calibration=loader.calibration(0))
    step.recapture()
    assert all(p.grad is None for p in model.parameters())
    before = model.get_submodule("conv3.branches.1x1.conv").weight.detach().clone()
    for raw in raws[3:]:
        step(raw)
    assert step.read().steps == 6
    assert not torch.equal(model.get_submodule("conv3.branches.1x1.conv").weight, before)


def test_the_accuracy_counts_what_the_network_said_before_it_learnt_from_it():
    loader, model = make_loader(), make_model()
    raw = next(iter(loader.batches(0)))
    images, labels = loader.prepare(raw)
    model.train()
    with torch.no_grad():
        logits = model(images)
    fresh = make_model()
    step = make_step(fresh, loader)
    step(raw)
    totals = step.read()
    assert totals.correct == (logits.argmax(1) == labels).sum().item()
    assert totals.loss == pytest.approx(16 * F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_steps_that_measure_differently_are_captured_apart(monkeypatch):
    loader = make_loader()
    step = make_step(make_model(), loader)
    step._graph_wanted, step._warmup, step.clock = True, 0, Clock(3, managed=True)
    captured, replayed = [], []

    def capture(kind):
        captured.append(kind)
        step._graphs[kind] = SimpleNamespace(replay=lambda: replayed.append(kind))
        return True

    monkeypatch.setattr(step, "_capture", capture)
    raw = next(iter(loader.batches(0)))
    for _ in range(SETTLING_STEPS + 6):
        step(raw)
    # at first in every step, for one step each; then in every third, for three
    assert [tuple(kind) for kind in captured] == [(False, True, 1), (False, False, 3), (False, True, 3)]
    assert [kind.measured for kind in replayed[SETTLING_STEPS:]] == [False, True, False, False, True, False]
