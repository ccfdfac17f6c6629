"""Workloads of flat prompts from arrays: record by record what the builder makes of them one by one."""

from __future__ import annotations

import numpy as np
import pytest

from radix_cache.simulator import FlowSpec, TurnSpec, Workload, WorkloadBuilder
from radix_cache.simulator.flat import flat_workload

NOTHING = np.empty(0, dtype=np.int64)


def random_prompts(seed: int, page: int, count: int) -> tuple[list[int], list[int], list[list[int]], list[float]]:
    """Prompt and answer tokens, ids and durations; prompts go on from an earlier one or begin anew."""
    rng = np.random.default_rng(seed)
    paths: list[list[int]] = []
    fresh = 0
    for number in range(count):
        base = paths[rng.integers(number)] if number and rng.random() < 0.7 else []
        more = int(rng.integers(0, 5))
        paths.append(
            [*base[: int(rng.integers(0, len(base) + 1))], *(3_000_000_000 + 7 * k for k in range(fresh, fresh + more))]
        )
        fresh += more
    tokens = [max(1, len(path) * page + int(rng.integers(0, page))) for path in paths]
    answers = rng.integers(0, 3 * page, count).tolist()
    service = [float("nan") if rng.random() < 0.2 else float(rng.integers(0, 4)) for _ in paths]
    return tokens, answers, paths, service


def from_arrays(
    page: int, tokens: list[int], answers: list[int], paths: list[list[int]], service: list[float]
) -> Workload:
    ids = np.array([page_id for path in paths for page_id in path], dtype=np.int64)
    return flat_workload(page, np.array(tokens), np.array(answers), ids, np.array(service))


@pytest.mark.parametrize("seed", range(20))
def test_the_same_records_as_one_by_one(seed: int) -> None:
    page = 2 + seed % 3
    tokens, answers, paths, service = random_prompts(seed, page, 1 + 20 * seed)
    builder = WorkloadBuilder(page, global_ids=True)
    for number, (prompt, answer, path, seconds) in enumerate(zip(tokens, answers, paths, service, strict=True)):
        turn = TurnSpec(prompt, answer, np.array(path, dtype=np.int64), NOTHING, service_s=seconds)
        builder.add(str(number), [FlowSpec([turn])])
    one_by_one, at_once = builder.build(), from_arrays(page, tokens, answers, paths, service)
    for name in ("nodes", "requests", "flows", "sessions"):
        ours, theirs = getattr(at_once, name), getattr(one_by_one, name)
        assert ours.dtype == theirs.dtype
        for field in ours.dtype.names:  # field by field: durations may be NaN
            np.testing.assert_array_equal(ours[field], theirs[field], err_msg=f"{name}.{field}")
    for name in ("page_size", "session_ids", "accesses", "distinct_pages", "prompt_tokens"):
        assert getattr(at_once, name) == getattr(one_by_one, name), name


def test_ids_that_do_not_fill_the_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="2 prompts have 3 full pages of 4; got 2 ids"):
        from_arrays(4, [8, 7], [0, 0], [[1], [2]], [1.0, 1.0])
    with pytest.raises(ValueError, match="prompts of 1 token or more"):
        from_arrays(4, [0], [0], [[]], [1.0])
