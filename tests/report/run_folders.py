"""Folders of runs that never were: the text files of a run, made up in milliseconds.

``from report.run_folders import write_run``
"""

import copy
import json

from dyrep.config import DyRepConfig
from dyrep.events import EventLog
from dyrep.methods.catalogue import METHODS
from dyrep.records import append_line

ALL = ["1x1", "1x1-KxK", "1x1-AVG", "1xK", "Kx1", "residual"]
PLAIN_MACS, BRANCH_MACS = 1_000_000, 50_000
PLAIN_PARAMETERS, BRANCH_PARAMETERS = 70_000, 1_000


def update(epoch, *edits, step=0, **more):
    """An update of the structure, for `write_run`.

    Args:
        epoch: after which one.
        edits: ``("expand" or "cut", layer, branches)``; a fourth item is the edit's detail.
        step: after which one, with ``unit="step"``.
        more: what its event shall say instead of what is made up: scores, importances, macs, seconds ...
    """
    return {"epoch": epoch, "step": step, "edits": [_edit(*edit) for edit in edits], "more": more}


def write_run(
    folder,
    *,
    method="dyrep",
    seed=0,
    epochs=10,
    trained=None,
    finished=True,
    updates=(),
    converted=None,
    plans=None,
    strengths=None,
    accuracy=90.0,
    split="test",
    writes_importances=True,
    rows=None,
    summary=None,
    dyrep=None,
    **recipe,
):
    """Write config.json, metrics.jsonl, events.jsonl, sessions.jsonl and, at the end, summary.json.

    Args:
        folder: where to; it is created.
        method: how it was trained.
        seed: the recipe's.
        epochs: the recipe's.
        trained: how many epochs are over (default: all of them).
        finished: whether there is a summary.
        updates: what `update` returned, in order.
        converted: branches by layer that are there from the start, each block with a norm on its origin.
        plans: what a block's plan says beyond its branches, by layer: ``{"conv1": {"scaling": "linear"}}``.
        strengths: importances by layer and branch, at any time; what is not in it has 0.01, and the
            norm of an origin (``"KxK"``) 1.
        accuracy: that of the last epoch, in percent; it rises by one every epoch.
        split: what is evaluated, ``"test"`` or ``"val"``.
        writes_importances: whether metrics and summary have importances, which those of earlier versions do not.
        rows: a function that changes a row of the metrics, in place.
        summary: what the summary shall say beyond what is made up.
        dyrep: settings of DyRep beyond its defaults.
        recipe: settings of the recipe beyond those of the demo.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trained = epochs if trained is None else trained
    settings = {**_RECIPE, **recipe, "method": method, "seed": seed, "epochs": epochs}
    settings["dyrep"] = {**_RECIPE["dyrep"], **(dyrep or {})}
    net = _Network(plans or {}, strengths or {}, METHODS.get(method))
    events = _Events()
    if method.startswith("dyrep"):
        events.add("started", config={**settings["dyrep"], "total": epochs}, ignored={})
    if converted:
        edits = [_edit("expand", layer, branches) for layer, branches in converted.items()]
        net.apply(edits, origin_norm=method != "fixed")
        events.add("converted", method=method, epochs=epochs, edits=edits)
    metrics, pending = [], list(updates)
    for epoch in range(1, trained + 1):
        while pending and pending[0]["epoch"] < epoch:  # in the course of this epoch
            events.update(net, pending.pop(0))
        row = _row(epoch, accuracy - (trained - epoch), split, net)
        if writes_importances:
            row["importances"] = net.importances()
        while pending and pending[0]["epoch"] == epoch and not pending[0]["step"]:
            events.update(net, pending.pop(0))
        row["update_seconds"] = 0.1 if events.all and events.all[-1].get("epoch") == epoch else 0.0
        if rows is not None:
            rows(row)
        metrics.append(row)
    _write(folder / "config.json", [{"format": 1, "recipe": settings, "settings": {"out": str(folder)}}])
    _write(folder / "metrics.jsonl", metrics)
    _write(folder / "events.jsonl", events.all)
    _write(folder / "sessions.jsonl", [_SESSION])
    if finished:
        found = _summary(settings, metrics, net, accuracy, split, writes_importances)
        _write(folder / "summary.json", [{**found, **(summary or {})}])
    return folder


class _Network:
    """The structure as edits leave it, with importances."""

    def __init__(self, plans, strengths, method):
        self.blocks, self._plans, self._strengths, self._method = {}, plans, strengths, method

    def apply(self, edits, origin_norm=False):
        for edit in edits:
            usual = {"branches": [], "origin_norm": origin_norm, "width": 1}
            if origin_norm and self._method is not None and self._method.scaling != "norm":
                usual["scaling"] = self._method.scaling
            block = self.blocks.setdefault(edit["layer"], {**usual, **self._plans.get(edit["layer"], {})})
            if edit["kind"] == "expand":
                block["branches"] = [*block["branches"], *edit["branches"]]
                continue
            block["branches"] = [branch for branch in block["branches"] if branch not in edit["branches"]]
            if "KxK" in edit["branches"]:
                block |= {"origin": False, "origin_norm": False}
            gone = tuple(f"{edit['layer']}.branches.{branch}." for branch in edit["branches"])
            self.blocks = {layer: block for layer, block in self.blocks.items() if not layer.startswith(gone)}
            if not block["branches"] and not block["origin_norm"]:
                del self.blocks[edit["layer"]]

    def structure(self):
        return {"format": 1, "blocks": copy.deepcopy(self.blocks)}

    def importances(self, origin=True):
        return {
            layer: {
                branch: self._strengths.get(layer, {}).get(branch, 1.0 if branch == "KxK" else 0.01)
                for branch in [*(["KxK"] if origin and block["origin_norm"] else []), *block["branches"]]
            }
            for layer, block in self.blocks.items()
            if block["branches"]
        }

    @property
    def branches(self):
        return sum(len(block["branches"]) for block in self.blocks.values())

    @property
    def macs(self):
        return PLAIN_MACS + BRANCH_MACS * self.branches

    @property
    def parameters(self):
        return PLAIN_PARAMETERS + BRANCH_PARAMETERS * self.branches


class _Events:
    def __init__(self):
        self.all = []

    def add(self, kind, **data):
        self.all.append({"seq": len(self.all), "type": kind, "time": 1.0 + len(self.all), **data})

    def update(self, net, planned):
        net.apply([edit for edit in planned["edits"] if edit["kind"] == "expand"])
        importances = net.importances(origin=False)  # of what is cut, too
        net.apply([edit for edit in planned["edits"] if edit["kind"] == "cut"])
        for edit in planned["edits"]:
            known = importances.get(edit["layer"], {})
            strengths = {branch: known[branch] for branch in edit["branches"] if branch in known}
            reason = {"score": 1.0} if edit["kind"] == "expand" else {"importances": strengths}
            edit["detail"] = {**reason, "drift": 1e-7, "train_drift": 1e-4, **edit["detail"]}
        told = {
            "update": 1 + sum(event["type"] == "update" for event in self.all),
            "epoch": planned["epoch"],
            "step": planned["step"],
            "edits": planned["edits"],
            "rolled_back": [],
            "rejected": {},
            "scores": {edit["layer"]: 1.0 for edit in planned["edits"] if edit["kind"] == "expand"},
            "scored_steps": 100,
            "skipped_steps": 0,
            "importances": importances,
            "structure": net.structure(),
            "parameters": net.parameters,
            "macs": net.macs,
            "plain_macs": PLAIN_MACS,
            "batches": 20,
            "seconds": 0.1,
        }
        self.add("update", **{**told, **planned["more"]})


def _edit(kind, layer, branches, detail=None):
    return {"kind": kind, "layer": layer, "branches": list(branches), "detail": detail or {}}


def _row(epoch, accuracy, split, net):
    return {
        "epoch": epoch,
        "train_loss": 1 / epoch,
        "train_accuracy": accuracy + 1,
        "lr": 0.1,
        f"{split}_loss": 2 / epoch,
        f"{split}_accuracy": accuracy,
        "parameters": net.parameters,
        "macs": net.macs,
        "branches": net.branches,
        "images_per_second": 1000.0,
        "train_seconds": 3.2,
        "eval_seconds": 0.1,
    }


def _summary(recipe, metrics, net, accuracy, split, writes_importances):
    last = metrics[-1]
    found = {
        "recipe": recipe,
        "test_accuracy": accuracy,
        "test_accuracy_folded": accuracy,
        "test_loss": 0.1,
        "best": {"epoch": last["epoch"], "split": split, "accuracy": accuracy},
        "fold_error": 2e-7,
        "fold_passed": True,
        "parameters_plain": PLAIN_PARAMETERS,
        "macs_plain": PLAIN_MACS,
        "hardware": _SESSION["hardware"],
        "processes": 1,
        "structure": net.structure(),
        "seconds": 4.0 * len(metrics),
        "mean_macs": sum(row["macs"] for row in metrics) / len(metrics),
        "mean_parameters": sum(row["parameters"] for row in metrics) / len(metrics),
        "train_loss": last["train_loss"],
        "train_accuracy": last["train_accuracy"],
    }
    return {**found, "importances": net.importances()} if writes_importances else found


def _write(path, items):
    if path.suffix == ".json":
        path.write_text(json.dumps(items[0], indent=2) + "\n", encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")


_RECIPE = {
    "name": "digits",
    "model": "small_vgg",
    "dataset": "digits",
    "val_split": 0,
    "batch_size": 32,
    "lr": 0.1,
    "schedule": "cosine",
    "weight_decay": 1e-4,
    "structure": None,
    "dyrep": {"interval": 3, "unit": "epoch", "score": "invariant", "gamma": 0.01, "cut": "paper", "seed": 0},
}
_SESSION = {
    "time": 1.0,
    "processes": 1,
    "device": "cpu",
    "epoch": 0,
    "step": 0,
    "settings": {"device": "cpu"},
    "versions": {"python": "3.11.0", "dyrep": "0.1.0", "torch": "2.6.0"},
    "hardware": "a CPU, 2 cores",
}


def own_log(folder, unit, *, metrics=(), begun=None):
    """The log of a training loop of one's own: two updates, at 2 and 4 of 8; at first it cost so much, if not 100."""
    log = EventLog(folder / "events.jsonl")
    log.write("started", config=DyRepConfig.paper(unit=unit, interval=2, total=8, seed=3).to_dict())
    for place, macs in ((2, 150), (4, 300)):
        edits = [{"kind": "expand", "layer": "a", "branches": ["1x1"], "detail": {"score": 1.0}}]
        when = {"epoch": 0, "step": 0, unit: place}
        costs = {"macs": macs, "plain_macs": 100, "parameters": macs}
        costs |= {"macs_before": begun} if begun and place == 2 else {}
        log.write("update", **when, edits=edits, **costs, scores={"a": 1.0})
    for row in metrics:
        append_line(folder / "metrics.jsonl", row)
    return folder
