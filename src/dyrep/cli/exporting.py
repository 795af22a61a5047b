"""``dyrep export``: from the folder of a run to a file that runs without dyrep."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from dyrep.engine.data.opening import EVAL_FACTOR
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.rundir import Which, versions
from dyrep.engine.running import load_run
from dyrep.engine.setup import make_data
from dyrep.engine.world import World
from dyrep.errors import ConfigError, DyRepError
from dyrep.exporting import FORMATS, export
from dyrep.records import read_config, write_json
from dyrep.wording import beginning

_IMAGES = 16  # real ones to compare on


def export_run(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    onnx: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    pt2: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    which: Which = "last",
    keep_branches: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    data: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
    opset: int | None = None,
    file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
) -> None:
    """Fold a run's network and write it as an ONNX file, a file of torch.export, or both.

    Each file takes batches of any size, and is compared with the network as it was trained, on random images and on
    some of the test images, before it gets its name.

    Args:
        run: folder of the run.
        onnx: ONNX file to write.
        pt2: file of torch.export to write.
        which: the network after the last epoch, or the best one.
        keep_branches: do not fold: write the network with all its branches.
        data: folder of the data set, if it is not the one that the run was started with.
        opset: version of the ONNX operators; unless it is given, torch chooses.
        file: write what was found to this file, too.
    """
    files = _checked_files(onnx, pt2, opset, file)
    model, state = load_run(run, which)
    if Recipe.from_dict(state["recipe"]).task == "detection":
        raise ConfigError(
            f"the run in {run} is of a detector, which takes lists of images and gives as many boxes as it finds: "
            "there is no file for that here. dyrep deploy writes its folded weights, for torchvision's own ONNX export"
        )
    images = _test_images(run, state, data)
    # of the size of the test images, which in segmentation are whole and not the squares that were trained on
    shape = (state["channels"], state["size"], state["size"]) if images is None else images.shape[1:]
    example = torch.zeros(1, *shape)
    reports = []
    for path in files:
        version = opset if path == onnx else None
        reports.append(export(model, path, example, fold=not keep_branches, inputs=images, opset=version))
        print(reports[-1], flush=True)
    if file is not None:
        about = {"run": str(run), "which": which, "epoch": state["epoch"], "model": state["recipe"]["model"]}
        exports = [report.as_dict() for report in reports]
        write_json(file, {**about, "exports": exports, "versions": _versions()})


def _checked_files(onnx: Path | None, pt2: Path | None, opset: int | None, file: Path | None) -> list[Path]:
    """The files to write, in order; whatever is wrong with their names is said before the first is written."""
    if onnx is None and pt2 is None:
        raise ConfigError("name a file to write: --onnx model.onnx, --pt2 model.pt2, or both")
    for path, ending in zip((onnx, pt2), FORMATS, strict=True):
        if path is not None and path.suffix.lower() != ending:
            raise ConfigError(f"--{FORMATS[ending]} {path}: the name must end in {ending}")
        if path is not None and path.is_dir():
            raise ConfigError(f"--{FORMATS[ending]} {path} is a folder; name a file")
    if opset is not None and onnx is None:
        raise ConfigError(f"--opset {opset} is of an ONNX file; name one with --onnx, or leave it out")
    if file is not None and file.is_dir():
        raise ConfigError(f"--json {file} is a folder; name a file")
    return [path for path in (onnx, pt2) if path is not None]


def _test_images(run: Path, state: Mapping[str, Any], folder: Path | None) -> Tensor | None:
    """Some test images as they are in evaluation; None, after saying why, if the run's own data is not there."""
    recipe = Recipe.from_dict(state["recipe"])
    whole = recipe.task == "segmentation" and recipe.image_size is None  # images are as large as they are
    recipe = dataclasses.replace(
        recipe,
        image_size=None if whole else state["size"],
        batch_size=_IMAGES // EVAL_FACTOR,  # so that a batch of evaluation has that many
        val_split=0,
        resident=False if recipe.dataset == "folder" else None,  # a few are enough: do not decode them all
    )
    known = read_config(run)["settings"].get("data")
    where = folder or (None if known is None else Path(known))
    settings = RunSettings(data=where, device="cpu", workers=0, channels_last=False)
    try:
        loader = make_data(recipe, settings, World(torch.device("cpu"))).test
        images, _ = loader.prepare(next(iter(loader.batches(0))))
    except (DyRepError, OSError) as error:
        if folder is not None:  # asked for, so it is not passed over
            raise
        reason = beginning(error)
        print(f"compared on random images alone, for the test images cannot be read: {reason}", flush=True)
        return None
    return images[:_IMAGES]


def _versions() -> dict[str, str]:
    found = versions()
    for name in ("onnx", "onnxruntime", "onnxscript"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # nor needed for a file of torch.export
            continue
    return found
