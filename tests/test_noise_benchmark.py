"""The benchmark that asks whether scores are signal: what it finds where the answer is known."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import noise


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 3, 6, 6, generator=generator), torch.randint(4, (16,), generator=generator)


def net(norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), norm, nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(8, 4)
    )


def test_the_sum_cancels_behind_a_batch_norm_and_only_there():
    behind, alone = (noise.scores(net(norm), batch(), "float64") for norm in (nn.BatchNorm2d(8), nn.Identity()))
    assert abs(behind["synflow_summed"][0]) < 1e-3 * behind["snip"][0]
    assert abs(alone["synflow_summed"][0]) > 1e-3 * alone["snip"][0]


def test_under_autocast_the_norm_knows_what_the_sum_does_not():
    model = net(nn.BatchNorm2d(8))
    exact, ours = (noise.scores(model, batch(), precision) for precision in ("float64", "bfloat16 autocast"))
    assert exact["synflow"] == exact["synflow_summed"]
    assert ours["synflow"] == pytest.approx(exact["synflow"], rel=0.1)
    assert abs(ours["synflow_summed"][0] - exact["synflow"][0]) > 2 * abs(exact["synflow"][0])


@pytest.mark.parametrize("metric", ["snip", "grad_norm", "invariant"])
def test_other_scores_hardly_depend_on_the_precision(metric):
    exact, ours = (noise.scores(net(nn.BatchNorm2d(8)), batch(), precision) for precision in noise.PRECISIONS[:2])
    assert ours[metric] == pytest.approx(exact[metric], rel=1e-4)


def test_agreement_compares_orders_and_choices():
    found = noise.agreement([1.0, 2.0, 4.0], [1.0, 2.0, 3.0])
    assert found == {"rank_correlation": pytest.approx(1.0), "same_choice": True, "median_error": 0.0}
    assert noise.agreement([3.0, 2.0, 1.0], [1.0, 2.0, 3.0])["rank_correlation"] == pytest.approx(-1.0)
    assert not noise.agreement([3.0, 2.0, 1.0], [1.0, 2.0, 3.0])["same_choice"]


def test_it_runs_on_digits(tmp_path, capsys):
    words = ["--dataset", "digits", "--model", "small_vgg", "--steps", "2", "--batches", "2", "--batch-size", "16"]
    noise.main([*words, "--device", "cpu", "--out", str(tmp_path / "noise.json")])
    found = json.loads((tmp_path / "noise.json").read_text())["networks"]
    assert list(found) == ["as initialised", "after 2 steps"]
    assert all(set(network["float32"]) == set(noise.METRICS) for network in found.values())
    assert "rank correlation" in capsys.readouterr().out
