"""The command ``dyrep``: finds out what is wanted, and imports no more than that needs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from dyrep.errors import ConfigError, DyRepError, MissingPackageError
from dyrep.extras import extra_of, missing

USAGE = """\
usage: dyrep COMMAND ...

  train [RECIPE] [--data DIR]      train a network, or go on with a run
  inspect RUN                      a run's structure, with importances and costs
  deploy RUN -o plain.safetensors  fold it into the plain network, checked
  export RUN --onnx model.onnx     write it for other programs, checked
  report RUN [RUN ...]             what happened in runs, compared on one page
  draw RUN LAYER                   one block with its branches, as a picture
  reproduce STUDY [--scale short]  a table or figure of the paper, and ours
  bench MODEL [--batch N]          what branches cost here, step by step
  recipes                          the recipes there are
  methods                          the methods there are

dyrep COMMAND --help tells more."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status.

    It is 0 if that was done, 1 if it failed, 2 if it was not understood or needs a package that is not installed, and
    128 + n if signal n stopped it.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        sys.exit(0 if words else 2)
    if words[0] == "--version":
        import dyrep

        print(dyrep.__version__)
        return
    commands: dict[str, Callable[[list[str]], None]] = {
        "train": _train,
        "inspect": _inspect,
        "deploy": _deploy,
        "export": _export,
        "report": _report,
        "draw": _draw,
        "reproduce": _reproduce,
        "bench": _bench,
        "recipes": _recipes,
        "methods": _methods,
    }
    if words[0] not in commands:
        _fail(f"there is no command {words[0]!r}; valid are {', '.join(commands)}", 2)
    try:
        commands[words[0]](words[1:])
    except (ConfigError, MissingPackageError) as error:
        _fail(str(error), 2)
    except ModuleNotFoundError as error:  # some modules import tyro or matplotlib as if all had them
        if error.name is None or extra_of(error.name) is None:
            raise
        _fail(str(missing(error.name, f"dyrep {words[0]}", cause=error)), 2)
    except DyRepError as error:
        _fail(str(error), 1)
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
    except OSError as error:  # a folder that is a file, a place that cannot be written to
        _fail(f"{error.filename or 'a file'} cannot be read or written: {error.strerror or error}", 1)


def _train(words: list[str]) -> None:
    from dyrep.cli.flags import parse_training
    from dyrep.engine.running import train

    parsed = parse_training(words)
    if parsed is not None:
        _stoppable(lambda: train(*parsed))


def _stoppable(work: Callable[[], object]) -> None:
    """Do something that signals may stop, and exit then as shells expect."""
    from dyrep.engine.running import Stopped

    try:
        work()
    except Stopped as stopped:
        number = signal.SIGINT if stopped.reason == "Ctrl-C" else signal.Signals[stopped.reason or "SIGTERM"]
        sys.exit(128 + number)


def _inspect(words: list[str]) -> None:
    from dyrep.cli.inspecting import inspect_run
    from dyrep.cli.parsing import parse

    parse(inspect_run, words, "dyrep inspect")


def _deploy(words: list[str]) -> None:
    from dyrep.cli.deploying import deploy_run
    from dyrep.cli.parsing import parse

    parse(deploy_run, words, "dyrep deploy")


def _export(words: list[str]) -> None:
    from dyrep.cli.exporting import export_run
    from dyrep.cli.parsing import parse

    parse(export_run, words, "dyrep export")


def _report(words: list[str]) -> None:
    from dyrep.cli.parsing import parse
    from dyrep.cli.reporting import report_runs

    parse(report_runs, words, "dyrep report")


def _draw(words: list[str]) -> None:
    from dyrep.cli.drawing import draw_block
    from dyrep.cli.parsing import parse

    parse(draw_block, words, "dyrep draw")


def _reproduce(words: list[str]) -> None:
    from dyrep.cli.parsing import parse
    from dyrep.cli.reproducing import reproduce

    _stoppable(lambda: parse(reproduce, words, "dyrep reproduce"))


def _bench(words: list[str]) -> None:
    import tyro

    from dyrep.cli.benching import bench_model
    from dyrep.cli.parsing import parse

    parse(bench_model, words, "dyrep bench", config=(tyro.conf.PositionalRequiredArgs,))


def _take_nothing(command: str, words: list[str]) -> None:
    if set(words) & {"-h", "--help"}:
        print(f"usage: dyrep {command}\n\nList the {command} there are.")
        sys.exit(0)
    if words:
        raise ConfigError(f"dyrep {command} lists what there is and takes no arguments: {' '.join(words)}")


def _recipes(words: list[str]) -> None:
    _take_nothing("recipes", words)
    from dyrep.engine.recipes import RECIPES

    for recipe in RECIPES.values():
        settings = f"{recipe.model} on {recipe.dataset}, {recipe.epochs} epochs, batch {recipe.batch_size}"
        print(f"{recipe.name:26s}{settings}, t={recipe.dyrep.interval}")


def _methods(words: list[str]) -> None:
    _take_nothing("methods", words)
    from dyrep.methods import METHODS

    for method in METHODS.values():
        source = f" ({method.source})" if method.source else ""
        print(f"{method.name:12s}{method.title}; changes: {method.changes}{source}")
    print(
        "variants of dyrep: dyrep-default (the library's defaults instead of the paper's settings), dyrep4 (four "
        "operations), dyrep-nodep (never cuts), dyrep-40 (fixed after epoch 40)"
    )


def _fail(message: str, status: int) -> None:
    print(f"dyrep: {message}", file=sys.stderr, flush=True)
    sys.exit(status)
