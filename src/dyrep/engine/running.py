"""Start or continue a run, bring it to its end, and say what came out."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dyrep.checkpoint import save
from dyrep.engine.progress import Reporter, make_reporter
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.rundir import RunDirectory, hardware
from dyrep.engine.setup import make_model
from dyrep.engine.signals import StopRequest, stop_request
from dyrep.engine.tasks import task_of
from dyrep.engine.trainer import Trainer
from dyrep.engine.world import World, joined_world
from dyrep.errors import CheckpointError, ConfigError
from dyrep.events import read_events
from dyrep.records import CONFIG, EVENTS, PLAIN, PREDICTIONS, SUMMARY, jsonable
from dyrep.surgery.costs import costs
from dyrep.surgery.folding import deploy, verify
from dyrep.surgery.structure import importances, restructure_, structure
from dyrep.wording import METRICS, counted, duration

COMPARED = 64
"""On how many test images, at most, the folded network is compared with the evolved one."""


class Stopped(BaseException):
    """A run that was asked to end has done so; it can be continued.

    Attributes:
        reason: the signal that asked for it; empty if another process received it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def train(recipe: Recipe, settings: RunSettings) -> dict[str, Any]:
    """Train a recipe, or continue the run that is in its folder already.

    Returns:
        The summary that is also written to the run's folder; empty if the run stopped before its end because of
        ``stop_after``.

    Raises:
        Stopped: a signal asked the run to end; everything is saved.
        DyRepError: something is wrong with settings, data, checkpoints or training itself.
    """
    with stop_request() as stop, joined_world(settings.device) as world:
        reporter = make_reporter(settings.progress, world.is_main)
        try:
            return _train(recipe, settings, world, reporter, stop)
        finally:
            reporter.close()


def _train(
    recipe: Recipe, settings: RunSettings, world: World, reporter: Reporter, stop: StopRequest
) -> dict[str, Any]:
    run = RunDirectory(settings.folder(recipe.name, recipe.method, recipe.seed))
    resuming = _check_folder(run, settings)
    if resuming and (run.path / SUMMARY).exists():
        summary = run.read_json(SUMMARY)
        if Recipe.from_dict(summary["recipe"]) == recipe:
            reporter.message(f"the run in {run.path} is complete; give another --out to train again")
            return summary
    world.barrier()  # nobody writes before everybody has looked
    trainer = Trainer(recipe, settings, world, run, reporter, stop, resuming=resuming)
    with run.locked() if world.is_main else nullcontext():
        if world.is_main and _check_folder(run, settings) != resuming:  # the first look was without the lock
            raise CheckpointError(f"another process has just started the run in {run.path}: give the command again")
        if resuming:
            trainer.resume()
            if world.is_main:
                _renew(run, recipe, settings, reporter)
            place = f"epoch {trainer.epoch + 1}, step {trainer.step + 1}"
            reporter.message(f"continuing the run in {run.path} at {place}")
        elif world.is_main:
            run.create(recipe, _plain(settings))
        return _carry_out(trainer, reporter, stop)


def _carry_out(trainer: Trainer, reporter: Reporter, stop: StopRequest) -> dict[str, Any]:
    run, world = trainer.run, trainer.world
    if world.is_main:
        run.clean()
        run.add_session(
            processes=world.size,
            device=str(world.device),
            epoch=trainer.epoch,
            step=trainer.step,
            settings=_plain(trainer.settings),
        )
    reporter.message(_introduction(trainer))
    for note in trainer.data.notes:
        reporter.message(note)
    kept = [edit.detail["norm kept"] for edit in trainer.converted if "norm kept" in edit.detail]
    if kept:
        blocks = f"{len(kept)} of {len(trainer.converted)} blocks"
        more = " (and others: see the log of events)" if len(set(kept)) > 1 else ""
        reporter.message(f"{blocks} do not replace the norm after them: {kept[0]}{more}")
    if trainer.train():
        return _finish(trainer, reporter)
    if not trainer.stopped:
        epochs = trainer.recipe.epochs
        reporter.message(f"stopped after epoch {trainer.epoch} of {epochs}; without --stop-after the command continues")
        return {}
    reason = stop.reason or "a signal to another process"
    place = f"epoch {trainer.epoch + 1}, step {trainer.step + 1}"
    reporter.message(f"{reason}: saved at {place} in {run.path}; the same command continues")
    raise Stopped(stop.reason)


