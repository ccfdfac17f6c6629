"""A short name for everything that decides what a cached prefix holds, beside its tokens.

The name is part of every key. Other weights under the same path, another layout or another setting of the model then
miss, instead of returning K and V that fit in size and in nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

SAMPLES = 16  # blocks read of each weight file
SAMPLE_BYTES = 65536
_IGNORED = {"_name_or_path", "transformers_version"}  # of config.json: they say nothing of the model


class FingerprintError(ValueError):
    """A checkpoint that cannot be read. The message names the file."""


def fingerprint(checkpoint: Path, layout: Sequence[str], settings: Mapping[str, object]) -> str:
    """32 hex digits that change when weights, config, layout or settings do.

    Weights are sampled: the header and 16 blocks of 64 KiB of every safetensors file, and its size. A checkpoint of
    hundreds of gigabytes is named in seconds; training changes all blocks, but a single patched number can go
    unseen.

    Args:
        checkpoint: folder with ``config.json`` and safetensors files.
        layout: one text for each plane (its place, shape of a page, element type), in the order they are stored.
        settings: what else changes K and V: element types, quantisation, index reuse.

    Raises:
        FingerprintError: the folder or a file cannot be read, or there are no weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        config = orjson.loads((checkpoint / "config.json").read_bytes())
        files = sorted(checkpoint.glob("*.safetensors"))
        if not files:
            raise FingerprintError(f"{checkpoint} holds no safetensors files: nothing tells its weights apart")
        kept = {name: value for name, value in config.items() if name not in _IGNORED}
        digest.update(orjson.dumps([kept, list(layout), dict(settings)], option=orjson.OPT_SORT_KEYS))
        for file in files:
            _sample(file, digest)
    except (OSError, orjson.JSONDecodeError, TypeError) as error:
        raise FingerprintError(f"{checkpoint}: cannot fingerprint the checkpoint: {error}") from None
    return digest.hexdigest()


def _sample(file: Path, digest: hashlib.blake2b) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size}\n".encode())
    span = max(1, (size - SAMPLE_BYTES) // (SAMPLES - 1))
    with file.open("rb") as handle:
        for number in range(SAMPLES):
            handle.seek(min(number * span, max(0, size - SAMPLE_BYTES)))
            digest.update(handle.read(SAMPLE_BYTES))
