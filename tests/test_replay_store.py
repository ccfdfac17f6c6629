"""A run on disk: whole lines, half lines, damaged lines, and what is sent again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from traces.replay.record import RequestError, RequestRecord, RunEvent, RunHeader, ServerInfo
from traces.replay.store import RunError, RunWriter, read_run, reopen


def header() -> RunHeader:
    return RunHeader(
        agentserve_version="0", run_id="r", started_unix=0.0, trace="t", trace_sha256="0", trace_format="weka",
        sessions=1, requests=9, tokens_per_block=64, recorded_block_size=64, prefix_sharing="session",
        history="recorded", concurrency=1, think={}, over_limit="end-flow", seed=0,
        server=ServerInfo(base_url="http://x", client="sglang"),
    )  # fmt: skip


def record(turn: int, *, flow: str = "main", error: str | None = None) -> RequestRecord:
    return RequestRecord(
        session="s", flow=flow, turn=turn, ready_s=turn, sent_s=turn, first_token_s=turn + 0.5, done_s=turn + 1.0,
        think_s=0.0, prompt_tokens=10, prompt_tokens_reported=10, output_tokens_wanted=2, output_tokens=2,
        cached_tokens=0, session_lcp=0, session_output_lcp=0, shared_lcp=0, shared_output_lcp=0, ready_lcp=0,
        error=None if error is None else RequestError(kind=error, message="m"),  # type: ignore[arg-type]
    )  # fmt: skip


def written(path: Path, *records: RequestRecord) -> Path:
    writer = RunWriter.create(path, header())
    writer.event(RunEvent(at_s=0.0, kind="started"))
    for each in records:
        writer.record(each, np.array([1, 2], dtype=np.int32))
    writer.close()
    return path


def test_round_trip(tmp_path: Path) -> None:
    run = read_run(written(tmp_path / "r", record(0), record(1)))
    assert run.header == header()
    assert list(run.records()) == [record(0), record(1)]
    assert [event.kind for event in run.events] == ["started"]
    assert run.truncated_lines == 0


def test_records_are_on_disk_before_the_writer_is_closed(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "r", header())
    writer.record(record(0), None)
    assert list(read_run(tmp_path / "r").records()) == [record(0)]
    writer.close()


def test_a_used_directory_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "r")
    with pytest.raises(RunError, match=r"not empty.*--resume"):
        RunWriter.create(tmp_path / "r", header())


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_half_last_line_is_skipped_by_readers_and_cut_on_resume(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "r", record(0), record(1))
    file = path / "requests.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    run = read_run(path)
    assert list(run.records()) == [record(0)]
    assert run.truncated_lines == 1
    writer, progress = reopen(path)
    assert (list(progress.done), progress.cut_lines) == ([("s", "main", 0)], 1)
    assert list(progress.outputs) == [("s", "main", 0)]  # the output of the cut record goes with it
    writer.record(record(1), None)
    writer.close()
    assert [r.turn for r in read_run(path).records()] == [0, 1]


def test_a_damaged_line_elsewhere_names_file_line_and_field(tmp_path: Path) -> None:
    path = written(tmp_path / "r", record(0), record(1), record(2))
    file = path / "requests.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1].replace(b'"turn":1', b'"turn":"x"') + lines[2])
    with pytest.raises(RunError, match=r"requests\.jsonl, line 2: field 'turn'"):
        list(read_run(path).records())
    file.write_bytes(lines[0] + lines[1][:30] + b"\n" + lines[2])
    with pytest.raises(RunError, match=r"requests\.jsonl, line 2"):
        reopen(path)


def test_damaged_outputs_stop_a_resume(tmp_path: Path) -> None:
    path = written(tmp_path / "r", record(0))
    (path / "outputs.jsonl").write_bytes(b'{"session": "s"}\n')
    with pytest.raises(RunError, match=r"outputs\.jsonl, line 1"):
        reopen(path)


def test_no_run_and_wrong_header_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run\.json is missing"):
        read_run(tmp_path)
    path = written(tmp_path / "r")
    content = orjson.loads((path / "run.json").read_bytes())
    (path / "run.json").write_bytes(orjson.dumps(content | {"schema_version": 99}))
    with pytest.raises(RunError, match="schema version 99"):
        read_run(path)
    (path / "run.json").write_bytes(orjson.dumps(content | {"seed": "x"}))
    with pytest.raises(RunError, match=r"run\.json: field 'seed'"):
        read_run(path)
    (path / "run.json").write_bytes(b"{")
    with pytest.raises(RunError, match=r"run\.json"):
        read_run(path)


def test_only_requests_that_ended_their_flow_by_losing_the_server_are_sent_again(tmp_path: Path) -> None:
    path = written(
        tmp_path / "r",
        record(0), record(1, error="connection"), record(2), record(3, error="timeout"), record(4, error="connection"),
        record(0, flow="a"), record(1, flow="a", error="http"),
    )  # fmt: skip
    writer, progress = reopen(path)
    writer.close()
    assert progress.retried == 2
    kept = [("main", 0), ("main", 1), ("main", 2), ("a", 0), ("a", 1)]
    assert [(flow, turn) for _, flow, turn in progress.done] == kept
    assert [(r.flow, r.turn) for r in read_run(path).records()] == kept
    assert len((path / "retried.jsonl").read_bytes().splitlines()) == 2
    assert progress.clock_s == 5.0  # the clock goes on after the retried ones too


def test_text_outputs_come_back_as_text(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "r", header())
    writer.record(record(0), 'say "ü"\n')
    writer.record(record(1), np.array([5, 6], dtype=np.int32))
    writer.close()
    again, progress = reopen(tmp_path / "r")
    again.close()
    assert progress.outputs[("s", "main", 0)] == 'say "ü"\n'
    assert np.array_equal(progress.outputs[("s", "main", 1)], [5, 6])