def _check_folder(run: RunDirectory, settings: RunSettings) -> bool:
    """Whether there is a run to continue; raise rather than overwrite one."""
    if run.exists and not settings.resume:
        raise CheckpointError(f"there is a run in {run.path} already: give another --out, or --resume to continue it")
    if run.checkpoints.exists and not run.exists:
        raise CheckpointError(f"{run.path} has checkpoints but no {CONFIG}: give another --out")
    return run.checkpoints.exists


def _renew(run: RunDirectory, recipe: Recipe, settings: RunSettings, reporter: Reporter) -> None:
    """Make the files of a run that goes on tell of what it is now, not of what it was before settings changed."""
    readable = run.readable
    if not readable or run.recipe() != recipe:
        run.write_config(recipe, _plain(settings))
        if not readable:
            reporter.message(f"{run.path / CONFIG} was damaged, and has been written anew")
    outdated = [name for name in (SUMMARY, PLAIN, PREDICTIONS) if (run.path / name).exists()]
    for name in outdated:
        (run.path / name).unlink()
    if outdated:
        reporter.message(f"removed, as they tell of the run with other settings: {', '.join(outdated)}")


def _introduction(trainer: Trainer) -> str:
    recipe, data = trainer.recipe, trainer.data
    counts = f"{data.train.examples:,} training images per epoch"
    if data.val is not None:
        counts += f", {data.val.examples:,} held out"
    size = trainer.size
    grown = f" with {counted(size['branches'], 'branch', 'es')}" if size["branches"] else ""
    place = hardware() if trainer.world.device.type == "cuda" else "the CPU"
    return (
        f"{recipe.name}, method {recipe.method}, seed {recipe.seed}: {recipe.model}{grown} "
        f"({size['macs'] / 1e6:,.1f} M multiply-adds, {size['parameters'] / 1e6:,.2f} M parameters), "
        f"{counts}, {data.test.examples:,} to test; {counted(recipe.epochs, 'epoch')} on {place}"
    )


def _finish(trainer: Trainer, reporter: Reporter) -> dict[str, Any]:
    """Fold the model, check that, and write what came out."""
    run, recipe, world = trainer.run, trainer.recipe, trainer.world
    evolved = trainer.score("test")
    trainer.evaluated.eval()
    plain = deploy(trainer.evaluated)
    folded = trainer.score("test", plain)
    report = verify(trainer.evaluated, plain, _test_inputs(trainer))
    rows, best, metric = run.rows, trainer.best, trainer.task.metric
    summary: dict[str, Any] = {
        "recipe": recipe.to_dict(),
        f"test_{metric}": evolved[metric],
        f"test_{metric}_folded": folded[metric],
        **{f"test_{key}": value for key, value in evolved.items() if key != metric},
        "best": None if best is None else {key: best[key] for key in ("epoch", "split", metric)},
        "fold_error": report.error,
        "fold_passed": report.passed,
        "fold_report": str(report),
        "parameters_plain": sum(p.numel() for p in plain.parameters()),
        "macs_plain": costs(plain, trainer.example).macs,
        "hardware": hardware(),
        "processes": world.size,
        "structure": structure(trainer.evaluated),
        "importances": importances(trainer.evaluated),
        "seconds": round(trainer.seconds, 1),
    }
    if rows:
        last = rows[-1]
        summary["mean_macs"] = sum(row["macs"] for row in rows) / len(rows)
        summary["mean_parameters"] = sum(row["parameters"] for row in rows) / len(rows)
        summary |= {key: last[key] for key in ("train_loss", "train_accuracy", f"val_{metric}") if key in last}
    summary = jsonable(summary)  # the same, whether it is returned now or read later
    if world.is_main:
        save(plain, run.path / PLAIN)
        _draw(trainer, plain, reporter)
        run.write_json(SUMMARY, summary)  # last: a run that has it is complete
    world.barrier()
    _report(summary, run.path, reporter, trainer.recipe, str(report))
    return summary


