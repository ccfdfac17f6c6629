"""The simulator's answers in words; shared by terminal, Markdown and page."""

from __future__ import annotations

from collections.abc import Sequence

from eval.report.schema_what_if import Answer, WhatIf
from eval.report.text import count, percent, points, seconds

TITLE = "What another cache would have brought"
COLUMNS = ("question", "hit rate", "points", "computed less", "more memory", "worth memory")
UNLIKE = 0.02  # a simulated rate this far from the server's is a doubt
_NO_CHANGE = 5e-5  # half of what two decimals of a percentage show


def gigabytes(size: float | None) -> str:
    """Bytes in units of 10^9, MB below one of them."""
    if size is None:
        return "-"
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def memory(tokens: int | None, size: int | None) -> str:
    """An amount of cache: bytes where they are known, else tokens."""
    if tokens is None:
        return "no size"
    if tokens == 0:
        return "0"
    return f"{count(tokens)} tokens" if size is None else gigabytes(size)


def cells(answer: Answer, found: WhatIf) -> tuple[str, ...]:
    """One row of ``COLUMNS``."""
    added = answer.capacity_tokens - (found.capacity_tokens or 0) + answer.host_tokens
    question = answer.question
    if answer.start_wait_s > 0:
        question += f"; new sessions wait {seconds(answer.start_wait_s)} (mean)"
    if answer.rejected:
        question += f"; {count(answer.rejected)} requests do not fit"
    return (
        question,
        percent(answer.rate),
        points(answer.difference),
        count(answer.saved_tokens),
        memory(added, answer.more_bytes),
        memory(answer.worth_tokens, answer.worth_bytes),
    )


def answers(found: WhatIf) -> list[Answer]:
    """Those worth a table: none where no change brings anything."""
    return found.answers if any(abs(a.difference) >= _NO_CHANGE for a in found.answers) else []


def lines(found: WhatIf) -> list[str]:
    """What the answers rest on."""
    parts = [_own(found)]
    if found.answers and not answers(found):
        parts.append("No change that was asked about brings anything: what was lost was not lost for want of memory.")
    parts.append(found.source_text)
    parts += found.notes
    if found.left_out:
        parts.append(left_out(found.left_out))
    return parts


def left_out(names: Sequence[str]) -> str:
    few = "; ".join(names[:3]) + ("; ..." if len(names) > 3 else "")
    return f"No time for {len(names)} simulations ({few}): give more seconds with --what-if."


def _own(found: WhatIf) -> str:
    live = (
        f"Live contexts: {count(round(found.live_tokens))} tokens on average, {count(found.sessions)} sessions at once."
    )
    if found.capacity_tokens is None:
        return live
    size = memory(found.capacity_tokens, None)
    if found.bytes_per_token is not None:
        each = count(round(found.bytes_per_token))
        size += f" ({gigabytes(found.capacity_tokens * found.bytes_per_token)}; {each} B a token)"
    own = f"This run's own setting, {found.policy} ({found.policy_text}) with {size}"
    real = "" if found.realized_rate is None else f", realized {percent(found.realized_rate)}"
    return f"{own}: simulated {percent(found.simulated_rate)}{real}. {live}"
