"""``python -m eval.bench.diagnose_scale``: a large log with planted breaks, read as ``agentserve diagnose`` does.

Prints size, processor seconds and peak memory of reading it, and beside them how many of the planted breaks were found
with the right cause.
"""

from __future__ import annotations

import random
import resource
import tempfile
import time
from pathlib import Path

import click
import orjson

from eval.diagnose.logs import read_log
from eval.diagnose.run import Diagnosis, diagnose_calls

EVERY = 50  # turns from one planted break to the next


def write_log(path: Path, sessions: int, turns: int, seed: int) -> int:
    """A log whose first user message differs in each ``EVERY``-th turn. Returns how many turns break."""
    rng = random.Random(seed)
    planted = 0
    with path.open("wb") as file:
        for session in range(sessions):
            messages = [{"role": "system", "content": "You code. " * 500}]
            for turn in range(turns):
                text = f"session {session}, question {turn} " + "word " * rng.randint(50, 400)
                messages.append({"role": "user", "content": text})
                reply = {"role": "assistant", "content": "answer " * 60, "reasoning_content": "think " * 50}
                sent = list(messages)
                if turn % EVERY == EVERY - 1:
                    sent[1] = {"role": "user", "content": "changed " + messages[1]["content"]}
                    planted += 2 if turn + 1 < turns else 1
                body = {"request": {"messages": sent}, "response": {"choices": [{"message": reply}]}}
                file.write(orjson.dumps(body) + b"\n")
                messages.append(reply)
    return planted


@click.command()
@click.option("--sessions", default=4, show_default=True)
@click.option("--turns", default=300, show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(sessions: int, turns: int, seed: int) -> None:
    """Write a log, read it, and print what it took and what was found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        planted = write_log(path, sessions, turns, seed)
        start = time.process_time()
        found = diagnose_calls(read_log(path, click.echo), Diagnosis())
        seconds = time.process_time() - start
        size = path.stat().st_size / 1e6
    right = sum(turn.found.cause == "user_changed" for turn in found.broken)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    click.echo(f"{size:,.0f} MB, {found.calls:,} calls, {found.conversations} conversations")
    click.echo(f"{seconds:.1f} s of processor time, {size / seconds:,.0f} MB/s, peak memory {peak:,.0f} MiB")
    click.echo(f"{right} of {planted} planted breaks found, {len(found.broken) - right} others")
    if (right, len(found.broken), found.conversations) != (planted, planted, sessions):
        raise click.ClickException("not what was planted")


if __name__ == "__main__":
    main()
