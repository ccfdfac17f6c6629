"""Numbers and foreign text as people read them; shared by the terminal and the page."""

from __future__ import annotations

from eval.report.schema import AuditLine, Completeness, Drafting, Goodput, Report, Throughput, Tiers
from eval.report.schema_causes import AttributionReport, ContextChanges

AUDIT_CAPTION = (
    "Configured: asked for. Eligible: could run here. Executed: counted by the server during this run; - where nothing "
    "counts it. ? is what a server does not report; agentserve audit URL --recipe RECIPE knows more."
)


def audit_cells(line: AuditLine) -> tuple[str, str, str, str, str]:
    """Path, configured, eligible, executed, verdict."""
    executed = "-" if line.executed is None else f"{line.executed:,.0f}"
    return line.path, yes_no(line.configured), yes_no(line.eligible), executed, line.verdict


def yes_no(answer: bool | None) -> str:
    return "?" if answer is None else "yes" if answer else "no"


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


def points(difference: float) -> str:
    """A difference of two rates, in percentage points, with its sign."""
    return f"{100 * difference + 0.0:+.2f}"  # never -0.00


def count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def per_second(number: float | None) -> str:
    return "-" if number is None else f"{number:,.1f}" if number >= 10 else f"{number:.3g}"


def seconds(value: float | None) -> str:
    """Three significant digits, in ms below one second."""
    if value is None:
        return "-"
    if abs(value) < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if abs(value) < 100 else f"{value:,.0f} s"


def printable(foreign: str) -> str:
    """Text from a record without control characters, which could steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in foreign)


def shortened(foreign: str, length: int) -> str:
    """``printable``, cut in the middle to ``length``: ids often differ only at their ends."""
    text = printable(foreign)
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def headline(report: Report) -> str:
    """The one sentence that the report is about."""
    theory, real, page = report.rate("aligned"), report.rate("realized"), report.page_size.tokens
    if theory is None:
        raise ValueError("a report always has the page-aligned rate")
    if real is None:
        return f"Theoretical hit rate {percent(theory.rate)} (page {page}); the server reported no realized rate."
    return (
        f"Realized hit rate {percent(real.rate)} of a theoretical {percent(theory.rate)} (page {page}): "
        f"{points(real.rate - theory.rate)} points."
    )


def share(found: AttributionReport) -> str:
    """How much of the gap no evidence accounts for, and what cost most."""
    most = "" if found.largest is None else f" Most is lost to: {found.largest.title} ({count(found.largest.tokens)})."
    if not found.gap_tokens:
        return f"There is no gap; {count(found.unexplained_tokens)} tokens are unexplained.{most}"
    return (
        f"The causes sum to the gap of {count(found.gap_tokens)} tokens exactly; unexplained are "
        f"{count(found.unexplained_tokens)} ({percent(found.unexplained_fraction)} of it).{most}"
    )


def changed(found: ContextChanges) -> str:
    """What clients changed in their own prompts."""
    known = [row for row in found.by_cause if row.cause != "unknown"]
    why = "; ".join(f"{row.title} ({count(row.lost_tokens)} tokens: {row.remedy})" for row in known[:3])
    return (
        f"Apart from the gap: clients edited {count(found.edits)} prompts and compacted {count(found.compactions)}, "
        f"which dropped {count(found.dropped_tokens)} or more tokens of the prompts before and lowers the ideal itself."
        + (f" Probable causes: {why}." if why else "")
    )


def token_range(start: int, end: int | None) -> str:
    """A range of positions, in units of 1,024 tokens; short enough for a column of a figure on a phone."""
    return f"{start // 1024}k+" if end is None else f"{start // 1024}-{end // 1024}k"


def objectives(good: Goodput) -> str:
    """The service-level objectives that were given, in words."""
    limits = (("TTFT", good.slo_ttft_s), ("TPOT", good.slo_tpot_s))
    return " and ".join(f"{name} <= {seconds(limit)}" for name, limit in limits if limit is not None)


def progress(done: Completeness) -> str:
    """Planned, recorded, failed, missing and dropped requests."""
    return (
        f"{count(done.planned)} requests planned, {count(done.recorded)} recorded ({count(done.failed)}"
        f" failed), {count(done.missing)} missing; {done.status.replace('_', ' ')}. The context limit had"
        f" left out {count(done.dropped)} turns."
    )


def by_tier(tiers: Tiers) -> str:
    """Where the cached tokens were."""
    return (
        f"Cached tokens by tier, {count(tiers.requests)} requests: device {count(tiers.device)}, "
        f"host {count(tiers.host)}, storage {count(tiers.storage)}, not split {count(tiers.unsplit)}."
    )


def speed(rates: Throughput) -> str:
    """Throughput in tokens and requests."""
    return (
        f"{per_second(rates.output_tokens_per_s)} output tokens/s, {per_second(rates.prompt_tokens_per_s)}"
        f" prompt tokens/s, {per_second(rates.requests_per_s)} requests/s over {seconds(rates.wall_s)}."
    )


def within(good: Goodput) -> str:
    """Goodput, its objectives, and what a hit is worth."""
    groups = "; ".join(f"{percent(g.fraction)} of {count(g.requests)} with {g.group}" for g in good.groups)
    return (
        f"{percent(good.fraction)} of recorded requests ({count(good.requests)}, "
        f"{per_second(good.requests_per_s)}/s) within {objectives(good)}." + (f" That is {groups}." if groups else "")
    )


def accepted(made: Drafting) -> str:
    """Acceptance of drafts, and what kind of acceptance it is."""
    kinds = {
        "real": "real verification",
        "synthetic": f"synthetic acceptance of {made.asked_length:g}, the text is not the model's"
        if made.asked_length is not None
        else "synthetic acceptance, the text is not the model's",
        "unknown": "the server does not say whether acceptance is real",
    }
    what = f"{made.algorithm}, {made.drafts} drafts a step, {kinds[made.mode]}: "
    if made.length is None:
        return what + "no verification step in the completed requests."
    positions = ", ".join(percent(fraction) for fraction in made.by_position)
    return what + f"acceptance length {made.length:.3f} over {count(made.steps)} steps; by position {positions}."
