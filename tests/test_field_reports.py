"""What people who run such systems report, each made small, with the verdict that it must get here.

A row is named by the public thread it comes from. The verdict comes from whoever owns the question: ``diagnose`` (text
and tokens), the attribution, the report, ``compare``, the audit, or the offload's own rules.

Of four rows only the kind can be made small here, since the report itself needs another machine, and each test says so:
ATOM#1551 and vllm#45562 (that GPU), vllm#48603 (another engine's kernel), evalscope#1648 (another client's warm-up).
Rows that need a daemon or several ranks have their tests beside the others of that kind, named in ``WITH_A_DAEMON``,
which is checked: LMCache#3855, #4759, #4492, ATOM#2175 and omlx#1888 in full.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agentserve.audit.counters import Metrics
from agentserve.audit.rows import audit_rows
from agentserve.runtime.msa_torch import BlockRule, attend_extend, select_extend
from agentserve.shapes.published import M3_CONFIG
from eval.compare import CompareError, compare
from eval.compare.text import verdicts
from eval.diagnose import Tokens, diagnose, prompt_of_text
from eval.diagnose.chat import Call, Message, Request
from eval.diagnose.misses import find_miss
from eval.report import summarize
from offload.guard import DeadlineFuture, Held, Quarantine
from offload.seal import Sealer, new_seals
from radix_cache.attribution import CacheKind, Cause, EvictedBy
from radix_cache.attribution.levels import Lengths, attribute, without_events
from radix_cache.attribution.simulated import explain
from radix_cache.features import Stop
from radix_cache.simulator import FlowSpec, Service, Setting, TurnSpec, simulate
from radix_cache.theory import PromptShape, SessionScan, SharedPrefixes
from tests.conftest import REPOSITORY, TinyServer
from tests.test_compare import records, run
from tests.test_msa_torch import as_sets, naive_attention, naive_choice
from tests.test_report_summary import FINISHED, header, record
from tests.test_simulator_naive import build
from traces.replay.record import RunEvent, ServerInfo

WITH_A_DAEMON = {
    "LMCache#3855": ("test_offload_faults.py", "test_a_frozen_daemon_holds_stored_tokens_no_longer_than_the_deadline"),
    "LMCache#4759": ("test_offload_faults.py", "test_a_frozen_daemon_delays_a_load_by_its_deadline"),
    "LMCache#4492": ("test_offload_faults.py", "test_other_weights_of_the_same_shape_under_the_same_path_miss"),
    "omlx#1888": ("test_offload_faults.py", "test_full_and_partial_prefixes_come_back_bit_for_bit"),
    "ATOM#2175": ("test_offload_ranks.py", "test_two_ranks_agree_on_every_outcome"),
}

# --- prefixes that break between turns

USER = "<|im_start|>user\nlist the files<|im_end|>\n"
ANSWERS = "<|im_start|>assistant\n"
NEXT = "<|im_start|>user\nthank you, go on<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\nYou are a coding agent.{more}<|im_end|>\n"
CALL = '<tool_call>\n{{"name": "ls", "arguments": {arguments}}}\n</tool_call>'


def verdict(before: str, after: str) -> tuple[str, str, int]:
    """Cause, kind of text, and how many characters both share."""
    found = diagnose(before, after)
    assert found is not None
    return found.cause, found.kind, found.place.at


@pytest.mark.parametrize("thought", ["", "\n\n"])
def test_qwen38_131_and_48_empty_think_blocks_that_come_and_go(thought: str) -> None:
    head, answer = USER + ANSWERS, "Three files.<|im_end|>\n"
    block = f"<think>{thought}</think>\n\n"
    assert verdict(head + block + answer, head + answer + NEXT) == ("think_dropped", "think block", len(head))
    # and the other way: kept now, not generated then
    assert verdict(head + answer, head + block + answer + NEXT)[0] == "think_inserted"


def test_sglang_39866_thinking_sent_back_as_content() -> None:
    head = USER + ANSWERS
    before = head + "<think>They want a list.</think>Three files.<|im_end|>\n"
    after = head + "They want a list.\n\nThree files.<|im_end|>\n" + NEXT
    assert verdict(before, after) == ("think_as_content", "think block", len(head))


def test_rapid_mlx_214_a_think_block_opened_by_the_prompt_and_missing_in_the_history() -> None:
    """The place is the boundary: right where the prompt told the model to go on."""
    sent = USER + ANSWERS + "<think>\n"
    after = USER + ANSWERS + "Three files.<|im_end|>\n" + NEXT
    cause, _, at = verdict(sent + "They want a list.\n</think>Three files.<|im_end|>\n", after)
    assert (cause, at) == ("think_dropped", len(USER + ANSWERS))


def test_sglang_28713_content_that_begins_with_a_stray_closing_tag() -> None:
    head = "]~b]user\nlist the files[e~[\n]~b]ai\n"
    before = head + "</mm:think>Three files.[e~[\n"
    assert verdict(before, head + "Three files.[e~[\n]~b]user\nthanks[e~[\n") == (
        "stray_think_tag",
        "answer",
        len(head),
    )


def test_sglang_34553_ai_sdk_472_and_dspy_10216_keys_in_another_order() -> None:
    head = USER + ANSWERS
    one, other = (CALL.format(arguments=a) for a in ('{"path": ".", "all": true}', '{"all": true, "path": "."}'))
    end = "<|im_end|>\n"
    assert verdict(head + one + end, head + other + end + NEXT)[:2] == ("argument_order", "tool call")
    tools = SYSTEM.format(more="\n<tools>\n{}\n</tools>")
    schema, changed = '{"name": "ls", "parameters": {}}', '{"parameters": {}, "name": "ls"}'
    assert verdict(tools.format(schema) + USER, tools.format(changed) + USER + NEXT)[0] == "tools_key_order"


def test_unsloth_10845_sorting_keys_breaks_what_the_model_wrote_unsorted() -> None:
    head, end = USER + ANSWERS, "<|im_end|>\n"
    wrote = CALL.format(arguments='{"path": "src", "all": true, "depth": {"z": 1, "a": 2}}')
    resent = CALL.format(arguments='{"all": true, "depth": {"a": 2, "z": 1}, "path": "src"}')
    found = diagnose(head + wrote + end, head + resent + end + NEXT)
    assert found is not None
    assert found.cause == "argument_order"
    assert "with or without sorted keys" in found.remedy


def test_anything_llm_6398_a_timestamp_by_the_minute_in_the_system_prompt() -> None:
    one, other = (SYSTEM.format(more=f" The time is {time}.") + USER for time in ("14:03", "14:04"))
    cause, kind, at = verdict(one, other + NEXT)
    assert (cause, kind) == ("timestamp", "system prompt")
    assert one[at] == "3"
    # By the hour it breaks once an hour, within it never.
    same = SYSTEM.format(more=" The time is 14:00.") + USER
    assert diagnose(same, same + NEXT) is None


def test_inference_perf_649_a_reply_decoded_and_encoded_again() -> None:
    """4,992 of 5,753 tokens hit: whole pages of 64 before the first token that came back as another."""
    generated = list(range(5_753))
    resent = [*generated[:5_000], *range(90_000, 90_800)]
    found = diagnose(prompt_of_text("the text", Tokens(generated)), prompt_of_text("the text", Tokens(resent)))
    assert found is not None
    assert (found.cause, found.place.at, found.place.before) == ("retokenised", 5_000, 5_753)
    assert found.place.at // 64 * 64 == 4_992


def test_llama_cpp_11970_one_text_two_tokenisations() -> None:
    text = "Hello world"
    one = Tokens([1, 2, 3], [5, 8, 11])
    other = Tokens([1, 4, 5], [5, 7, 11])
    found = diagnose(prompt_of_text(text, one), prompt_of_text(text + "!", Tokens([*other.ids, 6], [5, 7, 11, 12])))
    assert found is not None
    assert (found.cause, found.place.unit, found.place.at, found.place.old_text) == (
        "retokenised",
        "token",
        1,
        " world",
    )


def test_sglang_16521_generated_tokens_that_are_not_reused() -> None:
    """Prompt 100, output 50, next prompt 200: a hit of 100 where 149 are possible (the last token has no KV)."""
    first = record("a", 0, 100, output_tokens=50)
    lengths = {"session_output_lcp": 149, "shared_output_lcp": 149, "session_lcp": 100, "shared_lcp": 100}
    second = record("a", 1, 200, cached_tokens=100, ready_lcp=149, **lengths)
    report = summarize(header(), [first, second], FINISHED, page_size=1)
    hits = {rate.key: rate.hit_tokens for rate in report.rates}
    assert (hits["ideal"], hits["prompts_only"], hits["realized"]) == (149, 100, 100)
    # The cause is open without cache events, and the report says that instead of guessing.
    made = without_events(Lengths(200, 149, 149, 100), CacheKind(1), ready=149)
    assert [(loss.cause, loss.tokens, loss.at) for loss in made.losses] == [(Cause.NOT_OBSERVED, 49, 100)]


def test_splice_71_a_ttl_on_reasoning_that_drops_the_oldest_first() -> None:
    """Each turn loses the oldest think block that is left: the break is near the beginning, turn after turn."""

    def prompt(turns: int, dropped: int) -> str:
        text = SYSTEM.format(more="")
        for turn in range(turns):
            think = "" if turn < dropped else f"<think>I think about step {turn} for a while.</think>"
            text += (
                f"<|im_start|>user\ndo step number {turn}<|im_end|>\n{ANSWERS}{think}step {turn} is done<|im_end|>\n"
            )
        return text

    hit = total = 0
    for turns in range(6, 12):
        before, after = prompt(turns, turns - 5), prompt(turns + 1, turns - 4)
        found = diagnose(before, after)
        assert found is not None
        assert found.cause == "think_dropped"
        assert f"step {turns - 5} for a while" in found.place.old_text
        hit, total = hit + found.place.at, total + len(after)
    assert hit / total < 0.7
    # All at once, and then no more, breaks one turn of six.
    assert diagnose(prompt(8, 8), prompt(9, 8)) is None


# --- accounting


def test_sglang_20451_cached_tokens_of_zero_though_the_engine_hit() -> None:
    """The answers say 0, the text continues, and the server's own counters show the hits."""
    messages = (Message("user", "list the files"), Message("assistant", "three"), Message("user", "go on"))
    first = Call("log:1", Request(messages[:1]), answer=messages[1:2], prompt_tokens=4_000, cached_tokens=0)
    second = Call("log:2", Request(messages), prompt_tokens=4_100, cached_tokens=0)
    miss = find_miss(first, second)
    assert miss is not None
    assert (miss.cause, miss.expected) == ("never_counted", 4_000)
    assert "/metrics" in miss.remedy
    text = 'sglang:cached_tokens_total{cache_source="device"} 3968\n'
    rows = {row.path: row for row in audit_rows({"page_size": 128}, Metrics.from_text(text), config=M3_CONFIG)}
    assert rows["radix hit"].executed == 3_968


