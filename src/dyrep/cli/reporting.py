"""``dyrep report``: from the folders of runs to a page that shows what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from dyrep.report.page import write_report


def report_runs(
    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")
    ],
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = Path("report.html"),
) -> None:
    """Show what happened in one or several runs, on one page that needs no network.

    Runs that differ in nothing but the seed are taken together; different methods are compared. Neither weights nor
    data are needed, and a run that has not ended yet is shown as far as it is.

    Args:
        runs: folders of runs.
        out: the page; its figures are written as PNGs into a folder beside it.
    """
    page, figures = write_report(runs, out)
    print(f"{page}: {page.stat().st_size / 1024:.0f} KiB, opens in any browser")
    if figures:
        print(f"{figures[0].parent}: {len(figures)} figures as PNG")
