"""Writing traces: what is read back is what was written, but for what the report says was lost."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.cli import main
from eval.bench.theory_scan import scan_trace
from tests.random_sessions import sessions, turn
from traces import BlockScope, Session, StopReason, Turn, open_trace
from traces.anonymize import Anonymizer
from traces.check import problems
from traces.generate import PRESETS, generate_sessions
from traces.model import MAIN_FLOW, Flow
from traces.reblock import BlockSizeError, Reblocker, coarser_loss
from traces.sample import sampled
from traces.writers import write_trace, writer_names
from traces.writers.base import BLOCKS, CONVERSATION, SUBAGENT

ENDINGS = {"weka": "", "csv": ".csv"}
KEY = b"a secret of the tests"


def _with_details(session: Session, draw: Any) -> Session:
    """Fill the optional fields, in times that microseconds hold; the session begins at 0 s."""

    origin = min(one.start_s for flow in session.flows() for one in flow.turns)

    def detailed(old: Turn) -> Turn:
        return replace(
            old,
            start_s=old.start_s - origin,
            think_s=draw(st.sampled_from([None, 0.0, 1.25])) if old.index else None,
            api_s=draw(st.sampled_from([None, 0.5])),
            stop=draw(st.sampled_from(list(StopReason))),
            model=draw(st.sampled_from(["", "m"])),
        )

    def flow(old: Flow) -> Flow:
        duration = None if old.name == MAIN_FLOW else draw(st.sampled_from([None, 2.0]))
        return replace(old, turns=tuple(map(detailed, old.turns)), start_s=old.start_s - origin, duration_s=duration)

    return replace(session, main=flow(session.main), subagents=tuple(map(flow, session.subagents)))


@st.composite
def detailed_sessions(draw: st.DrawFn) -> list[Session]:
    """Two sessions of blocks that divide 16 and 512."""
    made = []
    for name in ("x", "y"):
        session = draw(sessions(name, max_turns=6).filter(lambda s: s.block_size in (2, 4, 8)))
        made.append(_with_details(session, draw))
    return made


def _path(folder: Path, name: str, ending: str | None = None) -> Path:
    return folder / f"out-{name}{ENDINGS.get(name, '.jsonl') if ending is None else ending}"


def _rows(found: Iterable[Session]) -> list[tuple[str, Turn, Flow, Session]]:
    """Turns with the name of their flow where every flow is a session, in a fixed order."""
    rows = []
    for session in found:
        for flow in session.flows():
            name = session.id if flow.name == MAIN_FLOW else f"{session.id}/{flow.name}"
            rows += [(name, one, flow, session) for one in flow.turns]
    return rows


def _differences(before: list[Session], after: list[Session], name: str) -> Counter[str]:
    """Which fields of the model differ, and in how many places."""
    one_by_one, named = name == "mooncake", name not in ("mooncake", "bailian")
    differ: Counter[str] = Counter()
    old_rows, new_rows = _rows(before), _rows(after)
    if one_by_one:  # the format has no sessions: its lines are in order of arrival
        old_rows = []
        for session in before:
            own = {id(row[1]): row for row in _rows([session])}
            old_rows += [own[id(one)] for _, one in session.turns_in_arrival_order()]
        differ[CONVERSATION] = sum(len(flow.turns) - 1 for session in before for flow in session.flows())
    else:
        differ[SUBAGENT] = len(after) - len(before)
    if named:
        for rows in (old_rows, new_rows):
            rows.sort(key=lambda row: (row[0], row[1].index))
    else:
        differ["id"] = len(before)
    for (old_name, old, old_flow, _), (new_name, new, new_flow, _) in zip(old_rows, new_rows, strict=True):
        differ["session id"] += named and old_name != new_name
        differ["prompt_tokens"] += old.prompt_tokens != new.prompt_tokens
        differ["output_tokens"] += old.output_tokens != new.output_tokens
        for name in ("think_s", "api_s", "stop", "model"):
            a, b = getattr(old, name), getattr(new, name)
            differ[name] += a != b if not isinstance(a, float) or b is None else abs(a - b) > 1e-5
        differ["start_s"] += abs(old.start_s - new.start_s) > 1e-5
        if old.index == 0:
            for name in ("tool_tokens", "system_tokens", "duration_s"):
                differ[name] += getattr(old_flow, name) != getattr(new_flow, name)
            if len(after) == len(before):
                for name in ("spawn_after", "join_before"):
                    differ[name] += getattr(old_flow, name) != getattr(new_flow, name)
    return +differ


def _shares(rows: list[tuple[str, Turn, Flow, Session]], block: int) -> list[list[int]]:
    """Common prefix of every pair of prompts, in tokens; only whole blocks of that size."""
    out = []
    for (_, a, _, left), (_, b, _, right) in itertools.combinations(rows, 2):
        comparable = left.scope is BlockScope.GLOBAL or left.id == right.id
        n = min(len(a.block_ids), len(b.block_ids)) if comparable else 0
        same = np.append(a.block_ids[:n] == b.block_ids[:n], False).argmin()
        out.append([int(same) * left.block_size // block])
    return out


@pytest.mark.parametrize("name", writer_names())
@settings(max_examples=15)
@given(data=st.data())
def test_what_is_read_back_is_what_was_written_but_for_what_was_lost(name: str, data: st.DataObject) -> None:
    before = data.draw(detailed_sessions())
    with tempfile.TemporaryDirectory() as folder:
        path = _path(Path(folder), name)
        written = write_trace(before, path, name)
        after = list(open_trace(str(path), format=name))
    assert [problem for session in after for problem in problems(session)] == []
    assert written.sessions == 2
    differ = _differences(before, after, name)
    for field, count in differ.items():
        assert count <= written.lost[field], f"{field}: {count} differ, {written.lost[field]} counted"
    lost = {field for field, count in written.lost.items() if count}
    # Nothing is called lost that is there: each loss of a plain field shows.
    for field in lost & {"think_s", "stop", "model", "tool_tokens", "duration_s", "spawn_after", "join_before"}:
        assert differ[field], f"{field} is called lost and is there"


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.xz", ".jsonl.gz", ".jsonl.bz2", ".parquet"])
def test_weka_rows_hold_everything(ending: str, tmp_path: Path) -> None:
    settings = PRESETS["tiny"].model_copy(update={"sessions": 6, "seed": 4})
    before = list(generate_sessions(settings))
    path = _path(tmp_path, "weka-rows", ending)
    written = write_trace(before, path, "weka-rows")
    assert written.lost == Counter()
    after = list(open_trace(str(path)))
    for old, new in zip(before, after, strict=True):
        for (_, a, *_), (_, b, *_) in zip(_rows([old]), _rows([new]), strict=True):
            np.testing.assert_array_equal(a.block_ids, b.block_ids)
            assert replace(a, block_ids=b.block_ids) == replace(b, start_s=pytest.approx(a.start_s))
        assert [f.spawn_after for f in old.subagents] == [f.spawn_after for f in new.subagents]


def _rates(found: Iterable[Session], pages: list[int], output: bool = True) -> list[int]:
    result = scan_trace(iter(found), page_sizes=pages, scope="session", output_inserted=output)
    return [rate.hit_tokens for rate in result.rates.values()]


@settings(max_examples=40)
@given(sessions("s").filter(lambda s: s.block_size in (4, 8)))
def test_smaller_blocks_change_no_theoretical_rate(session: Session) -> None:
    smaller = Reblocker(2).session(session)
    assert problems(smaller) == []
    assert _rates([smaller], [1, 2, 4, 8], output=False) == _rates([session], [1, 2, 4, 8], output=False)
    assert _rates([smaller], [1, 2, 4, 8]) == _rates([session], [1, 2, 4, 8])


@settings(max_examples=40)
@given(sessions("s").filter(lambda s: s.block_size in (2, 4)))
def test_larger_blocks_share_the_whole_blocks(session: Session) -> None:
    larger = Reblocker(8).session(session)
    assert problems(larger) == []
    before, after = _shares(_rows([session]), 8), _shares(_rows([larger]), 8)
    assert before == after
    if not coarser_loss(session, 8):
        assert _rates([larger], [8], output=False) <= _rates([session], [8], output=False)


@settings(max_examples=40)
@given(sessions("a"), sessions("b"))
def test_one_namespace_makes_sessions_share_nothing(one: Session, other: Session) -> None:
    other = Reblocker(one.block_size).session(other) if other.block_size % one.block_size == 0 else one
    other = replace(other, id="b")
    shared = Reblocker(shared=True)
    found = [shared.session(one), shared.session(other)]
    ids = [{block for _, t, *_ in _rows([session]) for block in t.block_ids.tolist()} for session in found]
    assert not ids[0] & ids[1]
    assert _shares(_rows([one]), one.block_size) == _shares(_rows([found[0]]), one.block_size)


def test_blocks_that_do_not_fit() -> None:
    session = Session("s", 48, BlockScope.SESSION, Flow(MAIN_FLOW, (turn(0, [1], 50),)))
    with pytest.raises(BlockSizeError, match="48 tokens can be neither split into nor joined to blocks of 512"):
        Reblocker(512).session(session)


@settings(max_examples=40)
@given(sessions("s"), st.booleans())
def test_anonymous_sessions_have_the_same_theory(session: Session, shared: bool) -> None:
    if shared:
        session = replace(session, scope=BlockScope.GLOBAL)
    found = Anonymizer(KEY).session(session)
    assert problems(found) == []
    for output in (True, False):
        assert _rates([found], [1, 2, 64], output) == _rates([session], [1, 2, 64], output)
    text = str(found).replace("main", "").replace("agent-", "")
    assert "sub1" not in text
    assert found.id != session.id
    ids = {block for _, t, *_ in _rows([found]) for block in t.block_ids.tolist()}
    assert not ids & set(range(1000))


def test_anonymizing_depends_on_key_and_session() -> None:
    made = Session("s", 4, BlockScope.SESSION, Flow(MAIN_FLOW, (turn(0, [1, 2], 9),)))
    first = Anonymizer(KEY).session(made)
    assert first.main.turns[0].block_ids.tolist() == Anonymizer(KEY).session(made).main.turns[0].block_ids.tolist()
    for other in (
        Anonymizer(KEY + b"!").session(made),
        Anonymizer(KEY).session(replace(made, id="t")),
    ):
        assert not set(first.main.turns[0].block_ids.tolist()) & set(other.main.turns[0].block_ids.tolist())
    with pytest.raises(ValueError, match="at least 16 bytes"):
        Anonymizer(b"short")


def test_samples_are_seeded_nested_and_independent_of_order() -> None:
    names = [f"s{n}" for n in range(50)]
    ten = sampled(names, 10, seed=1)
    assert ten == sampled(reversed(names), 10, seed=1)
    assert ten < sampled(names, 20, seed=1)
    assert len(ten) == 10
    assert ten != sampled(names, 10, seed=2)
    assert sampled(names, 99, seed=1) == set(names)


# --- the commands


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["traces", *map(str, arguments)])


GENERATED = "generated:sessions=5,seed=3,preset=tiny"


def test_convert_says_what_was_lost(tmp_path: Path) -> None:
    kept = _run("convert", GENERATED, tmp_path / "rows.parquet")
    assert (kept.exit_code, "nothing was lost" in kept.output) == (0, True), kept.output
    result = _run("convert", tmp_path / "rows.parquet", tmp_path / "out.jsonl", "--to", "mooncake", "--json")
    assert result.exit_code == 0, result.output
    report = orjson.loads(result.stdout)
    requests = sum(1 for _ in open_trace(str(tmp_path / "out.jsonl")))
    assert (report["sessions"], report["requests"]) == (5, requests)
    assert report["lost"]["stop"] > 0
    assert report["lost"][CONVERSATION] > 0


def test_convert_to_larger_blocks_counts_the_turns(tmp_path: Path) -> None:
    report = orjson.loads(_run("convert", GENERATED, tmp_path / "o.jsonl", "--to", "mooncake", "--json").stdout)
    expected = sum(coarser_loss(session, 512) for session in open_trace(GENERATED))
    assert report["lost"].get(BLOCKS, 0) == expected


@pytest.mark.parametrize(
    ("out", "to", "message"),
    [
        ("there.jsonl", "weka-rows", "exists already; name another path"),
        ("x.txt", "weka-rows", "a file of weka-rows must end in .jsonl or"),
        ("no/x.jsonl", "weka-rows", "its folder does not exist"),
    ],
)
def test_convert_refuses_paths(out: str, to: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("mine")
    result = _run("convert", GENERATED, tmp_path / out, "--to", to)
    assert result.exit_code == 1
    assert message in result.output
    assert (tmp_path / "there.jsonl").read_text() == "mine"


def test_a_faulty_trace_leaves_no_half_file(tmp_path: Path) -> None:
    _run("convert", GENERATED, tmp_path / "rows.jsonl")
    lines = (tmp_path / "rows.jsonl").read_bytes().splitlines()
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join([*lines[:3], b"{broken"]))
    result = _run("convert", tmp_path / "bad.jsonl", tmp_path / "out.jsonl", "--format", "weka-rows")
    assert result.exit_code == 1
    assert "bad.jsonl:4: not valid JSON" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "rows.jsonl"]


def test_check_lists_every_fault_with_its_line(tmp_path: Path) -> None:
    _run("convert", GENERATED, tmp_path / "rows.jsonl")
    good = _run("check", tmp_path / "rows.jsonl")
    assert (good.exit_code, "5 sessions" in good.output, "0 faults" in good.output) == (0, True, True)
    lines = [orjson.loads(line) for line in (tmp_path / "rows.jsonl").read_bytes().splitlines()]
    lines[1]["requests"][0]["in"] = 0
    lines[3]["id"] = lines[0]["id"]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)) + b"\n[]")
    bad = _run("check", tmp_path / "rows.jsonl")
    assert bad.exit_code == 1
    faults = [line for line in bad.output.splitlines() if line.startswith("fault: ")]
    assert ["rows.jsonl:2," in faults[0], "rows.jsonl:4," in faults[1], "rows.jsonl:6:" in faults[2]] == [True] * 3
    assert "field 'requests[0].in'" in faults[0]
    assert len(orjson.loads(_run("check", tmp_path / "rows.jsonl", "--json").stdout)["faults"]) == 3


def test_sample_takes_the_same_sessions_from_any_format(tmp_path: Path) -> None:
    for number, source in enumerate([GENERATED, tmp_path / "all.parquet"]):
        if number:
            _run("convert", GENERATED, source)
        assert _run("sample", source, tmp_path / f"{number}.jsonl", "--sessions", "2", "--seed", "5").exit_code == 0
    first, second = ([s.id for s in open_trace(str(tmp_path / f"{n}.jsonl"))] for n in range(2))
    assert first == second
    assert len(first) == 2


def test_anonymize_drops_names_and_keeps_the_theory(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    results = []
    for name in ("a", "b"):
        out = tmp_path / f"{name}.jsonl"
        assert _run("anonymize", GENERATED, out, "--key-file", tmp_path / "key").exit_code == 0
        results.append(out.read_bytes())
    assert results[0] == results[1]
    assert _run("anonymize", GENERATED, tmp_path / "c.jsonl").exit_code == 0
    assert (tmp_path / "c.jsonl").read_bytes() != results[0]
    pages = [1, 64, 256]
    assert _rates(open_trace(str(tmp_path / "c.jsonl")), pages) == _rates(open_trace(GENERATED), pages)
    for session in open_trace(GENERATED):
        assert session.id.encode() not in results[0]
    assert b"generated" not in results[0]


def test_anonymize_refuses_a_short_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"abc")
    result = _run("anonymize", GENERATED, tmp_path / "a.jsonl", "--key-file", tmp_path / "key")
    assert result.exit_code == 1
    assert "a key needs at least 16 bytes" in result.output


def test_text_logs_are_converted_with_a_tokenizer(tmp_path: Path) -> None:
    from agentserve.checkpoint.tokenizer import write_tokenizer
    from eval.bench.trace_samples import CODEX

    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model", max_length=10_000)
    (tmp_path / "log.jsonl").write_bytes(b"\n".join(map(orjson.dumps, CODEX)))
    refused = _run("convert", tmp_path / "log.jsonl", tmp_path / "out.jsonl")
    assert "--tokenizer DIR" in refused.output
    wrong = _run("convert", tmp_path / "log.jsonl", tmp_path / "out.jsonl", "--tokenizer", tmp_path)
    assert "no tokenizer.json; name the folder of the served checkpoint" in wrong.output
    done = _run("convert", tmp_path / "log.jsonl", tmp_path / "out.jsonl", "--tokenizer", tmp_path / "model")
    assert done.exit_code == 0, done.output
    assert "tools are not in the log" in done.stderr
    (session,) = open_trace(str(tmp_path / "out.jsonl"))
    assert len(session.main.turns) == 3


@pytest.mark.real_traces
def test_real_sessions_survive_the_round_trip_and_stay_the_same_theory(weka_archive: Path, tmp_path: Path) -> None:
    before = list(itertools.islice(open_trace(str(weka_archive)), 5))
    written = write_trace(before, tmp_path / "o.parquet", "weka-rows")
    assert written.lost == Counter()
    anonymizer = Anonymizer(KEY)
    after = [anonymizer.session(session) for session in open_trace(str(tmp_path / "o.parquet"))]
    assert _rates(after, [1, 64, 2048]) == _rates(before, [1, 64, 2048])
    split = Reblocker(16, shared=True)
    assert _rates(map(Reblocker(16).session, before), [1, 64]) == _rates(before, [1, 64])
    assert [problem for session in before[:3] for problem in problems(split.session(session))] == []
