"""What a recipe says about offloading, and what follows from it for the server and its daemon."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from offload.daemon import DaemonSpec, RedisClient, redis_adapter
from offload.settings import OffloadError, OffloadSettings

_OF_OUR_DAEMON = ("port", "http_port", "memory_gb", "l2", "redis_client")
_TIMES = OffloadSettings()


class Offload(BaseModel):
    """A second tier for cached prefixes (docs/design/offload.md); off without a backend. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["lmcache"] | None = None
    address: str | None = None  # host:port of a daemon that runs on this machine already; None: one is started
    port: int = Field(default=5555, ge=1, le=65535)  # of our daemon: requests
    http_port: int = Field(default=5556, ge=1, le=65535)  # and its health
    memory_gb: float = Field(default=4.0, gt=0)  # of host memory, for all ranks together
    chunk_tokens: int = Field(default=256, ge=1)  # of one stored object: shorter prefixes are not offloaded
    l2: str | None = None  # redis://host:port behind the host memory; None: nothing
    redis_client: RedisClient = "valkey"
    verify: bool = True  # seal every page with a checksum
    lookup_deadline: float = Field(default=_TIMES.lookup_deadline, gt=0)
    load_deadline: float = Field(default=_TIMES.load_deadline, gt=0)
    store_deadline: float = Field(default=_TIMES.store_deadline, gt=0)

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
            host, colon, port = self.address.rpartition(":")
            if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
                raise ValueError(f"address {self.address!r}: write it as host:port")
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

    def settings(self) -> OffloadSettings:
        """What the server's processes need to know."""
        host, port = "127.0.0.1", self.port
        if self.address is not None:
            host, _, text = self.address.rpartition(":")
            port = int(text)
        return OffloadSettings(
            host=host,
            port=port,
            chunk_tokens=self.chunk_tokens,
            lookup_deadline=self.lookup_deadline,
            load_deadline=self.load_deadline,
            store_deadline=self.store_deadline,
            verify=self.verify,
        )

    def daemon(self, ranks: int) -> DaemonSpec:
        """The daemon to start for a server of that many tensor-parallel ranks."""
        return DaemonSpec(
            host="127.0.0.1",
            port=self.port,
            http_port=self.http_port,
            chunk_tokens=self.chunk_tokens,
            memory_gb=self.memory_gb,
            workers=ranks,
            l2=self.l2,
            redis_client=self.redis_client,
        )
