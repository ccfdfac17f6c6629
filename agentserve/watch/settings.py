"""How ``agentserve launch`` asks the server's processes to be watched: one environment variable."""

from __future__ import annotations

import os
from collections.abc import Mapping

WATCH_VARIABLE = "AGENTSERVE_WATCH"
PAGE = "/agentserve/watch"  # path of the page; its data is at ``PAGE.json``
# The same page where SGLang asks for no key (as for metrics): a browser cannot send one, and the page holds no data.
OPEN_PAGE = "/metrics/watch"


def asked_for(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the server was launched to be watched; else nothing of this touches SGLang."""
    return environment.get(WATCH_VARIABLE) == "1"
