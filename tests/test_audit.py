"""Configured, eligible, executed: the rules on made-up servers, and the audit of a real one."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from agentserve.audit import AuditRow, Metrics, audit_rows, counters
from agentserve.audit.rows import PATHS
from agentserve.cli.audit import command
from agentserve.runtime.server_facts import server_facts
from agentserve.shapes.published import M3_CONFIG
from offload.state import bytes_per_token, prefix_state_planes
from tests.conftest import REPOSITORY
from tests.servers import TinyServer

NOTHING = Metrics([])


def audit(info: dict[str, Any], text: str = "", **known: Any) -> dict[str, AuditRow]:
    known.setdefault("config", M3_CONFIG)
    rows = audit_rows(info, Metrics.from_text(text), **known)
    return {row.path: row for row in rows}


# --- counters


def test_total_sums_labels_and_reads_one_rank() -> None:
    metrics = Metrics.from_text(
        'a_total{mode="x",tp_rank="0"} 3\na_total{mode="y",tp_rank="0"} 4\na_total{mode="x",tp_rank="1"} 3\n'
    )
    assert metrics.total("a_total") == 7
    assert metrics.total("a_total", mode="x") == 3
    assert metrics.total("a_total", mode="z") is None
    assert metrics.count("b_total") == 0


def test_since_counts_what_came_after_and_survives_a_restart() -> None:
    before = Metrics.from_text('a_total{m="x"} 3\nb_total 9\nsize 5\n')
    after = Metrics.from_text('a_total{m="x"} 5\na_total{m="y"} 2\nb_total 1\nsize 6\n').since(before)
    assert after.total("a_total") == 4
    assert after.total("b_total") == 1  # fell: another process
    assert after.total("size") == 6


def test_names_are_those_that_upstream_and_we_register() -> None:
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    upstream = (Path(spec.origin).parent / "srt/observability/metrics_collector.py").read_text()
    ours = "".join(path.read_text() for path in (REPOSITORY / "agentserve/runtime").glob("*_counters.py"))
    names = [value for name, value in vars(counters).items() if name.isupper() and not name.startswith("_")]
    assert len(names) > 10
    for name in names:
        if name.startswith("sglang:"):
            assert f'name="{name}"' in upstream, name
        else:
            assert f'"{name.removesuffix("_total")}"' in ours, name


# --- rules


@given(
    st.dictionaries(
        st.sampled_from(
            ["SGLANG_USE_AITER", "SGLANG_M3_ALLOW_CUSTOM_AR", "AGENTSERVE_INDEX_REUSE", "SGLANG_DISABLE_MSA"]
        ),
        st.sampled_from(["0", "1", "freq:4"]),
    ),
    st.sampled_from(["cpu", "cuda", "rocm"]),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
)
def test_nothing_is_credited_without_a_counter(environment: dict[str, str], device: Any, tp: int, on: bool) -> None:
    """However well it is configured: configured != eligible != executed."""
    info = {
        "device": "cpu" if device == "cpu" else "cuda",
        "tp_size": tp,
        "page_size": 128,
        "enable_lmcache": on,
        "kv_cache_dtype": "fp8_e4m3" if on else "auto",
        "speculative_algorithm": "EAGLE3" if on else None,
        "speculative_eagle_topk": 1 if on else None,
        "cuda_graph_config": {"decode": {"backend": "full" if on else "disabled", "max_bs": 8}},
    }
    rows = audit_rows(info, NOTHING, config=M3_CONFIG, environment=environment, device=device)
    assert len(rows) == len(PATHS) == len({row.path for row in rows})
    assert all(row.verdict != "runs" for row in rows)
    assert all(row.setting and row.condition and row.counter for row in rows)


def test_aiter_wants_one_kv_head_a_rank() -> None:
    for tp, eligible in ((1, False), (2, False), (4, True), (8, True)):
        known: dict[str, Any] = {"environment": {"SGLANG_USE_AITER": "1"}, "device": "rocm"}
        row = audit({"device": "cuda", "tp_size": tp}, **known)["AITER sparse paged attention"]
        assert row.configured
        assert row.eligible is eligible
        assert f"4 KV heads over tp {tp}: {max(1, 4 // tp)} a rank" in row.condition
        assert row.verdict == ("not proven" if eligible else "not eligible")


@pytest.mark.parametrize(
    ("info", "why"),
    [({"kv_cache_dtype": "fp8_e4m3"}, "is fp8_e4m3: Triton runs"), ({"enable_hisparse": True}, "HiSparse is on")],
)
def test_aiter_wants_the_pool_as_it_is(info: dict[str, Any], why: str) -> None:
    row = audit({"device": "cuda", "tp_size": 8, **info}, environment={"SGLANG_USE_AITER": "1"}, device="rocm")
    assert row["AITER sparse paged attention"].eligible is False
    assert why in row["AITER sparse paged attention"].condition


def test_kernels_are_credited_by_the_passes_that_they_ran_in() -> None:
    text = (
        'agentserve_sparse_attention_passes_total{kernel="msa",mode="decode"} 90\n'
        'agentserve_sparse_attention_passes_total{kernel="triton",mode="extend"} 10\n'
        'agentserve_quick_reduce_passes_total{mode="extend"} 4\n'
    )
    rows = audit({"device": "cuda", "tp_size": 8}, text)
    name = "agentserve_sparse_attention_passes_total"
    assert (rows["MSA kernel"].executed, rows["MSA kernel"].verdict) == (90, "runs")
    assert rows["MSA kernel"].counter == f"of 100 passes ({name}: msa 90, triton 10)"
    assert rows["AITER sparse paged attention"].executed == 0
    assert (rows["quantized all-reduce"].executed, rows["quantized all-reduce"].verdict) == (4, "runs")
    fell_back = {
        "device": "cuda",
        "page_size": 128,
        **server_facts("sm_100", None, {}),
        "agentserve_msa_installed": True,
    }
    only_triton = 'agentserve_sparse_attention_passes_total{kernel="triton",mode="decode"} 7\n'
    assert audit(fell_back, only_triton)["MSA kernel"].verdict == "not executed"
    # A server without us counts none of it.
    for path in ("MSA kernel", "AITER sparse paged attention", "quantized all-reduce"):
        assert audit({"device": "cuda", "tp_size": 8})[path].executed is None


def quick_reduce(tp: int, codec: str = "INT4", **info: Any) -> AuditRow:
    environment = {"ROCM_QUICK_REDUCE_QUANTIZATION": codec, "SGLANG_M3_ALLOW_CUSTOM_AR": "1"}
    server = {"device": "cuda", "tp_size": tp, **info}
    return audit(server, environment=environment, device="rocm")["quantized all-reduce"]


def test_a_configured_codec_does_not_reach_a_decode_message_of_1_5_mib() -> None:
    """The seeds' claim that had to be withdrawn: INT4 was configured, the message was below the gate."""
    row = quick_reduce(4, max_running_requests=128)
    assert (row.configured, row.eligible, row.executed, row.verdict) == (True, False, None, "not eligible")
    assert "at least 2 MiB (INT4, tp 4); decode up to 1.5 MiB" in row.condition
    row = quick_reduce(4, max_running_requests=128, chunked_prefill_size=8192)
    assert (row.eligible, row.verdict) == (True, "not proven")
    assert quick_reduce(4, disable_custom_all_reduce=True).verdict == "off"
    assert quick_reduce(4, codec="NONE").verdict == "off"
    assert quick_reduce(16, max_running_requests=9999).eligible is False


