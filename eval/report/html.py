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

from eval.report.assets import CONTENT_POLICY, CSS, JS
from eval.report.figures import Figure, figures
from eval.report.schema import Report
from eval.report.text import (
    accepted,
    by_tier,
    count,
    headline,
    percent,
    points,
    printable,
    progress,
    seconds,
    speed,
    within,
)
from traces.replay.record import RequestRecord

SESSIONS_SHOWN = 500  # rows of the session table; the JSON has all


def render_html(report: Report, records: Sequence[RequestRecord]) -> str:
    """The whole page.

    Args:
        report: the summary of ``records``.
        records: the run's records, as read.
    """
    drawn = figures(report, records)
    by_key = {figure.key: figure for figure in drawn}
    wide = [_figure(by_key[key]) for key in ("waterfall", "over_time")]
    small = [_figure(f) for f in drawn if f.key in ("ttft", "latency")]
    title = f"Hit rate of run {report.run.run_id}"
    body = [
        _head(report),
        _rates(report),
        *wide,
        f'<div class="grid">{"".join(small)}</div>',
        _latency(report),
        _figure(by_key["growth"]),
        _figure(by_key["sessions"]),
        _sessions(report),
        _worst(report),
        _errors(report),
        _settings(report),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(CONTENT_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{_text(title)}</title><style>{CSS}</style></head><body><main>"
        + "\n".join(part for part in body if part)
        + f'</main><script type="application/json" id="figures">{_data(drawn)}</script>'
        f"<script>{get_plotlyjs()}</script><script>{JS}</script></body></html>\n"
    )


def _data(drawn: Iterable[Figure]) -> str:
    plots = [{"id": f.key, **orjson.loads(plotly.io.to_json(f.plot, validate=False))} for f in drawn]
    # "<" occurs in JSON only within strings, where this escape means the same: no "</script>" is possible.
    return orjson.dumps(plots).decode().replace("<", "\\u003c")


def _text(foreign: object) -> str:
    return escape(printable(str(foreign)))


def _table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], left: int = 1) -> str:
    """Rows are (class, cells); cells are markup; the first ``left`` columns are text, the others numbers.

    A row of class "more" is one cell over the whole width: the definition of the row above it.
    """

    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = ("id" if i < left else "n" for i in range(len(values)))
        return "".join(f'<{tag} class="{k}">{v}</{tag}>' for k, v in zip(kinds, values, strict=True))

    def line(kind: str, values: Sequence[str]) -> str:
        if kind == "more":
            return f'<tr class="more"><td class="def" colspan="{len(columns)}">{values[0]}</td></tr>'
        return f'<tr class="{kind}">{cells("td", values)}</tr>'

    lines = "".join(line(kind, values) for kind, values in rows)
    head = cells("th", [escape(c) for c in columns])
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _figure(figure: Figure) -> str:
    return (
        f"<figure><h2>{_text(figure.title)}</h2>"
        f'<div class="plot" id="{figure.key}" style="height:{figure.height}px" role="img" '
        f'aria-label="{_text(figure.title)}"></div><figcaption>{_text(figure.definition)}</figcaption></figure>'
    )


def _head(report: Report) -> str:
    done = report.completeness
    tiles = [(rate.key, rate.title, percent(rate.rate)) for rate in report.rates[:4]]
    if report.rate("realized") is None:
        tiles = tiles[:3]
    chain = report.chain
    tiles.append(("gap", f"points, ideal to {chain.end_key}", points(-chain.gap_tokens / chain.prompt_tokens)))
    return (
        f"<h1>{_text(headline(report))}</h1>"
        f'<p class="dim">Run {_text(report.run.run_id)} · {_text(report.data_set.line)}</p>'
        f'<p class="dim">{_text(progress(done))}</p>'
        + (f'<p class="banner" role="alert">{_text(done.banner)}</p>' if done.banner else "")
        + '<div class="tiles">'
        + "".join(
            f'<div class="tile {key}"><b>{value}</b><span>{_text(title)}</span></div>' for key, title, value in tiles
        )
        + "</div>"
        + "".join(f'<p class="banner">{_text(note)}</p>' for note in report.notes)
    )


