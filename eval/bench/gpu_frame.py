"""What the benchmarks on a GPU share: one time budget, servers that take turns, and one JSON file.

A machine with a GPU is lent for minutes: what was found is on disk after every server, what does not fit is left out
and listed, and a server imports everything while the one before it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

START_LIMIT_S = 300.0


class Server(Protocol):
    """What takes turns: it imports at once, loads when its gate opens, and holds the GPU until it is stopped."""

    def open_gate(self) -> None: ...

    def wait_ready(self, timeout_s: float) -> None: ...  # RuntimeError when it does not get ready

    def stop(self) -> None: ...


M = TypeVar("M")  # what a server runs
S = TypeVar("S", bound=Server)


class Record:
    """What one call of a benchmark found, within its budget.

    Args:
        module: that was called, as ``gpu_run.sh`` gets it.
        out: the JSON file.
        budget_s: seconds for everything.
    """

    def __init__(self, module: str, out: Path, budget_s: float, **found: Any) -> None:
        self.out, self._end = out, time.monotonic() + budget_s
        runner = "python -m" if "--cpu" in sys.argv else "bash eval/bench/gpu_run.sh"
        command = f"{runner} {module} {shlex.join(sys.argv[1:])}".strip()
        self.found: dict[str, Any] = {"command": command, **found, "log": [], "left_out": []}

    def left(self) -> float:
        """Seconds of the budget; negative when it is spent."""
        return self._end - time.monotonic()

    def note(self, text: str) -> None:
        self.found["log"].append(f"{self.left():.0f} s left: {text}")
        print(self.found["log"][-1], flush=True)

    def save(self, **more: Any) -> None:
        """Write everything found so far, and ``more``, which is derived from it."""
        self.out.write_text(json.dumps({**self.found, **more}, indent=1))

    def show(self) -> None:
        """Print the file: the only way back from some machines."""
        if self.out.exists():
            print(self.out.read_text())


def take_turns(
    plan: Sequence[M],
    start: Callable[[M, int], S],
    use: Callable[[M, S, int], None],
    record: Record,
    *,
    ahead_s: float,
    save: Callable[[], None],
    failed: Callable[[M], None] = lambda mode: None,
) -> None:
    """One server after the other.

    Args:
        plan: what each of them runs.
        start: a server of a mode, given its place in the plan.
        use: measures it, given its place in the plan.
        ahead_s: with less than this left no further server is started.
        save: called after each.
        failed: called for a mode whose server did not get ready; the rest of the plan goes on.

    Raises:
        RuntimeError: the first server did not get ready.
    """
    following: S | None = start(plan[0], 0)
    try:
        for place, mode in enumerate(plan):
            if following is None:
                record.found["left_out"].append(str(mode))
                continue
            server, following = following, None
            last = place + 1 == len(plan)
            try:
                server.open_gate()
                try:
                    server.wait_ready(min(START_LIMIT_S, max(record.left(), 1.0)))
                except RuntimeError as error:
                    if place == 0:
                        raise
                    record.note(f"{mode}: {error}")
                    record.found["left_out"].append(str(mode))
                    failed(mode)
                    if not last and record.left() > ahead_s:
                        following = start(plan[place + 1], place + 1)
                    continue
                record.note(f"{mode} ready")
                if not last and record.left() > ahead_s:
                    following = start(plan[place + 1], place + 1)
                use(mode, server, place)
            finally:
                server.stop()
                save()
    finally:
        if following is not None:
            following.stop()


def prompt(length: int, seed: int, vocabulary: int) -> list[int]:
    """Random tokens, ``[length]``; the same for the same length and seed."""
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(2, vocabulary) for _ in range(length)]


def options(text: str | None, *, budget_s: float) -> argparse.ArgumentParser:
    """The options of every benchmark; a benchmark adds its own."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=budget_s, metavar="SECONDS", help="for everything")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs to share the model")
    parser.add_argument("--cpu", action="store_true", help="the tiny M3 on a CPU, to try the benchmark itself")
    return parser


def out_file(name: str) -> Path:
    """Where the result goes: ``$OUT``, or this folder."""
    return Path(os.environ.get("OUT", ".")) / name


def plugin_path(folder: Path, name: str, function: str) -> Path:
    """A folder for ``PYTHONPATH`` in which SGLang finds a plugin, ``module:function``, as a distribution of its own."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {function}\n")
    return folder


def python_path(first: Path, rest: str | None = None) -> str:
    """``PYTHONPATH`` with a folder before ``rest``, or before what this process has."""
    return os.pathsep.join(filter(None, [str(first), rest or os.environ.get("PYTHONPATH")]))
