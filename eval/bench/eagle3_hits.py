"""What EAGLE3 costs in prefix hits, and why: ``python -m eval.bench.eagle3_hits`` replays one trace against several
servers of the tiny M3, one after the other, and prints the hit rates side by side.

The draft is random and hardly ever accepted, which is no matter here: what a verification leaves in the cache has the
length of the answer whatever was accepted. Every rate stands beside the number of answers that are those of the server
without drafts.

What is told apart: SGLang keys an EAGLE tree by pairs of neighbouring tokens, ``agentserve launch --eagle3`` by tokens.
What pairs must lose follows from the prefix lengths and is printed beside what they do lose.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentserve.checkpoint.tiny import write_tiny_checkpoint
from agentserve.checkpoint.tiny_eagle3 import write_tiny_eagle3
from agentserve.launch.tiny import tiny_server
from radix_cache.rates import hit_tokens
from traces.replay import read_run
from traces.replay.config import ReplayConfig
from traces.replay.record import RequestRecord
from traces.replay.run import replay

PAGE = 128
# Blocks of 64 tokens, as recorded traces have: every other common prefix ends on a page.
TRACE = "generated:preset=tiny,sessions=5,seed=3,block_size=64"
Key = tuple[str, str, int]


class Row(NamedTuple):
    """One server's replay."""

    name: str
    requests: int
    prompt_tokens: int
    hit: int
    equal_answers: int
    steps: int

    @property
    def rate(self) -> float:
        return self.hit / self.prompt_tokens


def pair_key_loss(records: Iterable[RequestRecord], page: int) -> int:
    """Tokens that keys of pairs must lose: a common prefix of n tokens holds n - 1 pairs."""
    return sum(
        hit_tokens(r.shared_output_lcp, r.prompt_tokens, page)
        - hit_tokens(max(r.shared_output_lcp - 1, 0), r.prompt_tokens, page)
        for r in records
    )


def row_of(name: str, records: Mapping[Key, RequestRecord], reference: Mapping[Key, RequestRecord]) -> Row:
    """Sums over a run; answers are compared with those of ``reference``."""
    return Row(
        name,
        len(records),
        sum(r.prompt_tokens for r in records.values()),
        sum(r.cached_tokens or 0 for r in records.values()),
        sum(r.output_sha256 == reference[key].output_sha256 for key, r in records.items()),
        sum(sum(r.accepted_drafts or []) for r in records.values()),
    )


def line(row: Row, against: Row) -> str:
    """A printed row: rate, its difference in points and tokens, equal answers, verification steps."""
    difference = 100 * (row.rate - against.rate)
    return (
        f"{row.name:<34}{100 * row.rate:8.3f} %{difference:+9.3f} points{row.hit - against.hit:+9,} tokens"
        f"{row.equal_answers:7}/{row.requests} answers equal{row.steps:9,} steps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default=TRACE)
    parser.add_argument("--capacity", type=int, default=131_072, help="tokens of KV cache")
    parser.add_argument("--concurrency", type=int, default=1, help="1: all servers see one order of requests")
    parser.add_argument("--max-output", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eagle3-hits-") as name:
        folder = Path(name)
        target, draft = write_tiny_checkpoint(folder / "m3"), write_tiny_eagle3(folder / "draft")

        def play(label: str, capacity: int, **eagle3: Any) -> dict[Key, RequestRecord]:
            """Replay against a server of its own; records by turn."""
            overrides = {"kv.capacity_tokens": capacity, **{f"eagle3.{k}": v for k, v in eagle3.items()}}
            with tiny_server(overrides, checkpoint=target, log=folder / f"{label}.log") as server:
                config = ReplayConfig(
                    trace=arguments.trace, out=folder / label, url=server.plan.url, think="none",
                    concurrency=arguments.concurrency, max_output=arguments.max_output,
                )  # fmt: skip
                result = replay(config)
            if result.status != "finished":
                raise SystemExit(f"{label}: the replay ended as {result.status}")
            return {(r.session, r.flow, r.turn): r for r in read_run(folder / label).records()}

        off = play("off", arguments.capacity)
        reference = row_of("no drafts", off, off)
        print(line(reference, reference), flush=True)
        for title, keys in (("EAGLE3, pair keys (SGLang)", "pair"), ("EAGLE3, token keys (agentserve)", "token")):
            made = play(keys, arguments.capacity, draft=str(draft), radix_keys=keys)
            print(line(row_of(title, made, off), reference), flush=True)
        print(f"{'':34}pair keys must lose {pair_key_loss(off.values(), PAGE):,} tokens by theory")


if __name__ == "__main__":
    main()
