"""Comparisons: pairing and intervals by hand and against known truths, refusals, and the command."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from agentserve.audit.counters import SELECTIONS_REUSED
from agentserve.cli.compare import command
from agentserve.cli.report_facts import EVICTED as POLICY_EVICTED
from eval.compare import CompareError, compare, render_comparison, render_comparison_markdown
from eval.compare.doubts import EVICTED, REUSED, index_reuse, policy
from eval.compare.paired import FEWEST_SESSIONS, differences, draws, weighted_percentile
from eval.compare.text import paired_as, verdicts
from eval.report.load import Run
from tests.test_report_output import write_run
from tests.test_report_summary import FINISHED, header, record
from traces.replay.record import RequestError, RequestRecord, RunEvent, ServerInfo, Speculation


def records(hit: int, ttft: float, sessions: int = 8, seed: int = 0) -> list[RequestRecord]:
    """Sessions of three turns that hit ``hit`` more or less, the same sessions whatever ``hit`` is."""
    rng = np.random.default_rng(seed)
    return [
        record(
            f"s{s}",
            t,
            1_000,
            900,
            cached_tokens=hit + int(rng.integers(0, 40)),
            first_token_s=ttft + rng.random() / 10,
            done_s=3.0,
            output_sha256=f"{s}/{t}",
        )
        for s in range(sessions)
        for t in range(3)
    ]


def run(of: list[RequestRecord], events: list[RunEvent] = FINISHED, **changes: Any) -> Run:
    return Run(header(**changes), of, events, None, None, [])


def server(**changes: Any) -> ServerInfo:
    return ServerInfo(**{"base_url": "http://127.0.0.1:1", "client": "sglang", "page_size": 10, **changes})


def test_paired_by_hand() -> None:
    """Of three requests each, two are in both runs: 300 and 500 of 1,500 tokens hit."""
    failed = record("a", 9, 50, error=RequestError(kind="timeout", message="x"), cached_tokens=None)
    first = [record("a", 0, 1_000, 600, cached_tokens=300), record("b", 0, 500), record("c", 0, 70), failed]
    other = [record("b", 0, 500, cached_tokens=100), record("a", 0, 1_000, 600, cached_tokens=400), record("d", 0, 70)]
    result = compare([run(first), run(other)], ["x", "y"])
    (pairing,) = result.pairings
    assert (pairing.requests, pairing.only_first, pairing.only_other, pairing.answers) == (2, 1, 1, 0)
    rate = next(row for row in pairing.differences if row.key == "realized_rate")
    assert (rate.first, rate.other, rate.requests, rate.sessions) == (300 / 1_500, 500 / 1_500, 2, 2)
    assert rate.low is None  # two sessions say nothing about others
    assert [side.paired for side in result.runs] == [2, 2]
    assert result.runs[0].causes == {"not_observed": 300, "unexplained": 0}
    assert sum(result.runs[0].causes.values()) == result.runs[0].gap_tokens


def test_three_runs_are_shown_over_the_requests_of_all() -> None:
    runs = [run(records(500, 1.0)), run(records(700, 0.5)[:-3]), run(records(600, 0.7))]
    result = compare(runs, ["a", "b", "c"])
    assert [side.paired for side in result.runs] == [21, 21, 21]
    assert [p.name for p in result.pairings] == ["b", "c"]
    assert result.pairings[1].requests == 24
    assert result.pairings[1].same_answers == 24


def test_an_interval_holds_a_difference_that_is_there_and_zero_where_there_is_none() -> None:
    same = {d.key: d for d in differences(list(zip(records(500, 1.0), records(500, 1.0, seed=1), strict=True)))}
    other = {d.key: d for d in differences(list(zip(records(500, 1.0), records(800, 0.5), strict=True)))}
    for key in ("realized_rate", "ttft_mean", "ttft_p95", "computed_tokens"):
        low, high = same[key].low, same[key].high
        assert low is not None
        assert high is not None
        assert low <= 0 <= high
    rate, ttft = other["realized_rate"], other["ttft_mean"]
    assert (rate.low, rate.high) == (
        pytest.approx(0.3),
        pytest.approx(0.3),
    )  # the same noise in both: pairing takes it out
    assert ttft.low == pytest.approx(-0.5)
    assert rate.definition
    assert other["e2e_mean"].difference == 0


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Sessions drawn from a population with a true difference of 100 tokens: 95 % of intervals should hold it."""
    held, trials = 0, 40
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        pairs = []
        for s in range(30):
            shift = 100 + rng.normal(0, 60)  # a session's own difference
            for t in range(4):
                base = 400 + rng.integers(-50, 50)
                hits = (int(base), int(base + shift))
                pairs.append(tuple(record(f"s{s}", t, 1_000, cached_tokens=hit, first_token_s=None) for hit in hits))
        (rate,) = [d for d in differences(pairs) if d.key == "realized_rate"]
        assert rate.low is not None
        assert rate.high is not None
        held += rate.low <= 0.1 <= rate.high
    assert held / trials >= 0.85


