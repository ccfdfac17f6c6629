"""Time to the first token of a long prefix: computed, restored from LMCache, and still on the device.

``python -m eval.bench.offload_restore`` starts the tiny M3 with a daemon beside it. Each round takes a new prompt of
8,000 tokens through all three ways in turn, so that a shared machine's load falls on all of them. Beside the times
stands what makes them worth something: how many tokens came from where, that every restored page passed its check, and
that the answers are the same.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import httpx

TOKENS = 8000
NEW_TOKENS = 4
WAYS = ("computed", "restored", "device")


def generate(http: httpx.Client, ids: list[int]) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token, and SGLang's last answer of the stream, with log-probabilities."""
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": True}
    started, first, last = time.perf_counter(), None, ""
    with http.stream("POST", "/generate", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                first = first if first is not None else time.perf_counter() - started
                last = line
    if first is None:
        raise RuntimeError("the server streamed no token")
    return first, dict(json.loads(last.removeprefix("data: ")))


def flush(http: httpx.Client) -> None:
    """Empty the device's cache; SGLang refuses while stores are under way."""
    deadline = time.monotonic() + 60
    while http.post("/flush_cache").status_code != 200:
        if time.monotonic() > deadline:
            raise RuntimeError("the cache cannot be flushed: stores are still under way after 60 s")
        time.sleep(0.1)


def counted(http: httpx.Client, event: str) -> int:
    """Tokens of an event at /metrics."""
    pattern = rf'^agentserve_offload_tokens_total\{{.*event="{event}".*\}} (\S+)$'
    return int(sum(float(value) for value in re.findall(pattern, http.get("/metrics").text, re.MULTILINE)))


def difference(answers: list[dict[str, Any]]) -> float:
    """Largest difference of a log-probability from the first answer's; infinite where tokens differ."""
    runs = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
    if any([step[1] for step in run] != [step[1] for step in runs[0]] for run in runs):
        return float("inf")
    return float(max(abs(a[0] - b[0]) for run in runs for a, b in zip(run, runs[0], strict=True)))


def measure(url: str, rounds: int) -> dict[str, Any]:
    """Rounds of one prompt three ways; medians, ratios, and what was checked."""
    rng = random.Random(0)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    cached: dict[str, set[tuple[int, int]]] = {way: set() for way in WAYS}
    worst, exact = 0.0, True
    with httpx.Client(base_url=url, timeout=600) as http:
        generate(http, [rng.randrange(16, 256) for _ in range(1024)])  # warm up
        for _ in range(rounds):
            ids = [rng.randrange(16, 256) for _ in range(TOKENS)]
            answers = []
            for way in WAYS:
                if way == "restored":
                    flush(http)
                spent, answer = generate(http, ids)
                meta = answer["meta_info"]
                seconds[way].append(spent)
                cached[way].add((meta["cached_tokens"], (meta.get("cached_tokens_details") or {}).get("storage", 0)))
                answers.append(answer)
            worst = max(worst, difference(answers))
            exact = exact and difference(answers[1:]) == 0.0
        restored, verified, refused = (counted(http, event) for event in ("restored", "verified", "refused"))
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    return {
        "command": "python -m eval.bench.offload_restore",
        "tokens": TOKENS,
        "seconds_to_first_token": {way: [round(value, 4) for value in values] for way, values in seconds.items()},
        "computed_over_restored": round(medians["computed"] / medians["restored"], 2),
        "restored_over_device": round(medians["restored"] / medians["device"], 2),
        "cached_and_restored_tokens": {way: sorted(values) for way, values in cached.items()},
        "largest_difference_of_a_logprob": worst,
        "restored_equals_device_bit_for_bit": exact,
        "tokens_restored": restored,
        "tokens_verified": verified,
        "tokens_refused": refused,
    }


@click.command()
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON here too.")
def main(rounds: int, out: Path | None) -> None:
    """Start the tiny M3 with LMCache and measure; exit code 1 when a check fails."""
    from agentserve.launch.host import free_port
    from agentserve.launch.tiny import tiny_server

    settings = {
        "kv.capacity_tokens": 4 * 8192,
        "offload.backend": "lmcache",
        "offload.port": free_port(),
        "offload.http_port": free_port(),
        "offload.memory_gb": 2.0,
    }
    with tiny_server(settings) as server:
        result = measure(server.plan.url, rounds)
    text = json.dumps(result, indent=2)
    click.echo(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    whole = (TOKENS - 1) // 256 * 256
    good = result["largest_difference_of_a_logprob"] < 1e-4 and result["tokens_refused"] == 0
    good = good and result["restored_equals_device_bit_for_bit"]
    good = good and result["cached_and_restored_tokens"]["restored"] == [(whole, whole)]
    sys.exit(0 if good and result["tokens_verified"] == result["tokens_restored"] > 0 else 1)


if __name__ == "__main__":
    main()
