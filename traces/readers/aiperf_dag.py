"""AIPerf's conversation DAGs (``dag_jsonl``): scripts of conversations that branch, one conversation a line.

A ``.jsonl`` file (also ``.xz``, ``.gz``, ``.bz2``) with lines ``{session_id, turns: [{messages, model?,
max_tokens?, tools?, delay?, forks?, spawns?}], pre_session_spawns?}``. A turn's messages are added to the history;
``delay`` is in milliseconds. ``forks`` name conversations that go on from the history after the turn, ``spawns``
conversations that start anew; the next turn, or the one at ``join_at``, waits for spawned ones. Field definitions:
AIPerf's ``docs/benchmark-modes/dag.md`` and ``dataset/loader/dag_jsonl_models.py``.

How it is read: a conversation that no other names is a session, those that it names are its subagents. Replies are
not in the file. Each stands as ``max_tokens`` tokens found nowhere else (0 without ``max_tokens``), so blocks that
hold a reply are shared only with what goes on from it. Messages become tokens by the served model's template and
tokenizer: one is needed. Times are those of a server that answers at once: the sum of the delays. The file is read
twice, since the conversations of a tree may stand anywhere.

Not supported: branches of branches, orchestrators and rounds, ``context_mode`` other than the default (all
refused); ``extra`` is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from traces.logs.fields import FieldError
from traces.logs.messages import chat_messages, openai_dicts
from traces.model import MAIN_FLOW, BlockScope, Flow, Session, TraceError, Turn
from traces.readers.base import Reading, TraceFormat, register
from traces.readers.conversation import BLOCK_SIZE, Replies, ScriptedFlow
from traces.readers.files import LINE_FILES, Document, Group, first_object, grouped_lines, parse_object
from traces.readers.ids import TokenBlocks
from traces.readers.validate import Milliseconds, Name, OutputTokens, validated
from traces.text import ChatTokenizer

_DEFAULT_MODE = "deltas_without_responses"


class _Fork(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    child: Name


class _Spawn(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    children: Annotated[list[Name], Field(min_length=1)]
    join_at: int | None = None


class _Turn(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    messages: Any
    model: str | None = None
    max_tokens: OutputTokens | None = None
    tools: list[dict[str, Any]] | None = None
    delay: Milliseconds = 0.0
    forks: list[Name | _Fork] = []
    spawns: list[Name | _Spawn] = []


class _Conversation(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    session_id: Name
    turns: Annotated[list[_Turn], Field(min_length=1)]
    pre_session_spawns: list[Name] = []
    context_mode: str | None = None


class _Branch(NamedTuple):
    """How a conversation comes out of its parent."""

    after: int | None  # turn of the parent; None: with the session
    join: int | None
    forked: bool


def _matches(path: str) -> bool:
    first = first_object(path) if path.endswith(LINE_FILES) else None
    return first is not None and "session_id" in first and ("turns" in first or "orchestrator" in first)


def _read(path: str, reading: Reading) -> Iterator[Session]:
    tokenizer = reading.text_tokenizer(path)
    return reading.parsed(
        grouped_lines(path, _roots), partial(_session, tokenizer=tokenizer, ignored=reading.stats.ignored)
    )


def _roots(lines: Iterator[Document]) -> list[str | None]:
    """The root of each line's conversation; None for lines that cannot be read."""
    names: list[str | None] = []
    parents: dict[str, str] = {}
    for line in lines:
        try:
            parsed = validated(_Conversation, parse_object(line), line.source)
        except TraceError:
            names.append(None)
            continue
        names.append(parsed.session_id)
        for child in _branches(parsed):
            parents.setdefault(child, parsed.session_id)

    def root(name: str) -> str:
        seen = {name}
        while name in parents and parents[name] not in seen:
            name = parents[name]
            seen.add(name)
        return name

    return [None if name is None else root(name) for name in names]