@pytest.mark.parametrize(
    ("info", "eligible", "why"),
    [
        ({"device": "cpu"}, False, "this is a CPU"),
        ({"device": "cuda", "page_size": 128, "attention_backend": "fa3"}, False, "attention backend is fa3"),
        ({"device": "cuda", "page_size": 64, "attention_backend": "fa4"}, False, "page size must be 128, is 64"),
        (
            {"device": "cuda", "page_size": 128, "attention_backend": "fa4", "kv_cache_dtype": "fp8_e4m3"},
            False,
            "is fp8_e4m3 with fa4",
        ),
        (
            {"device": "cuda", "page_size": 128, "attention_backend": "fa4", "enable_hisparse": True},
            False,
            "HiSparse is on",
        ),
        ({"device": "cuda", "page_size": 128, "attention_backend": "fa4"}, None, "SM100"),
    ],
)
def test_msa_kernel_or_its_fallback(info: dict[str, Any], eligible: bool | None, why: str) -> None:
    row = audit(info)["MSA kernel"]
    assert row.eligible is eligible
    assert why in row.condition


def test_index_reuse_is_credited_by_its_own_counters() -> None:
    text = (
        'agentserve_index_selections_reused_total{mode="decode",layer="4"} 10\n'
        'agentserve_index_selections_reused_total{mode="extend",layer="5"} 2\n'
        'agentserve_index_producers_skipped_total{mode="decode",layer="4"} 0\n'
    )
    kept = {"AGENTSERVE_INDEX_REUSE": "freq:4", "AGENTSERVE_INDEX_PRODUCERS": "keep"}
    rows = audit({"device": "cuda"}, text, environment=kept, device="cuda")
    assert rows["index reuse"].executed == 12
    assert rows["index reuse"].verdict == "runs"
    assert rows["index producer skip"].verdict == "off"
    unknown = audit({"device": "cuda"}, text)
    assert unknown["index reuse"].configured
    assert unknown["index producer skip"].configured is None
    assert audit({"device": "cuda", "pp_size": 2}, environment=kept)["index reuse"].eligible is False
    assert audit({"device": "cuda", "enable_two_batch_overlap": True})["index reuse"].eligible is False


