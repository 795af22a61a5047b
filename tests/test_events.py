import json

import pytest

from dyrep.errors import CheckpointError
from dyrep.events import EventLog, read_events


def kinds(events):
    return [event["type"] for event in events]


def test_events_are_lines_of_json_in_order(tmp_path):
    log = EventLog(tmp_path / "run" / "events.jsonl")
    log.write("started")
    log.write("update", drift=float("nan"), scores={"a": float("inf")}, pair=(1, 2))
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [0, 1]
    assert json.loads(lines[1])["drift"] == "nan"
    assert json.loads(lines[1])["scores"] == {"a": "inf"}
    assert read_events(tmp_path / "run" / "events.jsonl") == log.events


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "events.jsonl"
    first = EventLog(path)
    for kind in ("started", "update", "update"):
        first.write(kind)
    second = EventLog(path)
    second.write("started")
    second.resume(2, epoch=4)
    second.write("update", again=True)
    events = read_events(path)
    assert kinds(events) == ["started", "update", "resumed", "update"]
    assert [event["seq"] for event in events] == [0, 1, 2, 3]
    assert events[3]["again"]
    assert second.events[:3] == events[:3]


def test_a_second_run_in_the_same_file_starts_over(tmp_path):
    path = tmp_path / "events.jsonl"
    for marker in (1, 2):
        log = EventLog(path)
        log.write("started")
        log.write("update", marker=marker)
    events = read_events(path)
    assert kinds(events) == ["started", "update"]
    assert events[1]["marker"] == 2


def test_a_partial_line_left_by_a_crash_is_passed_over_and_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("started")
    log.write("update")
    with open(path, "a") as file:
        file.write('{"seq": 2, "type": "upd')
    assert kinds(read_events(path)) == ["started", "update"]
    later = EventLog(path)
    later.write("started")
    later.resume(2)
    assert kinds(read_events(path)) == ["started", "update", "resumed"]


def test_a_run_that_begins_with_branches_goes_on_with_the_log_of_the_one_before(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for kind in ("started", "converted", "update", "update"):
        log.write(kind)
    later = EventLog(path)
    later.write("started")
    later.write("converted")
    later.resume(3)
    assert kinds(later.events) == kinds(read_events(path)) == ["started", "converted", "update", "resumed"]


@pytest.mark.parametrize(
    ("first", "seq", "history"),
    [
        (("started", "converted", "update"), 3, ["started", "converted", "update", "resumed"]),
        (("started", "update", "update"), 2, ["started", "converted", "resumed"]),
    ],
    ids=["the second stopped before it could go on", "the second began anew and goes on"],
)
def test_of_two_processes_that_one_goes_on_which_has_come_so_far(first, seq, history, tmp_path):
    path = tmp_path / "events.jsonl"
    for written in (first, ("started", "converted")):
        log = EventLog(path)
        for kind in written:
            log.write(kind)
    later = EventLog(path)
    later.write("started")
    later.resume(seq)
    assert kinds(later.events) == history


def test_damage_in_the_middle_is_reported_with_its_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"seq": 0, "type": "started"}\nrubbish\n{"seq": 1, "type": "update"}\n')
    with pytest.raises(CheckpointError, match=r"line 2 of .* is damaged: 'rubbish'"):
        read_events(path)


def test_a_missing_log_is_reported(tmp_path):
    with pytest.raises(CheckpointError, match="no event log at"):
        read_events(tmp_path / "none.jsonl")


def test_without_a_path_events_stay_in_memory():
    log = EventLog()
    log.write("started")
    log.write("update")
    log.resume(1)
    assert kinds(log.events) == ["started", "resumed"]


def test_restoring_replaces_whatever_the_file_holds(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    kept = [log.write("started"), log.write("update", update=1)]
    log.write("update", update=2)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"seq": 3, "type": "upd')
    other = EventLog(tmp_path / "events.jsonl")
    other.write("started")
    other.restore(kept)
    assert read_events(tmp_path / "events.jsonl") == kept
    assert other.write("update", update=2)["seq"] == 2
    assert [event["seq"] for event in read_events(tmp_path / "events.jsonl")] == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]
