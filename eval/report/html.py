"""The report as one HTML page that works offline: plotly, style, script and data are all inside.

Every text is escaped here, at the only place where text becomes markup; the figures' data is JSON in a script
element in which ``<`` cannot occur.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import orjson
import plotly.io
from plotly.offline import get_plotlyjs

from eval.report import html_causes, html_latency, html_what_if
from eval.report.advice import advice
from eval.report.assets import CONTENT_POLICY, CSS, JS
from eval.report.figures import Figure, figures
from eval.report.markup import table, text
from eval.report.schema import Report
from eval.report.text import (
    AUDIT_CAPTION,
    audit_cells,
    by_tier,
    count,
    headline,
    percent,
    points,
    progress,
    seconds,
)
from traces.replay.events import KvEvents
from traces.replay.metrics import Sample
from traces.replay.record import RequestRecord

SESSIONS_SHOWN = 500  # rows of the session table; the JSON has all


def render_html(
    report: Report,
    records: Sequence[RequestRecord],
    events: KvEvents | None = None,
    samples: Sequence[Sample] = (),
) -> str:
    """The whole page.

    Args:
        report: the summary of ``records``.
        records: the run's records, as read.
        events: the run's cache events, if any were recorded.
        samples: the server's counters during the run, if any were taken.
    """
    drawn = figures(report, records, events, samples)
    by_key = {figure.key: figure for figure in drawn}
    small = [_figure(f) for f in drawn if f.key in ("ttft", "latency")]
    why = report.attribution

    def pair(*keys: str) -> list[str]:
        return [_figure(by_key[key]) for key in keys if key in by_key]

    title = f"Hit rate of run {report.run.run_id}"
    body = [
        _head(report),
        *pair("waterfall"),
        _rates(report),
        *pair("over_time"),
        *((html_causes.evictions(why), *pair("causes_by_session", "causes_by_depth")) if why is not None else ()),
        *pair("capacity"),
        "" if report.what_if is None else html_what_if.what_if(report.what_if),
        *pair("timeline"),
        f'<div class="grid">{"".join(small)}</div>',
        html_latency.latency(report),
        _figure(by_key["growth"]),
        "" if why is None else html_causes.changes(why),
        _figure(by_key["sessions"]),
        _audit(report),
        _sessions(report),
        _worst(report),
        _errors(report),
        _settings(report),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(CONTENT_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{CSS}</style></head><body><main>"
        + "\n".join(part for part in body if part)
        + f'</main><script type="application/json" id="figures">{_data(drawn)}</script>'
        f"<script>{get_plotlyjs()}</script><script>{JS}</script></body></html>\n"
    )


def _data(drawn: Iterable[Figure]) -> str:
    plots = [{"id": f.key, **orjson.loads(plotly.io.to_json(f.plot, validate=False))} for f in drawn]
    # "<" occurs in JSON only within strings, where this escape means the same: no "</script>" is possible.
    return orjson.dumps(plots).decode().replace("<", "\\u003c")


def _figure(figure: Figure) -> str:
    return (
        f"<figure><h2>{text(figure.title)}</h2>"
        f'<div class="plot" id="{figure.key}" style="height:{figure.height}px" role="img" '
        f'aria-label="{text(figure.title)}"></div><figcaption>{text(figure.definition)}</figcaption></figure>'
    )


def _head(report: Report) -> str:
    done = report.completeness
    tiles = [(rate.key, rate.title, percent(rate.rate)) for rate in report.rates[:4]]
    if report.rate("realized") is None:
        tiles = tiles[:3]
    chain = report.chain
    tiles.append(("gap", f"points, ideal to {chain.end_key}", points(-chain.gap_tokens / chain.prompt_tokens)))
    return (
        f"<h1>{text(headline(report))}</h1>"
        f'<div class="answer">{"".join(f"<p>{text(line)}</p>" for line in advice(report))}</div>'
        f'<p class="dim">Run {text(report.run.run_id)} · {text(report.data_set.line)}</p>'
        f'<p class="dim">{text(progress(done))}</p>'
        + (f'<p class="banner" role="alert">{text(done.banner)}</p>' if done.banner else "")
        + '<div class="tiles">'
        + "".join(
            f'<div class="tile {key}"><b>{value}</b><span>{text(title)}</span></div>' for key, title, value in tiles
        )
        + "</div>"
        + "".join(f'<p class="banner">{text(note)}</p>' for note in report.notes)
    )


def _rates(report: Report) -> str:
    rows: list[tuple[str, Sequence[str]]] = []
    for rate in report.rates:
        kind = "strong" if rate.key in ("aligned", "realized") else ""
        rows.append((kind, (text(rate.title), percent(rate.rate), count(rate.hit_tokens))))
        rows.append(("more", (text(rate.definition),)))
    for mean in report.mean_rates:
        rows.append(("sub", (text(mean.title), percent(mean.mean), "")))
    rows.append(("more", (text(report.mean_rates[-1].definition),)))
    tiers = "" if report.tiers is None else f'<p class="dim">{text(by_tier(report.tiers))}</p>'
    population = f"{report.rate_definition} {report.population.text}"
    return (
        f'<h2>Hit rates</h2><p class="dim">{text(population)} Prompt tokens: '
        f"{count(report.population.prompt_tokens)}. Page size: {report.page_size.tokens} "
        f"({report.page_size.source}).</p>"
        + table(("definition", "rate", "hit tokens"), rows)
        + tiers
        + (_chain(report) if report.attribution is None else html_causes.causes(report.attribution))
    )


def _chain(report: Report) -> str:
    chain = report.chain
    prompt = chain.prompt_tokens
    rows: list[tuple[str, Sequence[str]]] = [
        ("strong", ("ideal", percent(chain.ideal_tokens / prompt), count(chain.ideal_tokens)))
    ]
    for step in chain.steps:
        parts = (
            f"Lost {count(step.lost_tokens)} tokens in {count(step.lost_requests)} requests, gained "
            f"{count(step.gained_tokens)} in {count(step.gained_requests)}."
        )
        rows.append(("", (text(f"− {step.title}"), points(-step.rate_difference), count(-step.tokens))))
        rows.append(("more", (text(f"{step.definition} {parts}"),)))
    rows.append(("strong", (chain.end_key, percent(chain.end_tokens / prompt), count(chain.end_tokens))))
    columns = ("step", "rate, points", "tokens")
    return f"<h2>Steps from ideal to {chain.end_key}, exact in tokens</h2>" + table(columns, rows)


def _sessions(report: Report) -> str:
    rows = [
        (
            "",
            (
                text(row.session),
                count(row.requests),
                count(row.failed),
                count(row.prompt_tokens),
                percent(row.theoretical_rate),
                percent(row.realized_rate),
                count(row.gap_tokens),
            ),
        )
        for row in report.sessions[:SESSIONS_SHOWN]
    ]
    columns = ("session", "requests", "failed", "prompt tokens", "theoretical", "realized", "gap tokens")
    shown = f"{len(rows):,} of {len(report.sessions):,}"
    return f"<details><summary>Table of sessions ({shown})</summary>{table(columns, rows)}</details>"


def _worst(report: Report) -> str:
    if not report.worst:
        return ""
    rows = [
        (
            "",
            (
                text(f"{row.session} / {row.flow} / turn {row.turn}"),
                seconds(row.sent_s),
                count(row.prompt_tokens),
                count(row.theoretical_tokens),
                count(row.ready_tokens),
                count(row.realized_tokens),
                count(row.gap_tokens),
                seconds(row.ttft_s),
            ),
        )
        for row in report.worst
    ]
    columns = ("request", "sent at", "prompt", "theoretical", "ready", "realized", "gap", "TTFT")
    return "<h2>Requests with the largest gap, in tokens</h2>" + table(columns, rows)


def _errors(report: Report) -> str:
    if not report.errors:
        return ""
    rows = [("", (row.kind, text(row.example), count(row.requests))) for row in report.errors]
    return "<h2>Failed requests (in no rate and no latency)</h2>" + table(
        ("kind", "first message", "requests"), rows, left=2
    )


def _audit(report: Report) -> str:
    rows: list[tuple[str, Sequence[str]]] = []
    for line in report.audit:
        rows.append(("", [text(cell) for cell in audit_cells(line)]))
        rows.append(("more", (text(f"{line.setting}; {line.condition}; {line.counter}"),)))
    if not rows:
        return ""
    columns = ("path", "configured", "eligible", "executed", "verdict")
    return f'<h2>Fast paths</h2><p class="dim">{text(AUDIT_CAPTION)}</p>{table(columns, rows, left=5)}'


def _settings(report: Report) -> str:
    pairs = {
        **report.run.model_dump(),
        **{f"data set: {k}": v for k, v in report.data_set.model_dump().items()},
    }
    rows = [("", (text(name), text("-" if value is None else value))) for name, value in pairs.items()]
    return f"<details><summary>Settings and data set</summary>{table(('setting', 'value'), rows, left=2)}</details>"
