import json

import torch

import dyrep
from dyrep.demo import main, small_vgg


def test_the_demo_evolves_folds_and_verifies(tmp_path, capsys):
    found = main(epochs=5, interval=2, out=tmp_path / "run")
    printed = capsys.readouterr().out
    assert "expand conv" in printed
    assert "passed" in printed
    assert found["fold_passed"]
    assert found["accuracy_plain"] == found["accuracy_evolved"] > 80
    assert found["parameters_plain"] == sum(p.numel() for p in small_vgg().parameters())
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"events.jsonl", "evolution.png", "model.safetensors", "plain.safetensors", "summary.json"}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["fold_error"] == found["fold_error"]
    plain = dyrep.load(tmp_path / "run" / "plain.safetensors", small_vgg()).eval()
    evolved = dyrep.load(tmp_path / "run" / "model.safetensors", small_vgg()).eval()
    x = torch.randn(4, 1, 8, 8)
    assert dyrep.verify(evolved, plain, x).passed
