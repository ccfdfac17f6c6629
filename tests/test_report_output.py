"""The report as files and on the terminal: run directory in; tables, JSON and page out."""

from __future__ import annotations

import io
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from plotly.offline import get_plotlyjs
from rich.console import Console

from agentserve.cli.report import command
from eval.report import Report, Slo, render_terminal, summarize
from eval.report.advice import advice
from eval.report.figures.timeline import running
from eval.report.html import render_html
from eval.report.markdown import render_markdown
from eval.report.schema import SCHEMA_VERSION, AuditLine
from eval.report.schema_causes import EvictionRow, LargestCause
from eval.report.schema_what_if import Answer, WhatIf
from eval.report.text import shortened
from radix_cache.attribution.causes import TITLES, Cause
from tests.test_report_summary import FINISHED, SMALL, header, record
from traces.replay.record import RequestRecord, RunEvent, RunHeader, Speculation

HOSTILE = '</script><img src=x onerror="alert(1)"><b>&'


def write_run(
    path: Path, head: RunHeader, records: list[RequestRecord], events: list[RunEvent], tail: str = ""
) -> Path:
    path.mkdir()
    (path / "run.json").write_text(head.model_dump_json())
    (path / "requests.jsonl").write_text("".join(r.model_dump_json() + "\n" for r in records) + tail)
    (path / "events.jsonl").write_text("".join(e.model_dump_json() + "\n" for e in events))
    return path


