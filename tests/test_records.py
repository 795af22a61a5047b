"""What is written as JSON is JSON, is there whole, and is read again by the same rules everywhere."""

import json
import math

import pytest

from dyrep import files, records
from dyrep.errors import CheckpointError, DyRepError
from dyrep.events import read_events
from dyrep.records import append_line, finite, jsonable, read_json, read_lines, write_json, write_lines, write_text


@pytest.fixture
def file(tmp_path):
    return tmp_path / "some.jsonl"


# -- numbers that JSON has no word for --------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_has_no_word_for_are_text_in_every_file(value, file):
    data = {"deep": [{"inside": (value, 1.5)}]}
    written = {"deep": [{"inside": [str(value), 1.5]}]}
    write_json(file, data)
    assert read_json(file) == json.loads(file.read_text(), parse_constant=pytest.fail) == written
    write_lines(file, [data])
    append_line(file, data)
    assert read_lines(file) == [written, written]
    assert [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()] == [written] * 2
    assert finite(value) is finite(str(value)) is None
    assert str(float(jsonable(value))) == str(value)


@pytest.mark.parametrize(
    ("value", "number"), [(1, 1.0), (0, 0.0), (-2.5, -2.5), (True, None), (None, None), ("3", None), ([1], None)]
)
def test_only_numbers_are_numbers(value, number):
    assert finite(value) == number


def test_keys_are_text_as_json_has_them():
    assert jsonable({1: {"a": 2}}) == {"1": {"a": 2}}


# -- files that hold one object ---------------------------------------------------------------------------------


def test_a_file_is_replaced_whole_or_not_at_all(file, monkeypatch):
    write_json(file, {"a": 1})

    def fail(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", fail)
        for write in (lambda: write_json(file, {"a": 2}), lambda: write_lines(file, []), lambda: write_text(file, "x")):
            with pytest.raises(DyRepError, match=r"some\.jsonl cannot be written: no space left on device"):
                write()
    assert read_json(file) == {"a": 1}
    assert list(file.parent.iterdir()) == [file]


def test_folders_are_made_for_files_and_what_is_in_the_way_is_named(tmp_path):
    write_json(tmp_path / "new" / "a.json", {})
    with pytest.raises(DyRepError, match=r"b\.json cannot be written: "):
        write_json(tmp_path / "new" / "a.json" / "b.json", {})
    with pytest.raises(DyRepError, match=r"c\.jsonl cannot be written: "):
        append_line(tmp_path / "none" / "c.jsonl", {})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"a": 1', "is damaged: Expecting"),
        (b"", "is damaged: Expecting value"),
        (b"[1]", "is damaged: it holds no JSON object"),
        (b'{"a": "\xff"}', "is damaged: 'utf-8' codec"),
    ],
)
def test_a_file_that_holds_no_object_is_named(content, reason, file):
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"some\.jsonl {reason}"):
        read_json(file)


@pytest.mark.parametrize("place", ["none.json", ""])
def test_a_file_that_is_not_there_is_named(place, tmp_path):
    with pytest.raises(CheckpointError, match="there is no file"):
        read_json(tmp_path / place)


# -- files of one object per line -------------------------------------------------------------------------------


def test_of_a_file_that_is_not_there_there_are_no_lines(file):
    assert read_lines(file) == []


@pytest.mark.parametrize("end", [b'{"b": 2', b'{"b": "\xc3', b"\x00\x00\x00", b"{", b'{"b": 2\n', b"2"])
def test_a_last_line_that_was_cut_off_is_passed_over_and_gives_way_to_the_next(end, file):
    file.write_bytes(b'{"a": 1}\n' + end)
    assert read_lines(file) == [{"a": 1}]
    if not end.endswith(b"\n"):
        append_line(file, {"c": 3})
        assert file.read_text() == '{"a": 1}\n{"c": 3}\n'


def test_a_last_line_that_is_whole_but_for_its_end_is_kept(file):
    file.write_text('{"a": 1}\n{"b": 2}')
    append_line(file, {"c": 3})
    assert read_lines(file) == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_a_file_that_holds_nothing_but_a_partial_line_begins_anew(file):
    file.write_text('{"a"')
    append_line(file, {"a": 1})
    assert read_lines(file) == [{"a": 1}]


@pytest.mark.parametrize("broken", ["rubbish", '{"b": ', "[1]"])
def test_a_broken_line_before_the_last_is_named_by_file_and_line(broken, file):
    file.write_text(f'{{"a": 1}}\n\n{broken}\n{{"c": 3}}\n')
    with pytest.raises(CheckpointError) as refused:
        read_lines(file)
    assert str(refused.value) == f"line 3 of {file} is damaged: {broken!r}"


def test_logs_are_read_by_the_same_rules(file):
    lines = ['{"seq": 0, "type": "started"}', "", "rubbish", '{"seq": 1, "type": "update"}']
    file.write_text("\n".join(lines[:3]))
    assert read_events(file) == read_lines(file) == [{"seq": 0, "type": "started"}]
    file.write_text("\n".join(lines))
    for read in (read_events, read_lines):
        with pytest.raises(CheckpointError, match=r"line 3 of .*some\.jsonl is damaged: 'rubbish'"):
            read(file)


def test_empty_lines_do_not_matter(file):
    file.write_text('\n{"a": 1}\n  \n{"b": 2}\n\n')
    assert read_lines(file) == [{"a": 1}, {"b": 2}]


# -- what a run was started with --------------------------------------------------------------------------------


def test_a_folder_without_a_config_is_no_run(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not the folder of a run: it has no config\.json"):
        records.read_config(tmp_path)
