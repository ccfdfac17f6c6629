"""SGLang's output streamer, which puts our facts of a request into its answer. Checked against sglang 0.5.23.

``SchedulerOutputStreamer`` is made to be subclassed for this (``build_additional_customized_info``); what it returns
becomes a field of ``meta_info``. With ``--incremental-streaming-output`` SGLang cuts such fields like tokens, and the
client does not see them.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sglang.srt.managers.scheduler_components import output_streamer as upstream

from agentserve.runtime.request_facts import BOOK, KEY


class FactsOutputStreamer(upstream.SchedulerOutputStreamer):
    """Adds ``meta_info["agentserve"]``, a list of one ``Facts``, to the last output of a request that has some."""

    has_additional_customized_info: ClassVar[bool] = True

    def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
        found = [BOOK.take(req.rid) if req.finished() else None for req in reqs]
        if not any(found):
            return {}
        return {KEY: [[facts] if facts else [] for facts in found]}

    def is_request_level_customized_info_key(self, key: str) -> bool:
        return key == KEY or super().is_request_level_customized_info_key(key)
