"""What a trace format is, and the one way to open a trace: ``open_trace``.

A format is one file in this folder that registers a ``TraceFormat``. Its module docstring says what the format
looks like and what is not supported. Formats read; they know nothing of caches, servers or token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from traces.model import ReadStats, Session, TraceError
from traces.text import ChatTokenizer

Unparsed = TypeVar("Unparsed")


@dataclass(slots=True)
class Reading:
    """One pass over a trace: what to do with faulty sessions, where to count, and how text becomes tokens."""

    stats: ReadStats
    skip_bad: bool = False
    tokenizer: ChatTokenizer | None = None
    text: bool = False  # the format holds text, of which only equal blocks are kept

    def parsed(self, documents: Iterator[Unparsed], parse: Callable[[Unparsed], Session]) -> Iterator[Session]:
        """Parse one document at a time; a faulty one raises TraceError, or is counted with ``skip_bad``."""
        while True:
            try:
                document = next(documents, None)
                if document is None:
                    return
                session = parse(document)
            except TraceError as error:
                self.fault(error)
            else:
                yield session

    def text_tokenizer(self, path: str) -> ChatTokenizer:
        """The tokenizer, for formats of text.

        Raises:
            TraceError: none was given.
        """
        if self.tokenizer is None:
            raise TraceError(
                "holds text; name the folder of the served model's tokenizer, so that blocks can be made of it "
                "(agentserve traces ... --tokenizer DIR; other commands read what 'agentserve traces convert' wrote)",
                file=path,
            )
        self.text = True
        return self.tokenizer

    def fault(self, error: TraceError) -> None:
        if not self.skip_bad:
            raise error
        self.stats.skipped_sessions += 1
        self.stats.skipped.append(str(error))


class TraceFormat(NamedTuple):
    """A way to read traces."""

    name: str  # what --format takes
    matches: Callable[[str], bool]  # is this path of the format? By name and first bytes, cheaply
    read: Callable[[str, Reading], Iterator[Session]]  # stream the sessions; raise TraceError on faults
    last: bool = False  # recognised only where no other format is: it matches more than is its own


_formats: dict[str, TraceFormat] = {}


def register(trace_format: TraceFormat) -> None:
    """Make a format known. Formats recognise paths that no other one does, but for those that come ``last``."""
    _formats[trace_format.name] = trace_format


def format_names() -> list[str]:
    return list(_formats)


def resolve_format(path: str, name: str | None = None) -> TraceFormat:
    """The format called ``name``, or the one that recognises the path.

    Raises:
        TraceError: unknown name, no such path, or no format recognises it.
    """
    if name is not None and name not in _formats:
        raise TraceError(f"unknown format '{name}'; known are {', '.join(_formats)}", file=path)
    generated = _formats.get("generated")
    is_generated = generated is not None and generated.matches(path)
    if not is_generated and not Path(path).exists():
        raise TraceError("no such file or directory; check the path", file=path)
    if name is not None:
        return _formats[name]
    for candidate in sorted(_formats.values(), key=lambda known: known.last):
        if candidate.matches(path):
            return candidate
    raise TraceError(f"format not recognised; name one of {', '.join(_formats)} (--format)", file=path)


def open_trace(
    path: str,
    *,
    format: str | None = None,
    skip_bad: bool = False,
    stats: ReadStats | None = None,
    limit: int | None = None,
    tokenizer: ChatTokenizer | None = None,
) -> Iterator[Session]:
    """Stream the sessions of a trace, one in memory at a time, each validated.

    Args:
        path: a file, directory or archive, or ``generated:sessions=20,seed=1`` (``traces.generate``).
        format: name of the format; recognised by name and content when None.
        skip_bad: pass over faulty sessions, counting them and keeping their messages in ``stats``.
        stats: filled while the sessions stream past.
        limit: stop after this many sessions.
        tokenizer: of the served model; only formats that hold text need it (``traces.text.load_tokenizer``).

    Raises:
        TraceError: at once if the path cannot be read; while iterating for a faulty session.
    """
    reading = Reading(ReadStats() if stats is None else stats, skip_bad, tokenizer)
    sessions = resolve_format(path, format).read(path, reading)
    return _counted(path, sessions, reading, limit)


def _counted(path: str, sessions: Iterator[Session], reading: Reading, limit: int | None) -> Iterator[Session]:
    seen: set[str] = set()
    while limit is None or reading.stats.sessions < limit:
        session = next(sessions, None)
        if session is None:
            return
        if session.id in seen:
            source = session.source or path
            message = "this id was already read from the same trace; give sessions unique ids"
            reading.fault(TraceError(message, file=source, session=session.id, field="id"))
            continue
        seen.add(session.id)
        reading.stats.sessions += 1
        reading.stats.requests += session.request_count
        if reading.text:
            reading.stats.ignored["messages (their text)"] += session.request_count
        reading.stats.prompt_tokens += sum(t.prompt_tokens for f in session.flows() for t in f.turns)
        yield session
