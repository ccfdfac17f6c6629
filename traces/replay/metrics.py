"""The server's counters while a run goes on, on the run's clock: ``RUN/metrics.jsonl``.

A line a sample::

    {"at": <run's clock, seconds>, "took": <seconds that the server needed>, "values": {SERIES: number, ...}}

``SERIES`` is a counter's or gauge's name with its labels, as at ``/metrics``:
``agentserve_offload_tokens_total{event="restored",rank="0"}``. Histograms, what Python says of itself, and labels that
name the model or the process are left out. The first line after a start or resume (``"whole": true``) has every series,
the following ones those that changed; ``read_metrics`` puts them together again.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import orjson
from prometheus_client.parser import text_string_to_metric_families

METRICS = "metrics.jsonl"
_KINDS = ("counter", "gauge", "unknown")
_NOT_OURS = ("python_", "process_")
_SAME_EVERYWHERE = frozenset({"model_name", "engine_type", "pid", "pp_rank", "moe_ep_rank", "engine"})
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class MetricsError(ValueError):
    """Samples that cannot be read. The message names file and line and says what to do."""


class Sample(NamedTuple):
    """All counters and gauges at one moment; ``at_s`` in seconds of the run's clock."""

    at_s: float
    values: Mapping[str, float]  # by series


def counters_of(text: str) -> dict[str, float]:
    """Counters and gauges of a ``/metrics`` page, by series; series that differ in dropped labels only are added up.

    Raises:
        ValueError: no Prometheus text format.
    """
    values: dict[str, float] = {}
    # Most lines of such a page are buckets of histograms, and the parser is slow.
    kept = "\n".join(line for line in text.split("\n") if "_bucket{" not in line)
    for family in text_string_to_metric_families(kept):
        if family.type not in _KINDS or family.name.startswith(_NOT_OURS):
            continue
        for sample in family.samples:
            if sample.name.endswith("_created") or not math.isfinite(sample.value):
                continue
            names = sorted(sample.labels.keys() - _SAME_EVERYWHERE)
            labels = [f'{name}="{_escaped(sample.labels[name])}"' for name in names]
            series = f"{sample.name}{{{','.join(labels)}}}" if labels else sample.name
            values[series] = values.get(series, 0.0) + sample.value
    return values


def total(values: Mapping[str, float], name: str, **labels: str) -> float | None:
    """Sum over the series of a counter or gauge that have these labels; None where there is none.

    ``name`` is as at ``/metrics``, for counters with its ``_total``.
    """
    found = [value for series, value in values.items() if _is(series, name, labels)]
    return sum(found) if found else None


def over_time(samples: list[Sample], name: str, **labels: str) -> list[tuple[float, float]]:
    """(seconds, value) of one counter or gauge, where it was known; see ``total``."""
    series = [(sample.at_s, total(sample.values, name, **labels)) for sample in samples]
    return [(at, value) for at, value in series if value is not None]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _is(series: str, name: str, labels: Mapping[str, str]) -> bool:
    own, _, rest = series.partition("{")
    return own == name and labels.items() <= dict(_LABEL.findall(rest)).items()


class MetricsLog:
    """Takes samples until it is cancelled.

    Args:
        file: appended to.
        metrics: the server's counters as text; empty where it tells none, which ends the sampling.
        clock: seconds of the run.
        every_s: seconds between samples.
    """

    def __init__(
        self, file: Path, metrics: Callable[[], Awaitable[str]], clock: Callable[[], float], every_s: float
    ) -> None:
        self._file = file
        self._metrics = metrics
        self._clock = clock
        self._every = every_s
        self._known: dict[str, float] = {}

    async def run(self) -> None:
        """One sample every ``every_s`` seconds; the first and the last one are the caller's, by ``sample``."""
        more = True
        while more:
            await asyncio.sleep(self._every)
            more = await self.sample()

    async def sample(self) -> bool:
        """Take a sample now; False where the server tells no counters."""
        asked, at = time.monotonic(), self._clock()
        text = await self._metrics()
        took = time.monotonic() - asked
        try:
            values = await asyncio.to_thread(counters_of, text)  # beside the requests' streams
        except ValueError:
            return False
        if not values:
            # A server without counters has none later; one that is busy or restarting has had some before.
            return bool(self._known)
        changed = {series: value for series, value in values.items() if self._known.get(series) != value}
        line: dict[str, object] = {"at": at, "took": took, "values": changed}
        if not self._known:
            line["whole"] = True
        self._known |= changed
        with self._file.open("ab") as file:
            file.write(orjson.dumps(line) + b"\n")
        return True


@asynccontextmanager
async def sampled(
    file: Path, metrics: Callable[[], Awaitable[str]], clock: Callable[[], float], every_s: float
) -> AsyncIterator[None]:
    """Take samples before, meanwhile and at the end; none where ``every_s`` is 0. Arguments as in ``MetricsLog``.

    The first one is over before anything else is sent: beside it, the first requests would need new connections at
    the same moment, and might reach the server in another order than they were sent in.
    """
    log = MetricsLog(file, metrics, clock, every_s)
    if not every_s or not await log.sample():
        yield
        return
    sampling = asyncio.create_task(log.run())
    try:
        yield
    finally:
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
        await log.sample()


def read_metrics(run: Path) -> list[Sample]:
    """The samples of a run directory, in order, each with all series; empty where none were taken.

    Raises:
        MetricsError: a faulty line that is not a half-written last one.
    """
    file = run / METRICS
    if not file.exists():
        return []
    samples: list[Sample] = []
    values: dict[str, float] = {}
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if not raw.endswith(b"\n"):
                break
            try:
                line = orjson.loads(raw)
                changed = {str(series): float(value) for series, value in line["values"].items()}
                values = changed if line.get("whole") else values | changed
                samples.append(Sample(float(line["at"]), values))
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
                raise MetricsError(
                    f"{file}, line {number}: {error!r}; the file was damaged after it was written; remove {METRICS} to "
                    "report without it"
                ) from error
    return samples
