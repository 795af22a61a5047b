"""Write the tables of the documentation from the files under results/.

``python benchmarks/tables.py`` rewrites them, ``--check`` only tells whether they are up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import downstream
import study_tables
from runs import short, told

from dyrep.methods import method
from dyrep.reproduce import STUDIES
from dyrep.wording import METRICS, MISSING, mean_and_spread

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
    networks = {"cifar10-vgg16": "VGG-16", "imagenet-resnet18": "ResNet-18", "imagenet-resnet50": "ResNet-50"}
    paper = {
        (networks[row.training.recipe], row.training.method): (row.paper["macs"] * 1e6, row.paper["parameters"] * 1e6)
        for table in STUDIES.values()
        for row in table.rows
        if row.training is not None and row.training.recipe in networks and "macs" in row.paper
        if row.training.method in ("dbb", "dbb7")
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
        accuracy = mean_and_spread([run["test_accuracy_folded"] for run in row["runs"]])
        worst = max(run["fold_error"] for run in row["runs"])
        lines.append(f"| {name} | {accuracy} | {worst:.1e} |")
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


CASES = {
    "resnet18": "ResNet-18, 224², batch 256",
    "resnet18-evolved": "the same, grown to the paper's average cost of DyRep",
    "resnet50": "ResNet-50, 224², batch 256",
    "vgg16": "VGG-16, 32², batch 128",
}
ARMS = {
    "plain": "plain",
    "published": "branches as published",
    "eager": "`eager`",
    "fused": "`fused`",
    "folded": "`folded`",
}


def fastest(measurements: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Every case and arm in the mode in which it is fastest."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(measurements, key=lambda row: -row["ms"]):
        best[row["case"], row["arm"]] = row
    return best


def pace_table() -> str:
    data = json.loads((ROOT / "results" / "pace.json").read_text())
    ways = list(data["rows"][0]["degrees"])
    lines = [f"| branches | steps | {' | '.join(ways)} |", "|---" * (2 + len(ways)) + "|"]
    for row in data["rows"]:
        figures = [f"{mean_and_spread(row['degrees'][way], '.1f')}°" for way in ways]
        lines.append(f"| {row['branches']} | {row['steps']} | {' | '.join(figures)} |")
    config = data["config"]
    lines += [
        "",
        f"({config['model']}, {config['data']}, {config['before']} steps with branches before; mean ± sd over "
        f"{config['seeds']} seeds; {data['hardware']}; torch {data['versions']['torch']}; `make pace`, "
        "`results/pace.json`)",
    ]
    return "\n".join(lines)


def headline_table() -> str:
    data = json.loads((ROOT / "results" / "speed.json").read_text())
    best = fastest([row for row in data["measurements"] if row["ms"] is not None])
    arms = ("published", "fused", "folded")
    heads = ("a training step with all seven branches everywhere, × plain", *(ARMS[arm] for arm in arms))
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in ("resnet18", "resnet50", "vgg16"):
        ratios = [f"{best[case, arm]['ms'] / best[case, 'plain']['ms']:.2f}" for arm in arms]
        lines.append(f"| {CASES[case]} | {' | '.join(ratios)} |")
    return "\n".join([*lines, "", f"({data['hardware']}; torch {data['versions']['torch']}; `results/speed.json`)"])


def speed_table() -> str:
    data = json.loads((ROOT / "results" / "speed.json").read_text())
    worked = [row for row in data["measurements"] if row["ms"] is not None]
    best = fastest(worked)
    heads = ("network", "blocks", "ms per step", "× plain", "peak memory, GiB", "× plain", "step")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case, network in CASES.items():
        plain = best["resnet18" if case == "resnet18-evolved" else case, "plain"]
        for arm, words in ARMS.items():
            row = best.get((case, arm))
            if row is None or (case == "resnet18-evolved" and arm == "plain"):
                continue
            time = f"{row['ms']:.1f} | {row['ms'] / plain['ms']:.2f}"
            memory = f"{row['peak_gib']:.1f} | {row['peak_gib'] / plain['peak_gib']:.2f}"
            lines.append(f"| {network} | {words} | {time} | {memory} | {HOW[row['mode']]} |")
            network = ""
    (captured,) = (row["ms"] for row in worked if (row["case"], row["arm"], row["mode"]) == ("vgg16", "plain", "graph"))
    ratios = [f"`{arm}` {best['vgg16', arm]['ms'] / captured:.2f}" for arm in ("fused", "folded")]
    versions = data["versions"]
    lines += [
        "",
        f"Against plain VGG-16 that is captured but not compiled ({captured:.2f} ms): {', '.join(ratios)}.",
        "",
        f"({data['hardware']}; torch {versions['torch']}; `make speed`, `results/speed.json`)",
    ]
    return "\n".join(lines)


HOW = {
    "eager": "not captured",
    "graph": "captured in a CUDA graph",
    "compiled": "compiled",
    "compiled+graph": "compiled and captured",
}


def profile_table() -> str:
    data = json.loads((ROOT / "results" / "speed.json").read_text())
    rows = [row for row in data["measurements"] if row.get("profile")]
    kinds = list(rows[0]["profile"]["by_kind_ms"])
    lines = [f"| network | blocks | {' | '.join(kinds)} | in all |", "|---|---|" + "---|" * (len(kinds) + 1)]
    for row in sorted(rows, key=lambda row: (list(CASES).index(row["case"]), list(ARMS).index(row["arm"]))):
        times = [f"{time:.2f}" for time in row["profile"]["by_kind_ms"].values()]
        total = row["profile"]["kernels_ms"]
        lines.append(f"| {CASES[row['case']]} | {ARMS[row['arm']]} | {' | '.join(times)} | {total:.2f} |")
    return "\n".join(lines)


def downstream_table() -> str:
    path = ROOT / "results" / "downstream.json"
    if not path.exists():
        return "Not measured yet: `make downstream DATA=DIR` does it on a machine with a GPU."
    data = json.loads(path.read_text())
    found = {name: [run for run in data["runs"] if run["task"] == name] for name in downstream.TASKS}
    tasks = {name: task for name, task in downstream.TASKS.items() if found[name]}
    methods = {after for arm, (_, after) in downstream.ARMS.items() if any(run["arm"] == arm for run in data["runs"])}
    # times alone, where all rows have one: beside times of runs that shared the GPU they would mislead
    alone = {name: times for name, times in data["epoch_seconds"].items() if methods <= times.keys()}
    heads = ["row", "Tiny-ImageNet, top-1 (%)"]
    for task in tasks.values():
        heads += [f"{task.folder}, {METRICS[task.metric]} (%)", "against origin (95 %)", "s per epoch"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for arm, (before, after) in downstream.ARMS.items():
        if not any(run["arm"] == arm for run in data["runs"]):
            continue
        cells = [arm, mean_and_spread([run["accuracy"] for run in data["backbones"] if run["method"] == before])]
        for name, task in tasks.items():
            own = [run for run in found[name] if run["arm"] == arm]
            shared = statistics.median(run["epoch_seconds"] for run in own) if own else None
            seconds = alone[name][after] if name in alone else shared
            cells += [
                mean_and_spread([run[task.metric] for run in own]),
                told(downstream.against_origin(found[name], task.metric, arm)),
                MISSING if seconds is None else f"{seconds:.2f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    words = []
    for part, (epochs, _) in data["config"]["epochs"].items():
        seeds = sorted({run["seed"] for run in (data["backbones"] if part == "backbones" else found[part])})
        if seeds:
            words.append(f"{part}: {epochs} epochs, seeds {', '.join(map(str, seeds))}")
    for name in tasks:
        workers = max(run["shared_by"] for run in found[name])
        if workers > 1 and name not in alone:
            words.append(f"times of {name} while up to {workers} runs shared the GPU")
    versions = data["versions"]
    about = f"{data['hardware']}; torch {versions['torch']}; `make downstream`, `results/downstream.json`"
    return "\n".join([*lines, "", f"(Test sets, folded networks, mean ± sd. {'; '.join(words)}; {about})"])


def noise_table() -> str:
    data = json.loads((ROOT / "results" / "noise.json").read_text())
    heads = ("VGG-16, CIFAR-10", "score", "float32", "bfloat16 autocast", "other batches (float64)")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for network, found in data["networks"].items():
        for metric in found["other_batches"]:
            rows = [found[key][metric] for key in ("float32", "bfloat16 autocast", "other_batches")]
            cells = [
                f"{row['rank_correlation']:+.2f}{'' if row['same_choice'] else ', another choice'}" for row in rows
            ]
            lines.append(f"| {network} | {metric} | {' | '.join(cells)} |")
            network = ""
    ratios = "; ".join(
        f"{network}: {found['synflow_to_snip']['median']:.0e}" for network, found in data["networks"].items()
    )
    lines += ["", f"|Σ g·θ| as a share of Σ |g·θ|, in the median layer, in float64: {ratios}."]
    return "\n".join(
        [*lines, "", f"({data['hardware']}; torch {data['versions']['torch']}; `make noise`, `results/noise.json`)"]
    )


TABLES = {
    ("README.md", "headline table"): headline_table,
    ("docs/numerics.md", "drift table"): drift_table,
    ("docs/training.md", "loop table"): loop_table,
    ("docs/methods.md", "methods table"): methods_table,
    ("docs/methods.md", "dbb table"): dbb_table,
    ("docs/methods.md", "digits table"): digits_table,
    ("docs/methods.md", "pace table"): pace_table,
    ("docs/speed.md", "speed table"): speed_table,
    ("docs/speed.md", "profile table"): profile_table,
    ("docs/speed.md", "executions table"): study_tables.executions_table,
    ("docs/downstream.md", "downstream table"): downstream_table,
    ("docs/results.md", "cifar table"): study_tables.cifar_table,
    ("docs/results.md", "choices table"): study_tables.choices_table,
    ("docs/results.md", "selection tables"): study_tables.selection_tables,
    ("docs/results.md", "missing studies"): study_tables.missing_studies,
    ("docs/results.md", "growth figures"): study_tables.growth_figures,
    ("docs/results.md", "noise table"): noise_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for (page, name), make in TABLES.items():
        path = ROOT / page
        old = path.read_text()
        new, places = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            lambda match, make=make: f"{match[1]}{make()}\n{match[2]}",
            old,
            flags=re.DOTALL,
        )
        if places != 1:
            sys.exit(f"{page} has {places} places for the {name}: it takes one <!-- {name} --> and <!-- /{name} -->")
        if new != old and check:
            sys.exit(f"{page} is out of date: run python benchmarks/tables.py")
        if new != old:
            path.write_text(new)


if __name__ == "__main__":
    main()
