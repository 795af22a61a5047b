"""One thread per worker, the same random numbers in every run."""

import pytest
import torch

torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "ignore:Using padding='same' with even kernel lengths:UserWarning")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