def test_draws_and_weighted_percentiles() -> None:
    assert (draws(7, 20).sum(axis=1) == 7).all()
    values = np.array([3.0, 1.0, 2.0])
    weights = np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 5.0], [1.0, 8.0, 1.0]])
    assert weighted_percentile(values, weights, 50).tolist() == [2.0, 2.0, 1.0]
    assert weighted_percentile(values, weights, 100).tolist() == [3.0, 2.0, 3.0]
    many = np.random.default_rng(0).random(999)
    assert weighted_percentile(many, np.ones((1, 999)), 95)[0] == np.percentile(many, 95, method="inverted_cdf")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"trace_sha256": "cd" * 32}, "data set"),
        ({"prefix_sharing": "tools+system"}, "prefix sharing"),
        ({"server": server(client="openai")}, "client"),
        ({"server": server(speculation=Speculation(algorithm="EAGLE3", mode="synthetic", length=2.8))}, "acceptance"),
    ],
)
def test_runs_that_answer_another_question_are_refused(changes: dict[str, Any], word: str) -> None:
    runs = [run(records(500, 1.0)), run(records(600, 1.0), **changes)]
    with pytest.raises(CompareError, match=word):
        compare(runs, ["a", "b"])
    kept = compare(runs, ["a", "b"], allow=True).doubts
    assert [(doubt.level, doubt.what) for doubt in kept if doubt.level == "refuse"] == [("refuse", word)]


def test_other_differences_are_shown() -> None:
    changed = server(page_size=20, args={"radix_eviction_policy": "lfu", "port": 2}, kv_capacity_tokens=4096)
    runs = [
        run(records(500, 1.0), server=server(args={"radix_eviction_policy": "lru", "port": 1})),
        run(records(600, 1.0), events=FINISHED[:1], concurrency=9, server=changed),
    ]
    result = compare(runs, ["a", "b"])
    assert {doubt.what for doubt in result.doubts} == {"page size", "concurrency", "KV capacity", "completeness"}
    assert result.server_differences == {"radix_eviction_policy": ["lru", "lfu"]}


def test_index_reuse_and_policy_are_told_by_counters() -> None:
    assert REUSED == SELECTIONS_REUSED
    assert EVICTED == POLICY_EVICTED
    lru, reused = 'agentserve_evicted_tokens_total{policy="lru",victim="ended"} 5.0\n', f"{REUSED} 7.0\n"
    live = server(args={"radix_cache_backend": "agentserve"})
    plain = run(records(500, 1.0), server=live)._replace(metrics=("", lru))
    other = run(records(500, 1.0), server=live)._replace(metrics=("", lru.replace("lru", "gittins") + reused))
    found = {doubt.what: doubt for doubt in compare([plain, other], ["a", "b"]).doubts}
    assert found["index reuse"].values == ["off", "on"]
    assert found["policy"].values == ["lru", "gittins"]
    assert {doubt.level for doubt in found.values()} == {"warn"}
    before = other._replace(metrics=(reused, reused))
    assert index_reuse(before) == "off"
    assert index_reuse(run(records(500, 1.0))) == "unknown"
    assert policy(run(records(500, 1.0))) == "SGLang's own"