def many(count: int, seed: int = 0) -> list[RequestRecord]:
    """Requests of 40-turn sessions with growing prompts, ids as long as real ones."""
    rng = random.Random(seed)
    records = []
    for i in range(count):
        session, turn = divmod(i, 40)
        prompt = 15_000 + 1_500 * turn + rng.randrange(1_000)
        lcp = 0 if turn == 0 else prompt - rng.randrange(200, 1_200)
        sent = 3.0 * turn + rng.random()
        first = sent + rng.lognormvariate(-1, 1)
        records.append(
            record(
                f"session-{session:04d}-{rng.getrandbits(128):032x}",
                turn,
                prompt,
                lcp,
                cached_tokens=max(0, lcp // 10 * 10 - rng.choice((0, 0, 0, 5_000))),
                ready_s=sent,
                sent_s=sent,
                first_token_s=first,
                done_s=first + rng.random() * 4,
            )
        )
    return records


class Page(HTMLParser):
    """Collects what a browser would load or show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._raw = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._raw = ""

    def handle_data(self, data: str) -> None:
        if self._raw == "script":
            self.scripts.append(data)
        elif not self._raw:
            self.text += data


def page_of(records: list[RequestRecord], events: list[RunEvent] = FINISHED) -> str:
    return render_html(summarize(header(requests=len(records)), records, events), records)


def test_page_loads_nothing_from_outside() -> None:
    text = page_of(many(200))
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form"), tag
        for name in ("src", "href", "action", "data", "srcset"):
            assert (attributes.get(name) or "data:,").startswith("data:,"), (tag, attributes)
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    own = text.replace(get_plotlyjs(), "")
    assert not re.search(r"@import|url\(|https?://(?!127\.0\.0\.1)", own)
    assert len(own) < len(text)


def test_page_escapes_text_of_records() -> None:
    records = [r.model_copy(update={"session": HOSTILE + r.session, "flow": "<i>f"}) for r in SMALL]
    error = records[-1].error
    assert error is not None
    records[-1] = records[-1].model_copy(update={"error": error.model_copy(update={"message": HOSTILE})})
    text = page_of(records)
    assert HOSTILE not in text
    assert "<img" not in text.replace(get_plotlyjs(), "")
    page = Page(text)
    assert HOSTILE + "a" in page.text  # shown as it is
    assert page.text.count(HOSTILE) >= 5  # sessions, worst requests, errors
    assert "<" not in page.scripts[0]  # no "</script>" can end it early
    figures = json.loads(page.scripts[0])  # plotly reads HTML in labels, so they hold entities
    labels = [label for f in figures if f["id"] == "sessions" for label in f["layout"]["yaxis"]["ticktext"]]
    assert labels
    assert not any("<" in label for label in labels)


def test_page_has_every_figure_with_a_definition_and_a_place() -> None:
    page = Page(page_of(many(200)))
    keys = {f["id"] for f in json.loads(page.scripts[0])}
    causes = {"causes_by_session", "causes_by_depth"}
    assert keys == {"waterfall", "over_time", "timeline", "ttft", "sessions", "latency", "growth"} | causes
    assert keys == {a["id"] for t, a in page.tags if t == "div" and a.get("class") == "plot"}
    assert sum(t == "figcaption" for t, _ in page.tags) == len(keys)
    report = summarize(header(), SMALL, FINISHED)
    for rate in report.rates:
        assert rate.definition in page.text


def test_waterfall_shows_the_chain() -> None:
    report = summarize(header(), SMALL, FINISHED)
    [figure] = [f for f in json.loads(Page(page_of(SMALL)).scripts[0]) if f["id"] == "waterfall"]
    bars = figure["data"][0]["y"]
    assert bars[0] + sum(bars[1:-1]) == pytest.approx(bars[-1])
    assert bars[-1] == pytest.approx(100 * report.chain.end_tokens / report.chain.prompt_tokens)


def test_page_without_cached_counts_and_first_tokens() -> None:
    records = [r.model_copy(update={"cached_tokens": None, "first_token_s": None}) for r in SMALL]
    page = Page(page_of(records))
    assert "reported no realized rate" in page.text
    assert "ttft" not in {f["id"] for f in json.loads(page.scripts[0])}


def test_running_requests() -> None:
    import numpy as np

    records = [record("a", 0, 5, sent_s=0.0, done_s=4.0), record("a", 1, 5, sent_s=1.0, done_s=2.0)]
    assert running(records, np.array([0.0, 2.0, 4.0, 6.0])).tolist() == [1.5, 1.0, 0.0]


@pytest.mark.parametrize("count", [5_000, 20_000])
def test_page_stays_small(count: int) -> None:
    assert len(page_of(many(count)).encode()) < 6_000_000


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_fits(width: int) -> None:
    out = io.StringIO()
    records = many(120)
    report = summarize(header(requests=500), records, [RunEvent(at_s=0, kind="interrupted")])
    render_terminal(report, Console(file=out, width=width, color_system=None))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(line.strip(" │") for line in lines).split())
    assert "380 of 500 planned requests are missing" in text
    for rate in report.rates:  # whole, not cut off by the width
        assert f"{rate.hit_tokens:,}" in text
        assert rate.definition.split(":")[0] in text
    assert "…" not in re.sub(r"sess\S*…\S*", "", text)


def test_terminal_prints_foreign_text_as_it_is() -> None:
    out = io.StringIO()
    records = [r.model_copy(update={"session": "[red]x\x1b[2J" + r.session}) for r in SMALL]
    render_terminal(summarize(header(), records, FINISHED), Console(file=out, width=120, color_system=None))
    assert "[red]x" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_audit_lines_are_shown_whole_and_escaped() -> None:
    line = AuditLine(
        path="radix hit", configured=None, setting=HOSTILE, eligible=True, condition="c", executed=1234567.0,
        counter="n", verdict="runs",
    )  # fmt: skip
    report = summarize(header(), SMALL, FINISHED, audit=[line])
    out = io.StringIO()
    render_terminal(report, Console(file=out, width=80, color_system=None))
    assert re.search(r"radix hit +\? +yes +1,234,567 +runs", out.getvalue())
    page = render_html(report, SMALL)
    assert HOSTILE not in page
    assert HOSTILE in Page(page).text
    assert "1,234,567" in page


def test_shortened_keeps_both_ends() -> None:
    assert shortened("abcdefghij", 5) == "ab…ij"
    assert shortened("abcde", 5) == "abcde"


def test_command_writes_json_and_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", header(), SMALL, FINISHED)
    result = CliRunner().invoke(command, [str(run)])
    assert result.exit_code == 0, result.output
    assert "34.48 %" in result.output  # 50 / 145
    report = Report.model_validate_json((run / "report.json").read_text())
    assert report.what_if is not None
    assert report.model_copy(update={"what_if": None}) == summarize(header(), SMALL, FINISHED)
    assert "<title>Hit rate of run run</title>" in (run / "report.html").read_text()
    assert (run / "report.md").read_text().startswith("# Realized hit rate 34.48 % of a theoretical")


def test_command_json_on_stdout_is_nothing_else(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", header(), SMALL, FINISHED)
    page = tmp_path / "page.html"
    result = CliRunner().invoke(command, [str(run), "--json", "-", "--html", str(page), "--page", "20"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["page_size"] == {"tokens": 20, "source": "option"}
    assert page.exists()
    assert sorted(p.name for p in run.iterdir()) == ["events.jsonl", "requests.jsonl", "run.json"]


def test_command_on_an_interrupted_run_cut_in_a_line(tmp_path: Path) -> None:
    half = SMALL[1].model_dump_json()[:50]
    events = [RunEvent(at_s=0, kind="started")]
    run = write_run(tmp_path / "run", header(), SMALL[:1], events, tail=half)
    result = CliRunner().invoke(command, [str(run)])
    assert result.exit_code == 0, result.output
    assert "3 of 4 planned" in " ".join(result.output.split())
    page = Page((run / "report.html").read_text())
    assert "3 of 4 planned requests are missing" in page.text
    assert "cut off" in page.text
    assert any(a.get("role") == "alert" for _, a in page.tags)


def test_command_names_file_and_line_of_a_corrupt_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", header(), SMALL[:1], FINISHED, tail='{"session": 3\n{}\n')
    result = CliRunner().invoke(command, [str(run)])
    assert result.exit_code == 1
    assert re.search(r"requests\.jsonl, line 2: ", result.output)
    assert not (run / "report.html").exists()


def test_command_on_an_empty_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(write_run(tmp_path / "run", header(), [], []))])
    assert result.exit_code == 1
    assert "no recorded request" in result.output


def test_command_on_something_else(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(tmp_path)])
    assert result.exit_code == 1
    assert "run.json" in result.output
    both = CliRunner().invoke(command, [str(tmp_path), "--html", "x", "--no-html"])
    assert both.exit_code == 2


def test_schema_keeps_every_field_of_its_version() -> None:
    """Within one version fields may be added; none goes, changes its type, or becomes one that a reader must know."""
    said = CliRunner().invoke(command, ["--schema"])
    assert said.exit_code == 0, said.output
    now = json.loads(said.output)
    kept = json.loads((Path(__file__).parent.parent / "docs" / "schema" / "report-1.json").read_text())
    assert now["properties"]["schema_version"]["default"] == SCHEMA_VERSION == 1
    for name, before in {"Report": kept, **kept["$defs"]}.items():
        after = now if name == "Report" else now["$defs"][name]
        for field, kind in before["properties"].items():
            assert field in after["properties"], f"{name}.{field} is gone: raise schema_version"
            assert _kind(after["properties"][field]) >= _kind(kind), f"{name}.{field} has another type"


def _kind(field: dict[str, object]) -> set[str]:
    """Types of a field, as text; the values of a closed list may grow."""
    if "enum" in field:
        return {str(value) for value in field["enum"]}  # type: ignore[attr-defined]
    choices = field.get("anyOf", [field])
    assert isinstance(choices, list)
    return {str(c.get("$ref") or f"{c.get('type')} of {c.get('items')}") for c in choices}


def test_command_says_where_else_to_write(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", header(), SMALL, FINISHED)
    target = tmp_path / "missing" / "report.json"
    result = CliRunner().invoke(command, [str(run), "--json", str(target), "--no-html"])
    assert result.exit_code == 1
    assert "--json PATH" in result.output
    assert not (run / "report.html").exists()


def test_resumed_run_tells_of_retried_requests(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", header(), SMALL, FINISHED)
    (run / "retried.jsonl").write_text(SMALL[0].model_dump_json() + "\n")
    result = CliRunner().invoke(command, [str(run), "--json", "-", "--no-html"])
    [note] = json.loads(result.stdout)["notes"]
    assert note.startswith("1 requests failed")


def test_the_page_has_goodput_with_hits_and_misses_apart() -> None:
    records = many(80)
    report = summarize(header(requests=80), records, FINISHED, slo=Slo(0.5, None))
    good = report.goodput
    assert good is not None
    shown = Page(render_html(report, records)).text
    assert "Goodput: TTFT <= 500 ms" in shown
    for group in good.groups:
        assert f"{group.group}{group.requests}{group.within}" in shown.replace("\n", "")
    assert "Goodput" not in Page(render_html(summarize(header(), SMALL, FINISHED), SMALL)).text


def test_the_page_has_acceptance_by_position() -> None:
    head = header()
    head.server.speculation = Speculation(algorithm="EAGLE3", drafts=3, mode="synthetic", length=2.78)
    records = [r.model_copy(update={"accepted_drafts": [4, 0, 2]}) for r in many(40)]
    shown = Page(render_html(summarize(head, records, FINISHED), records)).text
    assert "Accepted drafts: 1.67 tokens a step" in shown
    assert "1.33.33 %2.33.33 %" in shown
    assert "the text is not the model's" in shown
    assert "Accepted drafts" not in page_of(many(40))


def told(cause: Cause, tokens: int = 500, kind: str = "gap", **more: Any) -> Report:
    """A report whose largest loss is of one cause."""
    report = summarize(header(), SMALL, FINISHED)
    assert report.attribution is not None
    largest = LargestCause.model_validate({"kind": kind, "cause": cause, "title": TITLES[cause], "tokens": tokens})
    why = report.attribution.model_copy(update={"largest": largest, **more})
    return report.model_copy(update={"attribution": why})


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.OVERTAKEN])
def test_every_cause_has_something_to_do(cause: Cause) -> None:
    first, second = advice(told(cause))
    assert TITLES[cause] in first
    assert "500 tokens, " in first
    assert second.startswith("What to do: ")
    assert second.endswith(".")


def test_the_answer_names_victims_and_what_would_help() -> None:
    rows = [
        EvictionRow(cause="evicted", by="growth", by_title="growing", victim="ended", victim_title="over", tokens=n)
        for n in (1, 499)
    ]
    report = told(Cause.EVICTED, evictions=rows)
    base: dict[str, Any] = {
        "policy": "lru",
        "admission": "none",
        "host_tokens": 0,
        "rate": 0.5,
        "saved_tokens": 1,
        "worth_tokens": None,
        "worth_bytes": None,
        "start_wait_s": 0.0,
        "rejected": 0,
    }
    found = WhatIf(
        definition="-", source="cache events", source_text="-", requests=2, left_out_requests=0, sessions=1,
        policy="lru", policy_text="-", capacity_tokens=100, bytes_per_token=None, live_tokens=1.0, theoretical_rate=0.9,
        simulated_rate=0.4, realized_rate=0.4, curve=[], left_out=[], notes=[],
        answers=[
            Answer(key="a", question="a gate", capacity_tokens=100, more_bytes=0, difference=0.02, **base),
            Answer(key="b", question="twice", capacity_tokens=200, more_bytes=None, difference=0.3, **base),
            Answer(key="c", question="an oracle", capacity_tokens=100, more_bytes=0, difference=0.5,
                   **{**base, "policy": "belady"}),
        ],
    )  # fmt: skip
    said = advice(report.model_copy(update={"what_if": found}))
    assert "mostly for growing; the conversation that lost it: over" in said[0]
    assert said[2] == "By the simulator: a gate +2.00 points; twice +30.00 points for 100 tokens."
    far = found.model_copy(update={"simulated_rate": 0.3})
    assert "(it is -10.00 points off" in advice(report.model_copy(update={"what_if": far}))[2]
    out = io.StringIO()
    render_terminal(report, Console(file=out, width=100))
    shown = out.getvalue()
    assert shown.count("Largest cause: evicted") == 2  # first screen and last lines
    assert "Largest cause: evicted" in Page(render_html(report, SMALL)).text
    assert "- Largest cause: evicted" in render_markdown(report)


def test_no_advice_where_nothing_was_lost() -> None:
    report = told(Cause.EVICTED)
    assert report.attribution is not None
    whole = report.attribution.model_copy(update={"largest": None})
    assert advice(report.model_copy(update={"attribution": whole})) == ["Nothing was lost: there is nothing to do."]
    assert advice(report.model_copy(update={"attribution": None})) == []
