"""Numbers of a comparison as people read them; shared by terminal and Markdown. Pure."""

from __future__ import annotations

from eval.compare.schema import Comparison, Difference, Doubt, Pairing, RunSide
from eval.report.text import count, per_second, percent, points, seconds
from radix_cache.attribution.causes import TITLES, Cause

ARGUMENTS_SHOWN = 12


def label(doubt: Doubt) -> str:
    """What a doubt means for the comparison."""
    return "Not comparable" if doubt.level == "refuse" else "Differs"


def told(doubt: Doubt) -> str:
    """A doubt in one sentence."""
    return f"{doubt.what} ({' / '.join(doubt.values)}): {doubt.text}."


def rate_rows(runs: list[RunSide]) -> list[tuple[str, list[str]]]:
    """From ideal to realized, a row a level or cause and a value a run."""
    found = [("ideal hit rate", [percent(run.ideal_rate) for run in runs])]
    for cause in Cause:
        if any(cause.value in run.causes for run in runs):
            lost = [points(-run.causes.get(cause.value, 0) / run.prompt_tokens) for run in runs]
            found.append((f"− {TITLES[cause]}, points", lost))
    found.append(("realized hit rate", [percent(run.realized_rate) for run in runs]))
    found.append(("cache events", ["yes" if run.evidence == "events" else "no" for run in runs]))
    return found


def time_rows(runs: list[RunSide]) -> list[tuple[str, list[str]]]:
    """Latency over the paired requests, and what the whole runs did."""
    names = (
        ("TTFT p50", "ttft_p50_s"),
        ("TTFT p95", "ttft_p95_s"),
        ("TPOT p50", "tpot_p50_s"),
        ("E2E p50", "e2e_p50_s"),
    )
    found = [(title, [seconds(getattr(run, name)) for run in runs]) for title, name in names]
    found.append(("output tokens/s, whole run", [per_second(run.output_tokens_per_s) for run in runs]))
    found.append(("recorded / failed, whole run", [f"{count(run.recorded)} / {count(run.failed)}" for run in runs]))
    return found


def title(first: str, pairing: Pairing) -> str:
    """Names as they came: the caller makes them printable."""
    return f"{pairing.name} less {first}, {count(pairing.requests)} paired requests"


def paired_as(pairing: Pairing) -> str:
    """Whether both answered alike, and what stayed out of the pairs."""
    alike = (
        f"Same answers: {count(pairing.same_answers)} of {count(pairing.answers)}."
        if pairing.answers
        else "Answers were not recorded in both runs, so they are not compared."
    )
    lengths = "" if pairing.same_lengths else " Prompts differ in length."
    return f"{alike}{lengths} Not paired: {count(pairing.only_first)} and {count(pairing.only_other)}."


def difference_cells(row: Difference) -> tuple[str, str, str, str]:
    """First, other, difference, interval."""
    bounds = "-" if row.low is None or row.high is None else f"{_signed(row, row.low)} .. {_signed(row, row.high)}"
    return _plain(row, row.first), _plain(row, row.other), _signed(row, row.difference), bounds


def is_clear(row: Difference) -> bool:
    """The interval does not hold zero."""
    return row.low is not None and row.high is not None and not row.low <= 0 <= row.high


def _plain(row: Difference, value: float) -> str:
    if row.unit == "fraction":
        return percent(value)
    return seconds(value) if row.unit == "seconds" else f"{value:,.1f}"


def _signed(row: Difference, value: float) -> str:
    if row.unit == "fraction":
        return points(value)
    sign = "+" if value >= 0 else ""
    return sign + (seconds(value) if row.unit == "seconds" else f"{value:,.1f}")


def verdicts(result: Comparison) -> list[str]:
    """The answer in a sentence a pairing: what became of hit rate and time, and whether answers are the same."""
    return [_verdict(result.runs[0].name, pairing) for pairing in result.pairings]


def _verdict(first: str, pairing: Pairing) -> str:
    rows = {row.key: row for row in pairing.differences}
    parts = [f"hit rate {_changed(rows['realized_rate'], ' points')}"]
    if (ttft := rows.get("ttft_mean")) is not None:
        parts.append(f"mean TTFT {_changed(ttft)}")
    if pairing.answers:
        same = pairing.same_answers == pairing.answers
        parts.append(
            "the same answers"
            if same
            else f"{count(pairing.same_answers)} of {count(pairing.answers)} answers the same"
        )
    return f"{pairing.name} against {first}: {', '.join(parts)}."


def _changed(row: Difference, unit: str = "") -> str:
    """The difference, and how sure it is."""
    difference = difference_cells(row)[2] + unit
    if row.low is None:
        return f"{difference} (too few sessions to say how sure)"
    return difference if is_clear(row) else f"{difference} (within chance)"
