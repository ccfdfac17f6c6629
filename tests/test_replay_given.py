"""Prompts given token by token: what is sent, what the run keeps, and why a client's prompt changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from agentserve.checkpoint.tokenizer import write_tokenizer
from eval.report import load_run, summarize
from tests.replay_server import InThread, ReplayServer
from traces.model import MAIN_FLOW
from traces.replay.config import ReplayConfig
from traces.replay.given import GivenFlow, GivenPrompts, GivenTurn, given_prompts, read_prompts
from traces.replay.run import ReplayError, replay, replayed_sessions
from traces.replay.store import RunError, read_run

SYSTEM = "]~!b[]~b]system\nYou help.[e~[\n"
ASKED = SYSTEM + "]~b]user\nList the files.[e~[\n]~b]ai\n"
ANSWER = "I will look into the folder.[e~[\n]~b]user\nAnd now?[e~[\n]~b]ai\n"
THOUGHT = "<mm:think>They want to see all files here.</mm:think>"


def run_of(tmp_path: Path, texts: list[str]) -> tuple[ReplayServer, Path, list[list[int]]]:
    """One session, a turn a text, against a server whose checkpoint has the tiny M3's tokenizer."""
    write_tokenizer(tmp_path, max_length=1 << 20)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    server = ReplayServer(model_path=str(tmp_path), page_size=1)
    given = given_prompts({"s": {MAIN_FLOW: GivenFlow([GivenTurn(prompt) for prompt in ids])}}, block_size=16)
    with InThread(server) as url:
        config = ReplayConfig(trace="planted", out=tmp_path / "run", url=url, vocab=(0, 300))
        assert replay(config, given=given).status == "finished"
    return server, tmp_path / "run", ids


def test_prompts_are_sent_as_given_and_kept(tmp_path: Path) -> None:
    server, folder, ids = run_of(tmp_path, [ASKED, ASKED + ANSWER])
    assert [body["input_ids"] for body in server.seen] == ids
    assert [prompt.tolist() for prompt in read_prompts(folder).values()] == ids
    records = sorted(read_run(folder).records(), key=lambda r: r.turn)
    assert [(r.prompt_tokens, r.session_lcp) for r in records] == [(len(ids[0]), 0), (len(ids[1]), len(ids[0]))]
    assert read_run(folder).header.trace_format == "given"
    with pytest.raises(ReplayError, match="were given by a program"):
        replayed_sessions(read_run(folder))
    (folder / "prompts.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match=r"prompts\.jsonl, line 1: KeyError"):
        read_prompts(folder)


def test_a_dropped_think_block_is_the_largest_cause(tmp_path: Path) -> None:
    """The third turn leaves out what the first answer thought; all behind it is computed again."""
    rest = "Here they are, one by one.[e~[\n]~b]user\nThanks, go on.[e~[\n]~b]ai\n"
    texts = [ASKED, ASKED + THOUGHT + ANSWER, ASKED + ANSWER + rest]
    _, folder, ids = run_of(tmp_path, texts)
    header = read_run(folder).header
    known = header.model_copy(
        update={"server": header.server.model_copy(update={"args": {"model_path": str(tmp_path)}})}
    )
    (folder / "run.json").write_text(known.model_dump_json())
    run = load_run(folder)
    assert run.texts["s", MAIN_FLOW, 2] == texts[2]
    why = summarize(run.header, run.records, run.events, texts=run.texts).attribution
    assert why is not None
    same = next(i for i, (a, b) in enumerate(zip(ids[1], ids[2], strict=False)) if a != b)
    lost = min(len(ids[1]), len(ids[2]) - 1) - same
    (row,) = why.context_changes.by_cause
    assert (row.cause, row.changes, row.lost_tokens) == ("think_dropped", 1, lost)
    assert why.context_changes.largest[0].cause == "think_dropped"
    assert why.largest is not None
    assert (why.largest.kind, why.largest.cause, why.largest.tokens) == ("context_change", "think_dropped", lost)
    unread = summarize(run.header, run.records, run.events).attribution
    assert unread is not None
    assert [(row.cause, row.lost_tokens) for row in unread.context_changes.by_cause] == [("unknown", lost)]


@pytest.mark.parametrize(
    ("conversations", "message"),
    [
        ({"s": {"other": GivenFlow([GivenTurn([1])])}}, "none of its flows is called 'main'"),
        ({"s": {MAIN_FLOW: GivenFlow([GivenTurn([1]), GivenTurn([])])}}, "turn 1: give a prompt"),
        ({"s": {MAIN_FLOW: GivenFlow([])}}, "it has no turns"),
    ],
)
def test_faulty_prompts_are_named(conversations: dict[str, dict[str, GivenFlow]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        given_prompts(conversations)


def test_what_cannot_be_sent_as_given(tmp_path: Path) -> None:
    given = GivenPrompts([], {})
    with InThread(ReplayServer()) as url:
        config = ReplayConfig(trace="x", out=tmp_path / "run", url=url, vocab=(0, 300), history="own")
        with pytest.raises(ReplayError, match="leave out client, history and tokens_per_block"):
            replay(config, given=given)
