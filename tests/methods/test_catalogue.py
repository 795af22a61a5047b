"""Which methods there are, and which branches each gives a convolution."""

import pytest
from torch import nn

import dyrep
from dyrep.errors import ConfigError
from dyrep.geometry import ConvGeometry
from dyrep.methods import METHODS, dyrep_settings, method
from dyrep.methods.catalogue import DBB_BRANCHES, why_not

SEVEN = ("1x1", "1x1-KxK", "1x1-AVG", "1xK", "Kx1", "residual")
COPIES = ("KxK-2", "KxK-3", "KxK-4")
OREPA = ("1x1-AVG", "1x1-DCT", "1x1-KxK", "1x1", "DW-1x1")
CONVS = {
    "dense": nn.Conv2d(8, 8, 3, padding=1),
    "wider": nn.Conv2d(8, 16, 3, padding=1),
    "grouped": nn.Conv2d(8, 8, 3, padding=1, groups=2),
    "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "strided": nn.Conv2d(8, 8, 3, padding=1, stride=2),
    "strided depthwise": nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=8),
    "1x1": nn.Conv2d(8, 8, 1),
    "wider 1x1": nn.Conv2d(8, 16, 1),
    "5x5": nn.Conv2d(8, 8, 5, padding=2),
    "unpadded": nn.Conv2d(8, 8, 3),
}
DEFAULTS = {"start_with": None, "cut": "none", "regrow": True, "macs_limit": 1.5, "max_depth": 1}
EXPECTED = {
    "repvgg": {
        **dict.fromkeys(("dense", "grouped", "depthwise", "5x5"), ("1x1", "residual")),
        **dict.fromkeys(("wider", "strided", "strided depthwise", "unpadded"), ("1x1",)),
        "1x1": ("residual",),
        "wider 1x1": (),
    },
    "acnet": {**dict.fromkeys(CONVS, ("1xK", "Kx1")), "1x1": (), "wider 1x1": ()},
    "dbb": {
        **dict.fromkeys(CONVS, ("1x1-KxK", "1x1-AVG", "1x1")),
        **dict.fromkeys(("depthwise", "strided depthwise"), ("1x1-KxK", "1x1-AVG")),
        "1x1": (),
        "wider 1x1": (),
    },
    "dbb7": {
        **dict.fromkeys(("dense", "grouped", "5x5"), SEVEN),
        **dict.fromkeys(("wider", "strided", "unpadded"), SEVEN[:-1]),
        "depthwise": ("1x1-AVG", "1xK", "Kx1", "residual"),
        "strided depthwise": ("1x1", "1x1-AVG", "1xK", "Kx1"),
        "1x1": (),
        "wider 1x1": (),
    },
    "mobileone": {
        **dict.fromkeys(("dense", "grouped", "depthwise", "5x5"), (*COPIES, "1x1", "residual")),
        **dict.fromkeys(("wider", "strided", "strided depthwise", "unpadded"), (*COPIES, "1x1")),
        "1x1": (*COPIES, "residual"),
        "wider 1x1": COPIES,
    },
    "orepa": {**dict.fromkeys(CONVS, OREPA), "1x1": (), "wider 1x1": ()},
    **dict.fromkeys(("origin", "dyrep", "fixed"), dict.fromkeys(CONVS, ())),
}
EXPECTED["repnas"] = EXPECTED["dbb7"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", CONVS)
def test_every_method_adds_the_branches_that_fit(name, shape):
    assert METHODS[name].branches_for(ConvGeometry.of(CONVS[shape]), copies=4) == EXPECTED[name][shape]


@pytest.mark.parametrize("name", METHODS)
def test_dbb_widens_where_every_group_has_one_output_and_orepa_where_there_are_many_groups(name):
    widths = {shape: METHODS[name].width_for(ConvGeometry.of(conv)) for shape, conv in CONVS.items()}
    wide = {"depthwise", "strided depthwise"} if name in ("dbb", "orepa") else set()
    assert widths == {shape: 2 if shape in wide else 1 for shape in CONVS}


def test_orepa_keeps_the_width_up_to_four_groups_even_if_each_has_one_output():
    few, many = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(16, 32, 3, padding=1, groups=8)
    assert METHODS["orepa"].width_for(ConvGeometry.of(few)) == 1
    assert METHODS["orepa"].width_for(ConvGeometry.of(many)) == 2
    assert METHODS["dbb"].width_for(ConvGeometry.of(few)) == 2


def test_a_convolution_with_one_output_is_not_a_depthwise_one():
    geometry = ConvGeometry.of(nn.Conv2d(1, 1, 3, padding=1))
    assert METHODS["dbb"].width_for(geometry) == 1
    assert METHODS["dbb"].branches_for(geometry, copies=4) == DBB_BRANCHES


def test_mobileone_has_as_many_kernels_as_asked_for():
    geometry = ConvGeometry.of(CONVS["dense"])
    assert METHODS["mobileone"].branches_for(geometry, copies=1) == ("1x1", "residual")
    assert METHODS["mobileone"].branches_for(geometry, copies=2) == ("KxK-2", "1x1", "residual")


def test_methods_keep_their_publications_end_of_a_branch():
    assert {name for name, m in METHODS.items() if m.scaling == "linear"} == {"orepa"}
    assert {name for name, m in METHODS.items() if m.scaling == "gated"} == {"repnas"}
    assert {name for name, m in METHODS.items() if m.replaces_norm} == {
        "repvgg",
        "acnet",
        "dbb",
        "dbb7",
        "mobileone",
        "repnas",
    }
    assert {name for name, m in METHODS.items() if not m.builds_blocks} == {"origin", "dyrep", "fixed"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dyrep", {}),
        ("dyrep7", {}),
        ("dyrep4", {"branches": DBB_BRANCHES}),
        ("dyrep-nodep", {"cut": "none"}),
        ("dyrep-40", {"stop": 40}),
        ("dyrep4-40", {"branches": DBB_BRANCHES, "stop": 40}),
        ("dyrep4-nodep-40", {"branches": DBB_BRANCHES, "cut": "none", "stop": 40}),
        ("dyrep-default", DEFAULTS),
        ("dyrep4-default-40", {**DEFAULTS, "branches": DBB_BRANCHES, "stop": 40}),
    ],
)
def test_variants_of_dyrep_change_the_settings_they_name(name, changes):
    settings = {"interval": 10, "score": "snip", "seed": 3}
    assert method(name) is METHODS["dyrep"]
    assert dyrep_settings(name, dyrep.DyRepConfig.paper(**settings)) == dyrep.DyRepConfig.paper(**settings, **changes)


