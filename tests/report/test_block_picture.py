"""The structure of a block as a picture: everything is on it, nothing covers anything else."""

import itertools
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import FancyBboxPatch

from dyrep.report.block_picture import block_picture
from dyrep.report.block_tree import importance_text
from dyrep.report.runs import read_run
from report.run_folders import ALL, update, write_run

INSIDE = ".branches.1x1-KxK.conv"


class Drawn:
    """What is on a picture, and where: boxes, frames and texts with their extents in pixels."""

    def __init__(self, picture):
        self.picture = picture
        self.canvas = FigureCanvasAgg(picture.figure)
        self.canvas.draw()
        (axes,) = picture.figure.axes
        patches = [patch for patch in axes.patches if patch.get_gid() is not None]
        boxes = [patch for patch in patches if isinstance(patch, FancyBboxPatch)]
        self.frames = {self.tip(box): self.extent(box) for box in boxes if "has grown" in self.tip(box)}
        self.boxes = [(self.tip(box), self.extent(box)) for box in boxes if "has grown" not in self.tip(box)]
        self.sums = [(self.tip(patch), self.extent(patch)) for patch in patches if patch not in boxes]
        self.texts = [(text.get_text(), self.extent(text)) for text in axes.texts if text.get_text()]

    def tip(self, artist):
        return self.picture.told[artist.get_gid()]

    def extent(self, artist):
        return artist.get_window_extent(self.canvas.get_renderer())

    @property
    def words(self):
        return [text for text, _ in self.texts]


def drawn(folder, layer="conv", **about):
    return Drawn(block_picture(read_run(write_run(folder, **about)), layer))


def overlap(one, other, slack=1.0):
    return (
        min(one.x1, other.x1) - max(one.x0, other.x0) > slack and min(one.y1, other.y1) - max(one.y0, other.y0) > slack
    )


def holds(outer, inner, slack=0.5):
    wide = outer.x0 - slack <= inner.x0 and inner.x1 <= outer.x1 + slack
    return wide and outer.y0 - slack <= inner.y0 and inner.y1 <= outer.y1 + slack


def check_nothing_overlaps(found):
    for (one, here), (other, there) in itertools.combinations([*found.boxes, *found.sums], 2):
        assert not overlap(here, there), (one, other)
    for (one, here), (other, there) in itertools.combinations(found.texts, 2):
        assert not overlap(here, there), (one, other)
    for (tip, box), (text, place) in itertools.product(found.boxes, found.texts):
        assert holds(box, place) or not overlap(box, place), (tip, text)
    for one, other in itertools.combinations(found.frames.values(), 2):
        assert holds(one, other) or holds(other, one) or not overlap(one, other)
    for frame, (tip, box) in itertools.product(found.frames.values(), [*found.boxes, *found.sums]):
        assert holds(frame, box) or not overlap(frame, box, 0), tip
    for _, place in [*found.texts, *found.boxes, *((tip, frame) for tip, frame in found.frames.items())]:
        assert holds(found.picture.figure.bbox, place)


DEEP = [
    update(1, ("expand", "conv", ALL)),
    update(2, ("expand", f"conv{INSIDE}", ALL)),
    update(3, ("expand", f"conv{INSIDE}{INSIDE}", ["1x1", "1x1-AVG"]), ("cut", "conv", ["Kx1"])),
    update(4, ("expand", "conv.branches.1xK.conv", ["1x1"]), ("cut", f"conv{INSIDE}", ["residual", "1xK"])),
]


# -- what is on it ----------------------------------------------------------------------------------------------


def test_every_branch_is_a_chain_of_boxes_with_its_importance_below(tmp_path):
    strengths = {branch: 0.011 * (1 + number) for number, branch in enumerate(ALL)}
    found = drawn(tmp_path, updates=[update(2, ("expand", "conv", ALL))], strengths={"conv": strengths})
    check_nothing_overlaps(found)
    labels = [label for label in found.words if "×" in label]
    assert labels == ["K×K", "1×1", "1×1", "K×K", "AVG K×K", "1×1", "1×K", "K×1"]
    assert found.words.count("norm γ") == 7  # one at the end of each, and one inside of 1x1-KxK
    assert "identity" in found.words
    for branch, value in strengths.items():
        assert importance_text(value) in found.words
        assert f"{branch}: s = {value:.4f}, grown at epoch 2" in found.picture.told.values()
    assert "the original KxK: without a norm of its own" in " ".join(found.picture.told.values())
    assert [tip for tip, _ in found.sums] == ["sum of 7 lanes"]


