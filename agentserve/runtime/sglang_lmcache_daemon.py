"""LMCache's connector with a daemon that may be away: registered anew when it returns, out of use meanwhile.

LMCache 0.5.6 registers once, in its constructor, and ends the engine where that fails. Checked against lmcache 0.5.6.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any

import psutil

from agentserve.runtime.offload_counters import OffloadCounters
from agentserve.runtime.sglang_lmcache_ranks import RankConnector
from offload.processes import dead, listener
from offload.settings import OffloadError, OffloadSettings

logger = logging.getLogger(__name__)


class DaemonConnector(RankConnector):
    """Takes ``RankConnector``'s arguments. It starts without a daemon, too, and uses it once it is there."""

    def __init__(self, *, settings: OffloadSettings, tp_rank: int, **kwargs: Any) -> None:
        self._offload = settings
        self.online = False  # whether the daemon is in use on this rank; set by whoever sees something
        self._daemon: psutil.Process | None = None
        self.counters = OffloadCounters(tp_rank, enabled=False)
        super().__init__(settings=settings, tp_rank=tp_rank, **kwargs)
        self._heartbeat_thread = threading.Thread(target=self._watch, name="agentserve-offload-watch", daemon=True)
        self._heartbeat_thread.start()

    def _get_chunk_size(self) -> int:
        return self._offload.chunk_tokens  # upstream asks the daemon, which need not be there yet

    def register_kv_cache(self) -> None:
        """Called by upstream's constructor once the tensors are known."""
        try:
            self._connect()
        except OffloadError:
            raise
        except Exception as error:
            logger.warning(
                "no LMCache daemon at %s: serving without offload until there is (%s)", self.server_url, error
            )

    def _connect(self) -> None:
        """Register with the daemon under a new id, so that it refuses what an earlier registration left in flight.

        Raises:
            OffloadError: the daemon's chunks have another size.
            Exception: it does not answer.
        """
        self._req_client.ping(None).result(timeout=self._offload.ping_deadline)
        chunk = int(self._req_client.get_chunk_size().result(timeout=self._offload.ping_deadline))
        if chunk != self.chunk_size:
            raise OffloadError(
                f"the LMCache daemon at {self.server_url} has chunks of {chunk} tokens, this server expects "
                f"{self.chunk_size}; start it with "
                f"--chunk-size {self.chunk_size}, or set offload.chunk_tokens to {chunk}"
            )
        before = self._transfer_ctx
        if before is not None:
            before.unregister()
        self.instance_id = uuid.uuid4().int & ((1 << 63) - 1)
        self._registered = False
        super().register_kv_cache()
        self._daemon = listener(int(self.server_url.rpartition(":")[2]))
        self.online = True
        self.counters.online(True)
        logger.info("LMCache daemon at %s is in use", self.server_url)

    def _watch(self) -> None:
        """Ask the daemon for signs of life until the connector is closed; come back to it when it returns."""
        complained = False
        while not self._heartbeat_stop.wait(self._offload.ping_interval):
            try:
                self._req_client.ping(self.instance_id).result(timeout=self._offload.ping_deadline)
                if not self.online:
                    self._connect()
                    complained = False
                self.on_sign_of_life()
            except Exception as error:
                self._trouble(f"no sign of life: {error}")
                if isinstance(error, OffloadError) and not complained:
                    logger.error("%s", error)
                    complained = True

    def on_sign_of_life(self) -> None:
        """The daemon has answered just now; called in the watching thread."""

    def _trouble(self, what: str) -> None:
        """A missed deadline or a refusal: nothing is used until the daemon has been registered with again."""
        if self.online:
            logger.warning("LMCache daemon at %s is not used for now: %s", self.server_url, what)
            self.counters.lost()
        self.online = False
        self.counters.online(False)

    def daemon_gone(self) -> Callable[[], bool]:
        """Whether the daemon of this moment is known to be dead, as a function to ask later."""
        daemon = self._daemon

        def gone() -> bool:
            return daemon is not None and not (self.online and daemon is self._daemon) and dead(daemon)

        return gone

    def all_online(self) -> bool:
        """Whether the daemon is in use on every rank. All ranks must ask together."""
        return bool(self._sync_success(self.online))

    def _ensure_heartbeat_started(self) -> None:
        """Upstream's heartbeat only logs; ``_watch`` takes its place."""

    @property
    def deadlines(self) -> tuple[float, float, float]:
        """Seconds after which a lookup, a load and a store are given up."""
        return self._offload.lookup_deadline, self._offload.load_deadline, self._offload.store_deadline

    @property
    def operation_timeout(self) -> float:
        return self._offload.load_deadline  # a flush waits this long for what is in flight
