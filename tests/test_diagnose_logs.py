"""Logs of three kinds, made here with a known fault each, through the command."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.checkpoint.tokenizer import write_tokenizer
from agentserve.cli.diagnose import command
from eval.diagnose import Tokens
from eval.diagnose.chat import Call, Request
from eval.diagnose.logs import FORMATS, LogError, read_log
from eval.diagnose.run import Diagnosis, compare, diagnose_calls

SYSTEM = {"role": "system", "content": "You are a coding agent."}
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [{"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": ".", "all": true}'}}]


def user(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"question {number}, please look into it"}


def answer(number: int, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": f"answer {number}", **more}


def line(messages: list[dict[str, Any]], reply: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "request": {"model": "m3", "messages": messages, "tools": TOOLS},
        "response": {"choices": [{"message": reply}], **more},
    }


def write(path: Path, values: Iterable[Any]) -> Path:
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values))
    return path


def run(*arguments: str | Path) -> dict[str, Any]:
    result = CliRunner().invoke(command, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    made: dict[str, Any] = json.loads(result.stdout)
    return made


THINKS = answer(1, reasoning_content="I have to look.", tool_calls=CALLS)
FIRST = [SYSTEM, user(1)]
FAULTS: dict[str, list[dict[str, Any]]] = {
    "think_dropped": [*FIRST, answer(1, tool_calls=CALLS), user(2)],
    "think_as_content": [*FIRST, answer(1) | {"content": "I have to look.\n\nanswer 1", "tool_calls": CALLS}, user(2)],
    "argument_order": [
        *FIRST,
        THINKS | {"tool_calls": [{"id": "c1", "function": {"name": "ls", "arguments": '{"all": true, "path": "."}'}}]},
        user(2),
    ],
    "system_changed": [{"role": "system", "content": "You are another agent."}, user(1), THINKS, user(2)],
    "answer_left_out": [*FIRST, user(2)],
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_planted_fault_in_a_request_log_is_named_with_its_line(cause: str, tmp_path: Path) -> None:
    good = [*FIRST, THINKS, user(2)]
    log = write(
        tmp_path / "log.jsonl",
        [line(FIRST, THINKS), line(FAULTS[cause], answer(2)), line([*FIRST, THINKS, user(3)], answer(3))],
    )
    found = run(log)
    assert (found["calls"], found["conversations"]) == (3, 1)
    broken = [turn for turn in found["broken"] if turn["where"] == f"{log}:2"]
    assert [turn["cause"] for turn in broken] == [cause]
    assert broken[0]["follows"] == f"{log}:1"
    untouched = run(write(tmp_path / "good.jsonl", [line(FIRST, THINKS), line(good, answer(2))]))
    assert (untouched["appended"], untouched["broken"]) == (1, [])


def test_tools_in_another_order(tmp_path: Path) -> None:
    other = {"type": "function", "function": {"name": "cat"}}
    one, two = line(FIRST, THINKS), line([*FIRST, THINKS, user(2)], answer(2))
    one["request"]["tools"], two["request"]["tools"] = [*TOOLS, other], [other, *TOOLS]
    assert [c["name"] for c in run(write(tmp_path / "log.jsonl", [one, two]))["causes"]] == ["tools_reordered"]


def test_conversations_are_told_apart_and_found_again_without_names(tmp_path: Path) -> None:
    """Two at once, each growing; one whose system prompt has a nonce in each request."""
    lines, flows = [], {name: [{"role": "system", "content": "You help."}] for name in "ab"}
    for turn in range(4):
        for name, messages in flows.items():
            messages.append({"role": "user", "content": f"{name} asks for the {turn}. time"})
            sent = list(messages)
            if name == "b":
                sent[0] = {"role": "system", "content": f"You help. Request {10**9 + turn * 7919}."}
            lines.append(line(sent, answer(turn)))
            messages.append(answer(turn))
    found = run(write(tmp_path / "log.jsonl", lines))
    assert (found["conversations"], found["compared"], found["appended"]) == (2, 6, 3)
    assert {turn["cause"] for turn in found["broken"]} <= {"nonce", "timestamp"}
    assert len(found["broken"]) == 3


def test_places_are_tokens_of_the_served_template(tmp_path: Path) -> None:
    """The tiny tokenizer has a token a byte, its special ones apart: the place can be counted by hand."""
    write_tokenizer(tmp_path, max_length=4096)
    log = write(tmp_path / "log.jsonl", [line(FIRST, THINKS), line(FAULTS["think_dropped"], answer(2))])
    (broken,) = run(log, "--tokenizer", tmp_path)["broken"]
    assert (broken["unit"], broken["cause"]) == ("token", "think_dropped")
    assert broken["old_text"].startswith("<mm:think>I have to look.</mm:think>")
    assert broken["new_text"].startswith("answer 1")
    system = len(b"system\nYou are a coding agent.\n\n# Tools\n<tools>\n") + len(
        json.dumps(TOOLS[0]["function"]) + "\n</tools>\n"
    )
    # BOS, turn and end markers are one token each.
    assert broken["at"] == 1 + 1 + system + 1 + 1 + len(b"user\nquestion 1, please look into it") + 2 + 1 + len(b"ai\n")


def test_a_template_that_drops_what_the_client_sent_is_told_from_a_client_that_dropped_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, max_length=4096)
    template = tmp_path / "chat_template.jinja"
    text = template.read_text()
    # As many templates do: reasoning only behind the newest user message.
    kept = "{%- if message.reasoning_content -%}"
    assert kept in text
    template.write_text(text.replace(kept, "{%- if message.reasoning_content and loop.last -%}"))
    log = write(tmp_path / "log.jsonl", [line(FIRST, THINKS), line([*FIRST, THINKS, user(2)], answer(2))])
    (broken,) = run(log, "--tokenizer", tmp_path)["broken"]
    assert broken["cause"] == "template_without_reasoning"
    # The same log without the template is a client without fault.
    assert run(log)["broken"] == []


def test_sglangs_own_request_log_gives_tokens(tmp_path: Path) -> None:
    """As ``--log-requests-format json`` writes it: a time before each object, a request twice."""

    def finished(rid: str, ids: list[int], text: str, out: list[int], reply: str, cached: int) -> str:
        obj = {"rid": rid, "text": text, "input_ids": ids}
        meta = {"prompt_tokens": len(ids), "cached_tokens": cached}
        value = {"timestamp": "2026-01-01T00:00:00", "event": "request.finished", "rid": rid, "obj": obj}
        value["out"] = {"text": reply, "output_ids": out, "meta_info": meta}
        return f"[2026-01-01 00:00:00] {json.dumps(value)}"

    received = {"timestamp": "2026-01-01T00:00:00", "event": "request.received", "rid": "a", "obj": {"text": "x"}}
    head, prompt = list(range(100, 140)), "a line of many words"
    log = write(
        tmp_path / "host_0.log",
        [
            f"[2026-01-01 00:00:00] {json.dumps(received)}",
            finished("a", head, prompt, [5, 6, 99], " and two", 0),
            # The answer's two words came back as three other tokens.
            finished("b", [*head, 7, 8, 9, 10], prompt + " and two and so on", [11], " end", 40),
        ],
    )
    found = run(log)
    (broken,) = found["broken"]
    assert (broken["cause"], broken["unit"], broken["at"], broken["lost"]) == ("retokenised", "token", 40, 2)
    assert (found["prompt_tokens"], found["cached_tokens"]) == (84, 40)


def test_tokens_that_join_where_prompt_and_answer_meet() -> None:
    """A model that went on from "hel" with "lo": the whole text is tokenised as "hello"."""

    def tokenize(text: str) -> Tokens:
        found = list(re.finditer(r"\w+|\s", text))
        return Tokens([hash(m[0]) for m in found], [m.end() for m in found])

    first = Call("log:1", Request(text="say hel"), answer_text="lo there")
    second = Call("log:2", Request(text="say hello there and more"))
    assert compare(first, second) is None  # the text goes on
    broken = compare(first, second, tokenize=tokenize)
    assert broken is not None
    assert (broken.cause, broken.place.unit, broken.place.at, broken.place.lost) == ("retokenised", "token", 2, 4)
    apart = Call("log:1", Request(text="say "), answer_text="hello there")
    assert compare(apart, second, tokenize=tokenize) is None


def claude(uuid: str, parent: str | None, kind: str, content: Any, second: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "uuid": uuid,
        "parentUuid": parent,
        "sessionId": "s",
        "isSidechain": False,
        "timestamp": f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}.000Z",
        "message": {"role": kind, "content": content, **more.pop("message", {})},
        **more,
    }


def reply(number: str, new: int, cached: int) -> dict[str, Any]:
    usage = {"input_tokens": new, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    return {"id": f"msg_{number}", "model": "c", "usage": usage}


def claude_session() -> list[dict[str, Any]]:
    """An answer in two lines; a pause after which nothing was cached; going back; compaction."""
    tool = [{"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "ls"}}]
    result = [{"type": "tool_result", "tool_use_id": "t", "content": "a.py"}]
    return [
        {"type": "summary", "summary": "title", "leafUuid": "x"},
        claude("1", None, "user", "list the files of this folder"),
        claude("2", "1", "assistant", [{"type": "thinking", "thinking": "ls"}], 5, message=reply("1", 9000, 0)),
        claude("3", "2", "assistant", tool, 6, message=reply("1", 9000, 0)),
        claude("4", "3", "user", result, 7),
        claude("5", "4", "assistant", [{"type": "text", "text": "one file"}], 9, message=reply("2", 40, 9000)),
        claude("6", "5", "user", "what is in it?", 900),
        claude("7", "6", "assistant", [{"type": "text", "text": "code"}], 905, message=reply("3", 9100, 0)),
        # The user goes back to before the second question.
        claude("8", "5", "user", "delete it", 910),
        claude("9", "8", "assistant", [{"type": "text", "text": "done"}], 915, message=reply("4", 60, 9040)),
        claude("a", None, "user", "This session is being continued. Summary: files", 920, isCompactSummary=True),
        claude("b", "a", "assistant", [{"type": "text", "text": "I go on"}], 925, message=reply("5", 800, 100)),
    ]


def test_claude_code_sessions(tmp_path: Path) -> None:
    log = write(tmp_path / "s.jsonl", claude_session())
    found = run(log)
    assert (found["calls"], found["conversations"], found["compared"]) == (5, 1, 4)
    assert [(turn["where"], turn["cause"]) for turn in found["broken"]] == [
        (f"{log}:10", "rewound"),
        (f"{log}:12", "compacted"),
    ]
    assert not any(turn["fault"] for turn in found["broken"])
    (missed,) = found["missed"]
    assert (missed["where"], missed["cause"], missed["expected"]) == (f"{log}:8", "pause", 9040)
    assert found["cached_tokens"] == 9000 + 9040 + 100


def codex(kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": "2026-01-01T00:00:00Z", "type": kind, "payload": payload}


def codex_session() -> list[dict[str, Any]]:
    def says(role: str, text: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return codex("response_item", type="message", role=role, content=[{"type": kind, "text": text}])

    def counted(prompt: int, cached: int) -> dict[str, Any]:
        usage = {"input_tokens": prompt, "cached_input_tokens": cached, "output_tokens": 5}
        return codex("event_msg", type="token_count", info={"last_token_usage": usage})

    return [
        codex("session_meta", id="s", base_instructions={"text": "You code."}),
        codex("turn_context", model="gpt"),
        says("user", "list the files of this folder"),
        codex("response_item", type="reasoning", summary=[], encrypted_content="abc"),
        codex("response_item", type="function_call", name="shell", arguments='{"c": "ls"}', call_id="1"),
        counted(4000, 0),
        codex("response_item", type="function_call_output", call_id="1", output="a.py"),
        says("assistant", "one file"),
        counted(4100, 4000),
        codex("compacted", message="so far: one file"),
        says("user", "go on with the next thing"),
        says("assistant", "yes"),
        counted(300, 0),
    ]


def test_results_of_parallel_calls_are_all_in_the_next_prompt(tmp_path: Path) -> None:
    """Each result hangs to its own call, so the path to the next answer holds only one of them."""

    def call(name: str) -> list[dict[str, Any]]:
        return [{"type": "tool_use", "id": name, "name": "read", "input": {"path": name}}]

    def result(name: str) -> list[dict[str, Any]]:
        return [{"type": "tool_result", "tool_use_id": name, "content": f"text of {name}"}]

    events = [
        claude("1", None, "user", "read both"),
        claude("2", "1", "assistant", call("a"), 5, message=reply("1", 100, 0)),
        claude("3", "2", "assistant", call("b"), 5, message=reply("1", 100, 0)),
        claude("4", "2", "user", result("a"), 6),
        claude("5", "3", "user", result("b"), 7),
        claude("6", "5", "assistant", [{"type": "text", "text": "read"}], 9, message=reply("2", 40, 100)),
    ]
    log = write(tmp_path / "s.jsonl", events)
    *_, last = read_log(log, pytest.fail)
    assert [message.content for message in last.request.messages if message.role == "tool"] == [
        "text of a",
        "text of b",
    ]


def test_codex_sessions(tmp_path: Path) -> None:
    log = write(tmp_path / "rollout.jsonl", codex_session())
    found = run(log)
    assert (found["calls"], found["conversations"]) == (3, 1)
    assert [turn["cause"] for turn in found["broken"]] == ["compacted"]
    assert (found["prompt_tokens"], found["cached_tokens"], found["missed"]) == (8400, 4000, [])


def test_a_server_that_counts_nothing_is_told_from_a_client_that_breaks(tmp_path: Path) -> None:
    def usage(prompt: int, cached: int | None) -> dict[str, Any]:
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"usage": {"prompt_tokens": prompt, **details}}

    turns = [*FIRST, THINKS, user(2)]
    log = write(
        tmp_path / "log.jsonl", [line(FIRST, THINKS, **usage(5000, 0)), line(turns, answer(2), **usage(5200, 0))]
    )
    found = run(log)
    assert found["broken"] == []
    assert [(miss["cause"], miss["expected"]) for miss in found["missed"]] == [("never_counted", 5000)]
    # Without the field nothing is claimed.
    unsaid = run(write(tmp_path / "unsaid.jsonl", [line(FIRST, THINKS, **usage(5000, None)), line(turns, answer(2))]))
    assert (unsaid["missed"], unsaid["prompt_tokens"]) == ([], 0)


def test_bad_lines_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    log = write(
        tmp_path / "log.jsonl",
        [
            line(FIRST, THINKS),
            "{not json",
            "[1, 2]",
            {"request": {"messages": [{"content": "no role"}]}},
            {"request": {"messages": "text"}},
            {"request": {"input_ids": [[1], [2]]}},
            line([*FIRST, THINKS, user(2)], answer(2)),
        ],
    )
    result = CliRunner().invoke(command, [str(log)])
    assert result.exit_code == 0, result.output
    assert "2 calls, conversations: 1; 1 continue an earlier call: 1 append to it, 0 do not" in " ".join(
        result.stdout.split()
    )
    reasons = {
        2: "not a JSON object",
        4: "field 'messages[0].role' is missing",
        5: "field 'messages' must be a list",
        6: "field 'input_ids' must be a list",
    }
    for number, reason in reasons.items():
        assert f"skipped: {log}:{number}: " in result.stderr
        assert reason in result.stderr


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("", [], "no JSON object in it"),
        ('{"a": 1}\n', [], "no known kind of log; pass --format"),
        ('{"messages": 3}\n', [], "no call could be read"),
        ('{"messages": []}\n', ["--template-setting", "a=1"], "pass --tokenizer too"),
        ('{"messages": []}\n', ["--tokenizer", "nowhere"], "nowhere/tokenizer.json: no such file"),
    ],
)
def test_what_cannot_be_read_is_a_clear_error(content: str, arguments: list[str], message: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(content)
    result = CliRunner().invoke(command, [str(log), *arguments])
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output


def test_the_answer_stands_on_top(tmp_path: Path) -> None:
    broken = write(tmp_path / "b.jsonl", [line(FIRST, THINKS), line(FAULTS["think_dropped"], answer(2))])
    said = CliRunner().invoke(command, [str(broken)]).output.splitlines()
    assert said[1].startswith("largest fault: a think block is missing in the history (turns: 1); what to do:")
    good = write(tmp_path / "g.jsonl", [line(FIRST, THINKS), line([*FIRST, THINKS, user(2)], answer(2))])
    assert "no fault in how prompts were built" in CliRunner().invoke(command, [str(good)]).output


def test_a_folder_is_its_files_and_a_log_goes_on_in_the_next_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep" / "1.jsonl", [line(FIRST, THINKS)])
    write(tmp_path / "deep" / "2.jsonl", [line(FAULTS["think_dropped"], answer(2))])
    found = run(tmp_path)
    assert (found["calls"], found["conversations"]) == (2, 1)
    assert [turn["follows"] for turn in found["broken"]] == [f"{tmp_path}/deep/1.jsonl:1"]
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(command, [str(tmp_path / "empty")])
    assert "no .jsonl file in it" in result.output


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A valid log with a few faults of the kinds that disks, editors and other versions make."""
    for _ in range(rng.randint(1, 4)):
        at, to = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        piece = data[at : min(to, at + 40)]
        match rng.randrange(6):
            case 0:
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 1:
                data = data[:at] + data[at + len(piece) :]
            case 2:
                data = data[:to] + piece + data[to:]
            case 3:
                data = data[:at] or b"{"
            case 4:  # another type in a value's place
                for old in (b'"user"', b"null", b"[", b"9000"):
                    data = data.replace(old, rng.choice((b"null", b"{}", b"[[]]", b"-1", b'"x"', b"true")), 1)
            case 5:  # another field
                names = re.findall(rb'"[a-z_A-Z]+"', data)
                if names:
                    data = data.replace(rng.choice(names), rng.choice(names), 1)
    return data


