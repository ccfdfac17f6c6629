"""Which runs may be compared, and what a reader has to know when they are. Pure.

Refused is what would compare two different questions. Warned of is what the comparison may be about, or what may
explain it. The server's own arguments are listed where they differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from eval.compare.schema import Doubt
from eval.report.completeness import status_of
from eval.report.load import Run
from traces.replay.metrics import counters_of, total
from traces.replay.record import RunHeader

# Differ from start to start, and mean nothing.
_ALWAYS_DIFFERENT = (
    "startup_time", "launch_command", "port", "nccl_port", "random_seed", "kv_events_config", "log_file", "host",
    "last_gen_throughput", "token_capacity", "status", "internal_states",
)  # fmt: skip


# Counters of agentserve/runtime; ``tests/test_compare.py`` compares them with the audit's.
REUSED = "agentserve_index_selections_reused_total"
EVICTED = "agentserve_evicted_tokens_total"


class _Rule(NamedTuple):
    what: str
    level: Literal["refuse", "warn"]
    value: Callable[[RunHeader], object]
    text: str


def _acceptance(header: RunHeader) -> str:
    speculation = header.server.speculation
    return "none" if speculation is None else speculation.mode


def _drafts(header: RunHeader) -> str:
    s = header.server.speculation
    if s is None:
        return "none"
    length = f", length {s.length}" if s.length is not None else ""
    return f"{s.algorithm}, {s.drafts} drafts{length}, {s.keys or 'unknown'} keys"


def _numbers(header: RunHeader) -> str:
    kv, weights = (header.server.args.get(name) for name in ("kv_cache_dtype", "quantization"))
    return f"K/V {kv or 'not told'}, weights {weights or 'as they are'}"


def _filter(header: RunHeader) -> str:
    return ", ".join(f"{key} {value}" for key, value in header.filter.items() if value is not None) or "none"


_RULES = (
    _Rule("data set", "refuse", lambda h: f"{h.trace} ({h.trace_sha256[:12]})",
          "they sent other requests: their rates are of other prompts"),
    _Rule("prefix sharing", "refuse", lambda h: h.prefix_sharing, "the same trace, but other prompts were sent"),
    _Rule("client", "refuse", lambda h: h.server.client,
          "prompts of a text protocol have the server's own lengths, so rates are over other tokens"),
    _Rule("acceptance", "refuse", _acceptance,
          "with synthetic acceptance drafts are kept whatever the model says: its answers and times are no measurement"
          " of the same thing"),
    _Rule("model", "warn", lambda h: h.server.model, "times of two models are no difference of caches"),
    _Rule("number format", "warn", _numbers,
          "rounded numbers give other answers: a gain in memory or time counts only beside what the answers are worth"),
    _Rule("filter", "warn", _filter, "the filters differ, though the same requests were sent"),
    _Rule("page size", "warn", lambda h: h.server.page_size, "theory and page alignment are of two different caches"),
    _Rule("drafts", "warn", _drafts, "speculation changes times, and with EAGLE the cache's key"),
    _Rule("history", "warn", lambda h: h.history, "later prompts hold other answers"),
    _Rule("seed", "warn", lambda h: h.seed, "the prompts have the same lengths and other tokens"),
    _Rule("engine", "warn", lambda h: h.server.engine_version, "another engine version"),
    _Rule("concurrency", "warn", lambda h: h.concurrency, "another load"),
    _Rule("think times", "warn", lambda h: ", ".join(f"{k} {v}" for k, v in sorted(h.think.items())), "another load"),
    _Rule("KV capacity", "warn", lambda h: h.server.kv_capacity_tokens, "another cache size"),
)  # fmt: skip


def doubts(runs: Sequence[Run]) -> list[Doubt]:
    """What differs between the runs, refusals first."""
    found = []
    for rule in _RULES:
        values = [str(rule.value(run.header)) for run in runs]
        if len(set(values)) > 1:
            found.append(Doubt(level=rule.level, what=rule.what, values=values, text=rule.text))
    for what, told, text in (
        ("index reuse", index_reuse, "layers that take over a selection read other blocks, so answers can differ: a"
         " gain in time counts only beside what the answers are worth"),
        ("policy", policy, "another rule of what goes first"),
    ):  # fmt: skip
        said = [told(run) for run in runs]
        if len(set(said)) > 1:
            found.append(Doubt(level="warn", what=what, values=said, text=text))
    ends = [status_of(run.events) for run in runs]
    if set(ends) != {"finished"}:
        found.append(
            Doubt(
                level="warn",
                what="completeness",
                values=list(ends),
                text="a run that did not finish lacks requests; only those that both have are paired",
            )
        )
    return sorted(found, key=lambda doubt: doubt.level != "refuse")


def index_reuse(run: Run) -> str:
    """Whether layers took over selections during the run; no argument of a server tells it, only its counter."""
    if run.metrics is None:
        return "unknown"
    before, after = (total(_counters(text), REUSED) or 0.0 for text in run.metrics)
    return "on" if after > before or 0 < after < before else "off"  # fewer: the server was started again


def policy(run: Run) -> str:
    """Which eviction policy of agentserve the server ran; SGLang's own is among its arguments."""
    args = run.header.server.args
    if args.get("radix_cache_backend") != "agentserve":
        return "SGLang's own"
    series = "" if run.metrics is None else next((s for s in _counters(run.metrics[1]) if s.startswith(EVICTED)), "")
    named = re.search(r'policy="([^"]*)"', series)
    return named[1] if named else "agentserve's, not told which"


def _counters(text: str) -> dict[str, float]:
    try:
        return counters_of(text)
    except ValueError:
        return {}  # the report of that run says that its counters cannot be read


def server_differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The servers' own arguments that differ, one value a run."""
    names = sorted({name for run in runs for name in run.header.server.args} - set(_ALWAYS_DIFFERENT))
    table = {name: [str(run.header.server.args.get(name, "-")) for run in runs] for name in names}
    return {name: values for name, values in table.items() if len(set(values)) > 1}
