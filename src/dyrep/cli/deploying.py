"""``dyrep deploy``: from the folder of a run to the weights of the plain network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from dyrep.checkpoint import save
from dyrep.engine.recipe import Recipe
from dyrep.engine.rundir import Which
from dyrep.engine.running import load_run
from dyrep.engine.tasks import task_of
from dyrep.errors import ConfigError, DyRepError
from dyrep.surgery.folding import deploy, verify


def deploy_run(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = Path("plain.safetensors"),
    which: Which = "last",
) -> None:
    """Fold a run's network into the plain one and write its weights, after comparing both on random images.

    The file is an ordinary safetensors file; its keys are those of the plain network.

    Args:
        run: folder of the run.
        out: file to write; nothing is written if the two networks differ.
        which: the network after the last epoch, or the best one.
    """
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out {out}: this writes safetensors, so call it {out.with_suffix('.safetensors')}")
    model, state = load_run(run, which)
    plain = deploy(model)
    task = task_of(Recipe.from_dict(state["recipe"]))
    report = verify(model, plain, task.random_inputs(channels=state["channels"], size=state["size"]))
    if not report:
        raise DyRepError(f"the folded network does not compute the same, so nothing was written: {report}")
    save(plain, out)
    print(f"{report}")
    print(f"{out}: {sum(p.numel() for p in plain.parameters()):,} parameters of {state['recipe']['model']}")
