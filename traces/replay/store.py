"""A run on disk: written line by line as requests end, read back for reports and for resuming.

Beside the files that ``record`` lists, a run holds::

    RUN/outputs.jsonl   what the server answered to each request (token ids, or text without them); it is needed
                        to resume, since later prefixes can run into these tokens
    RUN/metrics-start.txt, metrics-end.txt   the server's counters before the first and after the last request, in the
                        Prometheus text format; a run resumed on another server process starts them anew
    RUN/metrics.jsonl   those counters every few seconds, on the run's clock (``metrics``)
    RUN/retried.jsonl   records of requests that failed because the server went away and were sent again

Every line is written whole and flushed. A process that is killed in the middle of a write leaves at most one
half line, at the end: readers skip it, resuming cuts it off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, ValidationError

from traces.replay.metrics import METRICS
from traces.replay.record import SCHEMA_VERSION, RequestRecord, RunEvent, RunHeader

HEADER, REQUESTS, EVENTS = "run.json", "requests.jsonl", "events.jsonl"
OUTPUTS, RETRIED = "outputs.jsonl", "retried.jsonl"
METRICS_START, METRICS_END = "metrics-start.txt", "metrics-end.txt"

TurnKey = tuple[str, str, int]  # session, flow, turn
Output = npt.NDArray[np.int32] | str  # token ids, or text where the server tells no ids

_Line = TypeVar("_Line", bound=BaseModel)
_OnHalfLine = Callable[[str], None]


class RunError(ValueError):
    """A run directory that cannot be used. The message names file and line and says what to do."""


def key_of(record: RequestRecord) -> TurnKey:
    return (record.session, record.flow, record.turn)


class RunWriter:
    """Appends to a run. Each method writes one whole line and flushes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, BinaryIO] = {}

    @classmethod
    def create(cls, path: Path, header: RunHeader) -> RunWriter:
        """Start a run in an empty or new directory.

        Raises:
            RunError: the directory holds something.
        """
        cls.check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        writer = cls(path)
        writer.header(header)
        for name in (REQUESTS, EVENTS):
            (path / name).touch()
        return writer

    @staticmethod
    def check_free(path: Path) -> None:
        """Raise ``RunError`` unless ``path`` is new or an empty directory."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(
                f"{path} exists and is not empty; choose another --out, or go on with that run by --resume {path}"
            )

    def header(self, header: RunHeader) -> None:
        """Write ``run.json`` whole or not at all."""
        temporary = self.path / (HEADER + ".new")
        temporary.write_text(header.model_dump_json(indent=2) + "\n")
        os.replace(temporary, self.path / HEADER)

    def record(self, record: RequestRecord, output: Output | None) -> None:
        """Append a request's record, and its answer, which own history and resuming need."""
        # The output goes first: a record on disk then always has its output beside it.
        if output is not None and len(output):
            content = {"text": output} if isinstance(output, str) else {"tokens": output}
            identity = {"session": record.session, "flow": record.flow, "turn": record.turn}
            self._append(OUTPUTS, orjson.dumps(identity | content, option=orjson.OPT_SERIALIZE_NUMPY))
        self._append(REQUESTS, record.model_dump_json().encode())

    def metrics(self, name: str, text: str) -> None:
        """Write ``METRICS_START`` or ``METRICS_END``; a server without counters leaves no file."""
        if text:
            (self.path / name).write_text(text, encoding="utf-8")
        else:
            (self.path / name).unlink(missing_ok=True)

    def event(self, event: RunEvent) -> None:
        self._append(EVENTS, event.model_dump_json().encode())

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, name: str, line: bytes) -> None:
        if name not in self._files:
            self._files[name] = (self.path / name).open("ab")
        file = self._files[name]
        file.write(line + b"\n")
        file.flush()


@dataclass(slots=True)
class Run:
    """A run as read from disk, finished or not.

    Attributes:
        truncated_lines: half-written last lines that were skipped (0 to 2), known once the files were read.
    """

    path: Path
    header: RunHeader
    events: list[RunEvent]
    truncated_lines: int = 0
    _counted: set[str] = field(default_factory=set)

    def records(self) -> Iterator[RequestRecord]:
        """Stream the records in order of completion.

        Raises:
            RunError: a corrupt line that is not a half-written last one; names file and line.
        """
        yield from _lines(self.path / REQUESTS, RequestRecord, self._note_truncated)

    def outputs(self) -> dict[TurnKey, Output]:
        """What the server answered to each request.

        Raises:
            RunError: a corrupt line; names file and line.
        """
        return dict(_outputs(self.path / OUTPUTS))

    def metrics(self) -> tuple[str, str] | None:
        """The server's counters at the start and at the end; None unless both were written."""
        files = (self.path / METRICS_START, self.path / METRICS_END)
        if not all(file.is_file() for file in files):
            return None
        start, end = (file.read_text(encoding="utf-8", errors="replace") for file in files)
        return start, end

    def _note_truncated(self, name: str) -> None:
        if name not in self._counted:
            self._counted.add(name)
            self.truncated_lines += 1