def test_dynamo_10925_usage_without_the_field() -> None:
    """No count is not a count of zero: such requests leave both sides of the comparison."""
    silent = [record("a", t, 1_000, 900, cached_tokens=None) for t in range(2)]
    report = summarize(header(), silent, FINISHED)
    assert report.rate("realized") is None
    assert report.population.without_count == 2
    one = Call("log:1", Request(), prompt_tokens=4_000, cached_tokens=None)
    assert find_miss(one, one) is None


@pytest.mark.parametrize("gauge", [0.0, 0.124, 1.0])
def test_sglang_26608_and_39889_a_gauge_of_the_last_batch_is_no_rate(gauge: float) -> None:
    """83.8 % by the requests; what the gauge happens to show changes nothing. The page's: ``test_watch.py``."""
    done = [record("a", t, 1_000, 900, cached_tokens=838) for t in range(10)]
    rate = summarize(header(), done, FINISHED).rate("realized")
    assert rate is not None
    assert rate.rate == 0.838
    text = f"sglang:cache_hit_rate {gauge}\nsglang:cached_tokens_total 8380\n"
    rows = {row.path: row for row in audit_rows({"page_size": 128}, Metrics.from_text(text), config=M3_CONFIG)}
    assert rows["radix hit"].executed == 8_380