def test_rocms_own_index_reuse_is_never_proved() -> None:
    row = audit({"device": "cuda"}, environment={"SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ": "4"}, device="rocm")[
        "index reuse"
    ]
    assert (row.configured, row.eligible, row.executed, row.verdict) == (True, True, None, "not proven")
    row = audit({"device": "cuda"}, environment={"SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ": "4"}, device="cuda")[
        "index reuse"
    ]
    assert row.verdict == "not eligible"


def test_graphs_are_counted_against_all_passes() -> None:
    text = (
        'sglang:cuda_graph_passes_total{mode="decode_cuda_graph",tp_rank="0"} 9\n'
        'sglang:cuda_graph_passes_total{mode="decode_none",tp_rank="0"} 1\n'
        'sglang:cuda_graph_passes_total{mode="prefill_none",tp_rank="0"} 4\n'
    )
    graphs = {"decode": {"backend": "full", "max_bs": 8}, "prefill": {"backend": "full", "max_bs": 64}}
    rows = audit({"device": "cuda", "cuda_graph_config": graphs}, text)
    assert (rows["CUDA graph, decode"].executed, rows["CUDA graph, decode"].verdict) == (9, "runs")
    assert "of 10 decode passes" in rows["CUDA graph, decode"].counter
    assert rows["CUDA graph, prefill"].verdict == "not executed"
    # What a recorded run keeps of the server's arguments.
    recorded = audit({"device": "cuda", "disable_prefill_cuda_graph": True}, text)
    assert recorded["CUDA graph, decode"].verdict == "runs"
    assert recorded["CUDA graph, prefill"].verdict == "off"