def read_run(path: Path | str) -> Run:
    """Open a run directory.

    Raises:
        RunError: no run there, another schema version, or a corrupt header or event line.
    """
    path = Path(path)
    run = Run(path=path, header=_read_header(path), events=[])
    run.events = list(_lines(path / EVENTS, RunEvent, run._note_truncated))
    return run


@dataclass(slots=True)
class Progress:
    """What a run has behind it when it is resumed."""

    header: RunHeader
    done: dict[TurnKey, RequestRecord]  # in order of completion
    outputs: dict[TurnKey, Output]
    clock_s: float  # last time that the run's clock has shown
    cut_lines: int  # half-written last lines that were cut off
    retried: int  # failed requests that are sent again


def reopen(path: Path) -> tuple[RunWriter, Progress]:
    """Prepare a run for resuming: cut half lines and take out the requests that the server's end made fail.

    Raises:
        RunError: no run there, or a corrupt line.
    """
    header = _read_header(path)
    cut = sum(_cut_half_line(path / name) for name in (REQUESTS, EVENTS, OUTPUTS, RETRIED, METRICS))
    run = read_run(path)
    records = list(run.records())
    retried = _to_retry(records)
    if retried:
        _move_out(path, records, retried)
    done = {key_of(record): record for record in records if key_of(record) not in retried}
    outputs = {key: output for key, output in _outputs(path / OUTPUTS) if key in done}
    times = [record.done_s for record in records] + [event.at_s for event in run.events]
    progress = Progress(header, done, outputs, max(times, default=0.0), cut, len(retried))
    return RunWriter(path), progress


def _to_retry(records: list[RequestRecord]) -> set[TurnKey]:
    """Requests that the connection failed and after which their flow got no answer any more.

    A failed request in the middle of a flow stays: to send it late would break the order of the conversation.
    """
    flows: dict[tuple[str, str], list[RequestRecord]] = {}
    for record in records:
        flows.setdefault((record.session, record.flow), []).append(record)
    retry: set[TurnKey] = set()
    for turns in flows.values():
        for record in sorted(turns, key=lambda record: -record.turn):
            if record.error is None or record.error.kind not in ("connection", "timeout"):
                break
            retry.add(key_of(record))
    return retry


def _move_out(path: Path, records: list[RequestRecord], retried: set[TurnKey]) -> None:
    lines = {True: b"", False: b""}
    for record in records:
        lines[key_of(record) in retried] += record.model_dump_json().encode() + b"\n"
    with (path / RETRIED).open("ab") as file:
        file.write(lines[True])
    temporary = path / (REQUESTS + ".new")
    temporary.write_bytes(lines[False])
    os.replace(temporary, path / REQUESTS)


def _read_header(path: Path) -> RunHeader:
    file = path / HEADER
    if not file.is_file():
        raise RunError(f"{path} holds no run: {HEADER} is missing; give a directory that `agentserve replay` wrote")
    try:
        raw = orjson.loads(file.read_bytes())
        if isinstance(raw, dict) and raw.get("schema_version") != SCHEMA_VERSION:
            raise RunError(
                f"{file}: schema version {raw.get('schema_version')}, this agentserve reads {SCHEMA_VERSION}; use the "
                f"version that wrote it ({raw.get('agentserve_version', 'unknown')})"
            )
        return RunHeader.model_validate(raw)
    except (orjson.JSONDecodeError, ValidationError) as error:
        raise RunError(f"{file}: {_first_fault(error)}; the file was damaged after it was written") from error


def _lines(file: Path, model: type[_Line], on_half_line: _OnHalfLine) -> Iterator[_Line]:
    if not file.exists():
        return
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                on_half_line(file.name)  # only the last line can lack its end
                return
            try:
                yield model.model_validate_json(line)
            except ValidationError as error:
                raise RunError(
                    f"{file}, line {number}: {_first_fault(error)}; the file was damaged after it was written; "
                    "remove that line to go on without it"
                ) from error


def _outputs(file: Path) -> Iterator[tuple[TurnKey, Output]]:
    if not file.exists():
        return
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                raw = orjson.loads(line)
                key = (raw["session"], raw["flow"], raw["turn"])
                yield key, raw["text"] if "text" in raw else np.array(raw["tokens"], dtype=np.int32)
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise RunError(
                    f"{file}, line {number}: {error}; the file was damaged after it was written; a run without its "
                    "outputs cannot be resumed exactly, start a new one"
                ) from error


def _cut_half_line(file: Path) -> bool:
    if not file.exists():
        return False
    with file.open("r+b") as stream:
        data = stream.read()
        whole = data.rfind(b"\n") + 1
        if whole == len(data):
            return False
        stream.truncate(whole)
        return True


def _first_fault(error: Exception) -> str:
    if isinstance(error, ValidationError):
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        return f"field '{where}': {fault['msg']}" if where else str(fault["msg"])
    return str(error)
