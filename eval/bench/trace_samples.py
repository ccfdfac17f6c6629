"""A small valid file of every trace format, made here: what tests read and what fuzzing mutates."""

from __future__ import annotations

import io
import tarfile
from typing import Any, NamedTuple

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

Record = dict[str, Any]


class Sample(NamedTuple):
    """A file of one format."""

    format: str
    name: str  # of the file
    raw: bytes
    sessions: int
    requests: int


def weka_session(name: str) -> Record:
    """Three turns of the main flow and a subagent of two."""
    return {
        "id": name,
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": 30,
        "system_tokens": 20,
        "requests": [
            {**_weka(0.0, 130, [1, 2]), "think_time": None},
            _weka(5.0, 200, [1, 2, 3]),
            {
                "type": "subagent",
                "t": 5.5,
                "agent_id": "helper",
                "subagent_type": "Explore",
                "duration_ms": 10_000,
                "status": "completed",
                "models": ["m"],
                "tool_tokens": 3,
                "system_tokens": 4,
                "requests": [_weka(0.0, 140, [7, 8]), _weka(4.0, 200, [7, 8, 9])],
            },
            {**_weka(20.0, 260, [1, 2, 3, 4]), "stop": "end_turn"},
        ],
    }


def _weka(t: float, prompt: int, ids: list[int]) -> Record:
    return {
        "t": t,
        "type": "s",
        "model": "m",
        "in": prompt,
        "out": 5,
        "hash_ids": ids,
        "input_types": ["text"],
        "output_types": ["text"],
        "stop": "tool_use",
        "api_time": 2.0,
        "think_time": 1.0,
        "ttft": 0.5,
    }


def _lines(records: list[Record]) -> bytes:
    return b"".join(orjson.dumps(record) + b"\n" for record in records)


