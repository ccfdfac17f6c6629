"""The attribution on the page: causes, evictions, whose requests took the memory, what clients changed."""

from __future__ import annotations

from collections.abc import Sequence

from eval.report.markup import table, text
from eval.report.schema_causes import AttributionReport
from eval.report.text import changed, count, percent, points, share

_SHOWN = 20  # rows of a table of sessions or turns; the JSON has more


def causes(found: AttributionReport) -> str:
    """From ideal to realized, exact in tokens."""
    prompt = found.prompt_tokens
    rows: list[tuple[str, Sequence[str]]] = [
        ("strong", ("ideal", percent(found.ideal_tokens / prompt), count(found.ideal_tokens), ""))
    ]
    for row in found.causes:
        rows.append(
            ("", (text(f"− {row.title}"), points(-row.rate_difference), count(-row.tokens), count(row.requests)))
        )
        rows.append(("more", (text(row.definition),)))
    rows.append(("strong", ("realized", percent(found.realized_tokens / prompt), count(found.realized_tokens), "")))
    return (
        '<h2>Why: from ideal to realized, exact in tokens</h2><p class="dim">'
        f"{text(found.evidence.text)} {text(share(found))}</p>"
        + table(("cause", "rate, points", "tokens", "requests"), rows)
        + f'<p class="dim">{text(changed(found.context_changes))}</p>'
    )


def evictions(found: AttributionReport) -> str:
    if not found.evictions:
        return ""
    rows = [
        ("", (text(row.by_title), text(row.victim_title), text(row.cause.replace("_", " ")), count(row.tokens)))
        for row in found.evictions
    ]
    page = (
        '<h2>Evictions that cost a hit</h2><p class="dim">What the memory was needed for, and what the conversation '
        "that had used it last was doing.</p>"
    ) + table(("memory for", "victim", "tier", "tokens"), rows, left=3)
    if found.evictors:
        sessions = [
            ("", (text(row.session), count(row.tokens_of_others), count(row.tokens_of_itself)))
            for row in found.evictors[:_SHOWN]
        ]
        shown = f"{len(sessions):,} of {len(found.evictors):,}"
        page += (
            f"<details><summary>Sessions whose requests took the memory ({shown})</summary>"
            + table(("session", "tokens lost by others", "by itself"), sessions)
            + "</details>"
        )
    return page


def changes(found: AttributionReport) -> str:
    if not found.context_changes.largest:
        return ""
    rows = [
        (
            "",
            (
                text(f"{row.session} / {row.flow} / turn {row.turn}"),
                text(row.kind if row.cause is None else f"{row.kind}: {row.cause_title}"),
                count(row.at_token),
                count(row.dropped_tokens),
            ),
        )
        for row in found.context_changes.largest[:_SHOWN]
    ]
    total = found.context_changes.edits + found.context_changes.compactions
    return (
        f"<details><summary>Prompts that clients changed ({len(rows):,} of {total:,})</summary>"
        + table(("turn", "kind", "still matches", "dropped"), rows, left=2)
        + "</details>"
    )