def test_sglang_32459_eagles_keys_cost_a_page_of_every_prefix_that_ends_on_one() -> None:
    lengths = Lengths(prompt=4_097, shared=4_096, session=4_096, realized=3_968)
    made = attribute(lengths, CacheKind(128, pair_keys=True))
    assert [(loss.cause, loss.tokens) for loss in made.losses] == [(Cause.SPECULATION_KEY, 128)]
    # What exceeds that page is not blamed on the key.
    deep = attribute(lengths._replace(realized=2_048), CacheKind(128, pair_keys=True))
    assert {loss.cause: loss.tokens for loss in deep.losses} == {
        Cause.SPECULATION_KEY: 128,
        Cause.UNEXPLAINED: 1_920,
    }


def test_vllm_31920_nothing_hit_on_a_growing_chat() -> None:
    """All had been computed before it was sent, so it is neither theory nor the client; without events that is all."""
    made = without_events(Lengths(6_001, 6_000, 6_000, 0), CacheKind(128, pair_keys=True), ready=6_000)
    causes = {loss.cause: loss.tokens for loss in made.losses}
    assert causes == {Cause.PAGE_ALIGNMENT: 6_000 - 5_888, Cause.NOT_OBSERVED: 5_888}


@pytest.mark.parametrize(
    ("other", "word"),
    [({"trace_sha256": "cd" * 32}, "data set"), ({"prefix_sharing": "tools+system"}, "prefix sharing")],
)
def test_inferencex_1632_two_data_sets_of_one_name(other: dict[str, str], word: str) -> None:
    runs = [run(records(500, 1.0)), run(records(600, 1.0), **other)]
    with pytest.raises(CompareError, match=word):
        compare(runs, ["a", "b"])


