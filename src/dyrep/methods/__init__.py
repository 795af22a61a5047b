"""Other ways to re-parameterize a network, on the same blocks, for runs side by side."""

from dyrep.methods.catalogue import METHODS, Method, dyrep_settings, method, names, takes_defaults
from dyrep.methods.conversion import convert_
from dyrep.methods.repnas import RepNAS, RepNASConfig

__all__ = [
    "METHODS",
    "Method",
    "RepNAS",
    "RepNASConfig",
    "convert_",
    "dyrep_settings",
    "method",
    "names",
    "takes_defaults",
]
