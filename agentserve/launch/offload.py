"""What a recipe says about offloading, and what follows from it for the server and its daemon."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from offload.daemon import DaemonSpec, RedisClient, redis_adapter
from offload.settings import OffloadError, OffloadSettings, parse_address

_OF_OUR_DAEMON = ("port", "http_port", "memory_gb", "daemons", "l2", "redis_client")
_TIMES = OffloadSettings()


class Offload(BaseModel):
    """A second tier for cached prefixes (docs/design/offload.md); off without a backend. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["lmcache"] | None = None
    address: str | None = (
        None  # host:port of a running daemon on this machine, or one a rank, comma between; None: ours
    )
    daemons: Literal["per_rank", "one"] = "per_rank"  # for a server of several tensor-parallel ranks
    port: int = Field(default=5555, ge=1, le=65535)  # of our daemon: requests; the next rank's is two further
    http_port: int = Field(default=5556, ge=1, le=65535)  # and its health
    memory_gb: float = Field(default=4.0, gt=0)  # of host memory, for all ranks together
    chunk_tokens: int = Field(default=256, ge=1)  # of one stored object: shorter prefixes are not offloaded
    l2: str | None = None  # redis://host:port behind the host memory; None: nothing
    redis_client: RedisClient = "valkey"
    verify: bool = True  # seal every page with a checksum
    lookup_deadline: float = Field(default=_TIMES.lookup_deadline, gt=0)
    load_deadline: float = Field(default=_TIMES.load_deadline, gt=0)
    store_deadline: float = Field(default=_TIMES.store_deadline, gt=0)
    store_delay: float = Field(default=_TIMES.store_delay, gt=0)  # with radix.policy: until what to store is decided

    @model_validator(mode="after")
    def _possible(self) -> Self:
        given = self.model_fields_set
        if self.backend is None:
            if given - {"backend"}:
                raise ValueError(f"{', '.join(sorted(given))}: set backend too, or pass --offload lmcache")
            return self
        if self.address is not None:
            ours = sorted(given & set(_OF_OUR_DAEMON))
            if ours:
                raise ValueError(f"{', '.join(ours)}: a daemon that runs already decides that; drop it or address")
            try:
                for address in self._addresses:
                    parse_address(address)
            except OffloadError as error:
                raise ValueError(str(error)) from None
        elif self.port == self.http_port:
            raise ValueError(f"port and http_port are both {self.port}")
        if self.l2 is not None:
            try:
                redis_adapter(self.l2, self.redis_client)
            except OffloadError as error:
                raise ValueError(str(error)) from None
        return self

    @property
    def starts_daemon(self) -> bool:
        return self.backend is not None and self.address is None

    @property
    def _addresses(self) -> list[str]:
        return [text.strip() for text in (self.address or "").split(",")]

    def settings(self, ranks: int) -> OffloadSettings:
        """What the processes of a server of that many tensor-parallel ranks need to know."""
        addresses = self._addresses if self.address is not None else [f"{d.host}:{d.port}" for d in self.specs(ranks)]
        host, port = parse_address(addresses[0])
        return OffloadSettings(
            host=host,
            port=port,
            rank_addresses=tuple(addresses) if len(addresses) > 1 else (),
            chunk_tokens=self.chunk_tokens,
            lookup_deadline=self.lookup_deadline,
            load_deadline=self.load_deadline,
            store_deadline=self.store_deadline,
            store_delay=self.store_delay,
            tiers="unknown" if self.address is not None else "host" if self.l2 is None else "told",
            verify=self.verify,
        )

    def specs(self, ranks: int) -> list[DaemonSpec]:
        """The daemons to start for a server of that many tensor-parallel ranks, in the order of the ranks."""
        count = ranks if self.daemons == "per_rank" else 1
        return [
            DaemonSpec(
                host="127.0.0.1",
                port=self.port + 2 * number,
                http_port=self.http_port + 2 * number,
                chunk_tokens=self.chunk_tokens,
                memory_gb=self.memory_gb / count,
                workers=ranks // count,
                l2=self.l2,
                redis_client=self.redis_client,
            )
            for number in range(count)
        ]
