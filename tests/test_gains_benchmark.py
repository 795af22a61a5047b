"""The picture of gains: which arms it shows, and what it says of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import gains
from comparisons import COMPARISONS

GROUP = "the paper's weight decay"


def runs(flags, accuracies, macs):
    return [
        {"flags": flags, "seed": seed, "val_accuracy": accuracy, "mean_macs": macs}
        for seed, accuracy in enumerate(accuracies)
    ]


@pytest.fixture
def found():
    rivals = COMPARISONS["rivals"].arms
    return [
        *runs(gains.PLAIN[GROUP], [92.0, 92.4, 92.2], 100),
        *runs(rivals["RepVGG"], [92.4, 92.8], 110),
        *runs(rivals["DyRep, our defaults"], [93.0, 93.2, 93.4], 150),
        *runs(rivals["seven branches"], [94.0], 300),
    ]


def test_gains_are_paired_by_seed_and_a_single_seed_has_none(found):
    ours, repvgg = gains.gains(found, GROUP)
    assert (ours.label, ours.seeds, ours.cost) == ("DyRep, our defaults", 3, 1.5)
    assert ours.mean == pytest.approx(1.0)
    assert ours.reach == pytest.approx(4.303 * 0.2 / 3**0.5, rel=1e-3)
    assert (repvgg.label, repvgg.seeds, repvgg.cost) == ("RepVGG's blocks", 2, 1.1)
    assert repvgg.mean == pytest.approx(0.4)


@pytest.mark.parametrize("group", gains.SHOWN)
def test_arms_are_compared_with_the_plain_network_of_their_own_weight_decay(group):
    stronger = "--weight-decay 5e-4" in gains.PLAIN[group]
    for label, (study, arm) in gains.SHOWN[group].items():
        flags = COMPARISONS[study].arms[arm]
        assert COMPARISONS[study].held_out
        assert "--warmup-epochs 2" in flags
        assert ("--weight-decay 5e-4" in flags) == (stronger or "times the weight decay" in label)


def test_the_picture_has_a_mark_for_every_gain_and_leaves_out_groups_without_any(found, tmp_path):
    picture = gains.draw({GROUP: gains.gains(found, GROUP)}, "about")
    assert [text.partition(":")[0] for text in picture.told.values()] == ["DyRep, our defaults", "RepVGG's blocks"]
    dots = [line for axis in picture.figure.axes for line in axis.lines if line.get_marker() == "o"]
    assert {dot.get_markerfacecolor() for dot in dots} == {"white"}  # fewer seeds than the rule asks for
    results = {"runs": found, "hardware": "a GPU", "versions": {"torch": "2.6"}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    gains.main(["--results", str(tmp_path / "results.json"), "--out", str(tmp_path / "gains.png")])
    assert (tmp_path / "gains.png").read_bytes().startswith(b"\x89PNG")
