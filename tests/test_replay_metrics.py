"""The server's counters on the run's clock: what is kept of a page, the file, its faults."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from traces.replay.metrics import METRICS, MetricsError, MetricsLog, counters_of, over_time, read_metrics, total

PAGE = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} RUNNING
# HELP agentserve_offload_tokens_total Tokens.
# TYPE agentserve_offload_tokens_total counter
agentserve_offload_tokens_total{event="restored",rank="0",pid="7"} 256.0
agentserve_offload_tokens_total{event="restored",rank="0",pid="8"} 128.0
agentserve_offload_tokens_total{event="stored",rank="0"} 512.0
# TYPE agentserve_offload_tokens_created gauge
agentserve_offload_tokens_created{event="stored",rank="0"} 1.7e9
# TYPE sglang:ttft histogram
sglang:ttft_bucket{le="1.0"} 4.0
sglang:ttft_bucket{le="+Inf"} 5.0
sglang:ttft_sum 3.5
sglang:ttft_count 5.0
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 9.0
# TYPE sglang:unset gauge
sglang:unset NaN
"""


def page(running: int) -> str:
    return PAGE.replace("RUNNING", str(float(running)))


def test_counters_and_gauges_are_kept_without_what_names_the_process() -> None:
    values = counters_of(page(3))
    assert values == {
        'sglang:num_running_reqs{tp_rank="0"}': 3.0,
        'agentserve_offload_tokens_total{event="restored",rank="0"}': 384.0,
        'agentserve_offload_tokens_total{event="stored",rank="0"}': 512.0,
    }
    assert total(values, "agentserve_offload_tokens_total") == 896.0
    assert total(values, "agentserve_offload_tokens_total", event="stored") == 512.0
    assert total(values, "agentserve_offload_tokens") is None


def sampled(folder: Path, pages: list[str]) -> MetricsLog:
    texts, times = iter(pages), iter(range(len(pages)))

    async def metrics() -> str:
        return next(texts)

    log = MetricsLog(folder / METRICS, metrics, lambda: float(next(times)), every_s=0.001)

    async def take() -> None:
        for _ in pages:
            await log.sample()

    asyncio.run(take())
    return log


def test_only_changes_are_written_and_read_back_whole(tmp_path: Path) -> None:
    sampled(tmp_path, [page(1), page(2), page(2)])
    lines = (tmp_path / METRICS).read_text().splitlines()
    assert ["stored" in line for line in lines] == [True, False, False]
    samples = read_metrics(tmp_path)
    assert over_time(samples, "sglang:num_running_reqs") == [(0.0, 1.0), (1.0, 2.0), (2.0, 2.0)]
    assert [total(s.values, "agentserve_offload_tokens_total") for s in samples] == [896.0] * 3
    # another server process after a resume: what the first one counted is gone
    sampled(tmp_path, ["# TYPE agentserve_x gauge\nagentserve_x 1.0\n"])
    assert read_metrics(tmp_path)[-1].values == {"agentserve_x": 1.0}


def test_a_server_without_counters_is_asked_once(tmp_path: Path) -> None:
    asked = []

    async def metrics() -> str:
        asked.append(1)
        return ""

    asyncio.run(asyncio.wait_for(MetricsLog(tmp_path / METRICS, metrics, lambda: 0.0, 0.001).run(), 5))
    assert (len(asked), read_metrics(tmp_path)) == (1, [])


def test_a_half_line_is_left_out_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    sampled(tmp_path, [page(1), page(2)])
    file = tmp_path / METRICS
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert len(read_metrics(tmp_path)) == 1
    file.write_bytes(b'{"at": 1, "values": 7}\n' + whole)
    with pytest.raises(MetricsError, match=r"metrics\.jsonl, line 1: .*remove metrics\.jsonl"):
        read_metrics(tmp_path)
