import math

import pytest

from dyrep.errors import ConfigError
from dyrep.policy import BlockState, Candidate, choose_cuts, choose_growth


def test_growth_takes_the_largest_score_and_the_first_of_equals():
    assert choose_growth([Candidate("a", 1.0), Candidate("b", 2.0), Candidate("c", 2.0)]) == ["b"]


def test_growth_passes_over_scores_that_are_not_finite():
    assert choose_growth([Candidate("a", math.nan), Candidate("b", math.inf), Candidate("c", -5.0)]) == ["c"]


def test_growth_without_candidates_is_empty():
    assert choose_growth([]) == []


def test_growth_per_mac_prefers_the_cheaper():
    candidates = [Candidate("dear", 10, added_macs=100), Candidate("cheap", 5, added_macs=10)]
    assert choose_growth(candidates) == ["dear"]
    assert choose_growth(candidates, per_mac=True) == ["cheap"]


def test_growth_keeps_to_the_budget_over_all_it_chooses():
    candidates = [
        Candidate("a", 3, added_macs=60),
        Candidate("b", 2, added_macs=60),
        Candidate("c", 1, added_macs=30),
    ]
    assert choose_growth(candidates, top_k=3, spare_macs=100) == ["a", "c"]
    assert choose_growth(candidates, top_k=3, spare_macs=20) == []


def test_paper_rule_cuts_everything_below_the_mean_once_spread_exceeds_lambda():
    block = BlockState({"1x1": 0.00, "1xK": 0.06, "Kx1": 0.09})  # mean 0.05, population deviation 0.0374
    assert choose_cuts({"conv": block}, threshold=0.037) == {"conv": ["1x1"]}
    assert choose_cuts({"conv": block}, threshold=0.038) == {}


def test_a_lone_branch_and_equal_branches_are_never_cut():
    assert choose_cuts({"a": BlockState({"1x1": 0.0}), "b": BlockState({"1x1": 1, "1xK": 1})}, threshold=0.0) == {}


def test_reference_rule_is_relative_to_the_origin_and_spares_what_is_above_a_tenth():
    block = {"1x1": 0.3, "1xK": 0.02, "Kx1": 0.9}
    assert choose_cuts({"conv": BlockState(block, origin=1.0)}, rule="reference") == {"conv": ["1xK"]}
    assert choose_cuts({"conv": BlockState(block, origin=0.1)}, rule="reference") == {}
    assert choose_cuts({"conv": BlockState(block, origin=10.0)}, rule="reference") == {"conv": ["1x1", "1xK"]}


def test_reference_rule_without_an_origin_norm_names_layer_and_remedy():
    with pytest.raises(ConfigError, match=r"'conv'.*origin_norm='reference'"):
        choose_cuts({"conv": BlockState({"1x1": 1.0})}, rule="reference")


def test_cuts_inside_a_branch_that_is_itself_cut_are_dropped():
    weak, strong = 0.0, 1.0
    blocks = {
        "conv": BlockState({"1x1-KxK": weak, "1x1": strong}),
        "conv.branches.1x1-KxK.conv": BlockState({"1x1": weak, "1xK": strong}),
        "other": BlockState({"1x1": weak, "1xK": strong}),
    }
    assert choose_cuts(blocks) == {"conv": ["1x1-KxK"], "other": ["1x1"]}


def test_rule_none_cuts_nothing_and_an_unknown_rule_lists_the_valid_ones():
    block = {"conv": BlockState({"1x1": 0.0, "1xK": 1.0})}
    assert choose_cuts(block, rule="none") == {}
    with pytest.raises(ConfigError, match="paper, reference, none"):
        choose_cuts(block, rule="median")
