"""Mutations of valid trace files: of bytes, of lines, and of JSON values. Pure, given the random numbers."""

from __future__ import annotations

import copy
import io
import json
from random import Random
from typing import Any

import orjson

# Values that break assumptions: of sign, size, type, depth and characters.
_ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 63, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**18, 0.0, -0.5, 1e308, 1e-308,
    1.5, "", " ", "x", "-1", "1e3", "null", "\u0000", "\ud7ff", "é" * 50, "1970-01-01T00:00:00Z",
    "9999-12-31T23:59:59.999999Z",
    [], {}, [[]], [None], [-1], [2**63 - 1], [1.5], ["x"], [1] * 300, list(range(300)), {"a": {"b": []}},
]  # fmt: skip
_ODD_BYTES = [
    b"\x00",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\n",
    b"\r",
    b'"',
    b"\\",
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b"9" * 30,
    b"-",
]
_DEEP = 2000


def mutated(raw: bytes, rng: Random) -> bytes:
    """One to three mutations of a text file of JSON, lines of JSON, or CSV."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        raw = rng.choice((_mutate_json, _mutate_json, _mutate_lines, mutate_bytes))(raw, rng)
    return raw


def mutate_bytes(raw: bytes, rng: Random) -> bytes:
    """Flip, put in, take out, repeat or cut off bytes anywhere."""
    at = rng.randrange(len(raw) + 1)
    end = min(len(raw), at + rng.choice((1, 1, 4, 50, 500)))
    match rng.randrange(7):
        case 0 if at < len(raw):
            return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
        case 1:
            return raw[:at] + rng.choice(_ODD_BYTES) + raw[at:]
        case 2:
            return raw[:at] + rng.choice(_ODD_BYTES) + raw[end:]
        case 3:
            return raw[:at] + raw[end:]
        case 4:
            return raw[:at] + raw[at:end] * rng.choice((2, 3, 50)) + raw[end:]
        case 5:
            return raw[:at] + rng.randbytes(rng.choice((1, 4, 64))) + raw[end:]
        case _:
            return raw[:at]


def mutate_values(records: list[Any], rng: Random) -> list[Any]:
    """Change one value somewhere in records, in a copy."""
    box = copy.deepcopy(records)
    places = list(_places(box))
    if not places:
        return box
    holder, key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1:
            holder[key] = copy.deepcopy(rng.choice(places)[0])
        case 2 if isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        case 3 if isinstance(holder, dict):
            holder[rng.choice(("x", key + "s", key.upper(), "id", "type"))] = holder.pop(key)
        case 4 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = rng.choice((-holder[key], holder[key] + 1, holder[key] * 1000, str(holder[key])))
        case _:
            holder[key] = copy.deepcopy(rng.choice(_ODD_VALUES))
    return box


def _mutate_json(raw: bytes, rng: Random) -> bytes:
    lines = raw.splitlines(keepends=True)
    if not lines:
        return raw
    at = rng.randrange(len(lines))
    try:
        value = orjson.loads(lines[at])
    except orjson.JSONDecodeError:
        return mutate_bytes(raw, rng)
    if rng.randrange(40) == 0:
        lines[at] = b"[" * _DEEP + b"]" * _DEEP + b"\n"
    else:
        lines[at] = b"".join(_json(value) + b"\n" for value in mutate_values([value], rng))
    return b"".join(lines)


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits, or a lone surrogate: the standard library writes them
        return json.dumps(value).encode()


def _mutate_lines(raw: bytes, rng: Random) -> bytes:
    lines = raw.splitlines(keepends=True)
    if not lines:
        return raw
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(other, lines[at])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            # Cells of CSV, or parts of JSON that a comma ends.
            parts = lines[at].split(b",")
            parts[rng.randrange(len(parts))] = rng.choice(_ODD_BYTES)
            lines[at] = b",".join(parts)
    return b"".join(lines)


def _places(value: Any) -> Any:
    """Every (holder, key) in nested lists and objects."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)


def parquet_of(records: list[Any]) -> bytes | None:
    """Records as a Parquet file; None where they are no table."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    out = io.BytesIO()
    try:
        pq.write_table(pa.Table.from_pylist(records), out)
    except (pa.ArrowException, AttributeError, TypeError, ValueError, KeyError, OverflowError):
        return None
    return out.getvalue()
