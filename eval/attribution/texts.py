"""A run's prompts as text, where it was given them token by token and the served tokenizer is readable here."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from traces.replay.given import read_prompts
from traces.replay.record import RunHeader
from traces.replay.store import TurnKey


def texts_of(run: Path, header: RunHeader) -> dict[TurnKey, str]:
    """Prompts by (session, flow, turn); empty where they were made from block ids, or nobody can read the tokens.

    Raises:
        RunError: a faulty line of ``prompts.jsonl``; names file and line.
    """
    prompts = read_prompts(run)
    file = Path(str(header.server.args.get("model_path", ""))) / "tokenizer.json"
    if not prompts or not file.is_file():
        return {}
    tokenizer = Tokenizer.from_file(str(file))
    return {key: tokenizer.decode(tokens.tolist(), skip_special_tokens=False) for key, tokens in prompts.items()}
