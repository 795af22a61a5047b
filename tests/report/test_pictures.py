"""One figure as a PNG and as a part of a page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from dyrep.report.pictures import INK, Picture, colour, in_order, new_figure, short, styled


@pytest.fixture
def picture():
    with styled():
        figure = new_figure(4, 2)
        axis = figure.subplots()
        picture = Picture("some", figure, 'Two bars: "one" & <two>')
        for place in range(2):
            (bar,) = axis.barh(place, place + 1, color="#4477aa")
            picture.tell(bar, f"bar {place} <&> more")
        axis.set_title("a title")
    return picture


def test_everything_that_was_told_can_be_read_and_pointed_at(picture):
    root = ElementTree.fromstring(picture.svg())
    marks = [element for element in root.iter() if element.get("class") == "mark"]
    assert [mark.get("aria-label") for mark in marks] == ["bar 0 <&> more", "bar 1 <&> more"]
    assert [mark[0].text for mark in marks] == ["bar 0 <&> more", "bar 1 <&> more"]
    assert root.get("aria-label") == picture.alt


def test_ink_has_the_colour_of_the_text_around_it(picture):
    svg = picture.svg()
    assert INK not in svg
    assert "currentColor" in svg
    assert "#4477aa" in svg


def test_text_stays_text(picture):
    assert "a title" in "".join(ElementTree.fromstring(picture.svg()).itertext())


def test_names_are_the_pictures_own_and_all_references_hold(picture):
    svg = picture.svg()
    names = re.findall(r'\bid="([^"]+)"', svg)
    assert len(set(names)) == len(names)
    assert all(name.startswith("some-") for name in names)
    assert set(re.findall(r'href="#([^"]+)"', svg)) | set(re.findall(r"url\(#([^)]+)\)", svg)) <= set(names)


def test_the_same_figure_gives_the_same_text(picture):
    assert picture.svg() == picture.svg()


def test_it_says_nothing_of_its_making_and_sets_no_rules_for_the_page(picture):
    svg = picture.svg()
    assert "<style" not in svg
    assert "metadata" not in svg


def test_files_are_written_whole_into_new_folders(picture, tmp_path):
    png = picture.save_png(tmp_path / "new" / "some.png")
    svg = picture.save_svg(tmp_path / "new" / "some.svg")
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert INK in svg.read_text()
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["some.png", "some.svg"]


def test_layers_are_sorted_and_called_as_people_do():
    assert sorted(["conv10", "conv2", "layer1.10.conv", "layer1.9.conv"], key=in_order) == [
        "conv2", "conv10", "layer1.9.conv", "layer1.10.conv"
    ]  # fmt: skip
    assert short("a.branches.1x1-KxK.conv.branches.1xK.conv") == "a › 1x1-KxK › 1xK"
    assert colour("1x1") != colour("1xK")
    assert colour("KxK") == colour("DW-1x1")
