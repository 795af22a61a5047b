"""Write the tables of the documentation from the files under results/.

``python benchmarks/tables.py`` rewrites them, ``--check`` only tells whether they are up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from dyrep.methods import method

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


def methods_table() -> str:
    data = json.loads((ROOT / "results" / "methods.json").read_text())["methods"]
    networks = list(next(iter(data.values())))
    heads = " | ".join(f"{network}: multiply-adds, parameters" for network in networks)
    lines = [
        f"| method | operations | structure changes | {heads} | deployed |",
        "|---|" + "---|" * (3 + len(networks)),
    ]
    for name, costs in data.items():
        entry = method(name)
        operations = "KxK" if not entry.branches else ", ".join(("KxK", *entry.branches))
        if name == "mobileone":
            operations = "4 KxK, 1x1, residual"
        elif entry.name == "dyrep":
            operations = "the four of dbb" if name == "dyrep4" else "the seven of dbb7"
        cells = [f"{short(costs[n]['macs'])}, {short(costs[n]['parameters'])}" for n in networks]
        plain = all(
            costs[n][f"deployed_{what}"] == data["origin"][n][what] for n in networks for what in ("macs", "parameters")
        )
        deployed = "the plain network" if plain else "another network"
        lines.append(f"| `{name}` | {operations} | {entry.changes} | {' | '.join(cells)} | {deployed} |")
    folding = ", ".join(f"{short(data['orepa'][n]['folding_macs'])} on {n}" for n in networks)
    lines += [
        "",
        f"`orepa` also folds its kernels once per step, whatever the batch: {folding}. (`make methods`)",
    ]
    return "\n".join(lines)


def dbb_table() -> str:
    data = json.loads((ROOT / "results" / "methods.json").read_text())["methods"]
    paper = {
        ("VGG-16", "dbb"): (728e6, 34.7e6),
        ("ResNet-18", "dbb"): (4.13e9, 26.3e6),
        ("ResNet-50", "dbb"): (6.79e9, 40.7e6),
        ("ResNet-50", "dbb7"): (8.02e9, 48.3e6),
    }
    lines = ["| network | method | | here | paper | difference |", "|---|---|---|---|---|---|"]
    for (network, name), theirs in paper.items():
        for key, what, figure in (("macs", "multiply-adds", theirs[0]), ("parameters", "parameters", theirs[1])):
            ours = data[name][network][key]
            change = f"{100 * (ours / figure - 1):+.1f} %"
            lines.append(f"| {network} | `{name}` | {what} | {short(ours)} | {short(figure)} | {change} |")
    return "\n".join(lines)


def digits_table() -> str:
    data = json.loads((ROOT / "results" / "digits.json").read_text())
    lines = ["| digits, 24 epochs | test accuracy, folded (%) | largest fold error |", "|---|---|---|"]
    for name, row in data["rows"].items():
        worst = max(run["fold_error"] for run in row["runs"])
        lines.append(f"| {name} | {row['accuracy']:.2f} ± {row['accuracy_sd']:.2f} | {worst:.1e} |")
    blocks = data["rows"]["repnas"]["runs"][0]["structure"]["blocks"]
    kept = [
        f"{layer}: {', '.join([*(['KxK'] if block.get('origin', True) else []), *block['branches']])}"
        for layer, block in blocks.items()
    ]
    setup = data["setup"]
    lines += [
        "",
        f"Mean and standard deviation over {setup['seeds']} seeds, same recipe for all; the data is too easy to rank "
        f"methods by. The structure that `repnas` kept with seed 0: {'; '.join(kept)}.",
        "",
        f"(on the CPU; torch {setup['versions']['torch']}; `{setup['command']}`)",
    ]
    return "\n".join(lines)


def short(count: float) -> str:
    return f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.1f} M"


TABLES = {
    ("docs/numerics.md", "drift table"): drift_table,
    ("docs/training.md", "loop table"): loop_table,
    ("docs/methods.md", "methods table"): methods_table,
    ("docs/methods.md", "dbb table"): dbb_table,
    ("docs/methods.md", "digits table"): digits_table,
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
