"""Fuzzing of every trace reader: mutated files must give valid sessions or a clean error, fast and in bounded memory.

``python -m eval.bench.fuzz_readers`` mutates the sample file of each format (``eval.bench.trace_samples``) 10,000
times, each format in a process of its own, and reads the result as ``open_trace`` does. An input passes if every
session that comes out fulfils ``traces.check`` and the reading ends normally or with a ``TraceError`` within
``MAX_SECONDS``. Every input is made from the seed and its number, so a failure can be made again: ``--only FORMAT
--seed S --count N``.
"""

from __future__ import annotations

import io
import json
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NamedTuple

import click

from agentserve.checkpoint.tokenizer import write_tokenizer
from eval.bench.mutations import mutate_bytes, mutate_values, mutated, parquet_of
from eval.bench.trace_samples import Sample, archive_of, samples, weka_session
from traces import ReadStats, TraceError, open_trace
from traces.check import problems
from traces.text import ChatTokenizer, load_tokenizer

COUNT = 10_000
MAX_SECONDS = 5.0  # a valid sample takes milliseconds
MAX_GROWTH_MB = 300  # peak memory beyond that of reading the valid samples
_ADDRESS_SPACE = 8 << 30  # a runaway allocation must not take the machine with it
_FAILURES_KEPT = 10


class HungError(Exception):
    """Reading took longer than ``MAX_SECONDS``."""


class UncleanError(Exception):
    """A session that breaks a rule, or an error that does not name its file."""


class Failure(NamedTuple):
    """An input that did not pass."""

    number: int
    reason: str


def tiny_tokenizer() -> ChatTokenizer:
    """The tiny M3's: formats of text need one."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), max_length=1 << 20)
        return load_tokenizer(folder)


def mutant(sample: Sample, seed: int, number: int) -> bytes:
    """The mutated file of one number: the same for the same seed."""
    rng = Random(f"{seed}/{sample.format}/{sample.name}/{number}")
    if sample.name.endswith(".parquet"):
        rows = mutate_values([weka_session("s1"), weka_session("s2")], rng) if rng.randrange(2) else []
        table = parquet_of(rows) if rows else None
        return mutate_bytes(sample.raw, rng) if table is None else table
    if sample.name.endswith(".tar.xz"):
        if rng.randrange(2):
            return mutate_bytes(sample.raw, rng)
        return _rearchived(sample.raw, rng)
    return mutated(sample.raw, rng)


def _rearchived(raw: bytes, rng: Random) -> bytes:
    """The archive with one member's text mutated."""
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        members = {m.name: file.read() for m in archive if (file := archive.extractfile(m)) is not None}
    name = rng.choice(sorted(members))
    members[name] = mutated(members[name], rng)
    return archive_of(members)


def read(path: Path, sample: Sample, number: int, tokenizer: ChatTokenizer) -> str:
    """How reading one file ended.

    Raises:
        UncleanError: a session came out that breaks a rule, or an error that does not name the file.
        Exception: whatever else the reader raises is a failure, too.
    """
    stats = ReadStats()
    # Half of the inputs are also put to the formats' recognition, a quarter is read past faults.
    name = sample.format if number % 2 else None
    try:
        for session in open_trace(str(path), format=name, skip_bad=number % 4 == 1, stats=stats, tokenizer=tokenizer):
            broken = problems(session)
            if broken:
                raise UncleanError(f"session {session.id}: {broken[0]}")
    except TraceError as error:
        if str(path) not in str(error):
            raise UncleanError(f"the error does not name the file: {error}") from error
        return "refused"
    return "skipped" if stats.skipped else "read"


