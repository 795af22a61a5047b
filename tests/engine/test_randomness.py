"""Every generator continues where it was."""

import random

import numpy as np
import pytest
import torch

from dyrep.engine import checkpoints
from dyrep.engine.randomness import random_state, restore_random_state, seed_everything
from dyrep.engine.world import World

ALONE = World(torch.device("cpu"))


def draw():
    """Numbers from every generator; an odd number of Gaussian ones, which are made in pairs."""
    return (
        [random.random(), random.gauss(0, 1), random.getrandbits(40)],
        [float(np.random.rand()), float(np.random.standard_normal()), int(np.random.randint(1000))],
        [*torch.rand(3).tolist(), *torch.randn(3).tolist(), *torch.randperm(5).tolist()],
    )


@pytest.fixture(autouse=True)
def _seeded():
    before = random.getstate(), np.random.get_state()
    seed_everything(3)
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


@pytest.mark.parametrize("draws", [0, 1, 2, 7])
def test_all_generators_continue_where_they_were(draws, tmp_path):
    for _ in range(draws):
        draw()
    cached = random.getstate()[2] is not None, bool(np.random.get_state()[3])
    assert cached == (draws % 2 == 1, draws % 2 == 1)
    saved = random_state(ALONE)
    expected = [draw() for _ in range(300)]  # more than the 624 words of a Mersenne twister
    seed_everything(4)
    assert draw() != expected[0]
    checkpoints.write(tmp_path / "state.ckpt", {"random": saved})
    restore_random_state(checkpoints.read(tmp_path / "state.ckpt")["random"], ALONE)
    assert (random.getstate()[2] is not None, bool(np.random.get_state()[3])) == cached
    assert [draw() for _ in range(300)] == expected


def test_reading_the_state_draws_nothing():
    random_state(ALONE)
    first = draw()
    seed_everything(3)
    assert draw() == first


def test_what_was_saved_does_not_change_with_the_generators():
    saved = random_state(ALONE)
    expected = draw()
    for _ in range(300):
        draw()
    restore_random_state(saved, ALONE)
    assert draw() == expected


def test_every_rank_gets_its_own_generators_back():
    states, expected = [], []
    for rank in range(2):
        seed_everything(3, rank)
        draw()
        states += random_state(ALONE)
        expected.append(draw())
    assert expected[0] != expected[1]
    for rank in (1, 0):
        restore_random_state(states, World(torch.device("cpu"), rank, 2))
        assert draw() == expected[rank]


def test_a_rank_that_was_not_there_keeps_its_own_seed():
    states = random_state(ALONE)
    seed_everything(5)
    expected = draw()
    seed_everything(5)
    restore_random_state(states, World(torch.device("cpu"), 1, 2))
    assert draw() == expected


def test_the_state_of_all_ranks_is_gathered():
    class Pair(World):
        def gather(self, value):
            return [value, value + 1]

    mine, other = random_state(Pair(torch.device("cpu"), 0, 2))
    assert torch.equal(mine["torch"], torch.get_rng_state())
    assert torch.equal(other["torch"], torch.get_rng_state() + 1)
    assert set(mine) == set(other) == {"torch", "cuda", "python", "numpy", "rest"}


def test_seeds_differ_by_every_part():
    firsts = set()
    for parts in ((0, "weights"), (0, "training", 0), (0, "training", 1), (1, "training", 0)):
        seed_everything(*parts)
        firsts.add(str(draw()))
    assert len(firsts) == 4
