"""Every error and warning of the package: each says which layer, which value, and what to do."""

from __future__ import annotations

import sys
import warnings

_LIBRARIES = ("dyrep", "torch", "contextlib")


class DyRepError(Exception):
    """Base class: ``except dyrep.DyRepError`` catches everything this package raises on purpose."""


class ShapeError(DyRepError, ValueError):
    """Tensors whose shapes do not fit together; the message names both shapes."""


class UnknownLayerError(DyRepError, ValueError):
    """A layer name that the model does not have; the message suggests close ones."""


class IneligibleLayerError(DyRepError, ValueError):
    """A layer that cannot be expanded exactly; the message says why."""


class BranchError(DyRepError, ValueError):
    """A branch that is unknown, impossible for this convolution, or not there; the message lists the valid ones."""


class CalibrationError(DyRepError, ValueError):
    """Calibration data that cannot serve: none, the wrong kind, or a layer that it never reaches."""


class UnreachedLayerError(CalibrationError):
    """A layer that the model's forward never calls, so that branches on it would never run."""


class OptimizerError(DyRepError, ValueError):
    """An optimizer that cannot follow a change of structure, or a saved state that does not fit it."""


class WrappedModelError(DyRepError, TypeError):
    """A model inside a wrapper that does not survive a change of structure, or something that is no model."""


class StructureError(DyRepError, ValueError):
    """A structure description that is malformed or does not fit the model."""


class CheckpointError(DyRepError, ValueError):
    """A file that is missing, damaged, or not one of ours."""


class ConfigError(DyRepError, ValueError):
    """A setting outside its range; the message lists the valid values."""


class MissingPackageError(DyRepError, ImportError):
    """A package that not everyone has, and that is needed now; the message says how to install it."""


class DesyncError(DyRepError, RuntimeError):
    """Ranks of a distributed job that would change their models differently."""


class DataError(DyRepError, ValueError):
    """Data that is missing, damaged, or not what it should be; the message names the file or folder."""


class DivergedError(DyRepError, ArithmeticError):
    """Training has diverged; the message says where it started and what to do."""


class LostRankError(DyRepError, RuntimeError):
    """Another process of the job has gone."""


class DyRepWarning(UserWarning):
    """Base class of every warning of this package."""


class ScoreNoiseWarning(DyRepWarning):
    """A score too small against its own terms to rank anything."""


class EditRolledBackWarning(DyRepWarning):
    """An edit that would have changed the network's function and was not made, or undone."""


class UnmeasuredEditWarning(DyRepWarning):
    """Edits of a model whose output does not tell how far they move it."""


class SettingsChangedWarning(DyRepWarning):
    """A run that goes on with other settings than it was saved with."""


class NoUpdateWarning(DyRepWarning):
    """Calls that never lead to an update, because the settings count something else."""


class UnsynchronisedWarning(DyRepWarning):
    """Several processes that train copies of a model which nothing keeps alike."""


def warn(message: str, category: type[Warning] = DyRepWarning) -> None:
    """Warn, and point to the line outside of the library that led here.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn("the score is noise", ScoreNoiseWarning)
        >>> caught[0].category.__name__, str(caught[0].message)
        ('ScoreNoiseWarning', 'the score is noise')
    """
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth)
