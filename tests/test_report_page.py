"""The page in a real browser: both widths, dark and printed; what is wrong with a page is seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.bench.browser import Browser, installed
from eval.bench.report_screenshots import WIDTHS, look, pictures
from eval.report import summarize
from eval.report.html import render_html
from eval.report.schema_what_if import CurvePoint, WhatIf
from tests.test_report_output import HOSTILE, many
from tests.test_report_summary import FINISHED, header

pytestmark = pytest.mark.skipif(not installed(), reason="needs Chromium and chromedriver")

CURVE = WhatIf(
    definition="-",
    source="cache events",
    source_text="-",
    requests=200,
    left_out_requests=0,
    sessions=2,
    policy="lru",
    policy_text="-",
    capacity_tokens=2_000_000,
    bytes_per_token=1000.0,
    live_tokens=1e6,
    theoretical_rate=0.95,
    simulated_rate=0.9,
    realized_rate=0.9,
    curve=[
        CurvePoint(capacity_tokens=size, of_live=size / 1e6, rates={"lru": rate, "belady": rate + 0.01})
        for size, rate in ((500_000, 0.6), (1_000_000, 0.8), (2_000_000, 0.9))
    ],
    answers=[],
    left_out=[],
    notes=[],
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some ids are markup: what an attacker or an odd trace would send."""
    records = many(400)
    records[:40] = [r.model_copy(update={"session": HOSTILE + r.session}) for r in records[:40]]
    records[100:300] = [r.model_copy(update={"cached_tokens": 0}) for r in records[100:300]]  # bars with a pattern
    report = summarize(header(requests=len(records)), records, FINISHED).model_copy(update={"what_if": CURVE})
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(render_html(report, records), encoding="utf-8")
    return file


@pytest.mark.parametrize("width", WIDTHS)
def test_no_error_no_request_outside_nothing_cut_off(browser: Browser, page: Path, width: int) -> None:
    assert look(browser, page, width) == []
    assert browser.run("return [document.images.length, document.title]") == [0, "Hit rate of run run"]
    picture = browser.screenshot(whole=False)
    (small,) = pictures(picture)
    assert len(small) < len(picture)


def test_what_is_wrong_is_seen(browser: Browser, tmp_path: Path) -> None:
    """The check itself: an error, a request to the outside, a page too wide, an empty figure."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<div class="plot" id="gone"></div><p style="width:2000px">wide</p><img src="http://127.0.0.1:9/x.png">'
        "<script>throw new Error('broken')</script>"
    )
    said = " ".join(look(browser, bad, 390))
    for part in ("broken", "asked for http://127.0.0.1:9/x.png", "pixels wide at 390", "figure gone is empty"):
        assert part in said


def test_dark_and_print(browser: Browser, page: Path) -> None:
    def background() -> str:
        return str(browser.run("return getComputedStyle(document.body).backgroundColor"))

    browser.open(page)
    browser.resize(390, 900)  # narrower than paper
    browser.command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    assert background() == "rgb(20, 23, 27)"
    browser.command("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    assert background() == "rgb(255, 255, 255)"
    browser.command("Emulation.setEmulatedMedia", {"media": "", "features": []})
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    assert len(printed) < 4_000_000  # patterns would make it 8,000,000
    assert browser.messages() == []
