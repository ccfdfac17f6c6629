"""The report as GitHub-flavoured Markdown, short enough for a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eval.report.advice import advice
from eval.report.schema import Report
from eval.report.schema_causes import AttributionReport
from eval.report.schema_what_if import WhatIf
from eval.report.text import (
    AUDIT_CAPTION,
    accepted,
    audit_cells,
    by_tier,
    changed,
    count,
    headline,
    percent,
    points,
    printable,
    progress,
    seconds,
    share,
    shortened,
    speed,
    within,
)
from eval.report.text_what_if import COLUMNS, TITLE, answers, cells, lines

SESSIONS_SHOWN = 10
EVICTIONS_SHOWN = 8
_SPECIAL = "\\`*_{}[]<>|#~&"


def render_markdown(report: Report) -> str:
    """Everything that people argue about; all rows are in the JSON."""
    parts = [
        f"# {headline(report)}",
        "\n".join(f"- {plain(line)}" for line in advice(report)),
        f"Run {plain(report.run.run_id)}. {plain(report.data_set.line)}",
        plain(progress(report.completeness)),
        "" if report.completeness.banner is None else f"> **{plain(report.completeness.banner)}**",
        _rates(report),
        _chain(report) if report.attribution is None else _causes(report.attribution),
        "" if report.tiers is None else by_tier(report.tiers),
        "" if report.what_if is None else _what_if(report.what_if),
        _latency(report),
        _audit(report),
        _sessions(report),
        _errors(report),
        "\n".join(f"> {plain(note)}" for note in report.notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(foreign: object) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{c}" if c in _SPECIAL else c for c in printable(str(foreign)))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table of cells that are Markdown already; the first ``left`` columns are text, the others numbers."""
    rule = [":--" if i < left else "--:" for i in range(len(columns))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows))


def _rates(report: Report) -> str:
    rows = [
        (_strong(rate.title, rate.key in ("aligned", "realized")), percent(rate.rate), count(rate.hit_tokens))
        for rate in report.rates
    ]
    rows += [(mean.title, percent(mean.mean), "") for mean in report.mean_rates]
    told = f"{report.rate_definition} {report.population.text} Page size: {report.page_size.tokens}."
    return f"## Hit rate\n\n{table(('definition', 'rate', 'hit tokens'), rows)}\n\n{plain(told)}"


def _chain(report: Report) -> str:
    chain = report.chain
    rows = [("ideal", percent(chain.ideal_tokens / chain.prompt_tokens), count(chain.ideal_tokens))]
    rows += [(f"− {s.title}", points(-s.rate_difference), count(-s.tokens)) for s in chain.steps]
    rows.append((_strong(chain.end_key), percent(chain.end_tokens / chain.prompt_tokens), count(chain.end_tokens)))
    return f"## From ideal to {chain.end_key}\n\n{table(('step', 'rate, points', 'tokens'), rows)}"


def _causes(found: AttributionReport) -> str:
    prompt = found.prompt_tokens
    rows = [("ideal", percent(found.ideal_tokens / prompt), count(found.ideal_tokens), "")]
    rows += [
        (f"− {row.title}", points(-row.rate_difference), count(-row.tokens), count(row.requests))
        for row in found.causes
    ]
    rows.append((_strong("realized"), percent(found.realized_tokens / prompt), count(found.realized_tokens), ""))
    text = f"## Why\n\n{table(('cause', 'rate, points', 'tokens', 'requests'), rows)}"
    text += f"\n\n{plain(found.evidence.text)} {plain(share(found))} {plain(changed(found.context_changes))}"
    if found.evictions:
        lost = [(r.by_title, r.victim_title, count(r.tokens)) for r in found.evictions[:EVICTIONS_SHOWN]]
        text += f"\n\n{table(('evicted for', 'the victim was', 'tokens'), lost, left=2)}"
    return text


def _what_if(found: WhatIf) -> str:
    rows = [[plain(cell) for cell in cells(answer, found)] for answer in answers(found)]
    text = f"## {TITLE}\n\n"
    if rows:
        text += table(COLUMNS, rows) + "\n\n"
    return text + plain(" ".join((found.definition, *lines(found))))


def _latency(report: Report) -> str:
    names = ("p50", "p90", "p99")
    rows = [
        (row.title, plain(row.group), count(row.requests), *(seconds(getattr(row, name)) for name in names))
        for row in report.latency
    ]
    told = [f"Throughput: {speed(report.throughput)}"]
    if report.goodput is not None:
        told.append(f"Goodput: {within(report.goodput)}")
    if report.drafting is not None:
        told.append(f"Drafts: {accepted(report.drafting)}")
    return "\n\n".join(
        (
            "## Latency and throughput",
            table(("metric", "requests", "n", *names), rows, left=2),
            "\n".join(f"- {plain(line)}" for line in told),
        )
    )


def _audit(report: Report) -> str:
    if not report.audit:
        return ""
    rows = [[plain(cell) for cell in audit_cells(line)] for line in report.audit]
    columns = ("path", "configured", "eligible", "executed", "verdict")
    return f"## Fast paths\n\n{table(columns, rows, left=5)}\n\n{plain(AUDIT_CAPTION)}"


def _sessions(report: Report) -> str:
    shown = report.sessions[:SESSIONS_SHOWN]
    rows = [
        (
            plain(shortened(row.session, 28)),
            count(row.requests),
            percent(row.theoretical_rate),
            percent(row.realized_rate),
            count(row.gap_tokens),
        )
        for row in shown
    ]
    columns = ("session", "requests", "theoretical", "realized", "gap tokens")
    more = f"{len(shown):,} of {len(report.sessions):,}"
    return f"<details><summary>Sessions with the largest gap ({more})</summary>\n\n{table(columns, rows)}\n\n</details>"


def _errors(report: Report) -> str:
    if not report.errors:
        return ""
    rows = [(plain(row.kind), plain(row.example), count(row.requests)) for row in report.errors]
    return "## Failed requests\n\n" + table(("kind", "first message", "requests"), rows, left=2)


def _strong(title: str, strong: bool = True) -> str:
    return f"**{title}**" if strong else title