def fuzz(sample: Sample, count: int, seed: int, tokenizer: ChatTokenizer) -> tuple[Counter[str], list[Failure], float]:
    """Read ``count`` mutants; how they ended, which did not pass, and the longest time in seconds."""
    outcomes: Counter[str] = Counter()
    failures: list[Failure] = []
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / sample.name
        for number in range(count):
            path.write_bytes(mutant(sample, seed, number))
            began = time.perf_counter()
            try:
                with _deadline(MAX_SECONDS):
                    outcome = read(path, sample, number, tokenizer)
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(last.filename).name}:{last.lineno}"
                failures.append(Failure(number, f"{type(error).__name__} at {where}: {str(error)[:300]}"))
                outcome = "failed"
            outcomes[outcome] += 1
            slowest = max(slowest, time.perf_counter() - began)
    return outcomes, failures, slowest


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    def end(_signal: int, _frame: FrameType | None) -> None:
        raise HungError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one(sample: Sample, count: int, seed: int) -> dict[str, Any]:
    """Fuzz one sample in this process, memory included."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    tokenizer = tiny_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        for valid in samples():
            path = Path(folder) / valid.name
            path.write_bytes(valid.raw)
            read(path, valid, 0, tokenizer)
    before = peak_mb()
    began = time.process_time()
    outcomes, failures, slowest = fuzz(sample, count, seed, tokenizer)
    return {
        "inputs": count,
        "outcomes": dict(sorted(outcomes.items())),
        "failures": [failure._asdict() for failure in failures[:_FAILURES_KEPT]],
        "failed": len(failures),
        "slowest_ms": round(1000 * slowest, 1),
        "processor_seconds": round(time.process_time() - began, 1),
        "peak_memory_growth_mb": round(peak_mb() - before, 1),
    }


def in_own_process(sample: Sample, count: int, seed: int) -> dict[str, Any]:
    """``one`` in a process of its own: a crash of the interpreter is a result, too."""
    command = [sys.executable, "-m", "eval.bench.fuzz_readers", "--inside", sample.name]
    command += ["--count", str(count), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = f"the process ended with {done.returncode}: {done.stderr[-500:]}"
        return {"inputs": count, "failed": 1, "failures": [{"number": None, "reason": reason}], "outcomes": {}}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _earlier(out: Path | None, seed: int, count: int) -> dict[str, Any]:
    """Results in the file that is about to be written, so that formats can be fuzzed one by one."""
    if out is None or not out.exists():
        return {}
    document = json.loads(out.read_text())
    same = document["seed"] == seed and all(result["inputs"] == count for result in document["results"].values())
    found: dict[str, Any] = document["results"] if same else {}
    return found


def passed(result: dict[str, Any]) -> bool:
    """No failure, and memory within bounds."""
    return not result["failed"] and result["peak_memory_growth_mb"] <= MAX_GROWTH_MB


@click.command()
@click.option("--count", default=COUNT, show_default=True, help="Inputs per sample.")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", multiple=True, help="Fuzz this format or file alone; may be given several times.")
@click.option("--out", type=click.Path(path_type=Path),
              help="Write the result as JSON; results of other formats with this seed and count stay.")  # fmt: skip
@click.option("--inside", hidden=True, help="Fuzz the sample of this file name in this process.")
def main(count: int, seed: int, only: tuple[str, ...], out: Path | None, inside: str | None) -> None:
    """Fuzz the readers of all trace formats."""
    chosen = [sample for sample in samples() if not only or {sample.format, sample.name} & set(only)]
    if inside is not None:
        click.echo(json.dumps(one(next(sample for sample in chosen if sample.name == inside), count, seed)))
        return
    if not chosen:
        raise click.UsageError(
            f"no format {' or '.join(only)}; known are {', '.join(sorted({s.format for s in samples()}))}"
        )
    document: dict[str, Any] = {}
    for sample in chosen:
        result = in_own_process(sample, count, seed)
        name = f"{sample.format} ({sample.name})"
        click.echo(f"{name}: {json.dumps(result)}", err=True)
        # Written after each format: a run that is ended early keeps what it has.
        known = {**document.get("results", {}), **_earlier(out, seed, count)}
        results = dict(sorted({**known, name: result}.items()))
        document = {
            "command": "python -m eval.bench.fuzz_readers",
            "seed": seed,
            "limits": {"seconds_per_input": MAX_SECONDS, "memory_growth_mb": MAX_GROWTH_MB},
            "passed": all(map(passed, results.values())),
            "results": results,
        }
        if out is not None:
            out.write_text(json.dumps(document, indent=2) + "\n")
    click.echo(json.dumps(document, indent=2))
    if not document["passed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