def test_inferencex_1632_a_context_limit_is_part_of_what_was_planned() -> None:
    """Turns over the limit are no part of the data set any more: the report counts them apart."""
    over = RunEvent(at_s=0, kind="dropped", session="a", flow="main", turn=2, requests=1)
    report = summarize(header(requests=2), [record("a", t, 100, 90 * t) for t in range(2)], [*FINISHED, over])
    assert (report.completeness.missing, report.completeness.dropped) == (0, 1)


def test_inference_sim_829_a_prefix_group_lost_in_conversion() -> None:
    """Ids that no longer repeat: theory itself is 0, so nothing is blamed on the cache."""

    def theory(ids: list[list[int]]) -> int:
        scan, hit = SessionScan(64, SharedPrefixes()), 0
        for blocks in ids:
            hit += scan.add(PromptShape(np.array(blocks, dtype=np.int64), len(blocks) * 64, 1)).session
        return hit

    group = [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]]
    lost = [[100 * turn + block for block in blocks] for turn, blocks in enumerate(group)]
    assert (theory(group), theory(lost)) == (3 * 64 + 4 * 64, 0)
    report = summarize(header(), [record("a", t, 200, 0) for t in range(3)], FINISHED)
    ideal = report.rate("ideal")
    assert ideal is not None
    assert (ideal.hit_tokens, report.chain.gap_tokens) == (0, 0)


