"""Reading traces: formats, accepted oddities, and one test a fault whose message must say where it is."""

from __future__ import annotations

import copy
import gzip
import io
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import BlockScope, ReadStats, Session, StopReason, TraceError, open_trace
from traces.readers import json_ids

Document = dict[str, Any]


def _request(t: float, prompt: int, ids: list[int], **changes: Any) -> Document:
    request = {
        "t": t,
        "type": "n",
        "model": "m",
        "in": prompt,
        "out": 5,
        "hash_ids": ids,
        "input_types": ["text"],
        "stop": "tool_use",
        "think_time": 1.0,
        "api_time": 2.0,
    }
    return {**request, **changes}


def _document(**changes: Any) -> Document:
    """Two main turns, a subagent of two, and a main turn after its end."""
    subagent = {
        "type": "subagent",
        "t": 5.5,
        "agent_id": "helper",
        "duration_ms": 10_000,
        "tool_tokens": 3,
        "system_tokens": 4,
        "requests": [_request(0.0, 140, [7, 8]), _request(4.0, 200, [7, 8, 9])],
    }
    document = {
        "id": "s1",
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": 30,
        "system_tokens": 20,
        "requests": [
            _request(0.0, 130, [1, 2]),
            _request(5.0, 200, [1, 2, 3]),
            subagent,
            _request(9.0, 260, [1, 2, 3, 4]),
            _request(20.0, 330, [1, 2, 3, 4, 5], stop="end_turn"),
        ],
    }
    return {**document, **changes}


def _read_one(tmp_path: Path, document: Document, stats: ReadStats | None = None) -> Session:
    path = tmp_path / "trace.json"
    path.write_bytes(orjson.dumps(document))
    (session,) = open_trace(str(path), stats=stats)
    return session


def test_weka_session_is_read_field_by_field(tmp_path: Path) -> None:
    session = _read_one(tmp_path, _document())
    assert (session.id, session.block_size, session.scope) == ("s1", 64, BlockScope.SESSION)
    assert (session.main.tool_tokens, session.main.system_tokens) == (30, 20)
    assert [t.index for t in session.main.turns] == [0, 1, 2, 3]
    second = session.main.turns[1]
    assert (second.start_s, second.prompt_tokens, second.output_tokens) == (5.0, 200, 5)
    assert (second.think_s, second.api_s, second.stop, second.model) == (1.0, 2.0, StopReason.TOOL_USE, "m")
    np.testing.assert_array_equal(second.block_ids, [1, 2, 3])
    assert second.block_ids.dtype == np.int64
    assert session.main.turns[3].stop is StopReason.END_TURN
    assert str(tmp_path) in session.source


def test_weka_subagent_is_placed_between_the_turns_around_it(tmp_path: Path) -> None:
    (helper,) = _read_one(tmp_path, _document()).subagents
    assert (helper.name, helper.tool_tokens, helper.system_tokens) == ("helper", 3, 4)
    # It ran from 5.5 to 15.5 s: started by the turn at 5 s; the turn at 9 s did not wait, the one at 20 s may have.
    assert (helper.start_s, helper.duration_s, helper.spawn_after, helper.join_before) == (5.5, 10.0, 1, 3)
    assert [t.start_s for t in helper.turns] == [5.5, 9.5]


def test_weka_times_count_from_the_first_request(tmp_path: Path) -> None:
    document = _document()
    for entry in document["requests"]:
        entry["t"] += 100.0
    session = _read_one(tmp_path, document)
    assert session.main.turns[0].start_s == 0.0
    assert session.subagents[0].turns[1].start_s == 9.5


def _accepted(change: Callable[[Document], None]) -> Document:
    document = copy.deepcopy(_document())
    change(document)
    return document


def test_accepts_output_of_zero(tmp_path: Path) -> None:
    session = _read_one(tmp_path, _accepted(lambda d: d["requests"][0].update(out=0)))
    assert session.main.turns[0].output_tokens == 0


def test_accepts_missing_think_and_api_time(tmp_path: Path) -> None:
    def change(document: Document) -> None:
        del document["requests"][1]["think_time"], document["requests"][1]["api_time"]

    turn = _read_one(tmp_path, _accepted(change)).main.turns[1]
    assert turn.think_s is None
    assert turn.api_s is None


