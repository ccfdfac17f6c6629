"""Is a cause that was made on purpose found? Live runs on the tiny M3, each with one known cause.

``python -m eval.bench.planted_causes`` serves eight workloads that lose hits for one reason each, records them, and
asks the report for the largest cause and its size. The planted size is what the same requests hit without the plant,
served live too (one session or request at a time, no gate, the daemon awake, histories left as they were), less what
they hit with it. Only for pages of 256 it is computed from the prompts: no server runs without pages.

Beside that stands the attribution's exactness, for these runs and for EAGLE3 with token and with pair keys: what is
left over of each request's gap, what is unexplained, and whether equal requests got equal answers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from agentserve.checkpoint.config import TinyM3Shape
from agentserve.checkpoint.tiny import write_tiny_checkpoint
from agentserve.checkpoint.tiny_eagle3 import write_tiny_eagle3
from agentserve.launch.daemon import Daemon, daemon_plan
from agentserve.launch.host import free_port
from agentserve.launch.tiny import tiny_server
from eval.attribution.live import attribute_with_events, attribute_without_events
from eval.bench import planted_workloads as workloads
from eval.bench.planted_workloads import Planted
from eval.report import load_run, summarize
from eval.report.load import Run
from offload.daemon import DaemonSpec
from radix_cache.attribution import CacheKind
from radix_cache.prefix_index import TokenPrefixIndex
from traces.replay.config import ReplayConfig
from traces.replay.given import GivenPrompts
from traces.replay.run import replay
from traces.replay.tally import Tally

AMPLE, SMALL, CHUNK = 131_072, 4096, 1024
TOLERANCE = 0.05
FREEZE_AFTER = 2  # requests: the first turn of both sessions
STORED_S = 2.0  # seconds until what they left is in the offload tier
PAUSE_S = 9.0  # before the second turns: until it is noticed that the daemon is away


class Result(NamedTuple):
    """One planted run."""

    plant: str
    expected: str
    found: str | None
    planted_tokens: int
    found_tokens: int
    gap_tokens: int
    residual_tokens: int
    unexplained_tokens: int
    equal_answers: int
    answers: int  # equal requests of both runs

    @property
    def off_by(self) -> float:
        return abs(self.found_tokens - self.planted_tokens) / self.planted_tokens if self.planted_tokens else 1.0

    @property
    def good(self) -> bool:
        return (
            self.found == self.expected
            and self.off_by <= TOLERANCE
            and self.residual_tokens == 0
            and self.unexplained_tokens <= 0.001 * self.gap_tokens
            and self.equal_answers == self.answers
        )


class Served(NamedTuple):
    """A running server, and the folder that its runs go to."""

    url: str
    folder: Path
    has_events: bool = True
    daemon: Daemon | None = None


def play(
    server: Served,
    name: str,
    given: GivenPrompts,
    *,
    concurrency: int = 1,
    in_flight: int | None = None,
    freeze_after: int | None = None,
) -> Run:
    """Replay given prompts and read the run; ``freeze_after``: requests until the daemon is put to sleep."""
    timer = threading.Timer(STORED_S, lambda: signalled(server.daemon, signal.SIGSTOP))

    def on_progress(tally: Tally) -> None:
        if freeze_after is not None and tally.requests >= freeze_after and timer.ident is None:
            timer.start()

    config = ReplayConfig(
        trace=f"planted:{name}", out=server.folder / name, url=server.url, concurrency=concurrency, in_flight=in_flight,
        metrics_every_s=1.0,
    )  # fmt: skip
    try:
        result = replay(config, given=given, on_progress=on_progress)
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
            signalled(server.daemon, signal.SIGCONT)
    if result.status != "finished" or result.tally.failed:
        raise SystemExit(f"{name}: the replay ended as {result.status} with {result.tally.failed} failed requests")
    run = load_run(server.folder / name)
    if server.has_events and (run.kv_events is None or not run.kv_events.header.emptied or run.kv_events.gaps):
        raise SystemExit(f"{name}: the cache events are not whole from an empty cache on")
    return run


def signalled(daemon: Daemon | None, what: signal.Signals) -> None:
    if daemon is None or daemon.pid is None:
        raise RuntimeError("this run needs a daemon of its own")
    os.kill(daemon.pid, what)


def hits(run: Run) -> int:
    return sum(record.cached_tokens or 0 for record in run.records)


def equal_answers(one: Run, other: Run) -> tuple[int, int]:
    """(equal ones, compared ones) over the requests that both runs sent."""
    known = {(r.session, r.flow, r.turn): r.output_sha256 for r in other.records}
    both = [r for r in one.records if (r.session, r.flow, r.turn) in known]
    return sum(r.output_sha256 == known[r.session, r.flow, r.turn] for r in both), len(both)


def residual(run: Run) -> int:
    """Tokens that the causes of any request miss its gap by; computed request by request."""
    compared = [record for record in run.records if record.cached_tokens is not None]
    if run.kv_events is None:
        found = attribute_without_events(compared, CacheKind(run.header.server.page_size or 1))
    else:
        header = run.kv_events.header
        cache = CacheKind(header.page_size, "shared", header.pair_keys)
        found = attribute_with_events(run.records, compared, run.kv_events, cache)
    return sum(abs(one.gap - sum(loss.tokens for loss in one.losses)) for one in found)


def alignment_loss(given: GivenPrompts, page: int) -> int:
    """Tokens after the last whole page of each prompt's longest common prefix, from the tokens alone.

    Answers are left out: they are random, and the next prompt does not go on with them.
    """
    index, lost = TokenPrefixIndex(), 0
    for prompt in given.tokens.values():
        lost += min(index.longest_prefix(prompt), len(prompt) - 1) % page
        index.insert(prompt)
    return lost


def judge(plant: str, expected: str, run: Run, planted_tokens: int, control: Run | None) -> Result:
    """What the report says of a run, beside what was planted."""
    why = summarize(run.header, run.records, run.events, kv_events=run.kv_events, texts=run.texts).attribution
    assert why is not None
    equal, answers = (0, 0) if control is None else equal_answers(run, control)
    return Result(
        plant,
        expected,
        None if why.largest is None else why.largest.cause,
        planted_tokens,
        0 if why.largest is None else why.largest.tokens,
        why.gap_tokens,
        residual(run),
        why.unexplained_tokens,
        equal,
        answers,
    )


def against(server: Served, plant: str, expected: str, work: Planted, control: Run, **how: Any) -> Result:
    """Run with the plant and hold it against a run without."""
    run = play(server, plant, work.planted, **how)
    return judge(plant, expected, run, hits(control) - hits(run), control)


@contextmanager
def server(
    folder: Path, checkpoint: Path, settings: Mapping[str, Any], daemon: Daemon | None = None
) -> Iterator[Served]:
    overrides = {"prefill_chunk": CHUNK, "kv_events": f"tcp://*:{free_port()}", **settings}
    with tiny_server(overrides, checkpoint=checkpoint, log=folder / f"server-{free_port()}.log") as process:
        yield Served(process.plan.url, folder, daemon=daemon)


def in_the_prompts(one: Served, checkpoint: Path) -> list[Result]:
    """Causes that any server shows: three edits by the client, and subagents that start together."""
    render = workloads.renderer(checkpoint)
    made: list[tuple[str, str, Callable[[workloads.Render], Planted]]] = [
        ("think block dropped", "think_dropped", workloads.think_dropped),
        ("argument order changed", "argument_order", workloads.argument_order),
        ("nonce in the system prompt", "nonce", workloads.nonce),
    ]
    results = []
    for plant, expected, make in made:
        work = make(render)
        control = play(one, f"{plant}, kept", work.control)
        results.append(against(one, plant, expected, work, control))
    work = workloads.subagents(7)
    control = play(one, "subagents, one by one", work.control, concurrency=2, in_flight=1)
    return [*results, against(one, "parallel subagents", "in_flight", work, control, concurrency=2)]


def bench_prompts(folder: Path, checkpoint: Path) -> list[Result]:
    # The subagents' prompts together fit into one chunk.
    with server(folder, checkpoint, {"kv.capacity_tokens": AMPLE, "prefill_chunk": 4096}) as one:
        return in_the_prompts(one, checkpoint)


def bench_pages(folder: Path, checkpoint: Path) -> list[Result]:
    other = write_tiny_checkpoint(folder / "m3-page-256", shape=TinyM3Shape(block_size=256))
    work = workloads.growing(3)
    with server(folder, other, {"kv.capacity_tokens": AMPLE}) as one:
        run = play(one, "page 256", work.planted)
    return [judge("page 256", "page_alignment", run, alignment_loss(work.planted, 256), None)]


def bench_memory(folder: Path, checkpoint: Path) -> list[Result]:
    """Sessions in turn against one after the other in a small cache, and a gate against none."""
    small, gated = workloads.alternating(11, tokens=2560), workloads.behind_a_gate(5)
    with server(folder, checkpoint, {"kv.capacity_tokens": SMALL}) as one:
        apart = play(one, "small cache, one after the other", small.control)
        results = [against(one, "small cache", "evicted", small, apart, concurrency=2, in_flight=1)]
        free = play(one, "gate, none", gated.control, concurrency=2)
    gate = {"radix.policy": "lru", "radix.admission": "gate:0.4", "kv.capacity_tokens": SMALL}
    with server(folder, checkpoint, gate) as one:
        return [*results, against(one, "gate", "held_by_admission", gated, free, concurrency=2)]


def bench_offload(folder: Path, checkpoint: Path) -> list[Result]:
    """The daemon falls asleep after the first turns, so that what it holds is not asked for."""
    spec = DaemonSpec("127.0.0.1", free_port(), free_port(), 256, 1.0)
    work, awake = workloads.alternating(21, tokens=2560, think_s=PAUSE_S), workloads.alternating(22, tokens=2560)
    offload = {"offload.backend": "lmcache", "offload.address": f"127.0.0.1:{spec.port}"}
    with (
        Daemon(daemon_plan(spec, folder), folder / "lmcache.log", frozen_after_s=120.0) as daemon,
        server(folder, checkpoint, {"kv.capacity_tokens": SMALL, **offload}, daemon) as one,
    ):
        control = play(one, "offload, awake", awake.control, concurrency=2, in_flight=1)
        result = against(
            one, "offload refused", "offload_refused", work, control, concurrency=2, in_flight=1,
            freeze_after=FREEZE_AFTER,
        )  # fmt: skip
    return [result]


def bench_eagle3(folder: Path, checkpoint: Path) -> list[Result]:
    """Exactness with drafts: evictions under token keys and under SGLang's pairs."""
    draft = write_tiny_eagle3(folder / "draft")
    work = workloads.alternating(31, tokens=2330, answer=12)
    results = []
    for keys in ("token", "pair"):
        drafting = {"eagle3.draft": str(draft), "eagle3.radix_keys": keys, "kv.capacity_tokens": SMALL}
        with server(folder, checkpoint, drafting) as one:
            apart = play(one, f"{keys} keys, one after the other", work.control)
            name = f"small cache, EAGLE3 {keys} keys"
            results.append(against(one, name, "evicted", work, apart, concurrency=2, in_flight=1))
    return results


