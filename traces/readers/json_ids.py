"""Parse a session's JSON without making a Python object of every block id.

Nearly all bytes of a Weka session are ``hash_ids``, and nearly every list begins with the ids of the list before it,
since a turn repeats the conversation. So the lists are cut out of the text, what a list repeats is taken from
the array before it, and only what is new is parsed. The rest of the document is small.

This is exact, not approximate: wherever the text is not of the simple form (no backslash anywhere, and behind every
``"hash_ids"`` a flat list of integers) the whole document is parsed as usual, so errors are those of the JSON parser.
"""

from __future__ import annotations

import re

import numpy as np
import orjson

from traces.model import BlockIds
from traces.readers.ids import NO_IDS, block_ids

_KEY = b'"hash_ids"'
_OPENING = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*\[")


def loads(raw: bytes) -> tuple[object, list[BlockIds] | None]:
    """The document, and the arrays that its ``hash_ids`` are indices of; (document, None) if it was parsed as usual.

    Raises:
        orjson.JSONDecodeError: it is no valid JSON.
    """
    taken = _take_lists(raw)
    if taken is not None:
        rest, arrays = taken
        try:
            return orjson.loads(rest), arrays
        except orjson.JSONDecodeError:
            pass  # tell the position in the whole document instead
    return orjson.loads(raw), None


def _take_lists(raw: bytes) -> tuple[bytes, list[BlockIds]] | None:
    # Without a backslash no quote is escaped, so the key cannot be part of a string.
    if b"\\" in raw:
        return None
    parts: list[bytes] = []
    arrays: list[BlockIds] = []
    text, ids, at = b"", NO_IDS, 0
    while (key := raw.find(_KEY, at)) >= 0:
        opening = _OPENING.match(raw, key + len(_KEY))
        end = -1 if opening is None else raw.find(b"]", opening.end())
        if opening is None or end < 0:
            return None
        before, text = text, raw[opening.end() : end]
        following = _following(before, ids, text)
        if following is None:
            return None
        ids = following
        parts += (raw[at : opening.end() - 1], b"%d" % len(arrays))
        arrays.append(ids)
        at = end + 1
    parts.append(raw[at:])
    return b"".join(parts), arrays


def _following(before: bytes, ids: BlockIds, text: bytes) -> BlockIds | None:
    """The integers of ``text``, given that ``before`` are those of ``ids``; None if it is no list of integers."""
    shared = _shared_text(before, text) if len(ids) else 0
    count = before.count(b",", 0, shared) + 1 if shared else 0
    rest = text[shared + 1 :] if 0 < shared < len(text) else text[shared:]
    if shared and not rest.strip():
        return ids[:count] if shared == len(text) else None  # a comma without a number is no JSON
    try:
        new = block_ids(orjson.loads(b"[%b]" % rest))
    except orjson.JSONDecodeError:
        return None
    return None if new is None else np.concatenate([ids[:count], new])


def _shared_text(before: bytes, text: bytes) -> int:
    """How many leading bytes are the same whole numbers in both: up to a comma or an end in both texts."""
    if text.startswith(before) and text[len(before) : len(before) + 1] in (b"", b","):
        return len(before)
    length = min(len(before), len(text))
    differs = np.frombuffer(before, np.uint8, length) != np.frombuffer(text, np.uint8, length)
    same = int(differs.argmax()) if differs.any() else length
    return max(0, before.rfind(b",", 0, same))