def test_accepts_null_duration(tmp_path: Path) -> None:
    session = _read_one(tmp_path, _accepted(lambda d: d["requests"][2].update(duration_ms=None)))
    assert session.subagents[0].duration_s is None
    # Its end is then that of its last request: 9.5 + 2 s.
    assert session.subagents[0].join_before == 3


def test_accepts_overlapping_turns_with_a_note(tmp_path: Path) -> None:
    stats = ReadStats()
    _read_one(tmp_path, _accepted(lambda d: d["requests"][0].update(api_time=50.0)), stats)
    assert len(stats.notes) == 1
    assert "session s1: 1 turns start before their predecessor ended" in stats.notes[0]


def test_accepts_ids_rounded_up_with_one_note_a_session(tmp_path: Path) -> None:
    def change(document: Document) -> None:
        document["requests"][0]["hash_ids"] = [1, 2, 90]
        document["requests"][1]["hash_ids"] = [1, 2, 3, 91]

    stats = ReadStats()
    session = _read_one(tmp_path, _accepted(change), stats)
    np.testing.assert_array_equal(session.main.turns[0].block_ids, [1, 2])
    np.testing.assert_array_equal(session.main.turns[1].block_ids, [1, 2, 3])
    assert len(stats.notes) == 1
    assert "2 turns have an id for the partial last block" in stats.notes[0]


def test_accepts_other_stop_reasons_and_repeated_subagent_names(tmp_path: Path) -> None:
    def change(document: Document) -> None:
        document["requests"][0]["stop"] = "max_tokens"
        document["requests"].insert(3, copy.deepcopy(document["requests"][2]))

    session = _read_one(tmp_path, _accepted(change))
    assert session.main.turns[0].stop is StopReason.UNKNOWN
    assert [flow.name for flow in session.subagents] == ["helper", "helper#2"]


def _set(entry: int, field: str, value: Any) -> Callable[[Document], None]:
    return lambda document: document["requests"][entry].update({field: value})


def _set_inner(turn: int, field: str, value: Any) -> Callable[[Document], None]:
    return lambda document: document["requests"][2]["requests"][turn].update({field: value})


def _drop(entry: int, field: str) -> Callable[[Document], None]:
    return lambda document: document["requests"][entry].pop(field) and None


