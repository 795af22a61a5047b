"""Pieces of a page: tables, figures with their data, cards. All text that comes from outside is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from dyrep.report.pictures import Picture
from dyrep.wording import MISSING

Cell = str | int | float | None


def number(value: float | None, form: str = ".4g") -> str:
    """A number as text, or a dash where there is none."""
    return MISSING if value is None else format(value, form) if value else "0"


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table; its first column names the rows, columns of figures are set flush right."""
    rows = list(rows)
    flush = [i > 0 and all(_is_figure(row[i]) for row in rows) for i in range(len(heads))]
    head = "".join(
        f'<th scope="col"{_flush(right)}>{escape(each)}</th>' for each, right in zip(heads, flush, strict=True)
    )
    body = []
    for first, *cells in rows:
        columns = zip(cells, flush[1:], strict=True)
        figures = "".join(f"<td{_flush(right)}>{_text(cell)}</td>" for cell, right in columns)
        body.append(f'<tr><th scope="row">{_text(first)}</th>{figures}</tr>')
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _text(cell: Cell) -> str:
    return escape(number(cell) if isinstance(cell, float) or cell is None else str(cell))


def _is_figure(cell: Cell) -> bool:
    return cell in (None, MISSING) or isinstance(cell, (int, float)) or cell[:1].isdigit()


def _flush(right: bool) -> str:
    return ' class="number"' if right else ""


def figure(picture: Picture | None, words: str, data: str = "") -> str:
    """A picture with a caption, and its data as a table for those who would rather read."""
    if picture is None:
        return ""
    more = f'<details class="data"><summary>As a table</summary>{data}</details>' if data else ""
    label = escape(f"{picture.alt}. Arrow keys go from mark to mark.", quote=True)
    return (
        f'<figure id="{picture.name}"><div class="chart" tabindex="0" role="group" aria-label="{label}">'
        f"{picture.svg()}</div><figcaption>{escape(words)}</figcaption>{more}</figure>"
    )


def embedded(png: bytes, words: str) -> str:
    """A picture that is part of the page, with words below it.

    Example:
        >>> embedded(b"", "a picture").startswith('<figure><img src="data:image/png;base64,')
        True
    """
    data = base64.b64encode(png).decode()
    caption = escape(words)
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'
    )


def card(title: str, headline: str, about: str, facts: Sequence[tuple[str, str, bool | None]]) -> str:
    """A box with one large figure; facts that are good or bad news have a colour, and say so in words."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd{_news(good)}>{escape(value)}</dd>" for name, value, good in facts)
    return (
        f'<article class="card"><h3>{escape(title)}</h3><p class="figure">{escape(headline)}</p>'
        f'<p class="quiet">{escape(about)}</p><dl>{rows}</dl></article>'
    )


def _news(good: bool | None) -> str:
    return "" if good is None else ' class="good"' if good else ' class="bad"'


def section(name: str, title: str, *parts: str) -> str:
    """A part of the page with a heading."""
    heading = f'<h2 id="{name}-title">{escape(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{"".join(parts)}</section>'


def page(title: str, subtitle: str, sections: Sequence[tuple[str, str]], body: str, styles: str, script: str) -> str:
    """A whole page that needs nothing else; ``sections`` are names and titles for the menu."""
    menu = "".join(f'<li><a href="#{name}">{escape(words)}</a></li>' for name, words in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="dyrep report">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{styles}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header><h1>{escape(title)}</h1><p class="quiet">{escape(subtitle)}</p>
<nav aria-label="Sections"><ul>{menu}</ul></nav></header>
<main id="content">
{body}
</main>
<script>
{script}</script>
</body>
</html>
"""
