"""What another cache would have brought: the workload of a run, the questions, and how the report tells it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from numba.core.dispatcher import Dispatcher

from agentserve.cli.report import command
from agentserve.cli.report_facts import serving_of_run
from eval.bench.report_scale import as_run, write_run
from eval.bench.simulator_workload import workload_from_sessions
from eval.report import Report, summarize
from eval.report.cache_use import cache_use, evictions
from eval.report.figures.timeline import session_timeline
from eval.report.html import render_html
from eval.report.markdown import render_markdown
from eval.report.schema_what_if import WhatIf
from eval.report.text_what_if import lines
from eval.report.what_if import Serving, what_if, workload_of_run
from radix_cache.attribution.simulated import explain
from radix_cache.simulator import Service, Setting, simulate
from radix_cache.simulator.run import UNBOUNDED
from tests.conftest import REPOSITORY
from tests.test_report_output import HOSTILE
from tests.test_report_summary import FINISHED, SMALL, header, record
from traces.readers import open_trace
from traces.replay.events import EventBatch, EventHeader, KvEvents, RequestPages
from traces.replay.record import RequestError, RequestRecord, RunHeader

PAGE, CLIENTS = 64, 4
Simulated = tuple[RunHeader, list[RequestRecord], KvEvents]


@cache
def simulated_run(of_live: float | None, seed: int = 1) -> Simulated:
    """A run that the simulator played: eight generated sessions, subagents among them; None: nothing is evicted."""
    workload = workload_from_sessions(open_trace(f"generated:sessions=8,seed={seed}"), page_size=PAGE)
    base = Setting(sessions=CLIENTS, think_cap=60.0, truncate=False, spare_pages=1)  # as a server
    live = simulate(workload, base).mean_context
    capacity = UNBOUNDED if of_live is None else int(of_live * live)
    outcome = simulate(workload, replace(base, capacity=capacity), log_evictions=True)
    return as_run(workload, outcome, explain(workload, outcome), seconds=True)


def asked(run: Simulated, *, events: bool = True, **options: Any) -> WhatIf:
    head, records, kv = run
    report = summarize(head, records, FINISHED, kv_events=kv)
    real = report.rate("realized")
    assert real is not None
    found = what_if(
        head,
        records,
        kv if events else None,
        page_size=PAGE,
        realized_rate=real.rate,
        **{"serving": Serving(bytes_per_token=1000.0), "seconds": 600.0, **options},
    )
    assert found is not None
    return found


@pytest.mark.parametrize("events", [True, False])
def test_the_workload_is_the_run_that_was_recorded(events: bool) -> None:
    """Request by request: what hit in a cache without bounds hits again, with page numbers and with lengths alone."""
    head, records, kv = simulated_run(None)
    made = workload_of_run(records, PAGE, kv if events else None)
    assert made is not None
    assert (made.left_out, made.source) == (0, "cache events" if events else "prefix lengths")
    assert made.workload.prompt_tokens == sum(r.prompt_tokens for r in records)
    assert len(made.workload.flows) > len(made.workload.sessions)  # subagents are there
    again = simulate(made.workload, Setting(sessions=head.concurrency, service=Service.FIXED))
    assert again.hit_tokens == sum(r.cached_tokens or 0 for r in records)


@pytest.mark.parametrize("of_live", [0.7, 0.85, 1.0])
def test_runs_under_pressure_are_simulated_as_they_were(of_live: float) -> None:
    """Seen: within 0.5 points. Where the server does not say how long a request was queued: up to 8 too few."""
    blind = []
    for seed in (1, 2, 3):
        head, records, kv = run = simulated_run(of_live, seed)
        found = asked(run, seconds=2.0)  # enough for its own setting, which comes first
        assert found.simulated_rate is not None
        assert found.realized_rate is not None
        assert found.theoretical_rate - found.realized_rate > 0.05  # memory was short
        assert abs(found.simulated_rate - found.realized_rate) < 0.01
        assert not found.notes
        untold = asked((head, [r.model_copy(update={"queued_s": None}) for r in records], kv), seconds=2.0)
        assert untold.simulated_rate is not None
        blind.append(abs(untold.simulated_rate - found.realized_rate))
        assert bool(untold.notes) == (blind[-1] > 0.02)
    assert 0.003 < max(blind) < 0.1


def test_answers_keep_the_order_that_must_hold() -> None:
    head, _, _ = run = simulated_run(0.85)
    found = asked(run, more_tokens=[64_000])
    rates = {answer.key: answer.rate for answer in found.answers}
    assert head.server.kv_capacity_tokens is not None
    half = head.server.kv_capacity_tokens // 2
    assert found.simulated_rate is not None
    assert found.simulated_rate <= rates["memory_64000"] <= rates[f"memory_{half}"] <= found.theoretical_rate
    assert rates["policy"] <= rates["belady"] <= found.theoretical_rate
    assert rates["host"] >= found.simulated_rate
    by_key = {answer.key: answer for answer in found.answers}
    assert by_key["memory_64000"].more_bytes == 64_000_000
    assert by_key["host"].more_bytes == head.server.kv_capacity_tokens * 1000
    assert by_key["policy"].more_bytes == 0
    for answer in found.answers:
        assert answer.saved_tokens == pytest.approx(answer.difference * sum(r.prompt_tokens for r in run[1]), abs=1)
        if answer.worth_tokens:
            assert answer.difference > 0
    # Memory is worth itself: the curve is interpolated, and the amount that was asked about lies on it.
    assert by_key["memory_64000"].worth_tokens == pytest.approx(64_000, abs=1)
    for point in found.curve:
        lru, belady = point.rates["lru"], point.rates["belady"]
        assert lru is not None
        assert belady is not None
        assert lru <= belady <= found.theoretical_rate
    sizes = [point.capacity_tokens for point in found.curve]
    assert sizes == sorted(sizes)
    assert head.server.kv_capacity_tokens in sizes  # this run's own point


def test_what_there_is_no_time_for_is_named() -> None:
    ticks = itertools.count(0, 5)
    found = asked(simulated_run(0.85), seconds=20.0, clock=lambda: float(next(ticks)))
    assert found.left_out
    assert 0 < found.theoretical_rate < 1
    drawn = sum(rate is not None for point in found.curve for rate in point.rates.values())
    assert len(found.answers) + drawn < 12
    assert any(f"No time for {len(found.left_out)} simulations" in line for line in lines(found))


def test_a_server_that_tells_no_capacity_has_a_curve_and_no_answers() -> None:
    head, records, kv = simulated_run(0.85)
    server = head.server.model_copy(update={"kv_capacity_tokens": None})
    found = asked((head.model_copy(update={"server": server}), records, kv))
    assert found.curve
    assert not found.answers
    assert found.simulated_rate is None
    assert "did not report its KV capacity" in found.notes[0]


def test_failed_requests_and_pages_without_events_are_counted() -> None:
    _, records, kv = simulated_run(0.85)
    failed = records[5].model_copy(update={"error": RequestError(kind="timeout", message="x"), "cached_tokens": None})
    changed = [*records[:5], failed, *records[6:]]
    paths = dict(kv.paths)
    del paths[records[9].session, records[9].flow, records[9].turn]
    made = workload_of_run(changed, PAGE, KvEvents(kv.header, kv.batches, paths))
    assert made is not None
    assert made.left_out == 1
    assert len(made.workload.requests) == len(records) - 2
    assert workload_of_run([failed], PAGE, None) is None
    other = workload_of_run(records, 128, kv)
    assert other is not None
    assert other.source == "prefix lengths"  # events of other pages say nothing


def test_policy_and_bytes_of_a_recorded_server() -> None:
    args = {"radix_cache_backend": "agentserve", "tp_size": 2}
    end = (
        'agentserve_evicted_tokens_total{policy="ttl:30",victim="ended"} 5.0\n'
        'sglang:kv_cache_memory_usage_gb{tp_rank="0"} 1.0\nsglang:max_total_num_tokens{tp_rank="0"} 960.0\n'
        'sglang:page_size{tp_rank="0"} 64.0\n'
    )
    live = serving_of_run(args, ("", end))
    assert (live.policy, live.whole_nodes) == ("ttl:30", False)
    assert live.bytes_per_token == 2 * 2**30 / 1024
    assert serving_of_run(args, None).policy_text.startswith("assumed")
    stock = serving_of_run({"radix_eviction_policy": "lfu"}, None, bytes_per_token=7.0)
    assert (stock.policy, stock.whole_nodes, stock.bytes_per_token) == ("lfu", True, 7.0)
    assert serving_of_run({"radix_eviction_policy": "filo"}, None).policy_text == "assumed instead of filo"


def events_by_hand() -> KvEvents:
    """Two sessions share page 0; page 1 is the first one's, 2 and 3 the second one's."""
    paths = {
        ("a", "main", 0): RequestPages(session="a", flow="main", turn=0, prompt=((0, 2),), answer=()),
        ("b", "main", 0): RequestPages(session="b", flow="main", turn=0, prompt=((0, 1), (2, 1)), answer=((3, 1),)),
    }
    ops: Sequence[Any] = [
        (("store", 1, ((0, 2),)),),
        (("remove", 1, ((1, 1),)), ("store", 1, ((0, 1), (2, 2)))),
        (("store", 2, ((1, 1),)), ("remove", 2, ((1, 1),)), ("remove", 1, ((0, 1), (2, 2)))),
        (("store", 1, ((0, 2),)), ("clear",)),
    ]
    batches = [EventBatch(seq=i, ts=float(i), at=float(i), ops=tuple(one)) for i, one in enumerate(ops)]
    return KvEvents(EventHeader(header=1, endpoint="-", page_size=10, pair_keys=False, emptied=True), batches, paths)


def test_cache_use_and_whose_pages_left_by_hand() -> None:
    records = [record("a", 0, 25, sent_s=0.0), record("b", 0, 25, sent_s=0.5)]
    use = cache_use(events_by_hand())
    assert use.tokens.tolist() == [20, 30, 0, 0]
    assert use.at_s.tolist() == [0.0, 1.0, 2.0, 3.0]
    gone = evictions(events_by_hand(), records)
    assert [tuple(one) for one in gone] == [(1.0, "a", 10), (2.0, "a", 10), (2.0, "b", 20)]
    figure = session_timeline(summarize(header(), records, FINISHED), records, gone)
    marks = next(trace for trace in figure.plot.data if trace.name == "evictions")
    assert len(marks.x) == 3


def test_markdown_shows_foreign_text_as_it_is() -> None:
    error = RequestError(kind="http", message=f"500 | {HOSTILE}\n| a |")
    records = [r.model_copy(update={"session": f"*{r.session}*|`<b>"}) for r in SMALL]
    records[-1] = records[-1].model_copy(update={"error": error})
    text = render_markdown(summarize(header(), records, FINISHED))
    assert HOSTILE not in text
    assert r"\*a\*\|\`\<b\>" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
    (broken,) = [line for line in text.splitlines() if line.startswith("| http")]
    assert "500" in broken
    assert broken.replace(r"\|", "").count("|") == 4  # three cells


def test_command_with_everything(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, *simulated_run(0.85))
    said = CliRunner().invoke(command, [str(run), "--bytes-per-token", "1000", "--more-gb", "0.01"])
    assert said.exit_code == 0, said.output
    assert "<- this run" in said.output
    report = Report.model_validate_json((run / "report.json").read_text())
    assert report.what_if is not None
    assert any(answer.key == "memory_10000" for answer in report.what_if.answers)
    markdown = (run / "report.md").read_text()
    assert "gittins instead of lru" in markdown
    page = (run / "report.html").read_text()
    assert "gittins instead of lru" in page
    assert {"capacity", "timeline", "over_time"} <= {f["id"] for f in figures_of(page)}
    over_time = next(f for f in figures_of(page) if f["id"] == "over_time")
    assert "in the cache" in {trace.get("name") for trace in over_time["data"]}


def test_command_without_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, *simulated_run(0.85))
    said = CliRunner().invoke(command, [str(run), "--what-if", "0", "--no-html", "--no-md", "--json", "-"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["what_if"] is None
    assert not (run / "report.md").exists()
    unknown = CliRunner().invoke(command, [str(run), "--more-gb", "1", "--no-html"])
    assert unknown.exit_code == 2
    assert "--bytes-per-token" in unknown.output
    both = CliRunner().invoke(command, [str(run), "--md", "x", "--no-md"])
    assert both.exit_code == 2


def figures_of(page: str) -> list[dict[str, Any]]:
    start = page.index('id="figures">') + len('id="figures">')
    found: list[dict[str, Any]] = json.loads(page[start : page.index("</script>", start)])
    return found


def test_page_of_a_run_that_has_all_of_it_is_small() -> None:
    head, records, kv = simulated_run(0.85)
    report = summarize(head, records, FINISHED, kv_events=kv)
    page = render_html(report.model_copy(update={"what_if": asked((head, records, kv))}), records, kv)
    assert len(page.encode()) < 6_000_000


def compiled() -> int:
    """How often something of the simulator was compiled, or read from disk, in this process."""
    modules = [module for name, module in sys.modules.items() if name.startswith("radix_cache.simulator")]
    functions = {value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)}
    return sum(len(function.signatures) for function in functions)


def test_nothing_is_left_to_compile_after_the_warm_up() -> None:
    """``python -m eval.report.what_if`` compiles ahead: a question that needs more would show here."""
    code = (
        "from tests.test_what_if import *; from eval.report.what_if.ask import warm_up; "
        "warm_up(Setting()); before = compiled(); "
        "found = asked(simulated_run(0.7)); print(before, compiled(), len(found.answers))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    before, after, answers = map(int, done.stdout.split())
    assert 0 < before == after
    assert answers > 5
