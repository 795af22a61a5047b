import inspect
import json
from dataclasses import dataclass

import pytest

import dyrep
from dyrep import DyRepConfig
from dyrep.branches import GAMMA
from dyrep.config import PAPER
from dyrep.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"interval": 0}, r"interval=0: must be a whole number of at least 1"),
        ({"interval": 2.5}, r"interval=2\.5"),
        ({"interval": True}, r"interval=True"),
        ({"unit": "batch"}, r"unit='batch': must be one of epoch, step"),
        ({"start": -1}, r"start=-1"),
        ({"stop": 0}, r"stop=0"),
        ({"score": "magnitude"}, r"score='magnitude': must be one of synflow, synflow_summed, snip, grad_norm, "),
        ({"cut": "all"}, r"cut='all': must be one of paper, reference, none"),
        ({"cut_threshold": -0.1}, r"cut_threshold=-0\.1"),
        ({"cut_threshold": float("nan")}, r"cut_threshold=nan"),
        ({"gamma": 0}, r"gamma=0: must be a positive, finite number"),
        ({"gamma": "small"}, r"gamma='small'"),
        ({"gamma": float("inf")}, r"gamma=inf"),
        ({"relative_gamma": "no"}, r"relative_gamma='no': must be True or False"),
        ({"regrow": 1}, r"regrow=1: must be True or False"),
        ({"include": ()}, r"include=\(\): nothing would ever be expanded"),
        ({"start": 10, "stop": 5, "start_with": ()}, r"no update would ever be due: the first comes after 15 epochs"),
        ({"total": 3, "interval": 5, "start_with": ()}, r"no update would ever be due.*total=3"),
        ({"start": 5, "total": 5, "interval": 1, "start_with": ()}, r"no update would ever be due"),
        ({"origin_norm": "batch"}, r"origin_norm='batch': must be one of none, calibrated, reference"),
        ({"branches": ("1x1", "5x5")}, r"'5x5' is unknown; valid are 1x1, 1x1-KxK, 1x1-AVG, 1xK, Kx1, residual"),
        ({"branches": ()}, r"branches=\(\)"),
        ({"branches": "1x1"}, r"branches='1x1'"),
        ({"start_with": "1x1"}, r"start_with='1x1': give a tuple from 1x1, .*, \(\) to start plain, or None"),
        ({"start_with": ("5x5",)}, r"start_with=\('5x5',\): '5x5' is unknown; valid are 1x1, "),
        ({"include": "backbone.*"}, r"include='backbone\.\*': give a tuple"),
        ({"exclude": (3,)}, r"exclude=\(3,\)"),
        ({"macs_limit": 0.5}, r"macs_limit=0\.5"),
        ({"max_depth": 0}, r"max_depth=0"),
        ({"absorb_after": 0}, r"absorb_after=0"),
        ({"absorb_after": 9, "total": 9}, r"absorb_after=9 leaves nothing to train, as total=9"),
        ({"top_k": 0}, r"top_k=0"),
        ({"width": 0}, r"width=0"),
        ({"drift_tolerance": 0}, r"drift_tolerance=0"),
        ({"calibration_batches": 0}, r"calibration_batches=0"),
        ({"seed": -1}, r"seed=-1"),
        ({"cut": "reference"}, r"cut='reference'.*origin_norm"),
    ],
)
def test_nonsense_is_refused_with_the_value_and_what_is_valid(setting, message):
    with pytest.raises(ConfigError, match=message):
        DyRepConfig(**setting)


def test_updates_are_due_at_multiples_of_the_interval_but_not_at_the_very_end():
    config = DyRepConfig(interval=3, total=9)
    assert [n for n in range(1, 12) if config.is_due(n)] == [3, 6]


def test_start_and_stop_bound_the_updates():
    config = DyRepConfig(interval=2, start=3, stop=8)
    assert [n for n in range(1, 15) if config.is_due(n)] == [5, 7]


def test_there_is_no_update_once_all_branches_are_absorbed():
    config = DyRepConfig(interval=2, absorb_after=6)
    assert [n for n in range(1, 15) if config.is_due(n)] == [2, 4]


def test_branches_that_were_there_from_the_start_can_be_absorbed_without_any_update_before():
    config = DyRepConfig(interval=20, absorb_after=3, total=10)
    assert not any(config.is_due(n) for n in range(11))


def test_branches_begin_with_the_papers_gamma_whoever_grows_them():
    growing = (dyrep.expand_, dyrep.restructure_)
    grown = [inspect.signature(function).parameters["gamma"].default for function in growing]
    assert {*grown, DyRepConfig().gamma, PAPER["gamma"]} == {GAMMA}


def test_paper_preset_is_the_paper():
    config = DyRepConfig.paper(interval=15)
    assert (config.score, config.gamma, config.cut, config.cut_threshold) == ("synflow", 0.01, "paper", 0.02)
    assert (config.calibration_batches, config.top_k, config.max_depth, config.branches) == (20, 1, None, None)
    assert (config.start_with, config.regrow, config.macs_limit) == ((), False, None)
    assert config.interval == 15


def test_the_presets_hold_every_setting_that_is_not_about_when_or_where():
    others = {"interval", "unit", "start", "stop", "total", "seed", "drift_tolerance", "grasp_batches", "square_only"}
    assert set(DyRepConfig().to_dict()) == {*PAPER, *others, "include", "exclude"}


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_presets_do_not_follow_the_defaults(preset):
    @dataclass(frozen=True)
    class Other(DyRepConfig):
        score: str = "snip"
        relative_gamma: bool = True
        macs_limit: float | None = 1.5

    found = getattr(Other, preset)()
    assert (found.score, found.relative_gamma, found.macs_limit) == ("synflow", False, None)


def test_reference_preset_is_the_published_code():
    config = DyRepConfig.reference()
    assert (config.origin_norm, config.cut, config.max_depth) == ("reference", "reference", 2)


def test_settings_survive_json():
    config = DyRepConfig(branches=("1x1", "residual"), include=("backbone.*",), macs_limit=2.0, start_with=())
    assert DyRepConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_settings_are_refused_with_the_list():
    with pytest.raises(ConfigError, match=r"unknown settings foo; valid are absorb_after, branches,"):
        DyRepConfig.paper(foo=1)
    with pytest.raises(ConfigError, match=r"unknown settings intervall; valid are absorb_after, branches,"):
        DyRepConfig.from_dict({"intervall": 3})


def test_patterns_decide_by_name():
    config = DyRepConfig(include=("backbone.*",), exclude=("*.downsample.*", "*.branches.*"))
    assert config.patterns.includes("backbone.layer1.0.conv1")
    assert not config.patterns.includes("head.conv")
    assert not config.patterns.includes("backbone.layer2.0.downsample.0")
    assert config.patterns.excludes("backbone.conv1.branches.1x1-KxK.conv")