def test_defaults_stand_back_for_settings_that_are_not_the_papers():
    own = dyrep.DyRepConfig.paper(macs_limit=3.0, max_depth=2, start_with=("1xK",), branches=("1xK", "1x1"))
    expected = dyrep.DyRepConfig(macs_limit=3.0, max_depth=2, start_with=("1xK",), branches=("1xK", "1x1"))
    assert dyrep_settings("dyrep-default", own) == expected


def test_seven_operations_undo_a_choice_of_branches_and_plain_dyrep_does_not():
    config = dyrep.DyRepConfig.paper(branches=("1x1",))
    assert dyrep_settings("dyrep7", config).branches is None
    assert dyrep_settings("dyrep", config).branches == ("1x1",)


def test_a_variant_that_would_never_update_is_refused():
    with pytest.raises(ConfigError, match="no update would ever be due"):
        dyrep_settings("dyrep-5", dyrep.DyRepConfig.paper(interval=10))


@pytest.mark.parametrize(
    "name", ["dyrep5", "dyrep-40-nodep", "dyrep-nodep-default", "dyrep-", "dyrep-0", "DBB", "dyrep-nodep4", "", "dbb4"]
)
def test_unknown_names_are_refused_with_the_valid_ones(name):
    with pytest.raises(ConfigError) as error:
        method(name)
    assert f"method={name!r} is unknown" in str(error.value)
    assert all(valid in str(error.value) for valid in (*METHODS, "dyrep4", "dyrep-nodep", "dyrep-40"))


@pytest.mark.parametrize("name", ["dbb", "fixed", "dyrep5"])
def test_settings_of_dyrep_belong_to_dyrep_alone(name):
    with pytest.raises(ConfigError, match=f"method='{name}' is not a variant of dyrep"):
        dyrep_settings(name, dyrep.DyRepConfig.paper())


def test_kernels_are_left_plain_for_a_reason():
    def reason(conv, name="dbb", limit=5):
        return why_not(METHODS[name], ConvGeometry.of(conv), limit)

    assert reason(nn.Conv2d(3, 8, 3)) == ""
    assert reason(nn.Conv2d(3, 8, 5)) == ""
    assert reason(nn.Conv2d(3, 8, 7)) == "the kernel is 7x7, larger than max_kernel=5"
    assert reason(nn.Conv2d(3, 8, 7), limit=None) == ""
    assert reason(nn.Conv2d(3, 8, (1, 3))) == "the kernel is 1x3, not square"
    assert reason(nn.Conv2d(3, 8, 1)) == "the kernel is 1x1: a branch could only repeat it"
    assert reason(nn.Conv2d(3, 8, 1), name="mobileone") == ""