def test_importances_are_under_their_branches_and_above_the_sum(tmp_path):
    strengths = {"conv": {branch: 0.011 * (1 + number) for number, branch in enumerate(ALL)}}
    found = drawn(tmp_path, updates=[update(2, ("expand", "conv", ALL))], strengths=strengths)
    places = dict(found.texts)
    for branch, value in strengths["conv"].items():
        label = places[importance_text(value)]
        own = [box for tip, box in found.boxes if tip.startswith(f"{branch}:")]
        assert own
        for box in own:
            assert label.y1 <= box.y0 + 1
            assert abs(label.x0 + label.x1 - box.x0 - box.x1) < 4
        assert label.y0 >= found.sums[0][1].y1


def test_the_order_is_fixed_and_the_original_comes_first(tmp_path):
    found = drawn(
        tmp_path, updates=[update(1, ("expand", "conv", ["residual", "Kx1"])), update(2, ("expand", "conv", ["1x1"]))]
    )
    boxes = sorted(found.boxes, key=lambda entry: entry[1].x0)
    assert [tip.split(":")[0] for tip, _ in boxes if "norm γ" not in tip] == ["the original KxK", "1x1", "Kx1"]
    assert boxes[-1][0].startswith("residual")


def test_a_block_in_a_block_is_inside_of_a_frame_to_any_depth(tmp_path):
    found = drawn(tmp_path, updates=DEEP)
    check_nothing_overlaps(found)
    layers = {tip.rpartition("(")[2].rstrip(")"): frame for tip, frame in found.frames.items()}
    assert set(layers) == {f"conv{INSIDE}", f"conv{INSIDE}{INSIDE}", "conv.branches.1xK.conv"}
    assert holds(layers[f"conv{INSIDE}"], layers[f"conv{INSIDE}{INSIDE}"])
    assert not overlap(layers[f"conv{INSIDE}"], layers["conv.branches.1xK.conv"])
    nested = [tip for tip, box in found.boxes if holds(layers[f"conv{INSIDE}{INSIDE}"], box)]
    assert {tip.partition(":")[0] for tip in nested} == {"the original KxK", "1x1", "1x1-AVG"}
    assert all("epoch 3" in tip for tip in nested if not tip.startswith("the original"))
    narrow = [tip for tip, box in found.boxes if holds(layers["conv.branches.1xK.conv"], box)]
    assert narrow[0].startswith("the original 1xK")  # the convolution inside is one of that size
    assert len(found.sums) == 4
    assert "KxK of 1x1-KxK: s = 0.0100, grown at epoch 1; it has grown 4 branches of its own" in " ".join(found.frames)


def test_the_picture_grows_with_what_is_on_it(tmp_path):
    small = drawn(tmp_path / "small", updates=[update(1, ("expand", "conv", ["1x1"]))]).picture.figure
    large = drawn(tmp_path / "large", updates=DEEP).picture.figure
    assert (large.get_size_inches() > 2 * small.get_size_inches()).all()


def test_a_block_inside_of_a_branch_can_be_drawn_alone(tmp_path):
    found = drawn(tmp_path, f"conv{INSIDE}", updates=DEEP)
    check_nothing_overlaps(found)
    assert found.words[0] == "conv › 1x1-KxK"
    assert len(found.frames) == 1


def test_branches_that_were_cut_are_faint_stubs(tmp_path):
    found = drawn(tmp_path, updates=DEEP)
    assert "K×1\ncut at\nepoch 3" in found.words
    assert "residual\ncut at\nepoch 4" in found.words
    tips = " | ".join(found.picture.told.values())
    assert "Kx1: grown at epoch 1, cut at epoch 3 (importance 0.0100" in tips
    assert "no longer there: Kx1 (cut at epoch 3)" in found.picture.alt


def test_the_alt_text_describes_it_in_words(tmp_path):
    alt = drawn(tmp_path, updates=DEEP).picture.alt
    assert alt.startswith("Structure of conv after epoch 10 of 10: the sum of the original KxK (without a norm")
    assert "1x1-AVG (s = 0.0100, grown at epoch 1)" in alt
    assert "whose KxK is in turn [the sum of the original KxK" in alt


