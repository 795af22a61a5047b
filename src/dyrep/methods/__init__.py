"""Other ways to re-parameterize a network, on the same blocks, for runs side by side."""

from dyrep.methods.catalogue import METHODS, Method, dyrep_settings, method, names
from dyrep.methods.conversion import convert_
from dyrep.methods.head_start import check_head_start, start_as_
from dyrep.methods.repnas import RepNAS, RepNASConfig

__all__ = [
    "METHODS",
    "Method",
    "RepNAS",
    "RepNASConfig",
    "check_head_start",
    "convert_",
    "dyrep_settings",
    "method",
    "names",
    "start_as_",
]