FAULTS: dict[str, tuple[Callable[[Document], None], list[str]]] = {
    "prompt 0": (_set(1, "in", 0), ["turn 1", "'requests[1].in'", "greater than or equal to 1"]),
    "prompt of another type": (_set(1, "in", "200"), ["turn 1", "'requests[1].in'", "integer"]),
    "fractional prompt": (_set(1, "in", 200.5), ["turn 1", "'requests[1].in'", "integer"]),
    "prompt missing": (_drop(1, "in"), ["turn 1", "'requests[1].in'", "required"]),
    "negative output": (_set(0, "out", -1), ["turn 0", "'requests[0].out'", "greater than or equal to 0"]),
    "negative think time": (_set(4, "think_time", -0.5), ["turn 3", "'requests[4].think_time'"]),
    "api time of another type": (_set(3, "api_time", "2"), ["turn 2", "'requests[3].api_time'", "number"]),
    "negative time": (_set(0, "t", -3.0), ["turn 0", "'requests[0].t'"]),
    "time that goes back": (_set(3, "t", 4.0), ["turn 2", "'requests[3].t'", "sorted by time"]),
    "unknown type": (_set(3, "type", "x"), ["turn 2", "'requests[3].type'", "unknown type 'x'", "'subagent'"]),
    "type missing": (_drop(3, "type"), ["turn 2", "'requests[3].type'", "unknown type None"]),
    "ids not a list": (_set(1, "hash_ids", "1,2,3"), ["turn 1", "'requests[1].hash_ids'", "list of 64-bit"]),
    "ids not integers": (_set(1, "hash_ids", [1, 2, 3.5]), ["turn 1", "'requests[1].hash_ids'", "list of 64-bit"]),
    "negative id": (_set(1, "hash_ids", [1, 2, -3]), ["turn 1", "'requests[1].hash_ids'", "-3 is negative"]),
    "too few ids": (_set(1, "hash_ids", [1, 2]), ["turn 1", "'requests[1].hash_ids'", "has 2 ids", "has 3 full"]),
    "too many ids": (_set(1, "hash_ids", [1, 2, 3, 4, 5]), ["turn 1", "'requests[1].hash_ids'", "has 5 ids"]),
    "ids out of order": (_set(1, "hash_ids", [1, 3, 2]), ["turn 1", "ids out of order", "id 2 after id 3", "id 1"]),
    "an id twice": (_set(1, "hash_ids", [1, 2, 2]), ["turn 1", "ids out of order", "id 2 after id 2"]),
    "ids that skip": (_set(3, "hash_ids", [2, 3, 4, 6]), ["turn 2", "id 2 after the start of the prompt"]),
    "fault in a subagent": (_set_inner(1, "in", 0), ["subagent helper", "turn 1", "'requests[2].requests[1].in'"]),
    "subagent's ids": (_set_inner(1, "hash_ids", [7, 9, 8]), ["subagent helper", "turn 1", "ids out of order"]),
    "nested subagent": (_set_inner(1, "type", "subagent"), ["subagent helper", "turn 1", "inside a subagent"]),
    "subagent without requests": (_set(2, "requests", []), ["subagent helper", "'requests[2].requests'"]),
    "duration of another type": (_set(2, "duration_ms", "1"), ["subagent helper", "'requests[2].duration_ms'"]),
    "block size 0": (lambda d: d.update(block_size=0), ["'block_size'", "greater than or equal to 1"]),
    "unknown scope": (lambda d: d.update(hash_id_scope="galaxy"), ["'hash_id_scope'", "'local' or 'global'"]),
    "no requests": (lambda d: d.update(requests=[]), ["'requests'", "no request of the session itself"]),
    "requests not a list": (lambda d: d.update(requests={}), ["'requests'", "list"]),
    "request not an object": (lambda d: d["requests"].insert(1, 7), ["turn 1", "'requests[1]"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named_with_file_session_turn_and_field(name: str, tmp_path: Path) -> None:
    change, expected = FAULTS[name]
    with pytest.raises(TraceError) as caught:
        _read_one(tmp_path, _accepted(change))
    message = str(caught.value)
    for part in [str(tmp_path / "trace.json"), "session s1", *expected]:
        assert part in message, f"{part!r} is not in: {message}"


def test_missing_session_id(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace.json, field 'id': field required"):
        _read_one(tmp_path, _accepted(lambda d: d.pop("id") and None))


@pytest.mark.parametrize("raw", [b"[1]", b"3", b'"x"'])
def test_json_that_is_no_session(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_bytes(raw)
    with pytest.raises(TraceError, match=r"trace\.json: "):
        list(open_trace(str(tmp_path / "trace.json")))


def test_not_a_number(tmp_path: Path) -> None:
    raw = orjson.dumps(_document()).replace(b'"think_time":1.0', b'"think_time":NaN', 1)
    (tmp_path / "trace.json").write_bytes(raw)
    with pytest.raises(TraceError, match=r"trace\.json: not valid JSON"):
        list(open_trace(str(tmp_path / "trace.json")))


def test_truncated_json(tmp_path: Path) -> None:
    raw = orjson.dumps(_document())
    (tmp_path / "trace.json").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(TraceError, match=r"trace\.json: not valid JSON .* truncated or damaged"):
        list(open_trace(str(tmp_path / "trace.json")))


def _archive(path: Path, documents: list[bytes], mode: str) -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for number, raw in enumerate(documents):
            member = tarfile.TarInfo(f"folder/t{number}.json")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))


def _collection() -> list[bytes]:
    bad = _accepted(_set(1, "in", 0))
    documents = [_document(id="a"), {**bad, "id": "b"}, _document(id="c"), _document(id="a")]
    return [*map(orjson.dumps, documents), b'{"id": "d", ']


@pytest.mark.parametrize(("name", "mode"), [("t.tar", "w"), ("t.tar.xz", "w:xz"), ("t.tar.gz", "w:gz")])
def test_archive_with_faulty_members_is_read_past_them(name: str, mode: str, tmp_path: Path) -> None:
    _archive(tmp_path / name, _collection(), mode)
    stats = ReadStats()
    read = [s.id for s in open_trace(str(tmp_path / name), skip_bad=True, stats=stats)]
    assert read == ["a", "c"]
    assert (stats.sessions, stats.requests, stats.skipped_sessions) == (2, 12, 3)
    assert stats.prompt_tokens == 2 * (130 + 200 + 140 + 200 + 260 + 330)
    zero, duplicate, truncated = stats.skipped
    assert "folder/t1.json), session b, turn 1, field 'requests[1].in'" in zero
    assert "folder/t3.json), session a, field 'id': this id was already read" in duplicate
    assert "folder/t4.json): not valid JSON" in truncated


def test_without_skip_bad_the_first_fault_ends_the_reading(tmp_path: Path) -> None:
    _archive(tmp_path / "t.tar", _collection(), "w")
    read: list[str] = []
    with pytest.raises(TraceError, match="session b"):
        read.extend(s.id for s in open_trace(str(tmp_path / "t.tar")))


def test_duplicate_session_id(tmp_path: Path) -> None:
    for name in ("x.json", "y.json"):
        (tmp_path / name).write_bytes(orjson.dumps(_document()))
    with pytest.raises(TraceError, match=r"y\.json, session s1, field 'id': this id was already read"):
        list(open_trace(str(tmp_path)))


def test_directory_is_read_in_order_of_names_and_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("sub/b", "a", "c"):
        (tmp_path / f"{name}.json").write_bytes(orjson.dumps(_document(id=name)))
    assert [s.id for s in open_trace(str(tmp_path))] == ["a", "c", "sub/b"]
    assert [s.id for s in open_trace(str(tmp_path), limit=2)] == ["a", "c"]


@pytest.mark.parametrize("cut", [400, -30], ids=["in the middle", "behind the last member"])
def test_truncated_archive(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "t.tar.xz"
    _archive(path, [orjson.dumps(_document(id=str(n))) for n in range(50)], "w:xz")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TraceError, match=r"t\.tar\.xz: cannot be read .* truncated or damaged"):
        list(open_trace(str(path)))
    stats = ReadStats()
    list(open_trace(str(path), skip_bad=True, stats=stats))
    assert stats.skipped_sessions == 1


@pytest.mark.parametrize(
    ("path", "format_name", "message"),
    [
        ("missing.json", None, "no such file or directory"),
        ("missing.json", "weka", "no such file or directory"),
        ("notes.txt", None, "format not recognised; name one of"),
        ("notes.txt", "excel", "unknown format 'excel'; known are"),
        (".", None, "no .json file in this directory"),
        ("empty.tar", None, "no .json member"),
    ],
)
def test_paths_that_are_no_trace(path: str, format_name: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    _archive(tmp_path / "empty.tar", [], "w")
    with pytest.raises(TraceError, match=message):
        list(open_trace(str(tmp_path / path), format=format_name))


def test_format_can_be_named_where_the_path_does_not_tell(tmp_path: Path) -> None:
    (tmp_path / "session").write_bytes(orjson.dumps(_document()))
    assert next(open_trace(str(tmp_path / "session"), format="weka")).id == "s1"


MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1536, "output_length": 0, "hash_ids": [0, 1, 3]},
]


@pytest.mark.parametrize("opener", [open, lzma.open, gzip.open], ids=["plain", "xz", "gz"])
def test_mooncake_line_is_a_session_of_one_turn(opener: Callable[..., Any], tmp_path: Path) -> None:
    suffix = {open: "", lzma.open: ".xz", gzip.open: ".gz"}[opener]
    path = tmp_path / f"trace.jsonl{suffix}"
    with opener(path, "wb") as stream:
        stream.write(b"\n".join(map(orjson.dumps, MOONCAKE)) + b"\n\n")
    first, second = open_trace(str(path))
    assert (first.id, second.id, first.scope, first.block_size) == ("1", "2", BlockScope.GLOBAL, 512)
    (turn,) = second.main.turns
    assert (turn.start_s, turn.prompt_tokens, turn.output_tokens) == (1.5, 1536, 0)
    np.testing.assert_array_equal(first.main.turns[0].block_ids, [0, 1])  # id 2 names the partial block
    np.testing.assert_array_equal(turn.block_ids, [0, 1, 3])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"input_length": 0}, "field 'input_length'"),
        ({"output_length": -1}, "field 'output_length'"),
        ({"timestamp": "now"}, "field 'timestamp'"),
        ({"hash_ids": [0]}, "field 'hash_ids': has 1 ids"),
        ({"hash_ids": None}, "field 'hash_ids': must be a list"),
        ({"hash_ids": [1, 0, 3]}, "field 'hash_ids': ids out of order"),
    ],
)
def test_mooncake_fault_names_line_and_field(changes: Document, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, [MOONCAKE[0], {**MOONCAKE[1], **changes}])))
    with pytest.raises(TraceError) as caught:
        list(open_trace(str(path)))
    assert f"{path}:2, session 2, turn 0, {expected}" in str(caught.value)