def test_evalscope_1648_nothing_is_left_out_of_the_measured_window() -> None:
    """There a warm-up was waited for, so that the window began with an empty pipeline. Here the run is the window: the
    cold first requests are in the rate, and the time goes from the first that was sent to the last that ended."""
    cold = [record(f"s{n}", 0, 1_000, cached_tokens=0, sent_s=0.5 * n, done_s=4.0 + n) for n in range(3)]
    later = [record(f"s{n}", 1, 1_000, 900, cached_tokens=800, sent_s=9.0, done_s=13.0) for n in range(3)]
    report = summarize(header(requests=6), [*cold, *later], FINISHED)
    rate = report.rate("realized")
    assert rate is not None
    assert (rate.rate, report.population.requests) == (0.4, 6)
    assert (report.completeness.recorded, report.completeness.missing) == (6, 0)
    assert report.throughput.wall_s == 13.0


def test_vllm_45562_numbers_that_score_0_01_where_0_97_is_right() -> None:
    """There FP8 K/V was fast and wrong. A speed stands here beside whether the answers are the same, and the number
    format is named. Which answers are right a cache's report cannot know. See also ``test_audit.py``."""
    wrong = [r.model_copy(update={"output_sha256": f"other {r.turn}"}) for r in records(800, 0.5)]
    kinds = [
        ServerInfo(base_url="http://127.0.0.1:1", client="sglang", page_size=10, args={"kv_cache_dtype": kind})
        for kind in ("auto", "fp8_e4m3")
    ]
    result = compare([run(records(800, 1.0), server=kinds[0]), run(wrong, server=kinds[1])], ["bf16", "fp8"])
    assert [doubt.what for doubt in result.doubts] == ["number format"]
    (said,) = verdicts(result)
    assert "mean TTFT -500 ms, 0 of 24 answers the same" in said


# --- kernels


@pytest.mark.server
def test_atom_1551_the_first_radix_hit(tiny_server: TinyServer) -> None:
    """There it ended the server. Here, on the CPU's kernels, a full and a partial hit answer as the cold prompt did."""
    prompt = [(17 * i) % 300 + 3 for i in range(700)]
    other = [*prompt[:400], *((19 * i) % 300 + 3 for i in range(300))]
    answers = []
    for order in ([prompt, prompt], [other], [prompt, other]):
        tiny_server.flush()
        answers.append([tiny_server.generate(ids, 6) for ids in order])
    (cold, full), (alone,), (_, partial) = answers
    assert [a["meta_info"]["cached_tokens"] for a in (cold, full, alone, partial)] == [0, 640, 0, 384]
    assert full["output_ids"] == cold["output_ids"]
    assert partial["output_ids"] == alone["output_ids"]


def test_vllm_48603_a_choice_of_blocks_that_is_read_in_another_order() -> None:
    """The buffer holds a head's queries one after the other. Read as a query's heads one after the other it has the
    same size and other blocks: what this project compares its attention with must see that."""
    generator = torch.Generator().manual_seed(0)
    rule, first, count = BlockRule(4, 3, 1, 1), 40, 6
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    idx_q, idx_k = draw(count, 2, 8), draw(first + count, 8)
    q, k, v = draw(count, 4, 8), draw(first + count, 2, 8), draw(first + count, 2, 8)
    chosen = select_extend(idx_q, idx_k, first, rule, 1.0)
    misread = chosen.reshape(count, 2, -1).transpose(0, 1)
    right = naive_choice(idx_q, idx_k, first, rule)
    assert as_sets(chosen) == right
    assert as_sets(misread) != right
    expected = naive_attention(q, k, v, right, first, rule.block_size)
    torch.testing.assert_close(attend_extend(q, k, v, chosen, first, rule.block_size, 8**-0.5), expected)
    assert not torch.allclose(attend_extend(q, k, v, misread, first, rule.block_size, 8**-0.5), expected, atol=1e-2)


# --- policies


