"""Times, goodput and acceptance on the page."""

from __future__ import annotations

from eval.report.markup import table, text
from eval.report.schema import Drafting, Report
from eval.report.text import accepted, count, objectives, percent, seconds, speed, within


def latency(report: Report) -> str:
    """Goodput, acceptance, and the distributions of times."""
    names = ("p50", "p90", "p95", "p99", "mean", "max")
    rows = [
        (
            "" if row.group == "all" else "sub",
            (
                text(row.title),
                text(row.group).replace(" ", "&nbsp;"),
                count(row.requests),
                *(seconds(getattr(row, name)) for name in names),
            ),
        )
        for row in report.latency
    ]
    lines = [f"Throughput: {speed(report.throughput)} {report.throughput.definition}"]
    lines += report.latency_definitions.values()
    return (
        _goodput(report)
        + ("" if report.drafting is None else _drafting(report.drafting))
        + "<h2>Latency and throughput</h2>"
        + table(("metric", "requests", "n", *names), rows, left=2)
        + "".join(f'<p class="dim">{text(line)}</p>' for line in lines)
    )


def _goodput(report: Report) -> str:
    good = report.goodput
    if good is None:
        return ""
    rows = [
        ("strong", ("all recorded", count(report.completeness.recorded), count(good.requests), percent(good.fraction)))
    ]
    rows += [("", (text(g.group), count(g.requests), count(g.within), percent(g.fraction))) for g in good.groups]
    told = f'<p class="dim">{text(f"{within(good)} {good.definition}")}</p>'
    return f"<h2>Goodput: {text(objectives(good))}</h2>{table(('requests', 'n', 'within', 'share'), rows)}{told}"


def _drafting(made: Drafting) -> str:
    rows = [("", (f"{number}.", percent(share))) for number, share in enumerate(made.by_position, start=1)]
    told = f'<p class="dim">{text(f"{accepted(made)} {made.definition}")}</p>'
    title = "no step" if made.length is None else f"{made.length:.2f} tokens a step"
    return f"<h2>Accepted drafts: {title}</h2>{table(('draft', 'accepted in steps'), rows) if rows else ''}{told}"