# -- other methods ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "branches", "expected"),
    [
        ("mobileone", ["KxK-2", "KxK-10", "1x1", "residual"], ["K×K", "K×K-2", "K×K-10", "1×1"]),
        (
            "orepa",
            ["1x1-AVG", "1x1-DCT", "1x1-KxK", "1x1", "DW-1x1"],
            ["K×K", "1×1", "1×1", "K×K", "AVG K×K", "1×1", "1×1", "DCT K×K", "DW K×K", "1×1"],
        ),
        ("dbb", ["1x1-KxK", "1x1-AVG", "1x1"], ["K×K", "1×1", "1×1", "K×K", "AVG K×K", "1×1"]),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_blocks_of_other_methods(method, branches, expected, finished, tmp_path):
    found = drawn(tmp_path, method=method, converted={"conv": branches}, finished=finished)
    check_nothing_overlaps(found)
    assert [label for label in found.words if "×" in label] == expected
    norms = "scale γ" if method == "orepa" else "norm γ"
    inner = "1x1-KxK" in branches and method != "orepa"
    assert found.words.count(norms) == len(branches) + 1 + inner
    assert "1.000" in found.words  # the original has a norm, too
    assert f"{branches[0]}: s = 0.0100, there from the start" in found.picture.told.values()


def test_an_original_kernel_that_a_search_dropped_is_a_stub(tmp_path):
    search = update(4, ("cut", "conv", ["KxK", "1x1"]), scores={}, importances=None)
    found = drawn(tmp_path, method="repnas", converted={"conv": ["1x1", "1xK"]}, updates=[search])
    check_nothing_overlaps(found)
    assert "K×K\ndropped at\nepoch 4" in found.words
    assert [tip for tip, _ in found.sums] == ["sum of 1 lane"]


def test_a_norm_that_the_block_replaces_is_told(tmp_path):
    about = {"method": "dbb", "converted": {"conv": ["1x1"]}, "plans": {"conv": {"replaces": "norm1"}}}
    assert drawn(tmp_path, **about).sums[0][0] == "sum of 2 lanes, in place of norm1"


# -- runs that have not ended, and old ones ---------------------------------------------------------------------


def test_a_run_that_goes_on_is_drawn_as_last_written_down(tmp_path):
    updates = [update(2, ("expand", "conv", ["1x1"])), update(4, ("expand", "conv", ["1xK"]))]
    found = drawn(tmp_path, updates=updates, trained=4, finished=False, strengths={"conv": {"1x1": 0.02}})
    assert {"0.0200", "0.0100", "1×1", "1×K"} <= set(found.words)  # the last row is older than 1xK
    assert "after epoch 4 of 10" in found.words[1]


def test_between_updates_importances_are_those_of_the_last_epoch(tmp_path):
    def later(row):
        if row["epoch"] == 5:
            row["importances"]["conv"]["1x1"] = 0.05

    found = drawn(tmp_path, updates=[update(2, ("expand", "conv", ["1x1"]))], trained=5, finished=False, rows=later)
    assert "0.0500" in found.words


def test_a_run_of_an_earlier_version_has_the_importances_of_its_last_update(tmp_path):
    found = drawn(tmp_path, updates=[update(2, ("expand", "conv", ["1x1"]))], writes_importances=False)
    assert "0.0100" in found.words
    assert any("at epoch 2" in words for words in found.words)


def test_without_importances_there_is_the_structure_alone(tmp_path):
    about = {"method": "dbb", "converted": {"conv": ["1x1"]}, "writes_importances": False}
    found = drawn(tmp_path, **about)
    check_nothing_overlaps(found)
    assert found.words[-1] == "Importances were not written down."


def test_updates_between_steps_are_told_in_parts_of_an_epoch(tmp_path):
    updates = [update(0, ("expand", "conv", ["1x1"]), step=50)]  # of 100 in an epoch
    found = drawn(tmp_path, updates=updates, dyrep={"unit": "step"})
    assert "1x1: s = 0.0100, grown at epoch 0.5" in found.picture.told.values()


def test_a_retrained_structure_is_known_before_the_run_has_ended(tmp_path):
    plan = {"branches": ["1x1"], "origin_norm": False, "width": 1}
    about = {"method": "fixed", "converted": {"conv": ["1x1"]}, "structure": {"format": 1, "blocks": {"conv": plan}}}
    assert drawn(tmp_path, finished=False, **about).words.count("norm γ") == 1


def test_numbers_that_json_has_no_word_for(tmp_path):
    written = {"conv": {"1x1": "nan"}}
    found = drawn(
        tmp_path, updates=[update(2, ("expand", "conv", ["1x1"]), importances=written)], writes_importances=False
    )
    assert "nan" in found.words


# -- files -----------------------------------------------------------------------------------------------------


def test_the_svg_tells_what_is_pointed_at_and_is_the_same_every_time(tmp_path):
    run = read_run(write_run(tmp_path, updates=DEEP))
    first = block_picture(run, "conv").save_svg(tmp_path / "first.svg").read_text()
    second = block_picture(run, "conv").save_svg(tmp_path / "second.svg").read_text()
    assert first == second
    root = ElementTree.fromstring(first)
    assert root.get("aria-label", "").startswith("Structure of conv")
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "1xK: s = 0.0100, grown at epoch 1" in titles


def test_on_a_page_it_takes_the_colour_of_the_text(tmp_path):
    picture = block_picture(read_run(write_run(tmp_path, updates=DEEP)), "conv")
    svg = picture.svg()
    assert picture.name == "block-conv"
    assert svg.count("<title>") == len(picture.told)
    assert "currentColor" in svg