def test_offload_needs_its_daemon_and_its_tokens() -> None:
    lost = 'agentserve_offload_online{rank="0"} 0\nagentserve_offload_tokens_total{event="stored",rank="0"} 0\n'
    rows = audit({"enable_lmcache": True}, lost)
    assert rows["offload store"].verdict == rows["offload load"].verdict == "not eligible"
    running = (
        'agentserve_offload_online{rank="0"} 1\n'
        'agentserve_offload_tokens_total{event="stored",rank="0"} 512\n'
        'agentserve_offload_tokens_total{event="stored",rank="1"} 512\n'
    )
    rows = audit({"enable_lmcache": True}, running)
    assert (rows["offload store"].executed, rows["offload store"].verdict) == (512, "runs")
    assert rows["offload load"].verdict == "not executed"
    # SGLang's connector without ours refuses M3's pool.
    assert audit({"enable_lmcache": True}, environment={})["offload store"].eligible is False
    host = 'sglang:load_back_tokens_total{pool="kv",tp_rank="0"} 256\n'
    assert audit({"enable_hierarchical_cache": True}, host)["offload load"].executed == 256


@pytest.mark.parametrize(("kv", "index", "fp8"), [("fp8_e4m3", "bfloat16", 1), ("bfloat16", "bfloat16", 0)])
@pytest.mark.parametrize("reuse", [None, "freq:4"])
@pytest.mark.parametrize("tp", [1, 8])
def test_fp8_is_proved_by_the_size_of_the_pool(kv: str, index: str, fp8: int, reuse: str | None, tp: int) -> None:
    freq = 4 if reuse else 1
    planes = prefix_state_planes(M3_CONFIG, kv_dtype=kv, index_dtype=index, tp=tp, index_topk_freq=freq)
    memory = (1280 + 128) * bytes_per_token(planes) / 2**30
    text = f"sglang:kv_cache_memory_usage_gb {memory}\nsglang:max_total_num_tokens 1280\nsglang:page_size 128\n"
    environment = {"AGENTSERVE_INDEX_REUSE": reuse} if reuse else {}
    info = {"device": "cuda", "tp_size": tp, "kv_cache_dtype": "fp8_e4m3"}
    row = audit(info, text, environment=environment)["FP8 K/V"]
    assert row.executed == fp8
    assert row.verdict == ("runs" if fp8 else "not executed")
    odd = text.replace(str(memory), str(memory * 1.1))
    assert audit(info, odd, environment=environment)["FP8 K/V"].executed is None


def test_eagle3_says_whether_acceptance_was_real() -> None:
    text = (
        'agentserve_speculation{mode="synthetic",length="2.78",keys="token"} 3\n'
        'agentserve_speculation_steps_total{mode="synthetic"} 100\n'
        'agentserve_speculation_accepted_drafts_total{mode="synthetic",position="1"} 90\n'
        'agentserve_speculation_accepted_drafts_total{mode="synthetic",position="2"} 88\n'
    )
    info = {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1}
    row = audit(info, text)["EAGLE3"]
    assert (row.executed, row.verdict) == (100, "runs")
    assert row.counter.endswith("178 drafts accepted, 2.78 tokens a step, synthetic acceptance of 2.78")
    real = text.replace("synthetic", "real").replace('"2.78"', '""')
    assert audit(info, real)["EAGLE3"].counter.endswith("2.78 tokens a step, real acceptance")
    assert audit({**info, "speculative_eagle_topk": 4})["EAGLE3"].verdict == "not eligible"
    assert audit(info, "sglang:spec_verify_calls_total 7\n")["EAGLE3"].executed == 7


def test_what_hangs_on_an_unknown_checkpoint_stays_open() -> None:
    rows = audit({"device": "cuda", "tp_size": 8}, config=None, environment={"SGLANG_USE_AITER": "1"}, device="rocm")
    assert rows["AITER sparse paged attention"].eligible is None
    assert rows["index reuse"].eligible is None
    assert "pass --recipe" in rows["AITER sparse paged attention"].condition


# --- a real server


def rows_of(table: str) -> list[str]:
    return [line for line in table.splitlines() if line.count("│") == 6]


