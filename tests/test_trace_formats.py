"""Every trace format: its sample is recognised and read as its definition says; faults name file, line and field."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from agentserve.checkpoint.tokenizer import write_tokenizer
from eval.bench.trace_samples import (
    AIPERF_DAG,
    BAILIAN,
    CLAUDE_CODE,
    CODEX,
    MOONCAKE_SESSIONS,
    OPENAI_CHAT,
    TRACELAB,
    samples,
    weka_session,
)
from eval.diagnose.logs import read_log
from traces import BlockScope, ReadStats, StopReason, TraceError, open_trace
from traces.check import problems
from traces.readers.ids import MAX_PROMPT_TOKENS
from traces.text import ChatTokenizer, load_tokenizer

SAMPLES = {f"{sample.format} {sample.name}": sample for sample in samples()}
TEXT_FORMATS = {"openai-chat", "claude-code", "codex", "aiperf-dag", "mooncake-sessions"}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """The tiny M3's: a token a byte."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, max_length=100_000)
    return load_tokenizer(folder)


def _write(folder: Path, name: str, records: list[Any]) -> str:
    path = folder / name
    path.write_bytes(b"\n".join(orjson.dumps(record) for record in records))
    return str(path)


def _sample(name: str, folder: Path) -> str:
    path = folder / SAMPLES[name].name
    path.write_bytes(SAMPLES[name].raw)
    return str(path)


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_is_recognised_and_valid(name: str, tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    sample = SAMPLES[name]
    stats = ReadStats()
    sessions = list(open_trace(_sample(name, tmp_path), stats=stats, tokenizer=tokenizer))
    assert [problem for session in sessions for problem in problems(session)] == []
    assert (stats.sessions, stats.requests) == (sample.sessions, sample.requests)
    named = list(open_trace(_sample(name, tmp_path), format=sample.format, tokenizer=tokenizer))
    assert [session.id for session in named] == [session.id for session in sessions]


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if sample.format in TEXT_FORMATS])
def test_text_needs_a_tokenizer(name: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"holds text; name the folder .* --tokenizer DIR; other commands"):
        list(open_trace(_sample(name, tmp_path)))


def test_samples_cover_every_format() -> None:
    from traces import format_names

    assert {sample.format for sample in SAMPLES.values()} == set(format_names()) - {"generated"}


def test_tokenizer_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json; name the folder"):
        load_tokenizer(tmp_path)


# --- Weka rows


@pytest.mark.parametrize("name", ["weka-rows rows.jsonl", "weka-rows rows.parquet"])
def test_rows_are_the_sessions_of_weka_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for session in ("s1", "s2"):
        (tmp_path / "folder" / f"{session}.json").write_bytes(orjson.dumps(weka_session(session)))
    expected = list(open_trace(str(tmp_path / "folder")))
    for got, wanted in zip(open_trace(_sample(name, tmp_path)), expected, strict=True):
        assert str(got).replace(got.source, "") == str(wanted).replace(wanted.source, "")
        assert [turn.block_ids.tolist() for flow in got.flows() for turn in flow.turns] == [
            turn.block_ids.tolist() for flow in wanted.flows() for turn in flow.turns
        ]


