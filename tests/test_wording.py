"""Numbers in words."""

import pytest

from dyrep.wording import counted, duration, large, mean_and_spread


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (60, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
        (86399, "23 h 59 min"),
        (360000, "100 h 0 min"),
    ],
)
def test_a_time_in_words(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (72_666, "72.67 k"), (1_222_032.5, "1.22 M"), (2.42e9, "2.42 G")],
)
def test_a_large_number(number, words):
    assert large(number) == words


@pytest.mark.parametrize(
    ("values", "form", "words"),
    [([], ".2f", "–"), ([94], ".2f", "94.00"), ((94.0, 95.0), ".2f", "94.50 ± 0.71"), ([310, 320], ".0f", "315 ± 7")],
)
def test_a_spread_takes_more_than_one_value(values, form, words):
    assert mean_and_spread(values, form) == words


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 branches"), (1, "1 branch"), (2, "2 branches"), (1200, "1,200 branches")]
)
def test_so_many_things(number, words):
    assert counted(number, "branch", "es") == words
