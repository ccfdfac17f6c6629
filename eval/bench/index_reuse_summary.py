"""From what the GPU benchmark of index reuse measured to what it says: pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SPARSE_LAYERS_OF_M3 = 57
LAYERS_OF_M3 = 60
MODES = ("off", "shared", "skipped")


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, smallest and largest of repeated times, and their number. At least one value."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "n": len(values),
    }


def standard_error(*samples: Sequence[float]) -> float | None:
    """Of a difference of medians, for roughly normal values; None where a sample has fewer than two."""
    if min(map(len, samples)) < 2:
        return None
    return float(sum(statistics.variance(values) / len(values) for values in samples) ** 0.5) * 1.2533


def saving(off: Sequence[float], mode: Sequence[float], *, layers: int, reusers: int, freq: int) -> dict[str, Any]:
    """What a mode saves against off, from repeated times in ms, by reusing layer and extrapolated to all of M3.

    Args:
        layers: of the measured model; 57 sparse of M3's 60 are taken to cost what the measured ones do.
        reusers: of them, layers that take over a selection.
        freq: group size.
    """
    before, after = statistics.median(off), statistics.median(mode)
    error = standard_error(off, mode)
    of_m3 = SPARSE_LAYERS_OF_M3 - len(range(0, SPARSE_LAYERS_OF_M3, freq))
    whole = (before - after) / reusers * of_m3
    return {
        "ratio_to_off": round(after / before, 4),
        "ratio_standard_error": None if error is None else round(error / before, 4),
        "saved_us_a_reusing_layer": round((before - after) / reusers * 1e3, 2),
        "saved_us_standard_error": None if error is None else round(error / reusers * 1e3, 2),
        "extrapolated_saved_ms_of_57_sparse_layers": round(whole, 3),
        # The head is counted once a step, not once in six layers: 60 layers cost less than ten times six.
        "extrapolated_saved_share_at_least": round(whole / (before * LAYERS_OF_M3 / layers), 4),
    }


def summary(
    cells: Mapping[str, Mapping[str, Mapping[str, Any]]], *, layers: int, sparse: int, freq: int
) -> dict[str, Any]:
    """By cell: spreads of prefill and time per output token in ms, and what sharing and skipping save.

    Args:
        cells: mode -> cell -> ``prefill_s`` and ``per_token_s`` (lists of seconds) and ``cached_at_prefill``.
    """
    reusers = sparse - len(range(0, sparse, freq))
    rows: dict[str, Any] = {}
    for cell in cells.get("off", {}):
        row: dict[str, Any] = {}
        known = [mode for mode in MODES if cell in cells.get(mode, {})]
        for what in ("prefill", "per_token"):
            times = {mode: [seconds * 1e3 for seconds in cells[mode][cell][f"{what}_s"]] for mode in known}
            if not all(times.values()):
                continue
            row[f"{what}_ms"] = {mode: spread(values) for mode, values in times.items()}
            for mode in known[1:]:
                row[f"{what}_{mode}"] = saving(times["off"], times[mode], layers=layers, reusers=reusers, freq=freq)
            if {"shared", "skipped"} <= times.keys():
                row[f"{what}_skipped_against_shared"] = saving(
                    times["shared"], times["skipped"], layers=layers, reusers=reusers, freq=freq
                )
        row["cached_tokens_at_prefill"] = sum(cells[mode][cell]["cached_at_prefill"] for mode in known)
        rows[cell] = row
    return rows


def equality(reference: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many answers are the same, and after how many tokens the first one that is not parts."""
    prefixes = [
        next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), len(left))
        for left, right in zip(reference, other, strict=True)
    ]
    return {
        "answers": len(prefixes),
        "equal": sum(n == len(left) for n, left in zip(prefixes, reference, strict=True)),
        "shortest_equal_prefix": min(prefixes),
        "distinct_tokens": len({token for answer in reference for token in answer}),
    }


def compare(checks: Mapping[str, Any]) -> dict[str, Any]:
    """The first server's answers against its own second ones and against every other server's.

    Args:
        checks: server -> ``tokens`` (by way of asking), ``logprobs``, ``hits`` and ``configurations`` (kernel -> what
            it chose); the first one also has the ways ``cold again`` and the ``logprobs again``, which tell what of a
            difference is the machine's.
    """
    if not checks:
        return {}
    (name, reference), *others = checks.items()
    tokens = reference["tokens"]
    return {
        "reference": name,
        f"{name}, asked again": {
            "cold": equality(tokens["cold"], tokens["cold again"]),
            "largest_logprob_difference": _largest(reference["logprobs"], reference["logprobs again"]),
        },
        **{
            other: {
                **{way: equality(tokens[way], check["tokens"][way]) for way in tokens},
                "cached_tokens": [reference["hits"], check["hits"]],
                "positions_compared": len(reference["logprobs"]),
                "largest_logprob_difference": _largest(reference["logprobs"], check["logprobs"]),
                "configurations": chosen_otherwise(reference["configurations"], check["configurations"]),
            }
            for other, check in others
        },
    }


def chosen_otherwise(reference: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """How many kernels chose a configuration in both servers, and those that chose another one (kernel -> both)."""
    both = sorted(reference.keys() & other.keys())
    return {
        "kernels": len(both),
        "other": {kernel: [reference[kernel], other[kernel]] for kernel in both if reference[kernel] != other[kernel]},
        "in_one_only": sorted(reference.keys() ^ other.keys()),
    }


def _largest(left: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))