def test_vllm_47802_eight_that_matter_among_thirty_two_others() -> None:
    """8,192 tokens, page 16: the eight wait for their users while 32 others pass. Every lost token is named."""
    page, pages = 16, 30

    def turn(first: int, count: int, think: float = 0.0) -> TurnSpec:
        ids = np.arange(first, first + count, dtype=np.int64)
        return TurnSpec(count * page + 1, 0, ids, np.empty(0, np.int64), think, 1.0, Stop.TURN)

    keep = [[FlowSpec([turn(100 * n, pages), turn(100 * n, pages + 1, think=60.0)])] for n in range(8)]
    pass_by = [[FlowSpec([turn(10_000 + 100 * n, pages)])] for n in range(32)]
    workload = build(keep + pass_by, page)
    setting = Setting(policy="lru", capacity=8_192, sessions=40, service=Service.FIXED)
    found = explain(workload, simulate(workload, setting, log_evictions=True))
    lost = [loss for one in found for loss in one.losses]
    assert sum(loss.tokens for loss in lost) > 0
    assert {loss.cause for loss in lost} == {Cause.EVICTED}
    by = {loss.by for loss in lost}
    assert EvictedBy.NEW_SESSION in by
    assert by <= {EvictedBy.NEW_SESSION, EvictedBy.RECOMPUTE}
    # With memory for all of them nothing is lost.
    roomy = simulate(workload, replace(setting, capacity=64 * 8_192), log_evictions=True)
    assert all(not one.losses for one in explain(workload, roomy))


# --- offload


PAGE, PAGES = 4, 8


def sealed_pages() -> tuple[list[torch.Tensor], Sealer, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    planes = [torch.randn(PAGES * PAGE, 2, 8, generator=generator) for _ in range(2)]
    sealer = Sealer(planes, new_seals(PAGES, "cpu"), PAGE, "weights")
    pages = torch.tensor([1, 4, 6])
    digests = sealer.digests(list(range(12)), "", 0)
    sealer.write(pages, digests)
    return planes, sealer, pages, digests


def test_lmcache_3388_a_failed_retrieve_reported_as_success() -> None:
    """Nothing was written, success was said: the bytes that lie there do not fit the seal."""
    planes, sealer, pages, digests = sealed_pages()
    for plane in planes:
        plane.zero_()
    assert sealer.failures(pages, digests) == 3


def test_lmcache_4984_corrupt_on_a_retrieve_of_several_chunks() -> None:
    """The second chunk in the place of the third: whole pages, right bytes, wrong place."""
    planes, sealer, pages, digests = sealed_pages()
    second, third = (slice(int(p) * PAGE, (int(p) + 1) * PAGE) for p in pages[1:])
    for plane in planes:
        plane[third] = plane[second].clone()
    assert sealer.failures(pages, digests) == 1


def test_omlx_1888_full_hits_right_and_partial_ones_corrupt() -> None:
    """A page's seal names all tokens up to its end, so a shorter prefix has seals of its own that must fit."""
    _, sealer, pages, digests = sealed_pages()
    assert sealer.failures(pages[:2], digests[:2]) == 0
    other_end = sealer.digests([*range(8), 99, 9, 10, 11], "", 0)
    assert torch.equal(other_end[:2], digests[:2])
    assert sealer.failures(pages, other_end) == 1


class Silent:
    """A daemon that never answers."""

    def query(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> bool:
        raise TimeoutError


def test_lmcache_3855_and_4759_nothing_waits_for_ever() -> None:
    """A store is given up at its deadline; the memory of a load stays out of use while the daemon may write to it."""
    now, gone = [0.0], [False]
    store = DeadlineFuture(Silent(), 10.0, clock=lambda: now[0])
    assert not store.query()
    now[0] = 10.0
    assert store.query()
    with pytest.raises(TimeoutError):
        store.result()
    held = Quarantine()
    held.add(Held(Silent(), lambda: gone[0], range(107_000)))
    assert (held.ready(), len(held)) == (0, 1)
    gone[0] = True
    assert held.release(held.ready()) == [range(107_000)]


@pytest.mark.parametrize("row", WITH_A_DAEMON)
def test_rows_that_need_a_daemon_have_their_test(row: str) -> None:
    file, name = WITH_A_DAEMON[row]
    assert f"def {name}" in (REPOSITORY / "tests" / file).read_text()
