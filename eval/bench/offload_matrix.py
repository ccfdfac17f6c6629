"""Every way a prefix can come back, against answers computed without any: same tokens, same log-probabilities.

``python -m eval.bench.offload_matrix --out FILE`` goes through tensor parallelism 1 and 2, index reuse off and on,
EAGLE3 off and on. In each combination, with prompts of 300 to 8,000 tokens on the tiny M3 in float32:

1. *computed* and *device*: a first server computes the prompts, stores them, and answers them again from its own cache
   (the first combination also computes those of 2. and 3., under keys of their own: nothing of them is found later);
2. *engine restart*: a second server gets them, and prompts that share nine tenths with them, from LMCache;
3. *Redis only*: daemons and their memory are replaced under the running server; the same comes from Redis.

All answers are compared with those computed by the first combination with the same index reuse: without drafts, on one
rank. FILE keeps the combinations that are done: call it again to go on. Exit code 1 when a check fails.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import httpx

from agentserve.checkpoint.tiny import write_tiny_checkpoint
from agentserve.checkpoint.tiny_eagle3 import write_tiny_eagle3
from agentserve.launch.daemon import Daemon, daemon_plan
from agentserve.launch.host import free_ports
from agentserve.launch.offload import Offload
from agentserve.launch.tiny import tiny_server
from eval.bench.offload_rig import Redis
from offload.daemon import DaemonSpec

LENGTHS = (300, 1100, 2400, 8000)  # in all of them whole pages before the last token are whole chunks, too
CHUNK = 256
NEW_TOKENS = 8
TOLERANCE = 1e-4  # of a log-probability: sums in another order, and the product over ranks


class Case(NamedTuple):
    """One combination."""

    tp: int
    reuse: bool
    eagle3: bool

    @property
    def name(self) -> str:
        return f"tp {self.tp}, reuse {'on' if self.reuse else 'off'}, EAGLE3 {'on' if self.eagle3 else 'off'}"


class Answer(NamedTuple):
    """What a server said, and where its prefix came from."""

    tokens: list[int]
    logprobs: list[float]
    accepted: list[int]  # verification steps by number of accepted drafts
    cached: int
    restored: int
    facts: dict[str, Any] | None = None  # what the request heard from the tier


def whole(length: int) -> list[int]:
    """The prompt of a length."""
    rng = random.Random(length)
    return [rng.randrange(16, 250) for _ in range(length)]


def branch(length: int, number: int) -> list[int]:
    """A prompt that shares nine tenths of another; numbers part at once."""
    rng = random.Random(f"{length}/{number}")
    return whole(length)[: shared(length)] + [rng.randrange(16, 250) for _ in range(200)]


def shared(length: int) -> int:
    return length * 9 // 10


def stored_chunks(branches: bool) -> int:
    """Chunks that a rank stores of all prompts with their answers, whose last token has no K and V."""
    prompts = [whole(length) for length in LENGTHS]
    if branches:
        prompts += [branch(length, number) for length in LENGTHS for number in (1, 2)]
    return sum((len(prompt) + NEW_TOKENS - 1) // CHUNK for prompt in prompts)


def ask(http: httpx.Client, ids: list[int], key: str | None = None) -> Answer:
    """A greedy answer; prompts under different keys share no cache."""
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "extra_key": key}
    response = http.post("/generate", json=body)
    response.raise_for_status()
    meta = response.json()["meta_info"]
    values = meta["output_token_logprobs"]
    return Answer(
        [token for _, token, *_ in values],
        [value for value, *_ in values],
        meta.get("spec_correct_drafts_histogram") or [],
        meta["cached_tokens"],
        (meta.get("cached_tokens_details") or {}).get("storage", 0),
        meta.get("agentserve"),
    )


def flush(http: httpx.Client) -> None:
    """Empty the device's cache, once no store is under way."""
    until(lambda: http.post("/flush_cache").status_code == 200, "the cache can be flushed")