def _draw(trainer: Trainer, plain: nn.Module, reporter: Reporter) -> None:
    """Draw what the folded network says about some images; a run does not fail of its illustration."""
    try:
        trainer.task.draw(plain, trainer.data, trainer.run.path / PREDICTIONS)
    except Exception as error:
        reporter.message(f"predictions could not be drawn, all else is written: {type(error).__name__}: {error}")


def _test_inputs(trainer: Trainer) -> Any:
    loader = trainer.data.test
    return trainer.task.inputs(loader.prepare(next(iter(loader.batches(0)))), COMPARED)


def _report(summary: dict[str, Any], folder: Path, reporter: Reporter, recipe: Recipe, verdict: str) -> None:
    metric = task_of(recipe).metric
    evolved, folded = (float(summary[f"test_{metric}{form}"]) for form in ("", "_folded"))
    time = duration(summary["seconds"])
    reporter.message(f"test {METRICS[metric]} {evolved:.2f} %, folded {folded:.2f} %, in {time}")
    if recipe.method != "origin":
        reporter.message(f"same function: {verdict}")
    reporter.message(f"results in {folder}: {PLAIN} loads strictly into the plain {recipe.model}")


def _plain(settings: RunSettings) -> dict[str, Any]:
    values = dataclasses.asdict(settings)
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def load_run(path: Path, which: str = "last") -> tuple[nn.Module, dict[str, Any]]:
    """The trained model of a run, with its branches, in eval mode; no data is needed.

    Args:
        path: the run's folder.
        which: ``"last"`` or ``"best"``.

    Returns:
        The model, and the state it was made from (recipe, structure, epoch, shape of the data).
    """
    state = RunDirectory(path).model_state(which)
    recipe, shape = Recipe.from_dict(state["recipe"]), {key: state[key] for key in ("channels", "size")}
    model = make_model(recipe, classes=len(state["classes"]), **shape, initialised=False)
    restructure_(model, state["structure"], generator=torch.Generator())
    model.load_state_dict(state["model"])
    return model.eval(), state


def structure_of_run(reference: str) -> dict[str, Any]:
    """The structure of a run's network, for `Recipe.structure`: ``RUN@EPOCH``, or ``RUN`` for the last one.

    Raises:
        CheckpointError: there is no such run.
        ConfigError: at that epoch the network was plain, was being searched, or had not been trained so far.
    """
    folder, at, number = reference.rpartition("@")
    if at and not number.isdecimal():
        raise ConfigError(f"structure={reference!r}: after the @ comes the number of an epoch, as in runs/x@40")
    run = RunDirectory(folder if at else reference)
    state = run.model_state()
    found, epoch = state["structure"], int(number) if at else state["epoch"]
    if epoch > state["epoch"]:
        raise ConfigError(f"structure={reference!r}: the run has been trained for {state['epoch']} epochs so far")
    events = read_events(run.path / EVENTS) if at else []
    updates = [event for event in events if event["type"] == "update"]
    if updates:  # a method that never updates has the same structure throughout
        # an update between two steps belongs to the epoch that was not over yet
        unfinished = Recipe.from_dict(state["recipe"]).dyrep.unit == "step"
        earlier = [event["structure"] for event in updates if event["epoch"] + unfinished <= epoch]
        begun = [event["structure"] for event in events if event["type"] == "converted" and "structure" in event]
        found = [{"format": found["format"], "blocks": {}}, *begun, *earlier][-1]
    gated = any(block.get("scaling") == "gated" for block in found["blocks"].values())
    if gated or (state["recipe"]["method"] == "repnas" and not found["blocks"]):
        raise ConfigError(f"structure={reference!r}: at epoch {epoch} the search for a structure had not ended")
    if not found["blocks"]:
        raise ConfigError(f"structure={reference!r}: at epoch {epoch} the network has no branches")
    return {**found, "source": reference}
