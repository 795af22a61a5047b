"""``dyrep draw``: the structure of one block of a run as a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import tyro

from dyrep.errors import ConfigError, DyRepError
from dyrep.report.block_picture import block_picture
from dyrep.report.block_tree import blocks_of, nothing_to_draw, which_layers
from dyrep.report.runs import read_run

FORMATS = (".svg", ".png")
_OTHER_FORMATS = (".pdf", ".jpg", ".jpeg", ".gif", ".webp", ".eps", ".ps", ".tif", ".tiff", ".bmp")


def draw_block(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    layer: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="LAYER")] = None,
    /,
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = None,
) -> None:
    """Draw a layer with the branches it has grown, blocks inside of branches too, and the importance s of each.

    Only the text files of the run are read. A run that has not ended is drawn as it was when it was last written down.

    Args:
        run: folder of the run.
        layer: the convolution, as dyrep inspect names it; without it you are told which ones have branches.
        out: picture to write: NAME.svg or NAME.png; NAME for both; a folder for both in there, named by the layer.
            Unless it is given, both go into the folder of the run.
    """
    found = read_run(run)
    if layer is None:
        layers = list(blocks_of(found))
        raise ConfigError(f"name a layer to draw; {which_layers(layers)}" if layers else nothing_to_draw(found))
    files = _files(run, layer, out)
    picture = block_picture(found, layer)
    for file in files:
        try:
            (picture.save_svg if file.suffix.lower() == ".svg" else picture.save_png)(file)
        except OSError as error:
            raise DyRepError(f"{file} cannot be written: {error}") from error
        print(file)


def _files(run: Path, layer: str, out: Path | None) -> list[Path]:
    """The pictures to write."""
    if out is not None and out.suffix.lower() in FORMATS:
        if out.is_dir():
            raise ConfigError(f"--out {out} is a folder; name a file")
        return [out]
    if out is not None and out.suffix.lower() in _OTHER_FORMATS:
        raise ConfigError(f"--out {out}: pictures can be {' or '.join(FORMATS)}, not {out.suffix}")
    folder = run.parent if run.is_file() else run
    name = folder / layer if out is None else out / layer if out.is_dir() else out
    # names of layers have dots in them, so an ending is added and never replaced
    return [Path(f"{os.fspath(name)}{ending}") for ending in FORMATS]