def until(condition: Any, what: str, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not so after {seconds:g} s")
        time.sleep(0.2)


def counted(http: httpx.Client, name: str, event: str = "") -> float:
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name) and event in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def difference(answer: Answer, other: Answer) -> float:
    """Largest difference of a log-probability; infinite where tokens differ."""
    if answer.tokens != other.tokens:
        return float("inf")
    return max(abs(a - b) for a, b in zip(answer.logprobs, other.logprobs, strict=True))


class Bench:
    """Checkpoints and folders that all combinations share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = write_tiny_checkpoint(folder / "tiny-m3")
        self.draft = write_tiny_eagle3(folder / "draft")

    @contextmanager
    def served(self, case: Case, **fields: Any) -> Iterator[httpx.Client]:
        settings = {
            "kv.capacity_tokens": 12288,
            "prefill_chunk": 2048,
            "tp": case.tp,
            **({"index_reuse": "freq:2"} if case.reuse else {}),
            **({"eagle3.draft": str(self.draft)} if case.eagle3 else {}),
            **fields,
        }
        log = self.folder / f"server-{time.monotonic_ns()}.log"
        with (
            tiny_server(settings, checkpoint=self.checkpoint, log=log) as server,
            httpx.Client(base_url=server.plan.url, timeout=600) as http,
        ):
            yield http

    def run(self, case: Case, baseline: dict[str, Answer]) -> dict[str, Any]:
        """One combination; fills an empty baseline. Raises RuntimeError when a tier does not answer."""
        checks: list[dict[str, Any]] = []
        first_of_its_kind = not baseline
        device: dict[int, Answer] = {}
        with ExitStack() as stack:
            redis = Redis(self.folder)
            redis.start()
            stack.callback(redis.kill)
            first = free_ports(2 * case.tp)
            specs = [
                DaemonSpec(
                    "127.0.0.1", first + 2 * rank, first + 2 * rank + 1, CHUNK, 1.0, l2=redis.url, redis_timeout_s=10.0
                )
                for rank in range(case.tp)
            ]
            fields = patient(",".join(f"127.0.0.1:{spec.port}" for spec in specs), case.tp)

            def compare(way: str, http: httpx.Client, length: int, part: int = 0) -> Answer:
                name = f"{length} part {part}" if part else f"{length} full"
                key = name if way == "computed" and part else None
                answer = ask(http, branch(length, part) if part else whole(length), key)
                if way == "computed":
                    baseline.setdefault(name, answer)
                here = way in ("computed", "device")
                expected = 0 if here else (shared(length) if part else length - 1) // CHUNK * CHUNK
                checks.append(
                    {
                        "way": way,
                        "prompt": "part" if part else "full",
                        "length": length,
                        "restored": answer.restored,
                        "expected": expected,
                        "difference": difference(answer, baseline[name]),
                        **({} if answer.restored == expected else {"facts": answer.facts}),
                        **({"as_device": answer[:3] == device[length][:3]} if length in device and not part else {}),
                    }
                )
                return answer

            with daemons(specs, self.folder):
                with self.served(case, **fields) as http:
                    for length in LENGTHS:
                        compare("computed", http, length)
                        device[length] = compare("device", http, length)
                        if first_of_its_kind:
                            compare("computed", http, length, part=1)
                            compare("computed", http, length, part=2)
                    flush(http)
                    until(lambda: redis.keys() >= case.tp * stored_chunks(first_of_its_kind), "Redis has all")
                restarted = stack.enter_context(self.served(case, **fields))
                for length in LENGTHS:
                    compare("engine restart", restarted, length)
                    flush(restarted)
                    compare("engine restart", restarted, length, part=1)
            until(lambda: counted(restarted, "agentserve_offload_online") == 0, "the daemons are missed")
            with daemons(specs, self.folder):
                until(lambda: counted(restarted, "agentserve_offload_online") == case.tp, "the new daemons are in use")
                flush(restarted)
                for length in LENGTHS:
                    compare("Redis only", restarted, length)
                    flush(restarted)
                    compare("Redis only", restarted, length, part=2)
                events = {
                    event: int(counted(restarted, "agentserve_offload_tokens_total", f'event="{event}"'))
                    for event in ("restored", "verified", "refused")
                }
                stack.close()  # the server before its daemons
        return {
            "checks": checks,
            "tokens": events,  # all ranks together
            "good": verdict(checks) and events["verified"] == events["restored"] > 0 and not events["refused"],
        }


def patient(address: str, ranks: int) -> dict[str, Any]:
    """Fields of a recipe that uses daemons with long deadlines: cores are shared, and what is measured is what comes
    back, not when. How long a sign of life may take is no field of a recipe, so it goes into the environment."""
    offload: dict[str, Any] = {"backend": "lmcache", "address": address}
    offload |= {"lookup_deadline": 20.0, "load_deadline": 20.0, "store_deadline": 60.0}
    settings = replace(Offload(**offload).settings(ranks), ping_deadline=10.0)
    return {f"offload.{name}": value for name, value in offload.items()} | {"env": settings.environment()}


def verdict(checks: list[dict[str, Any]]) -> bool:
    """Whether all prefixes came back whole, with the right answers."""
    return all(
        check["restored"] == check["expected"] and check["difference"] < TOLERANCE and check.get("as_device", True)
        for check in checks
    )


@contextmanager
def daemons(specs: list[DaemonSpec], folder: Path) -> Iterator[None]:
    with ExitStack() as stack:
        made = [Daemon(daemon_plan(spec, folder), folder / f"lmcache-{time.monotonic_ns()}.log") for spec in specs]
        for daemon in made:
            stack.callback(daemon.stop)
            daemon.start()
        for daemon in made:
            daemon.wait_healthy()
        yield


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="JSON; kept and added to.")
@click.option("--only", multiple=True, metavar="TEXT", help="Combinations whose name holds this; default: all.")
def main(out: Path, only: tuple[str, ...]) -> None:
    """Run what FILE lacks; see above."""
    cases = [Case(tp, reuse, eagle3) for tp, reuse, eagle3 in itertools.product((1, 2), (False, True), (False, True))]
    result: dict[str, Any] = {"command": "python -m eval.bench.offload_matrix"}
    if out.exists():
        result = json.loads(out.read_text())
    result.setdefault("baselines", {})
    result.setdefault("cases", {})
    with tempfile.TemporaryDirectory(prefix="agentserve-") as folder:
        bench = Bench(Path(folder))
        for case in cases:
            if case.name in result["cases"] or (only and not any(text in case.name for text in only)):
                continue
            reuse = "on" if case.reuse else "off"
            baseline = {name: Answer(*values) for name, values in result["baselines"].get(reuse, {}).items()}
            started = time.monotonic()
            result["cases"][case.name] = bench.run(case, baseline) | {
                "minutes": round((time.monotonic() - started) / 60, 1)
            }
            result["baselines"][reuse] = baseline
            save(out, result)
            click.echo(summary(case.name, result["cases"][case.name]))
    for name, found in result["cases"].items():
        click.echo(summary(name, found))
    sys.exit(0 if all(found["good"] for found in result["cases"].values()) else 1)


def save(out: Path, result: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def summary(name: str, found: dict[str, Any]) -> str:
    """One line of a combination."""
    checks = found["checks"]
    restored = [check for check in checks if check["expected"]]
    whole_hits = [check for check in restored if check["prompt"] == "full"]
    return (
        f"{name}: {'good' if found['good'] else 'WRONG'}; {len(restored)} restored prefixes of "
        f"{min(c['restored'] for c in restored)} to {max(c['restored'] for c in restored)} tokens; largest difference "
        f"of a log-probability {max(c['difference'] for c in checks):.1e}; "
        f"{sum(c['as_device'] for c in whole_hits)} of {len(whole_hits)} full hits equal the device's to the last bit"
    )


if __name__ == "__main__":
    main()
