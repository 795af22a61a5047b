"""Write the tables of the documentation from the files under results/.

``python benchmarks/tables.py`` rewrites them, ``--check`` only tells whether they are up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def drift_table() -> str:
    data = json.loads((ROOT / "results" / "drift.json").read_text())
    lines = [
        "| network | norm on the origin | eval, median | eval, worst | training, median | training, worst |",
        "|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        figures = [f"{row[key]:.1e}" for key in ("eval_median", "eval_max", "train_median", "train_max")]
        lines.append(f"| {row['network']} | {row['origin_norm']} | {' | '.join(figures)} |")
    versions = data["setup"]["versions"]
    lines += ["", f"({data['setup']['hardware']}; torch {versions['torch']}, Python {versions['python']})"]
    return "\n".join(lines)


def loop_table() -> str:
    data = json.loads((ROOT / "results" / "loop.json").read_text())
    plain = (data["plain"] + data["plain, again"]) / 2
    lines = ["| VGG-16, CIFAR-10 shapes, batch 128 | s per epoch | against plain |", "|---|---|---|"]
    lines.append(f"| plain, measured first and last | {data['plain']:.2f}, {data['plain, again']:.2f} | 1 |")
    lines.append(f"| plain, not captured | {data['plain, eager']:.2f} | {data['plain, eager'] / plain:.2f} |")
    for score in ("synflow", "invariant"):
        for every in (1, 10):
            time = data[f"{score}, every {every}"]
            steps = "every step" if every == 1 else f"every {every}th step"
            lines.append(f"| with scores ({score}), {steps} | {time:.2f} | {time / plain:.2f} |")
    updates = data["updates"]
    slowest = max(update["update"] for update in updates), max(update["recapture"] for update in updates)
    lines += [
        "",
        f"A structure update with 20 calibration batches takes up to {slowest[0]:.2f} s, and capturing anew up to "
        f"{slowest[1]:.2f} s.",
    ]
    versions = data["setup"]["versions"]
    lines += ["", f"({data['setup']['hardware']}; torch {versions['torch']}; `{data['setup']['command']}`)"]
    return "\n".join(lines)


TABLES = {
    ("docs/numerics.md", "drift table"): drift_table,
    ("docs/training.md", "loop table"): loop_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for (page, name), make in TABLES.items():
        path = ROOT / page
        old = path.read_text()
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        new = pattern.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", old)
        if new != old and check:
            sys.exit(f"{page} is out of date: run python benchmarks/tables.py")
        path.write_text(new)


if __name__ == "__main__":
    main()
