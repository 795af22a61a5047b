"""A network of a user's own, which `--model` finds by name, and processes that are killed."""

import pytest
from engine_helpers import NOISY_NET, SMALL, Driver, result


@pytest.fixture(scope="session")
def noisy_net(tmp_path_factory):
    """Makes the model "noisy_net:build" importable, and gives the folder it is in."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "noisy_net.py").write_text(NOISY_NET)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="session")
def driver(noisy_net):
    """Runs commands in processes that get a signal at a chosen moment."""
    made = Driver(noisy_net)
    yield made
    made.close()


@pytest.fixture(scope="session")
def whole_small(driver, tmp_path_factory):
    """What an uninterrupted run of `SMALL` comes to."""
    folder = tmp_path_factory.mktemp("whole")
    assert driver(SMALL, folder) == 0
    return result(folder)
