"""Reports in a real browser. Skipped where there is none."""

from __future__ import annotations

import random
import shutil

import pytest

from dyrep.report.page import write_report
from report.run_folders import ALL, update, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")

WIDE, PHONE = {"width": 1000, "height": 800}, {"width": 390, "height": 780}
RESNET = [
    "conv1",
    *(f"layer{stage}.{block}.conv{conv}" for stage in (1, 2, 3, 4) for block in (0, 1) for conv in (1, 2)),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module", params=["real runs", "a ResNet-18 with 20 updates"])
def url(request, folders, tmp_path_factory):
    """Two reports: of small real runs, and of a large network that changed often."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    if request.param == "real runs":
        write_report([folders.evolved, folders.second, folders.plain, folders.unfinished], out)
        return out.as_uri()
    chance, layers, updates = random.Random(0), list(RESNET), []
    for epoch in range(1, 21):
        chosen = layers.pop(chance.randrange(len(layers))) if layers else f"{RESNET[0]}.branches.1x1-KxK.conv"
        scores = {layer: chance.random() for layer in [*layers, chosen]}
        cut = [("cut", chosen, ["1xK"])] if epoch % 5 == 0 else []
        if epoch <= len(RESNET):
            updates.append(update(epoch, ("expand", chosen, ALL), *cut, scores=scores))
        else:
            updates.append(update(epoch, scores={layer: chance.random() for layer in RESNET}))
    write_report([write_run(out.parent / "run", epochs=21, updates=updates, model="resnet18")], out)
    return out.as_uri()


def opened(browser, url, **options):
    """A page, and everything that it complains about or loads from elsewhere."""
    context = browser.new_context(**options)
    page, trouble = context.new_page(), []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on(
        "request", lambda request: trouble.append(request.url) if not request.url.startswith(("file:", "data:")) else 0
    )
    page.goto(url)
    return page, trouble


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, {"viewport": PHONE}], ids=["light", "dark", "phone"])
def test_the_page_opens_without_a_complaint_and_fits(browser, url, options):
    page, trouble = opened(browser, url, **{"viewport": WIDE, **options})
    assert page.locator("main section").count() == 7
    assert page.locator("#timeline-1 svg .mark").count() > 5
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out
    assert all(box["width"] > 300 for box in (each.bounding_box() for each in page.locator("figure:visible svg").all()))
    assert not trouble


def test_text_can_be_told_from_the_ground_in_light_and_dark(browser, url):
    for scheme in ("light", "dark"):
        page, _ = opened(browser, url, color_scheme=scheme)
        for where in ("body", "#timeline-1 svg text >> nth=0", "figcaption >> nth=0", "nav a >> nth=0"):
            assert page.locator(where).evaluate(CONTRAST) >= 4.5, (scheme, where)


CONTRAST = """element => {
    const parse = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number)
    const light = text => parse(text)
        .map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0)
    const style = getComputedStyle(element)
    const ink = light(element.closest("svg") && style.fill !== "none" ? style.fill : style.color)
    const ground = light(getComputedStyle(document.body).backgroundColor)
    return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05)
}"""


def test_pointing_at_a_mark_tells_what_it_stands_for(browser, url):
    page, _ = opened(browser, url, viewport=WIDE)
    mark, tip = page.locator("#timeline-1 .mark").nth(2), page.locator("#tip")
    assert not tip.is_visible()
    mark.hover()
    assert tip.inner_text() == mark.get_attribute("aria-label")
    box = tip.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= WIDE["width"]
    page.locator("h1").hover()
    assert not tip.is_visible()


def test_the_keyboard_goes_from_mark_to_mark(browser, url):
    page, _ = opened(browser, url, viewport=WIDE)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    chart, tip = page.locator("#scores-1 .chart"), page.locator("#tip")
    chart.focus()
    marks = chart.locator(".mark")
    for key, expected in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("ArrowLeft", -1)):
        page.keyboard.press(key)
        assert tip.inner_text() == marks.nth(expected).get_attribute("aria-label")
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_charts_have_a_name_and_can_be_read_as_tables(browser, url):
    page, _ = opened(browser, url)
    for chart in page.locator(".chart").all():
        assert len(chart.get_attribute("aria-label")) > 20
    figure = page.locator("#drift-1")
    figure.locator("summary").click()
    rows = figure.locator("tbody tr")
    assert rows.count() * 2 == figure.locator(".mark").count()


def test_it_prints_with_everything_unfolded(browser, url, tmp_path):
    page, trouble = opened(browser, url)
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert not trouble