def _branches(conversation: _Conversation) -> dict[str, _Branch]:
    """Conversations that this one starts."""
    found = {child: _Branch(None, None, False) for child in conversation.pre_session_spawns}
    for at, turn in enumerate(conversation.turns):
        for fork in turn.forks:
            found.setdefault(fork if isinstance(fork, str) else fork.child, _Branch(at, None, True))
        for spawn in turn.spawns:
            children = [spawn] if isinstance(spawn, str) else spawn.children
            join = at + 1 if isinstance(spawn, str) or spawn.join_at is None else spawn.join_at
            inside = at < join < len(conversation.turns)
            for child in children:
                found.setdefault(child, _Branch(at, join if inside else None, False))
    return found


def _session(group: Group, tokenizer: ChatTokenizer, ignored: Counter[str]) -> Session:
    conversations: dict[str, tuple[Document, _Conversation]] = {}
    for line in group.lines:
        parsed = validated(_Conversation, parse_object(line), line.source, ignored=ignored)
        if parsed.context_mode not in (None, _DEFAULT_MODE):
            message = f"only '{_DEFAULT_MODE}' is supported; give complete prompts in another format"
            raise _fault(line, parsed, message, "context_mode")
        if parsed.session_id in conversations:
            raise _fault(line, parsed, "this session_id was already read from the same file", "session_id")
        conversations[parsed.session_id] = line, parsed
    if group.key not in conversations:
        raise TraceError("conversations that name each other in a circle", file=group.lines[0].source)
    line, root = conversations.pop(group.key)
    return _Tree(tokenizer, line, root, conversations).session()


class _Tree:
    """A root conversation and the branches it starts, as a session."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        line: Document,
        root: _Conversation,
        others: dict[str, tuple[Document, _Conversation]],
    ) -> None:
        self._line, self._root, self._others = line, root, others
        self._blocks = TokenBlocks(BLOCK_SIZE)
        self._start = ScriptedFlow(tokenizer, Replies(), root.session_id)
        self._tokenizer = tokenizer

    def session(self) -> Session:
        branches = _branches(self._root)
        for name, (line, conversation) in self._others.items():
            if name not in branches or _branches(conversation):
                message = "branches of branches are not supported; flatten them or skip the session (--skip-bad)"
                raise _fault(line, conversation, message, "turns")
        after: dict[int, ScriptedFlow] = {}
        turns = self._turns(self._line, self._root, self._start, 0.0, after)
        flows = []
        for name, branch in branches.items():
            if name not in self._others:
                raise _fault(self._line, self._root, f"'{name}' is started but not in the file", "turns")
            line, conversation = self._others[name]
            fresh = ScriptedFlow(self._tokenizer, self._start.replies, self._root.session_id)
            flow = after[branch.after].fork() if branch.forked and branch.after is not None else fresh
            start = 0.0 if branch.after is None else turns[branch.after].start_s
            own = self._turns(line, conversation, flow, start)
            flows.append(Flow(name, own, spawn_after=branch.after, join_before=branch.join, start_s=own[0].start_s))
        main = Flow(MAIN_FLOW, turns, start_s=turns[0].start_s)
        source = self._line.source
        return Session(self._root.session_id, BLOCK_SIZE, BlockScope.SESSION, main, tuple(flows), source=source)

    def _turns(
        self,
        line: Document,
        conversation: _Conversation,
        flow: ScriptedFlow,
        start_s: float,
        after: dict[int, ScriptedFlow] | None = None,
    ) -> tuple[Turn, ...]:
        turns = []
        for index, turn in enumerate(conversation.turns):
            try:
                messages = openai_dicts(chat_messages(turn.messages, f"turns[{index}].messages"))
            except FieldError as error:
                raise _fault(line, conversation, str(error), error.field) from error
            reply = turn.max_tokens or 0
            prompt = flow.turn(messages, turn.tools, reply, line.source, index)
            start_s += turn.delay / 1000
            think = turn.delay / 1000 if index else None
            turns.append(
                Turn(index, start_s, len(prompt), reply, self._blocks.ids(prompt), think, model=turn.model or "")
            )
            if after is not None:
                after[index] = flow.fork()
        return tuple(turns)


def _fault(line: Document, conversation: _Conversation, message: str, field: str) -> TraceError:
    return TraceError(message, file=line.source, session=conversation.session_id, field=field)


register(TraceFormat("aiperf-dag", _matches, _read))
