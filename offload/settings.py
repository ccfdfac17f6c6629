"""How ``agentserve launch`` tells the server's processes to offload, and how long anything may wait."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal

import orjson

SETTINGS_VARIABLE = "AGENTSERVE_OFFLOAD"

# What a daemon has: host memory only, more that it tells of (``offload.lmcache_tiers``), or something it does not tell.
Tiers = Literal["host", "told", "unknown"]


class OffloadError(ValueError):
    """Settings, a pool or a daemon that offloading cannot work with. The message says what to do."""


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """One server's view of its daemon. Times are seconds.

    Attributes:
        host: where the daemon listens; it maps the server's memory, so it runs on the same machine.
        port: of its request socket (ZMQ).
        rank_addresses: host:port of each tensor-parallel rank's own daemon, by rank; empty where ``host`` and ``port``
            serve all ranks.
        chunk_tokens: tokens of one stored object, a multiple of the page size; the daemon must say the same.
        lookup_deadline: after it a lookup counts as a miss.
        load_deadline: after it a load is given up, its slots are quarantined and the prefix is recomputed. The
            scheduler waits for a load, so this is also the longest pause of all other requests.
        store_deadline: after it a store is given up and its tokens may be evicted again.
        store_delay: with one of our policies, between the end of a request and the decision what of it to store.
        ping_interval: between two signs of life asked of the daemon.
        ping_deadline: how long such a sign may take before the daemon counts as lost.
        register_deadline: how long registering the KV cache with the daemon may take.
        tiers: what the daemon restores from, for the counters.
        verify: seal every stored page with a checksum and check it when it is restored.
    """

    host: str = "127.0.0.1"
    port: int = 5555
    rank_addresses: tuple[str, ...] = ()
    chunk_tokens: int = 256
    lookup_deadline: float = 2.0
    load_deadline: float = 5.0
    store_deadline: float = 10.0
    store_delay: float = 1.0
    ping_interval: float = 1.0
    ping_deadline: float = 2.0
    register_deadline: float = 10.0
    tiers: Tiers = "unknown"
    verify: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not value > 0:
                raise OffloadError(f"offload setting '{field.name}' must be more than 0 seconds, got {value}")
        if not 1 <= self.port <= 65535:
            raise OffloadError(f"offload setting 'port' must be 1 to 65535, got {self.port}")
        for address in self.rank_addresses:
            parse_address(address)
        if self.chunk_tokens < 1:
            raise OffloadError(f"offload setting 'chunk_tokens' must be at least 1, got {self.chunk_tokens}")

    def address(self, rank: int, ranks: int) -> tuple[str, int]:
        """Host and port of the daemon of one tensor-parallel rank.

        Raises:
            OffloadError: the daemons are not as many as the ranks.
        """
        if not self.rank_addresses:
            return self.host, self.port
        if len(self.rank_addresses) != ranks:
            raise OffloadError(
                f"offload names {len(self.rank_addresses)} daemons for {ranks} tensor-parallel ranks; give one, or one "
                "a rank"
            )
        return parse_address(self.rank_addresses[rank])

    def environment(self) -> dict[str, str]:
        """Variables for the server: ours, and LMCache's own configuration (it reads these instead of a file)."""
        extra = {
            # LMCache on a CPU would choose the other mode, which carries one tensor geometry only: M3 has two.
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            "lmcache.mp.mq_timeout": self.register_deadline,
        }
        return {
            SETTINGS_VARIABLE: orjson.dumps(asdict(self)).decode(),
            "LMCACHE_MP_HOST": self.host,
            "LMCACHE_MP_PORT": str(self.port),
            "LMCACHE_EXTRA_CONFIG": orjson.dumps(extra).decode(),
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_LOG_LEVEL": "WARNING",
        }


def parse_address(text: str) -> tuple[str, int]:
    """``host:port`` as a pair. Raises OffloadError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise OffloadError(f"address {text!r}: write it as host:port")
    return host, int(port)


def settings_from(environment: Mapping[str, str] = os.environ) -> OffloadSettings | None:
    """What was asked for; None where nothing was, and then nothing of this may touch SGLang.

    Raises:
        OffloadError: the variable does not hold settings.
    """
    text = environment.get(SETTINGS_VARIABLE)
    if not text:
        return None
    try:
        values = orjson.loads(text)
        return OffloadSettings(**{**values, "rank_addresses": tuple(values.get("rank_addresses", ()))})
    except (orjson.JSONDecodeError, TypeError, AttributeError) as error:
        raise OffloadError(
            f"environment variable {SETTINGS_VARIABLE} does not hold offload settings: {error}"
        ) from None
