"""Several processes on this machine, started by torchrun, with a network that lets things happen to them."""

import os
import subprocess
import sys

NETWORK = '''
import os
import signal

import torch
from torch import nn

from dyrep.models import small_vgg


class Incident(nn.Module):
    """At one training step, something happens to some ranks: INCIDENT=die@30@0,1 and the like."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        if not (self.training and torch.is_grad_enabled()):
            return x
        self.steps += 1
        what, step, ranks = os.environ.get("INCIDENT", "nothing@0@").split("@")
        if self.steps != int(step) or os.environ.get("RANK", "0") not in ranks.split(","):
            return x
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        elif what == "terminate the job":
            os.kill(os.getppid(), signal.SIGTERM)
        elif what == "overflow":
            return x * float("inf")
        return x


def network(num_classes, in_channels):
    chain = small_vgg(num_classes, in_channels, widths=((4,), (8,)))
    return nn.Sequential(*chain[:3], Incident(), *chain[3:])


def without_norms(num_classes, in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, num_classes),
    )
'''

DRIVER = '''
"""The command, but every rank keeps what it has in the end."""

import torch

from dyrep import structure
from dyrep.cli.main import main
from dyrep.engine import running
from dyrep.surgery.optimizer_state import state_by_name

finish = running._finish


def finish_and_keep(trainer, reporter):
    summary = finish(trainer, reporter)
    kept = {
        "parameters": dict(trainer.model.named_parameters()),
        "average": trainer.average.state_dict(),
        "optimizer": state_by_name(trainer.optimizer, trainer.model)["state"],
        "structure": structure(trainer.model),
        "summary": {key: summary[key] for key in ("test_accuracy", "test_loss", "fold_passed", "processes")},
    }
    torch.save(kept, f"rank{trainer.world.rank}.pt")
    return summary


running._finish = finish_and_keep
main()
'''

NETWORK_FLAGS = ("--model", "incidents:network", "--batch-size", "36", "--ema", "0.9")
METHOD_FLAGS = ("--epochs", "3", "--interval", "1", "--cut-threshold", "0.0005")
STEPS = 39
"""Steps per epoch with these flags."""


def torchrun(folder, out, *more, ranks=2, incident="nothing@0@", seconds=120):
    """Train with several processes in a folder; the status and output of all of them together."""
    (folder / "incidents.py").write_text(NETWORK)
    (folder / "driver.py").write_text(DRIVER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["driver.py", "train", *NETWORK_FLAGS, *METHOD_FLAGS, "--device", "cpu", "--out", str(out), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "INCIDENT": incident}
    started = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        started.terminate()  # torchrun ends its processes, by force after half a minute
        output, errors = started.communicate(timeout=60)
        raise AssertionError(f"the job did not end within {seconds} s:\n{output[-2000:]}\n{errors[-4000:]}") from None
    return subprocess.CompletedProcess(command, started.returncode, output, errors)