def test_rows_with_requests_as_json_text_and_ids_rounded_up(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = weka_session("s1")
    row["requests"][0]["hash_ids"] = [1, 2, 90]
    text = {**row, "requests": orjson.dumps(row["requests"]).decode()}
    pq.write_table(pa.Table.from_pylist([text]), tmp_path / "t.parquet")
    stats = ReadStats()
    (session,) = open_trace(str(tmp_path / "t.parquet"), stats=stats)
    assert session.main.turns[0].block_ids.tolist() == [1, 2]
    assert "1 turns have an id for the partial last block" in stats.notes[0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"id": None}, "row 2), field 'id': field required"),
        ({"requests": None}, "row 2), session s2, field 'requests': field required"),
        ({"block_size": 32}, "row 2), session s2, turn 0, field 'requests[0].hash_ids'"),
    ],
)
def test_faults_of_parquet_rows_name_the_row(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [weka_session("s1"), {**weka_session("s2"), **change}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    with pytest.raises(TraceError) as caught:
        list(open_trace(str(tmp_path / "t.parquet")))
    assert expected in str(caught.value)


def test_file_that_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(TraceError, match=r"t\.parquet: row 1 cannot be read .* damaged or no Parquet"):
        list(open_trace(str(tmp_path / "t.parquet")))


# --- Qwen-Bailian


def test_bailian_links_requests_and_chains_contents(tmp_path: Path) -> None:
    first, second = open_trace(_write(tmp_path, "t.jsonl", BAILIAN))
    assert (first.id, second.id) == ("6", "5")  # in the order of their last lines
    assert (first.scope, first.block_size) == (BlockScope.GLOBAL, 16)
    before, after = second.main.turns
    assert (before.start_s, after.start_s, after.prompt_tokens, after.output_tokens) == (1.5, 4.0, 64, 9)
    # Contents 10, 11 are shared; 13 follows. 11 behind 20 is another prefix than 11 behind 10.
    assert before.block_ids.tolist() == after.block_ids.tolist()[:2]
    assert not set(first.main.turns[0].block_ids.tolist()) & set(after.block_ids.tolist())


def test_bailian_parent_that_is_not_there_starts_a_session(tmp_path: Path) -> None:
    stats = ReadStats()
    (session,) = open_trace(_write(tmp_path, "t.jsonl", BAILIAN[2:]), stats=stats)
    assert session.id == "9"
    assert "t.jsonl:1: its parent_chat_id 5 is not in the file" in stats.notes[0]


# --- TraceLab


def test_tracelab_rounds_become_turns(tmp_path: Path) -> None:
    _, session = open_trace(_write(tmp_path, "t.jsonl", TRACELAB))
    first, second = session.main.turns
    assert (session.id, session.block_size) == ("claude:a", 64)
    assert (first.start_s, first.api_s, first.stop) == (0.0, 3.0, StopReason.TOOL_USE)
    assert (second.start_s, second.think_s, second.stop) == (7.0, 4.0, StopReason.END_TURN)
    np.testing.assert_array_equal(first.block_ids, [0, 1, 2])
    np.testing.assert_array_equal(second.block_ids, [0, 1, 3, 4])  # 190 of 200 tokens: two whole blocks


# --- CSV


def test_csv_of_other_collections(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = open_trace(str(path))
    assert (first.id, first.main.turns[0].prompt_tokens, second.main.turns[0].output_tokens) == ("2", 374, 109)
    (tmp_path / "burst.csv").write_text("Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n")
    (burst,) = open_trace(str(tmp_path / "burst.csv"))
    assert burst.main.turns[0].prompt_tokens == 472


def test_csv_says_what_it_takes_for_shared(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("session_id,prompt_tokens,output_tokens\na,130,5\na,200,5\na,100,5\n")
    stats = ReadStats()
    (session,) = open_trace(str(path), stats=stats)
    assert [turn.block_ids.tolist() for turn in session.main.turns] == [[0, 1], [0, 1, 2], [3]]
    assert "a prompt is taken to repeat the one before it" in stats.notes[0]


# --- OpenAI chat


def test_openai_conversations_are_found_by_what_they_repeat(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    other, session = open_trace(_write(tmp_path, "t.jsonl", OPENAI_CHAT), tokenizer=tokenizer)
    assert (other.id, session.id) == ("2", "1")
    first, second = session.main.turns
    body = OPENAI_CHAT[0]["request"]
    assert first.prompt_tokens == len(tokenizer.prompt(body["messages"], body["tools"]))
    assert (first.stop, first.api_s, second.start_s, second.think_s) == (StopReason.TOOL_USE, 2.5, 10.0, 7.5)
    # The second prompt is the first one, its answer as the template writes it, and the tool's result.
    assert first.block_ids.tolist() == second.block_ids.tolist()[: len(first.block_ids)]
    assert first.prompt_tokens + first.output_tokens < second.prompt_tokens


def test_openai_session_names_win(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    records = [{**record, "session_id": "one"} for record in OPENAI_CHAT]
    (session,) = open_trace(_write(tmp_path, "t.jsonl", records), tokenizer=tokenizer)
    assert (session.id, len(session.main.turns)) == ("one", 3)


# --- Claude Code


def test_claude_code_session_and_its_subagent(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    stats = ReadStats()
    path = _write(tmp_path, "t.jsonl", CLAUDE_CODE)
    (session,) = open_trace(path, tokenizer=tokenizer, stats=stats)
    first, second = session.main.turns
    assert (session.id, first.stop, second.stop) == ("s-1", StopReason.TOOL_USE, StopReason.END_TURN)
    assert (first.start_s, first.api_s, second.start_s, second.think_s) == (0.0, 3.0, 8.0, 5.0)
    assert first.prompt_tokens == len(tokenizer.prompt([{"role": "user", "content": "Which files are there?"}], []))
    (helper,) = session.subagents
    assert (helper.name, helper.start_s, helper.spawn_after, helper.join_before) == ("helper", 4.0, 0, 1)
    assert "system prompt and tools are not in the log" in stats.notes[0]


def test_claude_code_compaction_starts_anew(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    summary = {**CLAUDE_CODE[1], "uuid": "v1", "parentUuid": None, "isCompactSummary": True}
    summary = {**summary, "timestamp": "2026-01-02T03:05:00.000Z", "message": {"role": "user", "content": "So far: a."}}
    answer = {**CLAUDE_CODE[-1], "uuid": "v2", "parentUuid": "v1", "timestamp": "2026-01-02T03:05:01.000Z"}
    answer["message"] = {**answer["message"], "id": "m3"}
    (session,) = open_trace(_write(tmp_path, "t.jsonl", [*CLAUDE_CODE, summary, answer]), tokenizer=tokenizer)
    assert session.main.turns[2].prompt_tokens == len(tokenizer.prompt([{"role": "user", "content": "So far: a."}], []))


def test_claude_code_results_of_parallel_calls_are_all_in_the_prompt(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    """Each result hangs to its own call, and the next answer to the last result alone."""
    call = CLAUDE_CODE[4]
    second = {**call, "uuid": "w4", "parentUuid": "u4"}
    use = {**call["message"]["content"][0], "id": "t2", "input": {"prompt": "pwd"}}
    second["message"] = {**call["message"], "content": [use]}
    result = CLAUDE_CODE[7]
    other = {**result, "uuid": "w5", "parentUuid": "w4"}
    other["message"] = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "content": "/src"}]}
    answer = {**CLAUDE_CODE[8], "parentUuid": "w5"}
    records = [*CLAUDE_CODE[:5], second, *CLAUDE_CODE[5:8], other, answer]
    prompts: list[Any] = []

    class Recording:
        def prompt(self, messages: Any, tools: Any, *, answering: bool = True) -> Any:
            prompts.append(list(messages))
            return tokenizer.prompt(messages, tools, answering=answering)

    (session,) = open_trace(_write(tmp_path, "t.jsonl", records), tokenizer=Recording())
    assert len(session.main.turns) == 2
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "Task", "arguments": {"prompt": "ls"}}},
        {"id": "t2", "type": "function", "function": {"name": "Task", "arguments": {"prompt": "pwd"}}},
    ]
    messages = [
        {"role": "user", "content": "Which files are there?"},
        {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": calls},
        {"role": "tool", "content": "a.py", "tool_call_id": "t1"},
        {"role": "tool", "content": "/src", "tool_call_id": "t2"},
    ]
    assert messages in prompts


@pytest.mark.parametrize("name", ["openai-chat openai.jsonl", "claude-code claude.jsonl", "codex codex.jsonl"])
def test_diagnosis_sees_the_same_calls(name: str, tmp_path: Path) -> None:
    """Two users of one parser: what is a request here is a call there."""
    sample = SAMPLES[name]
    log = tmp_path / sample.name
    log.write_bytes(sample.raw)
    calls = list(read_log(log, pytest.fail))
    assert len(calls) == sample.requests
    assert all(call.request.messages and call.answer for call in calls)


def test_claude_code_directory_of_sessions(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    _write(tmp_path, "a.jsonl", CLAUDE_CODE)
    _write(tmp_path, "b.jsonl", [{**record, "sessionId": "s-2"} for record in CLAUDE_CODE])
    assert [session.id for session in open_trace(str(tmp_path), tokenizer=tokenizer)] == ["s-1", "s-2"]


# --- Codex


def test_codex_requests_and_compaction(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    (session,) = open_trace(_write(tmp_path, "t.jsonl", CODEX), tokenizer=tokenizer)
    first, second, third = session.main.turns
    system = {"role": "system", "content": "You are careful."}
    asked = [system, {"role": "user", "content": "Which files are there?"}]
    assert (session.id, first.prompt_tokens) == ("r-1", len(tokenizer.prompt(asked, [])))
    assert (first.stop, first.start_s, first.api_s, second.start_s) == (StopReason.TOOL_USE, 0.0, 2.0, 3.0)
    history = [
        system,
        {"role": "user", "content": "There is one file, a.py."},
        {"role": "user", "content": "Delete it."},
    ]
    assert third.prompt_tokens == len(tokenizer.prompt(history, []))


# --- AIPerf


def test_aiperf_dag_branches_are_subagents(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    (session,) = open_trace(_write(tmp_path, "t.jsonl", AIPERF_DAG), tokenizer=tokenizer)
    first, second, third = session.main.turns
    assert (second.start_s, third.start_s, third.think_s) == (0.5, 0.75, 0.25)
    said = AIPERF_DAG[0]["turns"][0]["messages"]
    assert first.prompt_tokens == len(tokenizer.prompt(said, []))
    # A reply takes max_tokens in the history, though nobody knows its text.
    go_on = [*said, {"role": "assistant", "content": ""}, {"role": "user", "content": "Go on."}]
    assert second.prompt_tokens == len(tokenizer.prompt(go_on, [])) + 70
    assert first.block_ids.tolist() == second.block_ids.tolist()[: len(first.block_ids)]
    helper, fork = session.subagents
    assert (helper.name, helper.spawn_after, helper.join_before) == ("helper", 0, 2)
    assert helper.turns[0].block_ids.tolist() == first.block_ids.tolist()  # the same prompt, started anew
    assert (fork.name, fork.spawn_after, fork.join_before) == ("a", 2, None)
    assert third.block_ids.tolist() == fork.turns[0].block_ids.tolist()[: len(third.block_ids)]


def test_mooncake_sessions_of_three_kinds(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    stats = ReadStats()
    path = _write(tmp_path, "t.jsonl", MOONCAKE_SESSIONS)
    read = {session.id: session for session in open_trace(path, tokenizer=tokenizer, stats=stats)}
    first, second = read["l"].main.turns
    assert (first.prompt_tokens, second.prompt_tokens, second.start_s) == (300, 300 + 40 + 150, 2.0)
    assert first.block_ids.tolist() == second.block_ids.tolist()[:4]
    assert (read["w"].scope, read["w"].block_size) == (BlockScope.GLOBAL, 512)
    assert read["w"].main.turns[0].block_ids.tolist() == [0, 1]
    text = read["t"].main.turns
    assert text[1].block_ids.tolist()[: len(text[0].block_ids)] == text[0].block_ids.tolist()
    assert text[1].prompt_tokens > text[0].prompt_tokens + 100
    assert "hash_ids of new tokens are no blocks of the prompt" in stats.notes[0]


def test_fields_that_are_not_read_are_counted(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    def ignored(name: str) -> dict[str, int]:
        stats = ReadStats()
        list(open_trace(_sample(name, tmp_path), stats=stats, tokenizer=tokenizer))
        return dict(stats.ignored)

    weka = ignored("weka session.json")
    assert weka == {"input_types": 5, "output_types": 5, "ttft": 5, "subagent_type": 1, "status": 1}
    assert ignored("weka-rows rows.jsonl") == {name: 2 * count for name, count in weka.items()}
    assert ignored("mooncake mooncake.jsonl") == {}
    assert ignored("bailian bailian.jsonl") == {"type": 3, "turn": 3}
    assert ignored("tracelab tracelab.jsonl")["newly_append_tokens"] == 3
    assert ignored("codex codex.jsonl") == {"messages (their text)": 3}


# --- faults

CASES: dict[str, tuple[list[Any], int, dict[str, Any], str]] = {
    "bailian time": (BAILIAN, 1, {"timestamp": -1}, "t.jsonl:2, session 6, field 'timestamp'"),
    "bailian ids": (BAILIAN, 2, {"hash_ids": [10]}, "t.jsonl:3, session 5, turn 1, field 'hash_ids': has 1 ids"),
    "bailian no id": (BAILIAN, 1, {"hash_ids": [1, "x", 2]}, "field 'hash_ids': must be a list of 64-bit integers"),
    "bailian name": (BAILIAN, 1, {"chat_id": "x"}, "t.jsonl:2, field 'chat_id'"),
    "tracelab time": (
        TRACELAB,
        0,
        {"timing_events": [{"event_type": "text", "timestamp": "noon"}]},
        "t.jsonl:1, session claude:a, field 'timing_events[0].timestamp': 'noon' is no ISO-8601 time",
    ),
    "tracelab no time": (TRACELAB, 1, {"timing_events": []}, "t.jsonl:2, session codex:b, field 'timing_events'"),
    "tracelab length": (TRACELAB, 1, {"input_tokens_total": 10**12}, "field 'input_tokens_total'"),
    "tracelab name": (TRACELAB, 1, {"session_id": 7}, "t.jsonl:2, field 'session_id'"),
    "openai role": (
        OPENAI_CHAT,
        1,
        {"request": {"messages": [{"content": "x"}]}},
        "t.jsonl:2, session 2, turn 0, field 'messages[0].role': is missing",
    ),
    "openai none": (OPENAI_CHAT, 1, {"request": {}}, "t.jsonl:2, turn 0, field 'messages'"),
    "openai time": (OPENAI_CHAT, 1, {"timestamp": "late"}, "t.jsonl:2, session 2, turn 0, field 'timestamp'"),
    "openai call": (
        OPENAI_CHAT,
        1,
        {"request": {"messages": [{"role": "assistant", "tool_calls": [{}]}]}},
        "field 'messages[0].tool_calls[0].function': is missing",
    ),
    "claude time": (CLAUDE_CODE, 3, {"timestamp": None}, "t.jsonl:4, session s-1, field 'timestamp': is missing"),
    "claude content": (CLAUDE_CODE, 1, {"message": {"content": 7}}, "t.jsonl:2, session s-1, field 'message.content'"),
    "codex payload": (CODEX, 2, {"payload": 7}, "t.jsonl:3, session r-1, field 'payload': must be an object"),
    "codex time": (CODEX, 2, {"timestamp": "noon"}, "t.jsonl:3, session r-1, field 'timestamp'"),
    "dag branch": (
        AIPERF_DAG,
        1,
        {"session_id": "other"},
        "session root, field 'turns': 'helper' is started",
    ),
    "dag mode": (AIPERF_DAG, 1, {"context_mode": "x"}, "t.jsonl:2, session helper, field 'context_mode'"),
    "dag tokens": (AIPERF_DAG, 0, {"turns": [{"messages": 1, "max_tokens": -1}]}, "field 'turns[0].max_tokens'"),
    "sessions kind": (MOONCAKE_SESSIONS, 2, {"messages": []}, "t.jsonl:3, session l, turn 1: is of another kind"),
    "sessions time": (MOONCAKE_SESSIONS, 4, {"timestamp": 0, "session_id": "l"}, "is of another kind"),
    "sessions length": (MOONCAKE_SESSIONS, 2, {"input_length": None}, "session l, turn 1, field 'input_length'"),
}


@pytest.mark.parametrize("name", CASES)
def test_fault_names_line_session_and_field(name: str, tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    records, at, change, expected = CASES[name]
    changed = [{**record, **change} if n == at else record for n, record in enumerate(records)]
    with pytest.raises(TraceError) as caught:
        list(open_trace(_write(tmp_path, "t.jsonl", changed), tokenizer=tokenizer))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("a,0,x,5,0", "t.csv:2, session a, field 'prompt_tokens': 'x' is no number of tokens"),
        (f"a,0,{MAX_PROMPT_TOKENS + 1},5,0", "field 'prompt_tokens'"),
        ("a,0,5,5", "t.csv:2, session a, field 'shared_tokens': is missing: the row has 4 cells, the header 5"),
        (",0,5,5,0", "t.csv:2, field 'session_id': is empty"),
        ("a,noon,5,5,0", "field 'start_s': 'noon' is neither seconds nor an ISO-8601 time"),
    ],
)
def test_fault_in_csv(row: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"session_id,start_s,prompt_tokens,output_tokens,shared_tokens\n{row}\n")
    with pytest.raises(TraceError) as caught:
        list(open_trace(str(path)))
    assert expected in str(caught.value)


def test_csv_without_a_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("prompt_tokens\n5\n")
    with pytest.raises(TraceError, match=r"t\.csv:1: no column of output tokens; name one of them output_tokens or"):
        list(open_trace(str(tmp_path / "t.csv")))


def test_bad_sessions_are_skipped_and_the_others_read(tmp_path: Path) -> None:
    records = [BAILIAN[0], {**BAILIAN[1], "timestamp": "x"}, BAILIAN[2]]
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(map(orjson.dumps, records)) + b"\n{broken\n"))
    stats = ReadStats()
    assert [session.id for session in open_trace(str(path), skip_bad=True, stats=stats)] == ["5"]
    assert ["t.jsonl.gz:2" in stats.skipped[0], "t.jsonl.gz:4" in stats.skipped[1]] == [True, True]


def test_grouping_keeps_only_open_sessions(tmp_path: Path) -> None:
    """Sessions come out as soon as their last line was read, not at the end of the file."""
    records = [{**TRACELAB[0], "session_id": f"s{n // 2}"} for n in range(8)]
    stats = ReadStats()
    sessions = open_trace(_write(tmp_path, "t.jsonl", records), stats=stats)
    assert (next(sessions).id, stats.sessions) == ("s0", 1)
    assert [session.id for session in sessions] == ["s1", "s2", "s3"]
