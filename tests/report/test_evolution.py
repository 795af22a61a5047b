import subprocess
import sys

from dyrep.events import EventLog
from dyrep.report.evolution import Life, draw_evolution, lives


def log_of(path, edits_by_epoch):
    log = EventLog(path)
    log.write("started", config={"total": 10})
    for epoch, edits in edits_by_epoch.items():
        log.write(
            "update",
            epoch=epoch,
            step=0,
            macs=200,
            plain_macs=100,
            edits=[{"kind": kind, "layer": layer, "branches": branches} for kind, layer, branches in edits],
        )
    return log.events


STORY = {
    2: [("expand", "conv", ["1x1", "1x1-KxK"])],
    4: [("expand", "conv.branches.1x1-KxK.conv", ["residual"])],
    6: [("cut", "conv", ["1x1-KxK"])],
    8: [("expand", "conv", ["1x1-KxK"])],
}


def test_lives_run_from_birth_to_cut_and_nested_ones_die_with_their_parent():
    assert lives(log_of(None, STORY)) == [
        Life("conv", "1x1", 2, None),
        Life("conv", "1x1-KxK", 2, 6),
        Life("conv.branches.1x1-KxK.conv", "residual", 4, 6),
        Life("conv", "1x1-KxK", 8, None),
    ]


def test_a_run_without_updates_draws_too(tmp_path):
    assert draw_evolution(log_of(None, {}), tmp_path / "empty.png").stat().st_size > 1000


def test_the_command_draws_from_a_run_folder(tmp_path):
    log_of(tmp_path / "events.jsonl", STORY)
    command = [sys.executable, "-m", "dyrep.report.evolution", str(tmp_path), "-o", str(tmp_path / "picture.svg")]
    subprocess.run(command, check=True)
    picture = (tmp_path / "picture.svg").read_text()
    assert "<svg" in picture
