"""What the training step does on a GPU alone. Skipped where there is none."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import dyrep
from dyrep.engine.averages import WeightAverage
from dyrep.engine.data import Augmentation, ImageArrays, Loading, ResidentLoader
from dyrep.engine.progress import SilentReporter
from dyrep.engine.recipe import RunSettings
from dyrep.engine.recipes import recipe
from dyrep.engine.rundir import RunDirectory
from dyrep.engine.setup import make_optimizer
from dyrep.engine.signals import StopRequest
from dyrep.engine.step import WARMUP_STEPS, TrainStep
from dyrep.engine.tasks.classification import learn_labels
from dyrep.engine.trainer import Trainer
from dyrep.engine.world import World
from dyrep.models import small_vgg

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda", 0)
RECIPE = replace(recipe("digits"), method="origin")


@pytest.fixture(autouse=True)
def _exact():
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


def make_loader():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (160, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (160,), generator=generator)
    augmentation = Augmentation(crop="pad", padding=1, flip=True, cutout=2)
    return ResidentLoader(
        ImageArrays(images, labels), Loading(CUDA, channels_last=True), batch_size=16, mean=(0.5,), std=(0.5,),
        augmentation=augmentation, shuffle=True,
    )  # fmt: skip


def make_step(*, graph, precision=torch.float32, model=None, loader=None, messages=None, ema=None):
    torch.manual_seed(0)
    model = (small_vgg() if model is None else model).to(CUDA).to(memory_format=torch.channels_last)
    optimizer = make_optimizer(model, RECIPE, CUDA)
    average = None if ema is None else WeightAverage(model, ema)
    step = TrainStep(
        model, optimizer, loader or make_loader(), precision=precision, average=average,
        learn=partial(learn_labels, label_smoothing=0.1),
        scaler=torch.amp.GradScaler("cuda", enabled=precision == torch.float16), graph=graph,
        message=(messages if messages is not None else []).append,
    )  # fmt: skip
    return model, optimizer, step, average


def train(step, loader=None, epochs=1):
    for epoch in range(epochs):
        for raw in (loader or make_loader()).batches(epoch):
            step(raw)
    return step.read()


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_captured_step_equals_an_eager_one(ema):
    found = []
    for graph in (False, True):
        model, _, step, average = make_step(graph=graph, ema=ema)
        totals = train(step, epochs=2)
        assert bool(step._graphs) == graph
        found.append((totals, copy.deepcopy(model), average))
    (eager, one, eager_average), (captured, other, captured_average) = found
    assert captured.steps == eager.steps == 20
    assert captured.loss == pytest.approx(eager.loss, rel=1e-4)
    for ours, theirs in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    if ema is not None:
        pairs = zip(eager_average.state_dict().values(), captured_average.state_dict().values(), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_mixed_precision_is_captured_and_learns(precision):
    model, _, step, _ = make_step(graph=True, precision=precision)
    first = train(step)
    step.reset()
    last = train(step, epochs=20)
    assert step._graphs
    assert not last.diverged
    assert last.loss / last.examples < first.loss / first.examples
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("graph", [False, True])
def test_no_step_changes_the_weights_after_a_loss_that_is_not_finite(graph):
    model, _, step, _ = make_step(graph=graph)
    train(step)
    good = {key: value.clone() for key, value in model.named_parameters()}
    with torch.no_grad():
        model.classifier.bias[0] = float("nan")
    totals = train(step)
    assert totals.diverged
    assert totals.steps == 10
    for key, value in model.named_parameters():
        if key != "classifier.bias":
            assert torch.equal(value, good[key]), key


def test_scores_are_counted_with_and_without_capturing():
    seen = []
    for graph in (False, True):
        model, optimizer, step, _ = make_step(graph=graph)
        config = dyrep.DyRepConfig.paper(score="snip", score_every=3)
        step.scorer = dyrep.DyRep(model, optimizer, config).scorer
        train(step, epochs=3)
        seen.append(step.scorer.read())
        if graph:
            assert {kind.scored for kind in step._graphs} == {True, False}
    assert seen[0].steps == seen[1].steps == 10
    for name, value in seen[0].means["snip"].items():
        assert seen[1].means["snip"][name] == pytest.approx(value, rel=1e-2)


def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_so():
    class Asks(nn.Module):
        def forward(self, x):
            return x * (1.0 if x.sum().item() > 0 else 0.5)

    messages = []
    model = nn.Sequential(small_vgg(), Asks())
    _, _, step, _ = make_step(graph=True, model=model, messages=messages)
    totals = train(step)
    assert len(messages) == 1
    assert "cannot be captured" in messages[0]
    assert totals.steps == 10
    assert totals.examples == 160
    torch.rand(1, device=CUDA)


@pytest.mark.parametrize("graph", [False, True])
def test_a_run_evolves_stops_resumes_and_recaptures(tmp_path, graph):
    chosen = replace(recipe("digits"), epochs=4, ema=0.9, dyrep=replace(recipe("digits").dyrep, interval=1))
    for stop_after in (2, None):
        settings = RunSettings(out=tmp_path, graph=graph, stop_after=stop_after)
        run = RunDirectory(tmp_path)
        trainer = Trainer(chosen, settings, World(CUDA), run, SilentReporter(), StopRequest())
        if stop_after is None:
            trainer.resume()
        else:
            run.create(chosen, {})
        finished = trainer.train()
    assert finished
    assert [row["epoch"] for row in run.rows] == [1, 2, 3, 4]
    assert len(dyrep.structure(trainer.model)["blocks"]) == 3
    assert run.rows[-1]["test_accuracy"] > 90
    images = torch.randn(8, 1, 8, 8, device=CUDA)
    assert dyrep.verify(trainer.evaluated, dyrep.deploy(trainer.evaluated), images).error < 1e-5
    assert trainer.data.train.steps > WARMUP_STEPS
