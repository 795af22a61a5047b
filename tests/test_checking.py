from dataclasses import dataclass

import pytest

from dyrep.checking import LayerPatterns, is_number, is_whole, read_settings, require_whole
from dyrep.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    size: int = 1
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(("value", "whole", "number"), [
    (1, True, True), (0, False, False), (1.0, False, True), (True, False, False), (None, False, False),
    ("1", False, False), (float("nan"), False, False), (float("inf"), False, True),
])  # fmt: skip
def test_numbers_are_told_from_what_looks_like_them(value, whole, number):
    assert (is_whole(value, 1), is_number(value, 1)) == (whole, number)


def test_an_error_names_the_setting_its_value_and_what_is_valid():
    with pytest.raises(ConfigError, match="width=0: must be a whole number of at least 1"):
        require_whole("width", 0, 1)


def test_settings_are_read_from_plain_data():
    assert read_settings(Settings, {"names": ["a", "b"]}) == Settings(names=("a", "b"))
    with pytest.raises(ConfigError, match="unknown settings length, width; valid are names, size"):
        read_settings(Settings, {"width": 1, "length": 2})


def test_patterns_are_checked_when_they_are_made():
    for wrong in ({"include": "backbone"}, {"exclude": (1,)}):
        with pytest.raises(ConfigError, match="give a tuple of patterns"):
            LayerPatterns(**wrong)
    with pytest.raises(ConfigError, match=r"include=\(\): nothing would ever be expanded"):
        LayerPatterns(())
