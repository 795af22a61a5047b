"""``dyrep reproduce``: the paper's tables and figures, one by one or all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from dyrep.engine.rundir import hardware, versions
from dyrep.errors import ConfigError, DyRepError
from dyrep.records import write_json, write_text
from dyrep.reproduce import SCALES, STUDIES
from dyrep.reproduce.drawing import picture
from dyrep.reproduce.outcomes import Workshop, planned
from dyrep.reproduce.tables import as_data, as_markdown, as_text


def reproduce(
    studies: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="STUDY [STUDY ...]", help_behavior_hint="")
    ] = (),
    scale: Literal["full", "short", "smoke"] = "short",
    seeds: int = 1,
    data: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
    out: Path = Path("runs/reproduce"),
    device: str | None = None,
    train: bool = True,
    list_all: Annotated[bool, tyro.conf.arg(name="list"), tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Train what a table or figure of the paper needs, and print and save our figures beside the paper's.

    Whatever was stopped goes on where it stopped, and runs that several tables need are trained once. What cannot be
    run here, for want of data or because of the scale, is marked so; networks whose structure never changes are
    counted all the same.

    Args:
        studies: which ones, see --list; "all" for all.
        scale: full is as in the paper, short a tenth of its epochs, smoke a few epochs of digits on a small network.
        seeds: how many seeds of every training.
        data: folder of the data sets: cifar10.npz and so on, or train/CLASS/*.jpg for ImageNet; for downstream tasks
            tiny-imagenet-100, BCCD and CamVid in it.
        out: folder for runs and results.
        device: where to train; unless it is given, on a GPU if there is one.
        train: train what is missing. Otherwise what is there already is shown.
        list_all: list everything there is.
    """
    if list_all:
        _list(scale, seeds)
        return
    unknown = [name for name in studies if name not in (*STUDIES, "all")]
    chosen = list(STUDIES) if "all" in studies else list(dict.fromkeys(studies))
    if unknown or not chosen:
        what = f"there is no study {unknown[0]!r}" if unknown else "no study given"
        raise ConfigError(f"{what}; valid are {', '.join(STUDIES)}, or all (dyrep reproduce --list tells more)")
    if seeds < 1:
        raise ConfigError(f"seeds={seeds}: must be at least 1")
    workshop = Workshop(out, SCALES[scale], seeds, data, device, train)
    failed: list[str] = []
    for name in chosen:
        study = STUDIES[name]
        outcomes = workshop.carry_out(study)
        print(f"\n{as_text(study, workshop.scale, outcomes)}", flush=True)
        results = out / scale
        about = {"study": name, "source": study.source, "scale": scale, "seeds": seeds, "versions": versions()}
        write_json(results / f"{name}.json", {**about, "hardware": hardware(), "rows": as_data(study, outcomes)})
        write_text(results / f"{name}.md", as_markdown(study, workshop.scale, outcomes))
        drawn = picture(study, outcomes)
        if drawn is not None:
            print(drawn.save_png(results / f"{name}.png"))
        if train and planned(study, workshop.scale, seeds) and not any(row.state == "done" for row in outcomes):
            failed.append(f"{name}: {next((row.reason for row in outcomes if row.reason), 'nothing was trained')}")
    if failed:
        raise DyRepError("nothing could be trained for\n" + "\n".join(failed))


def _list(scale: str, seeds: int) -> None:
    width = max(map(len, STUDIES))
    for study in STUDIES.values():
        runs = len(planned(study, SCALES[scale], seeds))
        kind = "not trained" if not runs else f"{runs} run{'s' if runs > 1 else ''}"
        print(f"{study.name:{width}s}  {study.source:9s}  {study.title} ({kind} at scale {scale})")
