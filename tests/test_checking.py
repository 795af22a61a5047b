from dataclasses import dataclass
from typing import Literal

import pytest

from dyrep.checking import LayerPatterns, is_number, is_whole, read_settings, require_types, require_whole
from dyrep.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    size: int = 1
    names: tuple[str, ...] = ()
    rate: float | None = None
    kind: Literal["a", "b"] = "a"
    loud: bool = False


@pytest.mark.parametrize(("value", "whole", "number"), [
    (1, True, True), (0, False, False), (1.0, False, True), (True, False, False), (None, False, False),
    ("1", False, False), (float("nan"), False, False), (float("inf"), False, True),
])  # fmt: skip
def test_numbers_are_told_from_what_looks_like_them(value, whole, number):
    assert (is_whole(value, 1), is_number(value, 1)) == (whole, number)


def test_an_error_names_the_setting_its_value_and_what_is_valid():
    with pytest.raises(ConfigError, match="width=0: must be a whole number of at least 1"):
        require_whole("width", 0, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 1.5}, "size=1.5: must be a whole number"),
        ({"size": True}, "size=True: must be a whole number"),
        ({"size": None}, "size=None: must be a whole number"),
        ({"rate": "0.1"}, "rate='0.1': must be a number or None"),
        ({"rate": False}, "rate=False: must be a number or None"),
        ({"kind": "c"}, "kind='c': must be one of a, b"),
        ({"kind": ["a"]}, "kind=['a']: must be one of a, b"),
        ({"loud": 1}, "loud=1: must be True or False"),
    ],
)
def test_values_of_another_type_are_refused(wrong, message):
    with pytest.raises(ConfigError) as error:
        require_types(Settings(**wrong))
    assert str(error.value) == message


def test_values_of_the_right_type_are_accepted():
    for fine in ({}, {"rate": 1}, {"rate": 0.5}, {"kind": "b"}, {"loud": True}, {"names": [1]}):
        require_types(Settings(**fine))


def test_settings_are_read_from_plain_data():
    assert read_settings(Settings, {"names": ["a", "b"]}) == Settings(names=("a", "b"))
    with pytest.raises(ConfigError, match="unknown settings length, width; valid are kind, loud, names, rate, size"):
        read_settings(Settings, {"width": 1, "length": 2})


def test_patterns_are_checked_when_they_are_made():
    for wrong in ({"include": "backbone"}, {"exclude": (1,)}):
        with pytest.raises(ConfigError, match="give a tuple of patterns"):
            LayerPatterns(**wrong)
    with pytest.raises(ConfigError, match=r"include=\(\): nothing would ever be expanded"):
        LayerPatterns(())
