"""A report: one page that needs nothing else, with figures that are those of the runs."""

from __future__ import annotations

import re
import statistics
from html.parser import HTMLParser

import pytest

from dyrep.errors import ConfigError, DyRepError
from dyrep.report.page import write_report
from dyrep.report.runs import read_run
from report.run_folders import own_log, update, write_run

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Checker(HTMLParser):
    """Reads a page: its text, names, links, and whether every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.names, self.links, self.loads, self.words, self.tables = [], [], [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        self.names += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes["href"]] if tag == "a" else []
        self.loads += [attributes[key] for key in ("src", "srcset", "data") if key in attributes]
        self.loads += [attributes["href"]] if tag == "link" else []
        self.tables += tag == "table"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def made(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "new" / "all.html"
    return write_report([folders.evolved, folders.second, folders.plain, folders.dbb, folders.unfinished], out)


@pytest.fixture(scope="module")
def page(made):
    return Checker(made[0].read_text())


def test_the_page_is_whole_and_loads_nothing(made, page):
    assert not page.open
    assert all(load.startswith("data:") for load in page.loads)
    text = made[0].read_text()
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert not re.search(r"\b(fetch|XMLHttpRequest|import)\(", text)


def test_names_are_unique_and_links_lead_somewhere(page):
    assert len(set(page.names)) == len(page.names)
    assert {link[1:] for link in page.links} <= set(page.names)


def test_all_sections_are_there(page):
    sections = {"result", "convergence", "cost", "structure", "proof", "time", "provenance"}
    assert sections <= set(page.names)
    assert {"curves", "costs", "timeline-1", "importance-1", "scores-1", "drift-1"} <= set(page.names)


def test_the_headline_is_mean_and_spread_over_seeds_of_the_folded_network(folders, page):
    found = [read_run(folder).summary["test_accuracy_folded"] for folder in (folders.evolved, folders.second)]
    assert f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f} %" in page.text
    assert "mean ± sd over 2 seeds" in page.text
    assert "not finished 1 run" in page.text


def test_costs_are_relative_to_the_plain_network_and_averaged_over_time(folders, page):
    run = read_run(folders.evolved)
    mean = statistics.mean(row["macs"] for row in run.rows)
    assert f"({mean / read_run(folders.plain).rows[0]['macs']:.2f} ×)" in page.text
    assert "1.00 ×" in page.text


def test_every_figure_is_written_as_a_png_too(made, page):
    _, pictures = made
    assert {picture.stem for picture in pictures} <= set(page.names)
    assert {picture.parent.name for picture in pictures} == {"all-figures"}
    assert all(picture.read_bytes()[:4] == b"\x89PNG" for picture in pictures)


def test_provenance_says_what_the_result_depends_on(page):
    for words in ("torch", "hardware", "seed", "All settings", '"weight_decay"'):
        assert words in page.text


def test_a_failed_proof_is_bad_news(tmp_path):
    run = write_run(tmp_path / "run", summary={"fold_passed": False, "fold_error": 0.5})
    page, _ = write_report([run], tmp_path / "report.html")
    text = page.read_text()
    assert '<dd class="bad">5.0e-01, too much</dd>' in text
    assert "failed" in Checker(text).text


UNDEFINED = {"test_accuracy": "nan", "test_accuracy_folded": "nan", "fold_passed": False}


@pytest.mark.parametrize("error", ["nan", "inf"])
def test_numbers_that_json_has_no_word_for_are_shown_for_what_they_are(tmp_path, error):
    def spoil(row):
        row |= {"train_loss": "nan", "train_accuracy": "inf", "test_accuracy": "nan"}

    def spoil_the_end(row):
        if row["epoch"] > 5:
            spoil(row)

    grown = update(2, ("expand", "a", ["1x1", "1xK"]))
    about = {"updates": [grown], "strengths": {"a": {"1x1": "nan"}}, "rows": spoil_the_end}
    run = write_run(tmp_path / "run", **about, summary={**UNDEFINED, "fold_error": error})
    other = write_run(tmp_path / "other", method="origin", rows=spoil, finished=False)
    page = Checker(write_report([run, other], tmp_path / "report.html")[0].read_text())
    assert "accuracy is not defined on these test images" in page.text
    assert "accuracy was not written down" in page.text
    assert f"{error}, too much" in page.text
    assert f"dyrep, seed 0 failed {error} – –" in page.text
    assert "dyrep, seed 0 10 – – 85.00 85.00" in page.text


def test_a_seed_whose_metric_is_not_defined_is_left_out_of_the_mean(tmp_path):
    runs = [write_run(tmp_path / str(seed), seed=seed, accuracy=90.0 + seed) for seed in (0, 2)]
    runs.append(write_run(tmp_path / "undefined", seed=3, summary={**UNDEFINED, "fold_error": "nan"}))
    text = Checker(write_report(runs, tmp_path / "report.html")[0].read_text()).text
    assert "91.00 ± 1.41 %" in text
    assert "mean ± sd over 2 seeds" in text
    assert "nan, too much" in text  # the largest error of folding is not hidden by those that are numbers


def test_a_page_that_cannot_be_written_is_named(folders, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DyRepError, match=r"report\.html cannot be written: "):
        write_report([folders.plain], tmp_path / "file" / "report.html")


def test_time_against_plain_needs_the_same_hardware(folders, page, tmp_path):
    assert "time per epoch" in page.text
    alone, _ = write_report([folders.evolved], tmp_path / "alone.html")
    assert "time per epoch" not in Checker(alone.read_text()).text


def test_epochs_are_timed_without_the_first(tmp_path):
    def train_seconds(others):
        return lambda row: row.update(train_seconds=50.0 if row["epoch"] == 1 else others, update_seconds=0.0)

    runs = [
        write_run(tmp_path / "plain", method="origin", rows=train_seconds(2.0)),
        write_run(tmp_path / "evolved", rows=train_seconds(3.0)),
    ]
    text = Checker(write_report(runs, tmp_path / "report.html")[0].read_text()).text
    assert "time per epoch 1.50 × plain" in text


def test_text_from_outside_is_escaped(tmp_path):
    grown = update(1, ("expand", "a<b>", ["1x1"]))
    run = write_run(tmp_path / "run", model="<script>alert(1)</script>", updates=[grown])
    page, _ = write_report([run], tmp_path / "report.html")
    text = page.read_text()
    assert "<script>alert" not in text
    assert "a<b>" not in text
    assert "a<b>" in Checker(text).text


def test_the_same_runs_give_the_same_page(folders, tmp_path):
    first, second = (write_report([folders.evolved], tmp_path / name)[0] for name in ("a.html", "b.html"))
    assert first.read_text() == second.read_text()


@pytest.mark.parametrize(
    ("runs", "out", "message"),
    [
        (["evolved"], "report.pdf", "report.pdf: a report is an .html file"),
        ([], "report.html", "no run to report"),
        (["evolved", "evolved"], "report.html", "the same run was given twice"),
    ],
)
def test_what_cannot_be_reported_is_refused(folders, tmp_path, runs, out, message):
    with pytest.raises(ConfigError, match=message):
        write_report([getattr(folders, name) for name in runs], tmp_path / out)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_a_loop_of_ones_own_has_a_report_without_what_it_does_not_know(tmp_path, unit):
    page = Checker(write_report([own_log(tmp_path / "mine", unit)], tmp_path / "report.html")[0].read_text())
    assert {"timeline-1", "scores-1", "costs", "proof"} <= set(page.names)
    assert not {"time", "convergence"} & set(page.names)
    assert "accuracy was not written down" in page.text
    assert "see dyrep.verify" in page.text
    assert f"grown after {unit}" in page.text


def test_epochs_and_steps_do_not_mix(folders, tmp_path):
    with pytest.raises(ConfigError, match="some of the runs count epochs and others steps"):
        write_report([folders.evolved, own_log(tmp_path / "mine", "step")], tmp_path / "report.html")


def test_every_network_is_compared_with_its_own_plain_one(folders, tmp_path):
    page, _ = write_report([own_log(tmp_path / "mine", "epoch"), folders.plain], tmp_path / "report.html")
    text = Checker(page.read_text()).text
    assert "1.25 × plain" in text  # of the log, of which nothing else is known
    assert "1.00 × plain" in text
    assert "time per epoch" not in text.replace("time per epoch, × plain", "")