def test_nothing_to_pair() -> None:
    with pytest.raises(CompareError, match="at least two"):
        compare([run(records(1, 1.0))], ["a"])
    with pytest.raises(CompareError, match="nothing to pair"):
        compare([run([record("a", 0, 50)]), run([record("b", 0, 50)])], ["a", "b"])


def test_markdown_says_what_the_terminal_says_and_quotes_foreign_text() -> None:
    runs = [run(records(500, 1.0)), run(records(800, 0.5), concurrency=9)]
    result = compare(runs, ["a|b", "new *run*"])
    text = render_comparison_markdown(result)
    assert "- **new \\*run\\* against a\\|b: hit rate +30.00 points, mean TTFT -500 ms, the same answers.**" in text
    assert "> **Differs:** concurrency (" in text
    out = io.StringIO()
    render_comparison(result, Console(file=out, width=400))
    shown = out.getvalue()
    rows = re.findall(r"^\| (.*) \|$", text, flags=re.MULTILINE)
    cells = {
        cell.strip("*").replace("\\", "") for line in rows for cell in line.split(" | ") if not cell.startswith(":")
    }
    assert len(cells) > 30
    assert [cell for cell in cells if cell not in shown and "--:" not in cell] == []
    columns = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]
    assert set(columns) == {4, 6}  # no name adds a column


def test_a_verdict_says_how_sure_it_is() -> None:
    (chance,) = verdicts(compare([run(records(500, 1.0)), run(records(500, 1.0, seed=1))], ["a", "b"]))
    assert "points" in chance
    assert "within chance" in chance
    (few,) = verdicts(compare([run(records(500, 1.0, 2)), run(records(800, 1.0, 2))], ["a", "b"]))
    assert "too few sessions" in few
    silent = [r.model_copy(update={"output_sha256": None}) for r in records(500, 1.0)]
    result = compare([run(silent), run(silent)], ["a", "b"])
    assert "answers" not in verdicts(result)[0]
    assert "not compared" in paired_as(result.pairings[0])


def test_command(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", header(), records(500, 1.0), FINISHED)
    other = write_run(tmp_path / "b", header(), records(800, 0.5), FINISHED)
    said = CliRunner().invoke(command, [str(first), str(other), "--json", str(tmp_path / "c.json")])
    assert said.exit_code == 0, said.output
    text = " ".join(said.output.split())
    assert "+30.00" in text
    assert "Same answers: 24 of 24" in text
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["schema_version"] == 1
    assert json.loads(CliRunner().invoke(command, [str(first), str(other), "--json", "-"]).stdout) == written
    file = tmp_path / "c.md"
    assert CliRunner().invoke(command, [str(first), str(other), "--md", str(file)]).exit_code == 0
    assert CliRunner().invoke(command, [str(first), str(other), "--md", "-"]).stdout == file.read_text()
    both = CliRunner().invoke(command, [str(first), str(other), "--md", "-", "--json", "-"])
    assert both.exit_code == 2
    assert "give one of them a file" in both.output
    nowhere = CliRunner().invoke(command, [str(first), str(other), "--md", str(tmp_path / "no" / "c.md")])
    assert nowhere.exit_code == 1
    assert "--md" in nowhere.output
    twice = CliRunner().invoke(command, [str(first), str(first)])
    assert twice.exit_code == 2
    assert "given twice" in twice.output
    foreign = write_run(tmp_path / "z", header(trace_sha256="ef" * 32), records(800, 0.5), FINISHED)
    refused = CliRunner().invoke(command, [str(first), str(foreign)])
    assert refused.exit_code == 1
    assert re.search("must not be compared: data set", " ".join(refused.output.split()))
    assert "Not comparable" in CliRunner().invoke(command, [str(first), str(foreign), "--anyway"]).output
    assert len(records(1, 1.0)) // 3 >= FEWEST_SESSIONS