BENCHES: dict[str, Callable[[Path, Path], list[Result]]] = {
    "prompts": bench_prompts,
    "pages": bench_pages,
    "memory": bench_memory,
    "offload": bench_offload,
    "eagle3": bench_eagle3,
}


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    rows = [{**r._asdict(), "off_by": round(r.off_by, 4), "good": r.good} for r in results]
    return {"command": "python -m eval.bench.planted_causes", "tolerance": TOLERANCE, "runs": rows}


def as_markdown(document: dict[str, Any]) -> str:
    lines = [
        "# Planted causes",
        "",
        f"`{document['command']}`: each run loses hits for one reason that was made on purpose.",
        "",
        "| plant | largest cause in the report | planted tokens | found | off by | residual | unexplained | gap |"
        " answers equal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["runs"]:
        lines.append(
            f"| {row['plant']} | {row['found']} | {row['planted_tokens']:,} | {row['found_tokens']:,} |"
            f" {100 * row['off_by']:.1f} % | {row['residual_tokens']} | {row['unexplained_tokens']} |"
            f" {row['gap_tokens']:,} | {row['equal_answers']} of {row['answers']} |"
        )
    return "\n".join(lines) + "\n"


def store(results: Sequence[Result], out: Path) -> None:
    """Write results, in place of earlier ones of the same plants."""
    document = as_json(results)
    if out.exists():
        mine = {result.plant for result in results}
        kept = [row for row in json.loads(out.read_text())["runs"] if row["plant"] not in mine]
        document["runs"] = kept + document["runs"]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=2) + "\n")
    out.with_suffix(".md").write_text(as_markdown(document))


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(BENCHES)), help="Some of them; others stay in --out.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write JSON here, Markdown beside it.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Keep runs and logs in this folder.")
def main(only: tuple[str, ...], out: Path | None, keep: Path | None) -> None:
    """Plant causes and look for them; exit code 1 when one is not found within 5 %."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="planted-") as temporary:
        folder = keep or Path(temporary)
        checkpoint = write_tiny_checkpoint(folder / "m3")
        for name in only or BENCHES:
            (folder / name).mkdir(parents=True)
            made = BENCHES[name](folder / name, checkpoint)
            results += made
            for result in made:
                click.echo(json.dumps({**result._asdict(), "off_by": round(result.off_by, 4), "good": result.good}))
            if out is not None:
                store(made, out)
    sys.exit(0 if all(result.good for result in results) else 1)


if __name__ == "__main__":
    main()