def test_mooncake_truncated_last_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, MOONCAKE))[:-9])
    stats = ReadStats()
    assert len(list(open_trace(str(path), skip_bad=True, stats=stats))) == 1
    assert "trace.jsonl:2" in stats.skipped[0]
    assert "not valid JSON" in stats.skipped[0]


def _without_arrays(raw: bytes) -> object:
    """What the fast parser made of a document, with its arrays put back."""
    document, lists = json_ids.loads(raw)

    def put_back(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: put_back(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [put_back(inner) for inner in value]
        return lists[value].tolist() if lists is not None and key == "hash_ids" else value

    return put_back(document)


@given(
    st.lists(
        st.lists(st.integers(-3, 2**63 - 1), max_size=6).flatmap(
            lambda ids: st.tuples(st.just(ids), st.integers(0, 6), st.sampled_from([",", ", ", " ,", "\n,\t"]))
        ),
        max_size=8,
    ),
    st.sampled_from(["", '"note": "x\\"hash_ids\\":[9",', '"hash_ids": [ ],']),
)
def test_fast_json_is_json(steps: list[tuple[list[int], int, str]], head: str) -> None:
    ids: list[int] = []
    parts = []
    for new, kept, comma in steps:
        ids = ids[:kept] + new
        parts.append('{"hash_ids":[' + comma.join(map(str, ids)) + "]}")
    raw = ("{" + head + '"requests":[' + ",".join(parts) + "]}").encode()
    try:
        expected = orjson.loads(raw)
    except orjson.JSONDecodeError:
        with pytest.raises(orjson.JSONDecodeError):
            json_ids.loads(raw)
        return
    assert _without_arrays(raw) == expected


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":[{"hash_ids":[1,2]},{"hash_ids":[1,2,]}]}',
        b'{"a":[{"hash_ids":[1,2]},{"hash_ids":[1,2,,3]}]}',
        b'{"a":[{"hash_ids":[1,2]},{"hash_ids":[1,2 3]}]}',
        b'{"a":[{"hash_ids":[  ]},{"hash_ids":[  ,5]}]}',
        b'{"a":[{"hash_ids":[1,2]},{"hash_ids":[1,2',
        b'{"a":[{"hash_ids":[1,2]},{"hash_ids":[01,2]}]}',
    ],
)
def test_fast_json_refuses_what_is_no_json(raw: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError) as expected:
        orjson.loads(raw)
    with pytest.raises(orjson.JSONDecodeError) as caught:
        json_ids.loads(raw)
    assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":[{"hash_ids":[1,2]},{"hash_ids":[1,2.5]}]}',
        b'{"a":[{"hash_ids":[1,2]},{"hash_ids":[1,[2]]}]}',
        b'{"a":[{"hash_ids":[1,2]},{"hash_ids":null}]}',
        b'{"a":[{"hash_ids":["]"]}]}',
        b'{"a":"hash_ids","hash_ids":[99999999999999999999]}',
        b'{"hash_ids":[12],"hash_ids":[123,4],"x":{"hash_ids":[123]}}',
        b'{"hash_ids" : [ 1 , 2 ],"x":{"hash_ids":[ 1 , 2 , 3]}}',
    ],
)
def test_fast_json_takes_any_json(raw: bytes) -> None:
    assert _without_arrays(raw) == orjson.loads(raw)


@pytest.mark.real_traces
def test_real_collection_is_valid_throughout(weka_archive: Path) -> None:
    stats = ReadStats()
    subagents = [f for s in open_trace(str(weka_archive), stats=stats) for f in s.subagents]
    assert (stats.sessions, stats.requests, stats.skipped_sessions) == (413, 30_118, 0)
    assert len(subagents) == 26
    assert all(flow.spawn_after is not None for flow in subagents)
