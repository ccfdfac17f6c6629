"""What a server says of its drafting: from SGLang's arguments and agentserve's gauge at ``/metrics``. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from traces.replay.record import Speculation

_GAUGE = re.compile(r"^agentserve_speculation\{(.*)\} \S+$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def speculation_of(server: Mapping[str, Any], metrics: str) -> Speculation | None:
    """How the server speculates; None where it does not.

    Args:
        server: the answer of ``/server_info`` (SGLang 0.5.23).
        metrics: the text of ``/metrics``, empty where there is none. SGLang's own answers do not tell synthetic
            acceptance from real: only what ``agentserve launch`` exports does.
    """
    algorithm = server.get("speculative_algorithm")
    if not algorithm:
        return None
    gauge = _GAUGE.search(metrics)
    labels = dict(_LABEL.findall(gauge.group(1))) if gauge else {}
    return Speculation.model_validate(
        {
            "algorithm": algorithm,
            "drafts": server.get("speculative_num_steps"),
            "mode": labels.get("mode", "unknown"),
            "length": float(labels["length"]) if labels.get("length") else None,
            "keys": labels.get("keys"),
        }
    )
