"""Files of `torch.onnx` and `torch.export`: trace, convert, write, and run again."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from dyrep.errors import ConfigError, DyRepError
from dyrep.exporting.inputs import Inputs
from dyrep.extras import needed
from dyrep.surgery.folding import floating, named_tensors

FORMATS = {".onnx": "onnx", ".pt2": "pt2"}
"""What is written, by the ending of the file's name."""
NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "pt2": ()}
"""Modules that each format needs beyond torch."""
TRIED_SINCE = "2.11"
"""The oldest torch that exporting is known to work with; older ones trace less, and do not fit today's onnxscript."""
ONNX_LIMIT = 2**31  # bytes: an ONNX file is one protobuf message

Runner = Callable[[Inputs], dict[str, Tensor]]
"""Runs a file on inputs: its floating-point outputs by name."""


def format_of(path: Path) -> str:
    """The format that the ending of a file's name stands for.

    Example:
        >>> format_of(Path("model.onnx"))
        'onnx'
    """
    found = FORMATS.get(path.suffix.lower())
    if found is None:
        raise ConfigError(f"{path}: the name must end in {' or '.join(FORMATS)}, which says what to write")
    return found


def check_weights(model: nn.Module, kind: str) -> None:
    """Raise if a model's weights have no values, or too many for one file."""
    weights = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in weights.items():
        if tensor.is_meta:
            raise ConfigError(f"{name!r} is on the meta device, where it has no values: load the model's weights first")
    size = sum(tensor.numel() * 4 for tensor in weights.values())
    if kind == "onnx" and size >= ONNX_LIMIT:
        raise DyRepError(
            f"the model's weights take {size / 1e9:,.2f} GB, and one ONNX file holds at most {ONNX_LIMIT / 1e9:,.2f} "
            "GB: export to a .pt2 file"
        )


class Traced:
    """A model as `torch.export` sees it.

    Args:
        model: the model, in eval mode on the CPU.
        inputs: what to trace it with.
        dynamic_batch: leave the size of the batch open.

    Attributes:
        outputs: the name of every tensor the model returns, in order.

    Raises:
        DyRepError: the model cannot be traced.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, dynamic_batch: bool) -> None:
        try:
            self.outputs = [name for name, _ in named_tensors(model(*inputs))]
        except Exception as error:
            raise DyRepError(f"the model does not run on inputs like example_input: {reason_of(error)}") from error
        shapes = torch.export.ShapesCollection()
        if dynamic_batch:
            batch = torch.export.Dim("batch")
            for tensor in inputs:
                shapes[tensor] = {0: batch}
        self._shapes = shapes.dynamic_shapes(model, inputs) if dynamic_batch else None
        try:
            with _quiet():
                self._program = torch.export.export(model, inputs, dynamic_shapes=self._shapes, strict=False)
        except Exception as error:
            if dynamic_batch and "Constraints violated" in str(error):
                raise DyRepError(
                    "torch.export cannot leave the size of the batch open, because what the model does depends on it: "
                    "dynamic_batch=False exports it for one size"
                ) from error
            raise DyRepError(f"torch.export cannot trace the model: {reason_of(error)}{_old_torch()}") from error
        for node in self._program.graph.nodes:
            node.meta.pop("stack_trace", None)  # lines of the user's code, with the paths of this machine

    def save(self, file: Path, kind: str, opset: int | None) -> int | None:
        """Write a file, and give the version of its ONNX operators, if it has any."""
        if kind == "onnx":
            return self._save_onnx(file, opset)
        with file.open("wb") as stream, _quiet():  # given a path, torch insists on the ending
            torch.export.save(self._program, stream)
        return None

    def _save_onnx(self, file: Path, opset: int | None) -> int:
        names = list(self._program.graph_signature.user_inputs)
        try:
            with _quiet():
                made = torch.onnx.export(
                    self._program,
                    dynamo=True,
                    verbose=False,
                    opset_version=opset,
                    dynamic_shapes=self._shapes,  # for the name of the dimension
                    input_names=names,
                    output_names=identifiers(self.outputs, names),
                )
            assert made is not None
            message = made.model_proto
            contents = message.SerializeToString()  # never a second file beside the first one
        except Exception as error:
            raise DyRepError(f"torch.onnx cannot convert the model: {reason_of(error)}{_old_torch()}") from error
        found = next(int(entry.version) for entry in message.opset_import if entry.domain in ("", "ai.onnx"))
        if opset not in (None, found):  # torch does not insist
            raise ConfigError(
                f"opset={opset}: torch cannot convert this model to it, and would write {found}: give another one, or "
                "leave it out"
            )
        file.write_bytes(contents)
        return found


def open_onnx(file: Path, outputs: Sequence[str]) -> Runner:
    """An ONNX file in onnxruntime, on the CPU, with as many threads as torch has."""
    onnx, runtime = (needed(module, "an ONNX file") for module in ("onnx", "onnxruntime"))
    onnx.checker.check_model(str(file))
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(inputs: Inputs) -> dict[str, Tensor]:
        arrays = [tensor.contiguous().numpy() for tensor in inputs]
        found = session.run(None, dict(zip(names, arrays, strict=True)))
        return floating({name: torch.from_numpy(array) for name, array in zip(outputs, found, strict=True)})

    return run


def open_pt2(file: Path, outputs: Sequence[str]) -> Runner:
    """A file of torch.export in torch."""
    with file.open("rb") as stream, _quiet():
        module = torch.export.load(stream).module()
    return lambda inputs: floating(module(*inputs))


OPEN: dict[str, Callable[[Path, Sequence[str]], Runner]] = {"onnx": open_onnx, "pt2": open_pt2}
"""How a written file is run, by its format."""


def identifiers(names: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """Names as ONNX wants them: letters, digits and underscores, each one once.

    Example:
        >>> identifiers(["logits", "aux[0]", "aux.0", "x"], taken=["x"])
        ['logits', 'aux_0', 'aux_0_', 'x_']
    """
    used = set(taken)
    found = []
    for name in names:
        wanted = re.sub(r"\W+", "_", name).strip("_") or "output"
        while wanted in used:
            wanted += "_"
        used.add(wanted)
        found.append(wanted)
    return found


def reason_of(error: BaseException) -> str:
    """What went wrong in the first place, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _old_torch() -> str:
    """The remedy, if it may be a newer torch."""
    version = torch.__version__
    old = tuple(map(int, version.split(".")[:2])) < tuple(map(int, TRIED_SINCE.split(".")))
    return f" (this is torch {version}; exporting is tried with {TRIED_SINCE} and newer)" if old else ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from talking about its inner life: what counts is whether the file computes the same."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
