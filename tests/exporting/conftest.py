"""The model that most tests of exporting share."""

import pytest
from exporting_helpers import evolve_, small_net


@pytest.fixture
def evolved():
    return evolve_(small_net())
