"""Small seeded traces in the Weka format, with appends, edits and subagents, for the replay's tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

BLOCK = 64


def write_trace(folder: Path, *, sessions: int = 4, turns: int = 6, seed: int = 0, think: float = 0.0) -> Path:
    """A directory with one file per session; each session has one subagent that is joined."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(sessions):
        rng = random.Random(f"{seed}/{number}")
        (folder / f"s{number}.json").write_text(json.dumps(_session(f"s{number}", turns, rng, think)))
    return folder


def _session(name: str, turns: int, rng: random.Random, think: float) -> dict[str, Any]:
    next_id = iter(range(1, 1 << 20))
    requests = _flow(turns, rng, next_id, think, step_s=10.0)
    child = _flow(2, rng, next_id, think, step_s=4.0)
    requests.insert(
        2,
        {
            "type": "subagent", "t": requests[1]["t"] + 1.5, "agent_id": f"{name}-agent", "subagent_type": "explore",
            "duration_ms": 6000, "status": "completed", "tool_tokens": 64, "system_tokens": 32,
            "requests": child, "models": ["m"], "total_tokens": 0, "tool_use_count": 0,
        },
    )  # fmt: skip
    return {
        "id": name, "models": ["m"], "block_size": BLOCK, "hash_id_scope": "local",
        "tool_tokens": 150, "system_tokens": 50, "requests": requests,
    }  # fmt: skip


def _flow(turns: int, rng: random.Random, next_id: Any, think: float, *, step_s: float) -> list[dict[str, Any]]:
    ids: list[int] = []
    length = 0
    requests = []
    for k in range(turns):
        if k and length > BLOCK and rng.random() < 0.25:
            length = rng.randrange(BLOCK, length)  # a context edit
            ids = ids[: length // BLOCK - 1] if length >= 2 * BLOCK else []
        length = max(length, len(ids) * BLOCK) + (rng.randrange(1, 400) if k else rng.randrange(300, 700))
        ids = ids + [next(next_id) for _ in range(length // BLOCK - len(ids))]
        requests.append(
            {
                "t": k * step_s, "type": "s", "model": "m", "in": length, "out": rng.choice([0, 1, 7, 40]),
                "hash_ids": list(ids), "input_types": ["text"], "output_types": ["text"],
                "stop": "tool_use" if k + 1 < turns else "end_turn", "think_time": think, "api_time": 1.0,
            }
        )  # fmt: skip
    return requests
