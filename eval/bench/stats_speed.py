"""How long ``traces stats`` takes, beside the time of only parsing the same bytes with orjson.

``python -m eval.bench.stats_speed TRACES`` reads ``weka-claude-code.tar.xz`` in the folder TRACES. Both are measured in
turn in one process, in processor seconds, since a shared machine's clock also counts its neighbours. Reading includes
decompressing the archive and checking every session; orjson gets the decompressed bytes in memory and drops what it
made. The numbers are compared with those of sessions that were parsed as usual, by orjson alone.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import orjson

from traces import ReadStats, Session, open_trace
from traces.readers.files import Document
from traces.readers.weka import build_session, documents
from traces.statistics import TraceStatistics

WEKA = "weka-claude-code.tar.xz"
WANTED_RATIO = 3.0  # issue 6


def statistics_of(sessions: Iterable[Session]) -> dict[str, Any]:
    found = TraceStatistics()
    for session in sessions:
        found.add(session)
    return found.summary()


def only_parse(raw: list[Document]) -> None:
    for document in raw:
        orjson.loads(document.raw)


def parsed_as_usual(raw: list[Document]) -> Iterable[Session]:
    for document in raw:
        yield build_session(orjson.loads(document.raw), document.source, ReadStats())


def command_seconds(path: Path) -> float:
    """Processor seconds of ``agentserve traces stats PATH``, the start of Python included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "from agentserve.cli import main; main()"
    subprocess.run([sys.executable, "-c", code, "traces", "stats", str(path)], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@click.command()
@click.argument("traces", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the result as JSON.")
def main(traces: Path, rounds: int, out: Path | None) -> None:
    """Time of the statistics of the collection in the folder TRACES, against orjson alone."""
    path = traces / WEKA
    if not path.exists():
        raise click.UsageError(f"{traces} has no {WEKA}; name the folder that holds it")
    raw = list(documents(path))
    parse, stats, command = [], [], []
    summary: dict[str, Any] = {}
    for _ in range(rounds):
        began = time.process_time()
        only_parse(raw)
        parse.append(time.process_time() - began)
        began = time.process_time()
        summary = statistics_of(open_trace(str(path)))
        stats.append(time.process_time() - began)
        command.append(command_seconds(path))
    times = {name: statistics.median(s) for name, s in (("orjson", parse), ("stats", stats), ("command", command))}
    result = {
        "command": "python -m eval.bench.stats_speed TRACES",
        "wanted_ratio": WANTED_RATIO,
        "sessions": summary["sessions"],
        "requests": summary["requests"],
        "json_bytes": sum(len(document.raw) for document in raw),
        "processor_seconds_median": {name: round(seconds, 2) for name, seconds in times.items()},
        "stats_over_orjson": round(times["stats"] / times["orjson"], 2),
        "command_over_orjson": round(times["command"] / times["orjson"], 2),
        "same_numbers_as_parsed_by_orjson_alone": summary == statistics_of(parsed_as_usual(raw)),
    }
    text = json.dumps(result, indent=2)
    click.echo(text)
    if out is not None:
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
