"""A few hundred mutated files for every reader; ``python -m eval.bench.fuzz_readers`` does 10,000 each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.bench.fuzz_readers import MAX_GROWTH_MB, HungError, fuzz, mutant, passed, peak_mb, tiny_tokenizer
from eval.bench.trace_samples import samples
from tests.conftest import REPOSITORY
from traces import TraceError, open_trace
from traces.readers import files
from traces.text import ChatTokenizer

SAMPLES = {f"{sample.format} {sample.name}": sample for sample in samples()}
COUNT = 200
ARCHIVES = (".parquet", ".tar.xz")  # made anew for each input, which takes most of the time


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return tiny_tokenizer()


@pytest.mark.parametrize("name", SAMPLES)
def test_mutated_files_give_valid_sessions_or_clean_errors(name: str, tokenizer: ChatTokenizer) -> None:
    before = peak_mb()
    count = COUNT // 2 if SAMPLES[name].name.endswith(ARCHIVES) else COUNT
    outcomes, failures, _ = fuzz(SAMPLES[name], count, seed=1, tokenizer=tokenizer)
    assert failures == []
    # Both kinds of mutants are there: those that the reader must refuse, and those that it takes.
    assert outcomes["refused"] > count // 10
    assert outcomes["read"] + outcomes["skipped"] > 0
    assert peak_mb() - before <= MAX_GROWTH_MB


def test_mutants_are_made_again_from_seed_and_number() -> None:
    sample = SAMPLES["mooncake mooncake.jsonl"]
    assert mutant(sample, 1, 5) == mutant(sample, 1, 5)
    made = {mutant(sample, 1, number) for number in range(50)}
    assert len(made - {sample.raw}) > 40


def test_fuzzing_sees_crashes_hangs_and_invalid_sessions(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eval.bench import fuzz_readers

    def broken(*_: object, **__: object) -> object:
        raise KeyError("planted")

    monkeypatch.setattr(fuzz_readers, "open_trace", broken)
    _, failures, _ = fuzz(SAMPLES["csv lengths.csv"], 3, seed=1, tokenizer=tokenizer)
    assert [failure.number for failure in failures] == [0, 1, 2]
    assert "KeyError" in failures[0].reason

    def endless(*_: object, **__: object) -> object:
        while True:
            pass

    monkeypatch.setattr(fuzz_readers, "open_trace", endless)
    monkeypatch.setattr(fuzz_readers, "MAX_SECONDS", 0.05)
    _, failures, _ = fuzz(SAMPLES["csv lengths.csv"], 1, seed=1, tokenizer=tokenizer)
    assert HungError.__name__ in failures[0].reason
    assert not passed({"failed": 0, "peak_memory_growth_mb": MAX_GROWTH_MB + 1})


@pytest.mark.parametrize("name", ["weka session.json", "mooncake mooncake.jsonl"])
def test_documents_are_bounded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small archive that unpacks to more than a document may have is refused before it fills the memory."""
    import gzip

    sample = SAMPLES[name]
    monkeypatch.setattr(files, "MAX_DOCUMENT_BYTES", 1 << 20)
    path = tmp_path / f"{sample.name}.gz"
    path.write_bytes(gzip.compress(sample.raw.rstrip() + b" " * (2 << 20)))
    with pytest.raises(TraceError, match="more than 1 MiB in one document"):
        list(open_trace(str(path), format=sample.format))


def test_the_stored_result_is_of_every_reader() -> None:
    """``docs/results/fuzz-readers.json``: a format without a line in it was never fuzzed at length."""
    stored = json.loads((REPOSITORY / "docs" / "results" / "fuzz-readers.json").read_text())
    assert set(stored["results"]) == {f"{sample.format} ({sample.name})" for sample in samples()}
    assert stored["passed"]
    assert {result["inputs"] for result in stored["results"].values()} == {10_000}