@pytest.mark.server
def test_audit_of_a_real_server(tiny_server: TinyServer, tmp_path: Path) -> None:
    tiny_server.flush()
    before = tmp_path / "before.txt"
    before.write_text(httpx.get(tiny_server.url + "/metrics", follow_redirects=True).text)
    prompt = [(7 * i) % 300 + 3 for i in range(700)]
    cached = [tiny_server.generate(prompt, 4)["meta_info"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, 640]

    launched = ["--recipe", "tiny-cpu", "--set", f"model={tiny_server.checkpoint}"]
    result = CliRunner().invoke(command, [tiny_server.url, "--json", "--since", str(before), *launched])
    assert result.exit_code == 0, result.output
    rows = {row["path"]: row for row in orjson.loads(result.stdout)}
    assert len(rows) == len(PATHS)
    assert rows["radix hit"]["executed"] == 640
    assert {path for path, row in rows.items() if row["verdict"] == "runs"} == {"radix hit"}
    for path in ("index reuse", "index producer skip", "EAGLE3", "offload store", "CUDA graph, decode"):
        assert rows[path]["configured"] is False
        assert rows[path]["executed"] == 0
    assert rows["MSA kernel"]["configured"] is True
    assert rows["MSA kernel"]["eligible"] is False
    assert "3,712 B a token are K/V in float32" in rows["FP8 K/V"]["counter"]
    assert "of 0 decode passes" not in rows["CUDA graph, decode"]["counter"]

    table = CliRunner().invoke(command, [tiny_server.url + "/v1"], env={"COLUMNS": "160"})
    assert table.exit_code == 0, table.output
    assert "radix hit" in table.stdout
    for name in (counters.CACHED_TOKENS, counters.ATTENTION_PASSES):  # whole, though folded
        assert name in re.sub(r"[│\s]", "", "".join(line.split("│")[4] for line in rows_of(table.stdout)))


# --- what cannot be audited


@pytest.fixture
def stand_in() -> Iterator[tuple[str, dict[str, bytes]]]:
    """An address and the pages it serves, by path; anything else is 404."""
    pages = {"/server_info": b'{"device": "cpu"}'}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in pages else 404)
            self.end_headers()
            self.wfile.write(pages.get(self.path, b""))

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", pages
        server.shutdown()
        thread.join()


def test_a_server_without_metrics_proves_nothing(stand_in: tuple[str, dict[str, bytes]]) -> None:
    result = CliRunner().invoke(command, [stand_in[0]])
    assert result.exit_code == 1
    assert "answers 404" in result.stderr
    assert "--enable-metrics" in result.stderr


def test_text_that_is_no_metrics_names_its_source(stand_in: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
    url, pages = stand_in
    pages["/metrics"] = b"a_total 1\n"
    faulty = tmp_path / "before.txt"
    faulty.write_text('{\n  "a": 1\n}\n')
    result = CliRunner().invoke(command, [url, "--since", str(faulty)])
    assert result.stderr == f"Error: {faulty}: not in the Prometheus text format\n"
    faulty.write_text("foo bar baz\n")
    result = CliRunner().invoke(command, [url, "--since", str(faulty)])
    assert result.exit_code == 1
    assert f"{faulty}: not in the Prometheus text format" in result.stderr
    assert "pass --recipe too" in CliRunner().invoke(command, [url, "--set", "tp=2"]).stderr
    missing = ["--recipe", "tiny-cpu", "--set", "eagle3.draft=/no/draft"]
    assert "'/no/draft' does not exist" in CliRunner().invoke(command, [url, *missing]).stderr
    astray = CliRunner().invoke(command, [url.removeprefix("http://") + "/astray"])
    assert astray.stderr == f"Error: {url}/astray/server_info answers 404: is this the address of an SGLang server?\n"
    pages["/server_info"] = b"[]"
    assert "a JSON object was expected" in CliRunner().invoke(command, [url]).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:9"], "no SGLang server answers"),
        (["not a url"], "no SGLang server answers"),
    ],
)
def test_no_server_is_said_plainly(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 1
    assert message in result.stderr