@pytest.mark.parametrize("name", [f.name for f in FORMATS])
def test_damaged_logs_give_named_lines_or_clear_errors(name: str, tmp_path: Path) -> None:
    """AGENTSERVE_EXAMPLES=10000 tries that many a format."""
    lines = {
        "requests": [line(FIRST, THINKS), *(line(messages, answer(2)) for messages in FAULTS.values())],
        "claude-code": claude_session(),
        "codex": codex_session(),
    }[name]
    whole = write(tmp_path / "whole.jsonl", lines).read_bytes()
    rng = random.Random(name)
    log = tmp_path / "damaged.jsonl"
    for _ in range(int(os.environ.get("AGENTSERVE_EXAMPLES", "200"))):
        log.write_bytes(damaged(whole, rng))
        skipped: list[str] = []
        found = Diagnosis()
        try:
            diagnose_calls(read_log(log, skipped.append), found)
        except LogError as error:
            skipped.append(str(error))
        assert found.calls <= 40
        assert all(re.match(rf"{re.escape(str(log))}(:\d+)?: .", message) for message in skipped)


def test_no_file() -> None:
    with pytest.raises(LogError, match=r"missing\.jsonl: cannot be read"):
        list(read_log(Path("missing.jsonl"), lambda _: None))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "user", "assistant", "text", "x y z"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "role",
                    "content",
                    "messages",
                    "text",
                    "tools",
                    "tool_calls",
                    "function",
                    "arguments",
                    "uuid",
                    "parentUuid",
                    "message",
                    "id",
                    "usage",
                    "payload",
                    "info",
                    "request",
                    "response",
                    "choices",
                    "input",
                    "prompt",
                    "input_ids",
                    "thinking",
                    "input_tokens",
                    "sessionId",
                    "output",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from(["type", "payload", "message", "request", "messages", "uuid",
                                                 "input_ids", "text", "response", "tools"]), json_values),
                max_size=4), st.sampled_from([f.name for f in FORMATS]))  # fmt: skip
def test_any_objects_give_calls_or_named_lines(values: list[dict[str, Any]], name: str) -> None:
    from eval.diagnose.logs.base import Line

    skipped: list[str] = []
    reader = next(f for f in FORMATS if f.name == name)
    lines = (Line(f"log:{i}", value) for i, value in enumerate(values))
    found = diagnose_calls(reader.read(lines, skipped.append), Diagnosis())
    assert found.calls <= len(values)
    assert all(message.startswith("log:") for message in skipped)
    json.dumps(found.as_dict())
