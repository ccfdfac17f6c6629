"""Cache events of what LMCache has stored; SGLang publishes its own tiers only. Checked against sglang 0.5.23.

Pages appear with medium ``EXTERNAL``, the name that SGLang has for a shared or remote pool, in order with the events of
the device. LMCache says of no page that it dropped it: that shows in the next lookup (``request_facts``).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.kv_events import BlockStored, StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder


def publish_stored(events: KVCacheEventRecorder, node: Any, start: int, end: int) -> None:
    """Say that LMCache has tokens ``start`` to ``end``, whole pages, of the path that ends at ``node``."""
    if not events.enabled:
        return
    path: list[Any] = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    at, page = 0, events.page_size
    for one in reversed(path):
        first, last = max(start - at, 0) // page, (min(end - at, len(one.key)) + page - 1) // page
        at += len(one.key)
        if first >= last:
            continue
        whole = KVCacheEventRecorder(
            enabled=True, page_size=page, dynamo_format=events.dynamo_format, lora_names=events.lora_names
        )
        whole.record_store(one, medium=StorageMedium.EXTERNAL)
        for event in whole.take():
            events.enqueue(part(event, first, last))


def part(event: BlockStored, first: int, last: int) -> BlockStored:
    """Pages ``first`` to ``last`` of an event."""
    parents = [event.parent_block_hash, *event.block_hashes]
    return BlockStored(
        block_hashes=event.block_hashes[first:last],
        parent_block_hash=parents[first],
        token_ids=event.token_ids[first * event.block_size : last * event.block_size],
        block_size=event.block_size,
        lora_id=event.lora_id,
        medium=event.medium,
        cache_salt=event.cache_salt,
        session_id=event.session_id,
        lora_name=event.lora_name,
    )
