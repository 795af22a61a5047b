"""Figures that serve twice: as a PNG, and as an SVG inside a page, with a word on every mark. Needs matplotlib.

A figure is drawn once. For a page its ink becomes the colour of the text around it, so that it can be read on a dark
background, its names are made unique, and whatever was described with `Picture.tell` can be pointed at and read out.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from dyrep.branches import BRANCHES
from dyrep.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT = "#1b1f24", "#8a9099"
COLOURS = dict(zip(BRANCHES, ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"), strict=True))
OTHER = "#999999"  # the origin, and branches of other methods
RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b2a300")
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_RC: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "dyrep",  # the same figure gives the same file
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


@dataclass
class Picture:
    """A figure with a name, and what its marks stand for.

    Attributes:
        name: for files and links.
        figure: matplotlib's figure.
        alt: what it shows, in words.
        told: what marks stand for, by their name in the file.
    """

    name: str
    figure: Figure
    alt: str
    told: dict[str, str] = field(default_factory=dict)

    def tell(self, artist: Any, text: str) -> None:
        """Say what something that was drawn stands for."""
        mark = f"mark-{len(self.told)}"
        artist.set_gid(mark)
        self.told[mark] = text

    def save_png(self, path: str | os.PathLike[str]) -> Path:
        """Write it as a PNG, atomically."""
        path = Path(path)
        with replacing(path) as temporary:
            self.figure.savefig(temporary, format="png", dpi=150, facecolor="white")
        return path

    def save_svg(self, path: str | os.PathLike[str]) -> Path:
        """Write it as an SVG that stands for itself, atomically."""
        buffer, path = io.StringIO(), Path(path)
        with styled():
            self.figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
        svg = buffer.getvalue().replace("<svg ", f'<svg role="img" aria-label={quoteattr(self.alt)} ', 1)
        for mark, text in self.told.items():  # browsers show a title when its element is pointed at
            svg = svg.replace(f'<g id="{mark}">', f'<g id="{mark}">\n<title>{escape(text)}</title>', 1)
        with replacing(path) as temporary:
            temporary.write_text(svg, encoding="utf-8")
        return path

    def svg(self) -> str:
        """As an element of a page."""
        buffer = io.StringIO()
        with styled():
            self.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        ElementTree.register_namespace("", _SVG)
        ElementTree.register_namespace("xlink", _XLINK)
        root = ElementTree.fromstring(buffer.getvalue())
        for parent in list(root.iter()):
            for child in list(parent):
                if child.tag in (f"{{{_SVG}}}style", f"{{{_SVG}}}metadata"):
                    parent.remove(child)  # a page has rules of its own
        for element in root.iter():
            self._adapt(element)
        width = float(str(root.attrib.pop("width")).removesuffix("pt"))
        root.attrib.pop("height")
        root.attrib |= {"role": "img", "aria-label": self.alt, "style": f"min-width: {min(width, 560):.0f}px"}
        return ElementTree.tostring(root, encoding="unicode")

    def _adapt(self, element: ElementTree.Element) -> None:
        own = element.get("id")
        if own in self.told:
            text = self.told[own]
            element.attrib |= {"class": "mark", "role": "img", "aria-label": text}
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = text
            element.insert(0, title)
        for key, value in element.attrib.items():
            if key == "id":
                element.attrib[key] = f"{self.name}-{value}"
            elif key.endswith("href") and value.startswith("#"):
                element.attrib[key] = f"#{self.name}-{value[1:]}"
            elif "url(#" in value:
                element.attrib[key] = re.sub(r"url\(#", f"url(#{self.name}-", value)
            elif key == "style":
                element.attrib[key] = value.replace(INK, "currentColor")


@contextmanager
def styled() -> Iterator[None]:
    """Our fonts, lines and colours, for what is drawn or saved meanwhile."""
    import matplotlib

    with matplotlib.rc_context(_RC):
        yield


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """An empty figure that no global list knows of."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", **options)


def over_epochs(axis: Any, epochs: int) -> None:
    """Let the horizontal axis be time, from the beginning of a run to its end."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlim(0, epochs + 0.02 * epochs)  # marks at the end are seen whole
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def colour(branch: str) -> str:
    """The colour of a branch, the same in all pictures."""
    return COLOURS.get(branch, OTHER)


def short(layer: str) -> str:
    """A layer's name as people can read it: where it is nested is an arrow."""
    return re.sub(r"\.branches\.([^.]+)\.(conv|point)", r" › \1", layer)


def in_order(layer: str) -> list[tuple[int, str]]:
    """A key that sorts layers as people do: 10 after 9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"\.|(?<=\D)(?=\d)", layer)]