def archive_of(members: dict[str, bytes]) -> bytes:
    """A ``.tar.xz`` of these members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as archive:
        for name, raw in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    return out.getvalue()


def _parquet(records: list[Record]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), out)
    return out.getvalue()


MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1536, "output_length": 0, "hash_ids": [0, 1, 3]},
]

# Two conversations, mixed; contents 11 and 12 stand behind different histories.
BAILIAN = [
    {"chat_id": 5, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, "output_length": 3, "type": "text",
     "turn": 1, "hash_ids": [10, 11, 12]},
    {"chat_id": 6, "parent_chat_id": -1, "timestamp": 2.0, "input_length": 48, "output_length": 3, "type": "text",
     "turn": 1, "hash_ids": [20, 11, 12]},
    {"chat_id": 9, "parent_chat_id": 5, "timestamp": 4.0, "input_length": 64, "output_length": 9, "type": "search",
     "turn": 2, "hash_ids": [10, 11, 13, 14]},
]  # fmt: skip


def _event(kind: str, second: int, **more: Any) -> Record:
    return {"event_type": kind, "timestamp": f"2026-01-02T03:04:{second:02}.500Z", **more}


TRACELAB = [
    {"provider": "claude", "session_id": "claude:a", "round_index": 0, "model": "m", "input_tokens_total": 200,
     "prefix_tokens": 0, "newly_append_tokens": 200, "output_tokens": 20,
     "timing_events": [_event("user_message", 0), _event("reasoning", 2), _event("tool_call", 3, tool_index=0)],
     "tools": [{"tool_index": 0, "tool_name": "Bash"}]},
    {"provider": "codex", "session_id": "codex:b", "round_index": 0, "model": "m", "input_tokens_total": 70,
     "prefix_tokens": 0, "newly_append_tokens": 70, "output_tokens": 5, "timing_events": [_event("text", 5)],
     "tools": []},
    {"provider": "claude", "session_id": "claude:a", "round_index": 1, "model": "m", "input_tokens_total": 300,
     "prefix_tokens": 190, "newly_append_tokens": 110, "output_tokens": 8,
     "timing_events": [_event("tool_result", 7), _event("text", 9)], "tools": []},
]  # fmt: skip

_SAID = [
    {"role": "system", "content": "You are careful."},
    {"role": "user", "content": "List the files, please."},
]
_CALLED = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "I should look.",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}],
}
_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a.py b.py"}
_TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]

# The second request goes on from the first, the third is another conversation.
OPENAI_CHAT = [
    {"timestamp": 1000.0, "duration_s": 2.5, "request": {"model": "m", "messages": _SAID, "tools": _TOOLS},
     "response": {"choices": [{"message": _CALLED, "finish_reason": "tool_calls"}],
                  "usage": {"prompt_tokens": 50, "completion_tokens": 12}}},
    {"timestamp": 1003.0, "request": {"model": "m", "messages": [{"role": "user", "content": "Hello"}]},
     "response": {"choices": [{"message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}]}},
    {"timestamp": 1010.0, "duration_s": 1.0,
     "request": {"model": "m", "messages": [*_SAID, _CALLED, _RESULT], "tools": _TOOLS},
     "response": {"choices": [{"message": {"role": "assistant", "content": "Two files."}, "finish_reason": "stop"}]}},
]  # fmt: skip


def _claude(kind: str, uuid: str, parent: str | None, second: int, message: Record, **more: Any) -> Record:
    time = f"2026-01-02T03:04:{second:02}.000Z"
    base = {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s-1", "timestamp": time}
    return {**base, "isSidechain": False, "message": message, **more}


def _said(answer: str, block: Record, stop: str) -> Record:
    usage = {"input_tokens": 5, "cache_read_input_tokens": 100, "output_tokens": 9}
    return {"id": answer, "role": "assistant", "model": "m", "content": [block], "stop_reason": stop, "usage": usage}


CLAUDE_CODE = [
    {"type": "mode", "mode": "normal", "sessionId": "s-1"},
    _claude("user", "u1", None, 0, {"role": "user", "content": "Which files are there?"}),
    {"type": "attachment", "uuid": "u2", "parentUuid": "u1", "sessionId": "s-1", "isSidechain": False},
    _claude("assistant", "u3", "u2", 2, _said("m1", {"type": "thinking", "thinking": "Look."}, "tool_use")),
    _claude("assistant", "u4", "u3", 3,
            _said("m1", {"type": "tool_use", "id": "t1", "name": "Task", "input": {"prompt": "ls"}}, "tool_use")),
    _claude("user", "x1", None, 4, {"role": "user", "content": "ls"}, isSidechain=True, agentId="helper"),
    _claude("assistant", "x2", "x1", 5, _said("m9", {"type": "text", "text": "a.py"}, "end_turn"),
            isSidechain=True, agentId="helper"),
    _claude("user", "u5", "u4", 8, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a.py"}]}]}),
    _claude("assistant", "u6", "u5", 9, _said("m2", {"type": "text", "text": "One file: a.py."}, "end_turn")),
]  # fmt: skip


def _codex(kind: str, second: int, **payload: Any) -> Record:
    return {"timestamp": f"2026-01-02T03:04:{second:02}.000Z", "type": kind, "payload": payload}


def _spoke(role: str, second: int, text: str) -> Record:
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": text}]
    return _codex("response_item", second, type="message", role=role, content=content)


CODEX = [
    _codex("session_meta", 0, id="r-1", base_instructions={"text": "You are careful."}),
    _codex("turn_context", 0, model="m"),
    _spoke("user", 1, "Which files are there?"),
    _codex("response_item", 2, type="reasoning", summary=[], content=None, encrypted_content="gAAA"),
    _codex("response_item", 3, type="function_call", name="ls", arguments='{"path":"."}', call_id="c1"),
    _codex("event_msg", 3, type="token_count", info={"last_token_usage": {"input_tokens": 9, "output_tokens": 4}}),
    _codex("response_item", 4, type="function_call_output", call_id="c1", output="a.py"),
    _spoke("assistant", 6, "One file: a.py."),
    _codex("compacted", 7, message="There is one file, a.py."),
    _spoke("user", 8, "Delete it."),
    _spoke("assistant", 9, "Done."),
]

AIPERF_DAG = [
    {"session_id": "root", "turns": [
        {"model": "m", "messages": _SAID, "max_tokens": 70, "spawns": [{"children": ["helper"], "join_at": 2}]},
        {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 8, "delay": 500},
        {"messages": [{"role": "user", "content": "And now?"}], "max_tokens": 8, "delay": 250, "forks": ["a"]}]},
    {"session_id": "helper", "turns": [{"messages": _SAID, "max_tokens": 5}]},
    {"session_id": "a", "turns": [{"messages": [{"role": "user", "content": "Shorter."}], "max_tokens": 5}]},
]  # fmt: skip

# One session of lengths, one of whole prompts with ids, one of new messages.
MOONCAKE_SESSIONS = [
    {"session_id": "l", "timestamp": 0, "input_length": 300, "output_length": 40, "hash_ids": [1]},
    {"session_id": "w", "timestamp": 5, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 6],
     "context_mode": "message_array_with_responses"},
    {"session_id": "l", "delay": 2000, "input_length": 150, "output_length": 20},
    {"session_id": "t", "message_mode": "delta", "messages": _SAID, "output_length": 100, "timestamp": 0},
    {"session_id": "t", "message_mode": "delta", "messages": [{"role": "user", "content": "Thanks."}],
     "output_length": 100, "delay": 2000},
]  # fmt: skip

CSV = b"""session_id,start_s,prompt_tokens,output_tokens,shared_tokens
a,0.0,200,20,0
b,1.0,70,5,0
a,7.5,300,8,190
"""


def samples() -> list[Sample]:
    """One or two files of each format that is read from a file."""
    weka = [weka_session("s1"), weka_session("s2")]
    raw = [orjson.dumps(session) for session in weka]
    return [
        Sample("weka", "session.json", raw[0], 1, 5),
        Sample("weka", "sessions.tar.xz", archive_of({f"t/{n}.json": part for n, part in enumerate(raw)}), 2, 10),
        Sample("weka-rows", "rows.jsonl", _lines(weka), 2, 10),
        Sample("weka-rows", "rows.parquet", _parquet(weka), 2, 10),
        Sample("mooncake", "mooncake.jsonl", _lines(MOONCAKE), 2, 2),
        Sample("mooncake-sessions", "mooncake-sessions.jsonl", _lines(MOONCAKE_SESSIONS), 3, 5),
        Sample("bailian", "bailian.jsonl", _lines(BAILIAN), 2, 3),
        Sample("tracelab", "tracelab.jsonl", _lines(TRACELAB), 2, 3),
        Sample("csv", "lengths.csv", CSV, 2, 3),
        Sample("openai-chat", "openai.jsonl", _lines(OPENAI_CHAT), 2, 3),
        Sample("claude-code", "claude.jsonl", _lines(CLAUDE_CODE), 1, 3),
        Sample("codex", "codex.jsonl", _lines(CODEX), 1, 3),
        Sample("aiperf-dag", "dag.jsonl", _lines(AIPERF_DAG), 1, 5),
    ]
