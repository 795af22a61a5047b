import json
import os
import signal
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import prune

import dyrep
from dyrep.errors import CheckpointError
from dyrep.files import PARTIAL


def net(channels=6):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
    )


@pytest.fixture
def evolved():
    model = net()
    dyrep.expand_(model, ["0", "3"], calibration=[torch.randn(4, 3, 8, 8)])
    dyrep.expand_(model, "3.branches.1x1-KxK.conv", ["1x1", "residual"])
    dyrep.cut_(model, "0", ["1x1"])
    return model


def test_structure_and_every_tensor_come_back(evolved, tmp_path):
    path = dyrep.save(evolved, tmp_path / "sub" / "model.safetensors")
    twin = dyrep.load(path, net())
    assert dyrep.structure(twin) == dyrep.structure(evolved)
    ours, theirs = evolved.state_dict(), twin.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


KILLED = """
import resource, signal, sys
from torch import nn
import dyrep
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python would raise instead of dying
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
dyrep.save(nn.Conv2d(8, 64, 3), sys.argv[1])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on the size of files")
def test_a_kill_while_writing_leaves_nothing_but_what_runs_clean_up(tmp_path):
    dead = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "model.safetensors"], check=False)
    assert dead.returncode == -signal.SIGXFSZ
    assert [path.suffix for path in tmp_path.iterdir()] == [PARTIAL]


@pytest.mark.skipif(os.name != "posix", reason="no such permissions")
def test_saved_files_can_be_read_by_whom_new_files_can(evolved, tmp_path):
    (tmp_path / "other").touch()
    saved = dyrep.save(evolved, tmp_path / "model.safetensors")
    assert saved.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_loading_gives_a_differently_evolved_model_the_structure_of_the_file(evolved, tmp_path):
    path = dyrep.save(evolved, tmp_path / "model.safetensors")
    other = net()
    dyrep.expand_(other, "0", ["1x1", "1x1-AVG"])
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(dyrep.load(path, other).eval()(x), evolved.eval()(x))


def test_loading_lets_an_optimizer_follow(evolved, tmp_path):
    path = dyrep.save(evolved, tmp_path / "model.safetensors")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dyrep.load(path, model, optimizer=optimizer)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}


def test_loading_does_not_draw_random_numbers(evolved, tmp_path):
    path = dyrep.save(evolved, tmp_path / "model.safetensors")
    model = net()
    torch.manual_seed(5)
    dyrep.load(path, model)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_shared_modules_and_channels_last_weights_survive(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(4, 4, 3, padding=1)
            self.second = self.first

        def forward(self, x):
            return self.second(self.first(x))

    model = Twice().to(memory_format=torch.channels_last)
    dyrep.expand_(model, "first", ["1x1", "residual"])
    x = torch.randn(2, 4, 6, 6)
    loaded = dyrep.load(dyrep.save(model, tmp_path / "model.safetensors"), Twice())
    torch.testing.assert_close(loaded.eval()(x), model.eval()(x))


def test_a_failed_save_leaves_the_old_file_and_no_litter(evolved, tmp_path, monkeypatch):
    path = dyrep.save(evolved, tmp_path / "model.safetensors")
    before = path.read_bytes()

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        dyrep.save(evolved, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_errors_say_what_is_wrong_with_the_file(evolved, tmp_path):
    with pytest.raises(CheckpointError, match="no model file at"):
        dyrep.load(tmp_path / "none.safetensors", net())
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(dyrep.save(evolved, tmp_path / "model.safetensors").read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        dyrep.load(damaged, net())
    foreign = tmp_path / "foreign.safetensors"
    safetensors.torch.save_file({"0.weight": torch.zeros(1)}, foreign)
    with pytest.raises(CheckpointError, match=r"not written by dyrep\.save.*prepare_"):
        dyrep.load(foreign, net())
    for about in ("{", "1", "[]", '{"format": 99}'):
        safetensors.torch.save_file({"0.weight": torch.zeros(1)}, foreign, metadata={"dyrep": about})
        with pytest.raises(CheckpointError, match=r"not written by dyrep\.save"):
            dyrep.load(foreign, net())


@pytest.mark.parametrize("change", [
    {"aliases": None}, {"aliases": []}, {"aliases": {"0.bias": "nowhere"}}, {"structure": None}, {"structure": []},
], ids=str)  # fmt: skip
def test_a_file_whose_description_is_damaged_is_refused_and_nothing_changes(evolved, tmp_path, change):
    path, model = dyrep.save(evolved, tmp_path / "model.safetensors"), net()
    with safetensors.safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["dyrep"]) | change
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    about = {key: value for key, value in about.items() if value is not None}
    safetensors.torch.save_file(tensors, path, metadata={"dyrep": json.dumps(about)})
    with pytest.raises(CheckpointError, match="is damaged: what it says about the model's structure is not complete"):
        dyrep.load(path, model)
    assert not dyrep.structure(model)["blocks"]


def test_a_file_of_another_architecture_is_refused_and_nothing_changes(evolved, tmp_path):
    path = dyrep.save(evolved, tmp_path / "model.safetensors")
    wider = net(channels=8)
    before = {key: value.clone() for key, value in wider.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"does not fit this model.*size mismatch"):
        dyrep.load(path, wider)
    after = wider.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    with pytest.raises(CheckpointError, match="which this model does not have"):
        dyrep.load(path, nn.Sequential(nn.Linear(2, 2)))


def test_extra_state_that_is_no_tensor_is_refused_by_name(tmp_path):
    class Odd(nn.Conv2d):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(CheckpointError, match="'_extra_state' is a dict"):
        dyrep.save(Odd(1, 1, 1), tmp_path / "model.safetensors")


def test_pruned_block_comes_back_in_a_model_that_is_pruned_too(evolved, tmp_path):
    twin = net()
    dyrep.restructure_(twin, dyrep.structure(evolved))
    for model in (evolved, twin):
        prune.random_unstructured(model[3], "weight", amount=0.5)
    path = dyrep.save(evolved, tmp_path / "model.safetensors")
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(dyrep.load(path, twin).eval()(x), evolved.eval()(x))
    with pytest.raises(CheckpointError, match=r"does not fit this model.*3\.weight_orig"):
        dyrep.load(path, net())


SAVING = """
import sys, torch, dyrep
from torch import nn
torch.manual_seed(0)
conv = nn.Conv2d(4, 4, 3, padding=1)
model = nn.Sequential(conv, nn.BatchNorm2d(4), conv)
dyrep.expand_(model, "0")
for path in sys.argv[1:]:
    dyrep.save(model, path)
"""


def test_equal_models_give_equal_files_in_every_process(tmp_path):
    files = [tmp_path / f"{process}{time}" for process in "abc" for time in "12"]
    for seed in range(3):
        command = [sys.executable, "-c", SAVING, *map(str, files[2 * seed : 2 * seed + 2])]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": str(seed)})
    assert len({file.read_bytes() for file in files}) == 1


def test_modules_that_look_for_their_version_in_a_state_dict_are_loaded(tmp_path):
    class Versioned(nn.Conv2d):
        _version = 2

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
            assert local_metadata.get("version") == 2
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    model = nn.Sequential(Versioned(3, 4, 3), nn.Conv2d(4, 4, 3))
    dyrep.expand_(model, "1", ["1x1"])
    twin = nn.Sequential(Versioned(3, 4, 3), nn.Conv2d(4, 4, 3))
    dyrep.load(dyrep.save(model, tmp_path / "model.safetensors"), twin)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True))