def _rates(report: Report) -> str:
    rows: list[tuple[str, Sequence[str]]] = []
    for rate in report.rates:
        kind = "strong" if rate.key in ("aligned", "realized") else ""
        rows.append((kind, (_text(rate.title), percent(rate.rate), count(rate.hit_tokens))))
        rows.append(("more", (_text(rate.definition),)))
    for mean in report.mean_rates:
        rows.append(("sub", (_text(mean.title), percent(mean.mean), "")))
    rows.append(("more", (_text(report.mean_rates[-1].definition),)))
    tiers = "" if report.tiers is None else f'<p class="dim">{_text(by_tier(report.tiers))}</p>'
    population = f"{report.rate_definition} {report.population.text}"
    return (
        f'<h2>Hit rates</h2><p class="dim">{_text(population)} Prompt tokens: '
        f"{count(report.population.prompt_tokens)}. Page size: {report.page_size.tokens} "
        f"({report.page_size.source}).</p>"
        + _table(("definition", "rate", "hit tokens"), rows)
        + tiers
        + _chain(report)
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
        rows.append(("", (_text(f"− {step.title}"), points(-step.rate_difference), count(-step.tokens))))
        rows.append(("more", (_text(f"{step.definition} {parts}"),)))
    rows.append(("strong", (chain.end_key, percent(chain.end_tokens / prompt), count(chain.end_tokens))))
    columns = ("step", "rate, points", "tokens")
    return f"<h2>Steps from ideal to {chain.end_key}, exact in tokens</h2>" + _table(columns, rows)


def _latency(report: Report) -> str:
    names = ("p50", "p90", "p95", "p99", "mean", "max")
    rows = [
        (
            "" if row.group == "all" else "sub",
            (
                _text(row.title),
                _text(row.group).replace(" ", "&nbsp;"),
                count(row.requests),
                *(seconds(getattr(row, name)) for name in names),
            ),
        )
        for row in report.latency
    ]
    lines = [f"Throughput: {speed(report.throughput)} {report.throughput.definition}"]
    if report.goodput is not None:
        lines.append(f"Goodput: {within(report.goodput)} {report.goodput.definition}")
    if report.drafting is not None:
        lines.append(f"Drafts: {accepted(report.drafting)} {report.drafting.definition}")
    lines += report.latency_definitions.values()
    return (
        "<h2>Latency and throughput</h2>"
        + _table(("metric", "requests", "n", *names), rows, left=2)
        + "".join(f'<p class="dim">{_text(line)}</p>' for line in lines)
    )


def _sessions(report: Report) -> str:
    rows = [
        (
            "",
            (
                _text(row.session),
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
    return f"<details><summary>Table of sessions ({shown})</summary>{_table(columns, rows)}</details>"


def _worst(report: Report) -> str:
    if not report.worst:
        return ""
    rows = [
        (
            "",
            (
                _text(f"{row.session} / {row.flow} / turn {row.turn}"),
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
    return "<h2>Requests with the largest gap, in tokens</h2>" + _table(columns, rows)


def _errors(report: Report) -> str:
    if not report.errors:
        return ""
    rows = [("", (row.kind, _text(row.example), count(row.requests))) for row in report.errors]
    return "<h2>Failed requests (in no rate and no latency)</h2>" + _table(
        ("kind", "first message", "requests"), rows, left=2
    )


def _settings(report: Report) -> str:
    pairs = {
        **report.run.model_dump(),
        **{f"data set: {k}": v for k, v in report.data_set.model_dump().items()},
    }
    rows = [("", (_text(name), _text("-" if value is None else value))) for name, value in pairs.items()]
    return f"<details><summary>Settings and data set</summary>{_table(('setting', 'value'), rows, left=2)}</details>"
