"""The training loop: epochs of steps, evaluation, structure updates and checkpoints, resumable at any step."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dyrep.controller import DyRep
from dyrep.engine.averages import WeightAverage
from dyrep.engine.divergence import DivergedError, all_finite, find_origin
from dyrep.engine.evolving import convert_model_, make_controller
from dyrep.engine.precision import computing_in, make_precision
from dyrep.engine.progress import Curves, Reporter, Status
from dyrep.engine.randomness import random_state, restore_random_state, seed_everything
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.resources import uses_channels_last
from dyrep.engine.rundir import RunDirectory
from dyrep.engine.schedule import learning_rate, set_learning_rate_
from dyrep.engine.setup import make_data, make_model, make_optimizer, suit_device_, uses_graph
from dyrep.engine.signals import StopRequest
from dyrep.engine.step import Totals, TrainStep
from dyrep.engine.tasks import task_of
from dyrep.engine.world import World
from dyrep.errors import CheckpointError, ConfigError
from dyrep.events import EventLog
from dyrep.execution import Clock
from dyrep.methods import method
from dyrep.models.backbones import train_
from dyrep.norm import sync_norms_
from dyrep.records import EVENTS
from dyrep.surgery.costs import costs
from dyrep.surgery.edits import Edit
from dyrep.surgery.executing import set_execution_
from dyrep.surgery.optimizer import load_state_by_name_, state_by_name
from dyrep.surgery.structure import importances, structure

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
        size: parameters, multiply-adds and branches of the model as it is now.
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
        self._saved_best = -1
        self._reporter, self._stop = reporter, stop
        self._precision = make_precision(recipe, world.device)
        self.task = task_of(recipe)
        if world.device.type == "cuda":
            torch.backends.cudnn.benchmark = self.task.same_shapes
        self.data = make_data(recipe, settings, world)
        seed_everything(recipe.seed, "weights")
        shape = {"channels": self.data.channels, "size": self.data.size}
        self.model = make_model(recipe, classes=len(self.data.classes), **shape, initialised=not resuming)
        self._train_mode_()  # frozen norms are in eval mode from the start
        self.converted = convert_model_(self.model, recipe, self.task.example(**shape, device="cpu"))
        if recipe.sync_norms:
            if world.device.type != "cuda":
                raise ConfigError("--sync-norms needs GPUs: torch synchronises batch norms there alone")
            self.model = sync_norms_(nn.SyncBatchNorm.convert_sync_batchnorm(self.model))
        channels_last = uses_channels_last(settings, world.device)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.model.to(world.device).to(memory_format=layout)
        seed_everything(recipe.seed, "training", world.rank)
        self.optimizer = make_optimizer(self.model, recipe, world.device)
        self.average = None if recipe.ema is None else WeightAverage(self.model, recipe.ema)
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=self._precision == torch.float16)
        trained = self._wrapped()
        self._log = EventLog()  # in memory until it is sure that this run goes on
        averages = [] if self.average is None else [self.average.module]
        self.controller = make_controller(recipe, trained, self.optimizer, averages, self._scaler, self._log)
        if self.converted:
            edits = [edit.as_dict() for edit in self.converted]
            self._log.write("converted", method=recipe.method, epochs=recipe.epochs, edits=edits)
        graph, reason = uses_graph(settings, world, same_shapes=self.task.same_shapes)
        if reason:
            reporter.message(reason)
        self._train_on = TrainStep(
            trained,
            self.optimizer,
            self.data.train,
            precision=self._precision,
            average=self.average,
            scaler=self._scaler,
            graph=graph,
            message=reporter.message,
            clock=Clock(recipe.sigma_every, managed=True),
            learn=self.task.learn,
        )
        self._train_on.scorer = None if self.controller is None else self.controller.scorer
        self._set_execution()
        self._curves: Curves | None = None
        self._earlier_seconds = 0.0
        self._began = self._last_saved = self._last_looked = time.perf_counter()
        self._examples_at_start = 0.0
        self._measure()

    # -- the loop -----------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Train to the end; whether it was reached. If not, the run can be resumed."""
        self._log.move_to(self.run.path / EVENTS)
        if self.settings.tensorboard and self.world.is_main:
            self._curves = Curves(self.run.path / "tensorboard", self.epoch)
        now = time.perf_counter()
        self._began = self._began_epoch = self._last_saved = self._last_looked = now
        end = min(self.recipe.epochs, self.settings.stop_after or self.recipe.epochs)
        while self.epoch < end:
            if not self._train_epoch():
                self.save()
                self.stopped = True
                return False
            self._finish_epoch()
            due, stopped = self.world.any([self._save_is_due(), bool(self._stop)])
            if due or stopped or self.epoch == end:
                self.save()
            if stopped and self.epoch < end:
                self.stopped = True
                return False
        if self._curves is not None:
            self._curves.close()
        return self.epoch == self.recipe.epochs

    def _train_mode_(self) -> None:
        train_(self.model, norms=self.recipe.norms, frozen_stages=self.recipe.frozen_stages)

    def _train_epoch(self) -> bool:
        """Train to the end of the epoch; False if somebody wants to stop before."""
        loader = self.data.train
        self._train_mode_()
        self._began_epoch, self._examples_at_start = time.perf_counter(), self._train_on.read().examples
        self._train_on.clock.step = self.step  # the same whether the run was interrupted or not
        for raw in loader.batches(self.epoch, self.step):
            progress = self.epoch + self.step / loader.steps
            set_learning_rate_(self.optimizer, learning_rate(self.recipe, progress))
            self._train_on(raw)
            self.step += 1
            if isinstance(self.controller, DyRep) and self.recipe.dyrep.unit == "step":
                self._announce(self._evolve(after_epoch=False))
            self._look_now_and_then()
            if self.step < loader.steps and (self.world.size == 1 or self.step % AGREE_STEPS == 0):
                due, stopped = self.world.any([self._save_is_due(), bool(self._stop)])
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
        edits = [] if self.controller is None else self._evolve(after_epoch=True)
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
            self.best = {**self._description(), **place, "model": weights}
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

    @property
    def example(self) -> Any:
        """A batch of one empty image, to count what the model costs."""
        return self.task.example(channels=self.data.channels, size=self.data.size, device=self.world.device)

    @property
    def evaluated(self) -> nn.Module:
        """The model that counts: the moving average if there is one."""
        return self.model if self.average is None else self.average.module

    # -- structure ----------------------------------------------------------------------------------------------

    def _evolve(self, *, after_epoch: bool) -> list[Edit]:
        """Let the controller update the structure if that is due, in the precision the model trains in."""
        assert self.controller is not None
        call = self.controller.epoch_end if after_epoch else self.controller.step_end
        before = self.controller.updates
        with computing_in(self._precision, self.world.device):
            edits = call(self.data.train.calibration(self.epoch))
        if self.controller.updates > before:  # scores start over in new tensors, so graphs are stale in any case
            self._set_execution()
            self._train_on.recapture()
        return edits

    def _set_execution(self) -> None:
        """Run all blocks there are now as the recipe says."""
        recipe, clock = self.recipe, self._train_on.clock
        set_execution_(
            self.model, recipe.execution, images=recipe.sigma_images, gradient=recipe.sigma_gradient, clock=clock
        )

    def _announce(self, edits: list[Edit]) -> None:
        """Tell of edits, and of what the structure costs after them."""
        if edits:
            self._measure()
        for edit in edits:
            self._reporter.message(f"    {edit}")

    @torch.no_grad()
    def _measure(self) -> None:
        """Count what the structure costs, and describe it."""
        counted = costs(self.model, self.example)
        blocks = structure(self.model)["blocks"]
        branches = sum(len(block["branches"]) for block in blocks.values())
        self.size = {"parameters": counted.parameters, "macs": counted.macs, "branches": branches}
        self._described = f"{len(blocks)} blocks, {branches} branches" if blocks else "plain"

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
        return Status(self.epoch, self.recipe.epochs, self.step, steps, loss, accuracy, rate, self._described, seconds)

    def _healthy_totals(self, *, weights: bool = False) -> Totals:
        """The sums so far; raise if the loss, or on demand a weight, is infinite or NaN, and say where that began."""
        totals = self._train_on.read()
        # a bad gradient spoils the weights one step before the loss shows it, and must not reach a checkpoint
        spoiled = weights and not all_finite(self.model)
        if not totals.diverged and not spoiled:
            return totals
        loader = self.data.train
        batch = loader.prepare(next(iter(loader.batches(self.epoch, min(totals.steps, loader.steps - 1)))))
        self._train_mode_()
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

    # -- checkpoints --------------------------------------------------------------------------------------------

    def _save_is_due(self) -> bool:
        return time.perf_counter() - self._last_saved >= 60 * self.settings.checkpoint_minutes

    def save(self) -> None:
        """Write a checkpoint; all ranks have to call this together."""
        self._healthy_totals(weights=True)
        random = random_state(self.world)
        sums = [{"totals": own} for own in self.world.gather(self._train_on.state_dict()["totals"])]
        if self.world.is_main:
            # first the best: if this process dies in between, the one that goes on writes it again
            if self.best is not None and self.best["epoch"] != self._saved_best:
                self.run.checkpoints.save_best(self.best)
                self._saved_best = self.best["epoch"]
            self.run.checkpoints.save({**self._state(), "random": random, "sums": sums})
        self._last_saved = time.perf_counter()

    def _state(self) -> dict[str, Any]:
        controller = self.controller
        return {
            **self._description(),
            "world": self.world.size,
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "controller": None if controller is None else controller.state_dict(),
            "optimizer": state_by_name(self.optimizer, self.model) if controller is None else None,
            "model": self.model.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "scaler": self._scaler.state_dict(),
            "best": self.best,
            "rows": self.run.rows,
            "events": self._log.events,
        }

    def _description(self) -> dict[str, Any]:
        """What it takes, besides weights, to rebuild the model as it is now."""
        return {
            "recipe": self.recipe.to_dict(),
            "classes": list(self.data.classes),
            "channels": self.data.channels,
            "size": self.data.size,
            "structure": structure(self.model),
        }

    def resume(self) -> None:
        """Continue from the last checkpoint.

        Raises:
            ConfigError: the recipe or the number of processes is another one, and that was not allowed.
            CheckpointError: the checkpoint cannot be read, or does not fit.
        """
        state = self.run.checkpoints.load(fallback=self.settings.fallback)
        self._check_same_run(state)
        controlled = state.get("controller", state.get("dyrep"))  # what it was called at first
        if self.controller is None or controlled is None:
            saved = state["optimizer"] if controlled is None else controlled["optimizer"]
            load_state_by_name_(self.optimizer, self.model, saved)
        else:
            self.controller.load_state_dict(controlled)
        suit_device_(self.optimizer, self.world.device)
        self._set_execution()
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            lines = " ".join(line.strip() for line in str(error).splitlines()[:4])
            raise CheckpointError(f"the weights in {self.run.path} do not fit the model: {lines}") from error
        if self.average is not None:
            if state["average"] is None:
                self.average.load_state_dict(state["model"])
            else:
                self.average.load_state_dict(state["average"])
        if state["scaler"]:  # empty if the precision was another one
            self._scaler.load_state_dict(state["scaler"])
        self._train_on.load_state_dict(self._own_sums(state["sums"]))
        self.epoch, self.step, self._earlier_seconds = state["epoch"], state["step"], state["seconds"]
        self.best = state["best"]
        if state["events"]:  # none if the plain method has trained so far: what a controller has just logged stays
            self._log.restore(state["events"])
        if self.world.is_main:
            self.run.restore_rows(state["rows"])
        self._measure()
        restore_random_state(state["random"], self.world)

    def _own_sums(self, saved: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """This rank's part of the sums of an epoch; if there were more or fewer ranks, the main one takes over all."""
        if len(saved) == self.world.size:
            return saved[self.world.rank]
        totals = torch.stack([sums["totals"] for sums in saved])
        own = totals.sum(0) if self.world.is_main else torch.zeros_like(totals[0])
        own[3] = totals[0, 3]  # steps are counted by every rank
        return {"totals": own}

    def _check_same_run(self, state: dict[str, Any]) -> None:
        saved = Recipe.from_dict(state["recipe"])
        changes = saved.differences(self.recipe)
        if state["world"] != self.world.size:
            changes.append(f"processes: {state['world']} against {self.world.size}")
        if changes and not self.settings.change_settings:
            raise ConfigError(
                f"the run in {self.run.path} was started with other settings ({'; '.join(changes)}): give the same "
                "ones, another --out, or --change-settings to go on with the new ones"
            )
        evolves = self.controller is not None and method(saved.method) is method(self.recipe.method)
        if not evolves and state["structure"] != structure(self.model):
            saved_blocks, blocks = state["structure"]["blocks"], structure(self.model)["blocks"]
            has = "has no branches" if not saved_blocks else "has other branches" if blocks else "has branches already"
            raise CheckpointError(
                f"the model in {self.run.path} {has}, so --method {self.recipe.method} cannot continue it"
            )

    @property
    def seconds(self) -> float:
        """Time this run has taken so far, over all processes that worked on it one after the other."""
        return self._earlier_seconds + time.perf_counter() - self._began

    def _wrapped(self) -> nn.Module:
        if self.world.size == 1:
            return self.model
        return DistributedDataParallel(
            self.model, device_ids=[self.world.device] if self.world.device.type == "cuda" else None
        )
