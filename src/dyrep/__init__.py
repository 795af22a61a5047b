"""Dynamic structural re-parameterization: grow, shed and fold branches of a CNN while it trains."""

from dyrep import algebra
from dyrep.block import RepConv1d, RepConv2d, RepConv3d
from dyrep.branches import BRANCHES
from dyrep.checkpoint import load, save
from dyrep.config import DyRepConfig
from dyrep.controller import DyRep
from dyrep.errors import DyRepError
from dyrep.events import read_events
from dyrep.execution import EXECUTIONS
from dyrep.exporting import ExportReport, export
from dyrep.methods import METHODS, RepNAS, RepNASConfig, convert_
from dyrep.norm import sync_norms_
from dyrep.scoring import SCORES
from dyrep.surgery.copies import follow_
from dyrep.surgery.costs import Costs, costs
from dyrep.surgery.edits import Edit, cut_, expand_
from dyrep.surgery.executing import set_execution_
from dyrep.surgery.folding import FoldReport, deploy, verify
from dyrep.surgery.statistics import update_norms_
from dyrep.surgery.structure import prepare_, restructure_, structure
from dyrep.surgery.targets import Target, targets
from dyrep.surgery.timing import measure_executions

__version__ = "0.1.0"

__all__ = [
    "BRANCHES",
    "EXECUTIONS",
    "METHODS",
    "SCORES",
    "Costs",
    "DyRep",
    "DyRepConfig",
    "DyRepError",
    "Edit",
    "ExportReport",
    "FoldReport",
    "RepConv1d",
    "RepConv2d",
    "RepConv3d",
    "RepNAS",
    "RepNASConfig",
    "Target",
    "algebra",
    "convert_",
    "costs",
    "cut_",
    "deploy",
    "expand_",
    "export",
    "follow_",
    "load",
    "measure_executions",
    "prepare_",
    "read_events",
    "restructure_",
    "save",
    "set_execution_",
    "structure",
    "sync_norms_",
    "targets",
    "update_norms_",
    "verify",
]
