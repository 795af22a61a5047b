"""Every method there is: which branches its blocks have, how they start, and when they change."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from dyrep.branches import BRANCHES, ORIGIN, branch_option, branch_options
from dyrep.config import DyRepConfig
from dyrep.errors import ConfigError
from dyrep.geometry import ConvGeometry

DBB_BRANCHES = ("1x1-KxK", "1x1-AVG", "1x1")
"""What the paper calls four operations, with the origin."""

_DYREP = re.compile(r"dyrep([47])?(-default)?(-nodep)?(?:-([1-9][0-9]*))?")


def _never(_: ConvGeometry) -> bool:
    return False


def _one_output_per_group(geometry: ConvGeometry) -> bool:
    return geometry.groups == geometry.out_channels > 1


def _many_groups(geometry: ConvGeometry) -> bool:
    return geometry.groups > 4


@dataclass(frozen=True)
class Method:
    """A way to train a network with more parameters than it is deployed with.

    Attributes:
        name: what it is called.
        title: what it is, in a line.
        branches: its branches beside the origin.
        changes: when the structure changes, in words.
        replaces_norm: whether, as published, its blocks take the place of the batch norm after the convolution too.
        scaling: what stands at the end of its branches, one of `dyrep.scaling.SCALINGS`.
        copies: whether the original kernel is there several times.
        pointwise: whether it has something to add to 1x1 convolutions.
        keeps_duplicates: whether it adds branches that are others up to scale, as they are on depthwise convolutions.
        drops_point: where it leaves the 1x1 branch out.
        doubles_width: where ``1x1-KxK`` has twice as many inner channels.
        source: who published it.
    """

    name: str
    title: str
    branches: tuple[str, ...] = ()
    changes: str = "never"
    replaces_norm: bool = False
    scaling: str = "norm"
    copies: bool = False
    pointwise: bool = False
    keeps_duplicates: bool = True
    drops_point: Callable[[ConvGeometry], bool] = _never
    doubles_width: Callable[[ConvGeometry], bool] = _never
    source: str = ""

    @property
    def builds_blocks(self) -> bool:
        """Whether it turns convolutions into blocks before training begins."""
        return bool(self.branches)

    def branches_for(self, geometry: ConvGeometry, copies: int) -> tuple[str, ...]:
        """The branches that fit a convolution."""
        more = tuple(f"{ORIGIN}-{number}" for number in range(2, copies + 1)) if self.copies else ()
        without = ("1x1",) if self.drops_point(geometry) else ()
        options = {b: branch_option(b, geometry) for b in (*more, *self.branches) if b not in without}
        return tuple(b for b, o in options.items() if o.possible and (self.keeps_duplicates or not o.duplicate))

    def width_for(self, geometry: ConvGeometry) -> int:
        """Inner channels of ``1x1-KxK`` per input channel."""
        return 2 if self.doubles_width(geometry) else 1


_ALL = (
    Method("origin", "the plain network"),
    Method(
        "repvgg",
        "KxK + 1x1 + residual",
        ("1x1", "residual"),
        replaces_norm=True,
        source="Ding et al., RepVGG, CVPR 2021",
    ),
    Method("acnet", "KxK + 1xK + Kx1", ("1xK", "Kx1"), replaces_norm=True, source="Ding et al., ACNet, ICCV 2019"),
    Method(
        "dbb",
        "diverse branch block of four operations",
        DBB_BRANCHES,
        replaces_norm=True,
        drops_point=_one_output_per_group,
        doubles_width=_one_output_per_group,
        source="Ding et al., Diverse Branch Block, CVPR 2021",
    ),
    Method(
        "dbb7",
        "diverse branch block of DyRep's seven operations",
        BRANCHES,
        replaces_norm=True,
        keeps_duplicates=False,
        source="Huang et al., DyRep, CVPR 2022, appendix",
    ),
    Method(
        "mobileone",
        "several KxK + 1x1 + residual",
        ("1x1", "residual"),
        replaces_norm=True,
        copies=True,
        pointwise=True,
        source="Vasu et al., MobileOne, CVPR 2023",
    ),
    Method(
        "orepa",
        "six operations without norms, squeezed into one convolution at every step",
        ("1x1-AVG", "1x1-DCT", "1x1-KxK", "1x1", "DW-1x1"),
        scaling="linear",
        doubles_width=_many_groups,
        source="Hu et al., Online Convolutional Re-parameterization, CVPR 2022",
    ),
    Method(
        "repnas",
        "a search over seven operations, in the same run",
        BRANCHES,
        changes="once, when the search ends",
        replaces_norm=True,
        scaling="gated",
        keeps_duplicates=False,
        source="Zhang et al., RepNAS, 2021",
    ),
    Method(
        "dyrep",
        "grows and sheds branches while it trains",
        changes="every few epochs",
        source="Huang et al., DyRep, CVPR 2022",
    ),
    Method("fixed", "a structure taken from a run, trained from the start", changes="never"),
)
METHODS: dict[str, Method] = {entry.name: entry for entry in _ALL}


def names() -> str:
    """The names of all methods, for messages."""
    return f"{', '.join(METHODS)}, and variants of dyrep such as dyrep-default, dyrep4, dyrep-nodep and dyrep-40"


def method(name: str) -> Method:
    """A method by its name.

    Variants of DyRep: ``dyrep-default`` has the library's defaults where settings are the paper's, ``dyrep4`` grows
    DBB's four operations instead of seven, ``dyrep-nodep`` never cuts, and ``dyrep-40`` leaves the structure alone
    after epoch 40; they combine, in this order: ``dyrep4-default-40``, ``dyrep4-nodep-40``.

    Raises:
        ConfigError: there is no such method.

    Example:
        >>> method("dyrep4-40").name
        'dyrep'
    """
    if name in METHODS:
        return METHODS[name]
    if _DYREP.fullmatch(name):
        return METHODS["dyrep"]
    raise ConfigError(f"method={name!r} is unknown; valid are {names()}")


def takes_defaults(name: str) -> bool:
    """Whether a method is a variant of DyRep that has the library's defaults in place of the paper's settings.

    Example:
        >>> takes_defaults("dyrep4-default-40"), takes_defaults("dyrep4")
        (True, False)
    """
    found = _DYREP.fullmatch(name)
    return found is not None and found.group(2) is not None


def dyrep_settings(name: str, config: DyRepConfig) -> DyRepConfig:
    """The settings of a variant of DyRep.

    Example:
        >>> dyrep_settings("dyrep4-nodep-40", DyRepConfig(interval=10)).cut
        'none'
    """
    found = _DYREP.fullmatch(name)
    if found is None:
        raise ConfigError(f"method={name!r} is not a variant of dyrep: dyrep-default, dyrep4, dyrep-nodep ...")
    operations, _, without_cutting, last = found.groups()
    if takes_defaults(name):
        config = config.with_defaults()
    if operations == "4":
        config = replace(config, branches=DBB_BRANCHES)
    elif operations == "7":
        config = replace(config, branches=None)
    if without_cutting:
        config = replace(config, cut="none")
    if last and config.unit == "step":
        raise ConfigError(f"method={name!r} counts epochs, and unit='step' steps: set stop instead")
    if last:
        config = replace(config, stop=int(last))
    return config


def why_not(chosen: Method, geometry: ConvGeometry, max_kernel: int | None) -> str:
    """Why a method leaves a convolution plain by its shape; empty if it does not."""
    kernel = "x".join(map(str, geometry.kernel_size))
    if geometry.taps == 1 and not chosen.pointwise:
        return branch_options(geometry)["1x1"].reason
    if len(set(geometry.kernel_size)) > 1:
        return f"the kernel is {kernel}, not square"
    if max_kernel is not None and max(geometry.kernel_size) > max_kernel:
        return f"the kernel is {kernel}, larger than max_kernel={max_kernel}"
    return ""
