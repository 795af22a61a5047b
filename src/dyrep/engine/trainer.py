"""The training loop: epochs of steps, evaluation and structure updates."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dyrep.controller import DyRep
from dyrep.engine.learner import Learner
from dyrep.engine.precision import computing_in
from dyrep.engine.progress import Curves, Reporter, Status
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.resuming import Place, Saver
from dyrep.engine.rundir import RunDirectory
from dyrep.engine.schedule import learning_rate, set_learning_rate_
from dyrep.engine.signals import StopRequest
from dyrep.engine.step import Totals
from dyrep.engine.world import World
from dyrep.errors import DivergedError
from dyrep.records import EVENTS
from dyrep.surgery.divergence import all_finite, find_origin
from dyrep.surgery.edits import Edit
from dyrep.surgery.structure import importances

AGREE_STEPS = 20
"""Several processes ask each other this often whether to save or stop."""


class Trainer:
    """Trains one model by a recipe.

    Args:
        recipe: what to train and how.
        settings: where and with what.
        world: the processes that train together.
        run: the folder of the run.
        reporter: tells a person what happens.
        stop: whether somebody wants the run to end.
        resuming: whether `resume` follows, so that files with initial weights are not needed any more.

    Attributes:
        model: the bare model.
        task: what is learnt.
        data: the loaders.
        converted: what was made of the model before training.
        controller: changes the model's structure; None for methods that never do.
        epoch: epochs completed.
        step: steps of the current epoch completed.
        stopped: whether the run ended because somebody asked for it.
        best: the best model so far.
    """

    def __init__(
        self,
        recipe: Recipe,
        settings: RunSettings,
        world: World,
        run: RunDirectory,
        reporter: Reporter,
        stop: StopRequest,
        *,
        resuming: bool = False,
    ) -> None:
        self.recipe, self.settings, self.world, self.run = recipe, settings, world, run
        self.epoch = self.step = 0
        self.stopped = False
        self.best: dict[str, Any] | None = None
        self._reporter, self._stop = reporter, stop
        learner = Learner(recipe, settings, world, reporter.message, initialised=not resuming)
        self._learner, self._saver = learner, Saver(learner, run, settings)
        self.task, self.data, self.model, self.converted = learner.task, learner.data, learner.model, learner.converted
        self.optimizer, self.average, self.controller = learner.optimizer, learner.average, learner.controller
        self._precision, self._train_on = learner.precision, learner.train_on
        self._curves: Curves | None = None
        self._earlier_seconds = 0.0
        self._began = self._last_looked = time.perf_counter()
        self._examples_at_start = 0.0

    @property
    def size(self) -> dict[str, int]:
        """Parameters, multiply-adds and branches of the model as it is now."""
        return self._learner.size

    @property
    def example(self) -> Any:
        """A batch of one empty image, to count what the model costs."""
        return self._learner.example

    @property
    def evaluated(self) -> nn.Module:
        """The model that counts: the moving average if there is one."""
        return self._learner.evaluated

    @property
    def seconds(self) -> float:
        """Time this run has taken so far, over all processes that worked on it one after the other."""
        return self._earlier_seconds + time.perf_counter() - self._began

    # -- the loop -----------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Train to the end; whether it was reached. If not, the run can be resumed."""
        self._learner.log.move_to(self.run.path / EVENTS)
        if self.settings.tensorboard and self.world.is_main:
            self._curves = Curves(self.run.path / "tensorboard", self.epoch)
        self._began = self._began_epoch = self._last_looked = time.perf_counter()
        self._saver.start_clock()
        end = min(self.recipe.epochs, self.settings.stop_after or self.recipe.epochs)
        while self.epoch < end:
            if not self._train_epoch():
                self.save()
                self.stopped = True
                return False
            self._finish_epoch()
            due, stopped = self.world.any([self._saver.due, bool(self._stop)])
            if due or stopped or self.epoch == end:
                self.save()
            if stopped and self.epoch < end:
                self.stopped = True
                return False
        if self._curves is not None:
            self._curves.close()
        return self.epoch == self.recipe.epochs

    def save(self) -> None:
        """Write a checkpoint, unless training has diverged; all ranks have to call this together."""
        self._healthy_totals(weights=True)
        self._saver.save(Place(self.epoch, self.step, self.seconds, self.best))

    def resume(self) -> None:
        """Continue from the last checkpoint.

        Raises:
            ConfigError: the recipe or the number of processes is another one, and that was not allowed.
            CheckpointError: the checkpoint cannot be read, or does not fit.
        """
        place = self._saver.resume()
        self.epoch, self.step, self.best = place.epoch, place.step, place.best
        self._earlier_seconds = place.seconds

    def _train_epoch(self) -> bool:
        """Train to the end of the epoch; False if somebody wants to stop before."""
        loader = self.data.train
        self._learner.train_mode_()
        self._began_epoch, self._examples_at_start = time.perf_counter(), self._train_on.read().examples
        # the same whether the run was interrupted or not; σ settles anew, as the structure may just have changed
        self._train_on.clock.step = self.step
        for raw in loader.batches(self.epoch, self.step):
            progress = self.epoch + self.step / loader.steps
            set_learning_rate_(self.optimizer, learning_rate(self.recipe, progress))
            self._train_on(raw)
            self.step += 1
            if isinstance(self.controller, DyRep) and self.recipe.dyrep.unit == "step":
                self._announce(self._learner.evolve_(self.controller.step_end, self.epoch))
            self._look_now_and_then()
            if self.step < loader.steps and (self.world.size == 1 or self.step % AGREE_STEPS == 0):
                due, stopped = self.world.any([self._saver.due, bool(self._stop)])
                if stopped:
                    return False
                if due:
                    self.save()
        return True

    def _finish_epoch(self) -> None:
        totals = self._healthy_totals(weights=True)
        trained = time.perf_counter()
        sums = torch.tensor([totals.loss, totals.correct, totals.examples], dtype=torch.float64)
        loss, correct, examples = self.world.sum(sums.to(self.world.device)).tolist()
        rate = (totals.examples - self._examples_at_start) * self.world.size / (trained - self._began_epoch)
        row = {
            "epoch": self.epoch + 1,
            "train_loss": loss / examples,
            **({"train_accuracy": 100 * correct / examples} if self.task.counts_hits else {}),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            **self._evaluate(),
            **self.size,
            "images_per_second": round(rate, 1),
            "train_seconds": round(trained - self._began_epoch, 3),
            "steps": self.data.train.steps,
        }
        evaluated = time.perf_counter()
        row["eval_seconds"] = round(evaluated - trained, 3)
        if self.world.device.type == "cuda":
            row["memory_gib"] = round(torch.cuda.max_memory_allocated(self.world.device) / 2**30, 3)
        row["importances"] = importances(self.model)
        edits = [] if self.controller is None else self._learner.evolve_(self.controller.epoch_end, self.epoch)
        row["update_seconds"] = round(time.perf_counter() - evaluated, 3)
        self.epoch, self.step = self.epoch + 1, 0
        self._train_on.reset()
        if self.world.is_main:
            self.run.add_row(row)
            if self._curves is not None:
                self._curves.add(row)
        self._reporter.epoch(row, self._status(row["train_loss"], row.get("train_accuracy"), rate))
        self._announce(edits)

    def _evaluate(self) -> dict[str, float]:
        """Metrics on the held-out split, or on the test set if there is none; both belong to the last epoch."""
        epoch = self.epoch + 1
        if epoch % self.recipe.eval_every and epoch != self.recipe.epochs:
            return {}
        split = "test" if self.data.val is None else "val"
        found = self.score(split)
        metric = self.task.metric
        # NaN, where a split has nothing to find, is no better than what comes after it
        if self.best is None or found[metric] > self.best[metric] or math.isnan(self.best[metric]):
            weights = {key: value.detach().clone() for key, value in self.evaluated.state_dict().items()}
            place = {"epoch": epoch, "split": split, metric: found[metric]}
            self.best = {**self._learner.description(), **place, "model": weights}
        return {f"{split}_{key}": value for key, value in found.items()}

    def score(self, split: str, model: nn.Module | None = None) -> dict[str, float]:
        """Metrics on a split, ``"val"`` or ``"test"``, of the model that counts or of another one."""
        chosen = self.evaluated if model is None else model
        if self.world.size > 1:  # each rank has its own running statistics; rank 0's are those that are saved
            for buffer in chosen.buffers():
                dist.broadcast(buffer, 0)
        loader = self.data.test if split == "test" else self.data.val
        assert loader is not None
        return self.task.evaluate(chosen, loader, self.world, self._precision, self.data.classes)

    # -- structure ----------------------------------------------------------------------------------------------

    def _announce(self, edits: list[Edit]) -> None:
        """Tell of edits, and of what the structure costs after them."""
        if edits:
            self._learner.measure()
        for edit in edits:
            self._reporter.message(f"    {edit}")

    # -- looking after the run ----------------------------------------------------------------------------------

    def _look_now_and_then(self) -> None:
        """About once a second, see that all is well and show it; every look waits for the device."""
        now = time.perf_counter()
        if now - self._last_looked < 1:
            return
        totals = self._healthy_totals()
        count = max(totals.examples, 1)
        rate = (totals.examples - self._examples_at_start) * self.world.size / (now - self._began_epoch)
        accuracy = 100 * totals.correct / count if self.task.counts_hits else None
        self._reporter.status(self._status(totals.loss / count, accuracy, rate))
        self._last_looked = time.perf_counter()

    def _status(self, loss: float, accuracy: float | None, rate: float) -> Status:
        steps = self.data.train.steps
        left = (self.recipe.epochs - self.epoch) * steps - self.step
        seconds = left * self.recipe.batch_size / max(rate, 1e-9)
        return Status(
            self.epoch, self.recipe.epochs, self.step, steps, loss, accuracy, rate, self._learner.described, seconds
        )

    def _healthy_totals(self, *, weights: bool = False) -> Totals:
        """The sums so far; raise if the loss, or on demand a weight, is infinite or NaN, and say where that began."""
        totals = self._train_on.read()
        # a bad gradient spoils the weights one step before the loss shows it, and must not reach a checkpoint
        spoiled = weights and not all_finite(self.model)
        if not totals.diverged and not spoiled:
            return totals
        loader = self.data.train
        batch = loader.prepare(next(iter(loader.batches(self.epoch, min(totals.steps, loader.steps - 1)))))
        self._learner.train_mode_()
        with computing_in(self._precision, self.world.device):
            origin = find_origin(self.model, self.task.inputs(batch))
        if totals.diverged:
            what = f"the loss is not finite at epoch {self.epoch + 1}, step {totals.steps + 1}"
        else:
            what = f"weights are not finite after epoch {self.epoch + 1}, step {totals.steps}"
        lower = f"--lr {self.recipe.lr / 3:.2g}"
        if self.run.checkpoints.exists:
            kept = f"the last good checkpoint is kept in {self.run.path}; {lower} --change-settings continues from it"
        else:
            kept = f"there is no checkpoint in {self.run.path} yet; start again with {lower}"
        raise DivergedError(
            f"{what}. It began with {origin}. Training has diverged: {kept}. --warmup-epochs, or --precision fp32, in "
            "a new run may help too"
        )
