"""Requests that lose hits for one known reason, made on purpose. Pure: prompts are tokens, or texts of a chat template.

Each ``Plant`` comes with the same conversations without the plant where the plant is in the prompts; otherwise the
plant is in how they are served (``eval.bench.planted_causes``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2.sandbox
from tokenizers import Tokenizer

from traces.model import MAIN_FLOW
from traces.replay.given import GivenFlow, GivenPrompts, GivenTurn, given_prompts

LOW, HIGH = 32, 126  # byte tokens that are printable
Message = dict[str, Any]
Render = Callable[[list[Message]], list[int]]


class Planted(NamedTuple):
    """Conversations with the plant in them, and without; the same object where it is not in the prompts."""

    planted: GivenPrompts
    control: GivenPrompts


def renderer(checkpoint: Path) -> Render:
    """The served chat template and tokenizer, as SGLang applies them."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((checkpoint / "chat_template.jinja").read_text())
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def render(messages: list[Message]) -> list[int]:
        text = template.render(messages=messages, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return render


def alternating(seed: int, *, tokens: int, think_s: float = 0.0, answer: int = 2, turns: int = 2) -> Planted:
    """Two sessions of ``turns`` turns each that are too large for a small cache together."""
    rng = random.Random(seed)
    made = {}
    for name in ("a", "b"):
        prompt, flow = _words(rng, tokens), []
        for turn in range(turns):
            flow.append(GivenTurn(prompt, answer, think_s if turn else 0.0))
            prompt = prompt + _words(rng, 64)
        made[f"{name}{seed}"] = {MAIN_FLOW: GivenFlow(flow)}
    return _unchanged(made)


def growing(seed: int, *, sessions: int = 3, turns: int = 6) -> Planted:
    """Conversations that grow by lengths which are no multiple of a page."""
    rng = random.Random(seed)
    made = {}
    for number in range(sessions):
        prompt, flow = _words(rng, 700), []
        for _ in range(turns):
            flow.append(GivenTurn(prompt, 2))
            prompt = prompt + _words(rng, rng.randrange(150, 400))
        made[f"grow{number}"] = {MAIN_FLOW: GivenFlow(flow)}
    return _unchanged(made)


def subagents(seed: int, *, agents: int = 4, shared: int = 896, busy: int = 3800) -> Planted:
    """A turn spawns subagents that begin with the same long text, all at once.

    They fit into one prefill batch, and arrive while the server computes the ``busy`` tokens of another session:
    otherwise it would take the first one alone, and the rest would find what that one left.
    """
    rng = random.Random(seed)
    head, asked = _words(rng, shared), _words(rng, 200)
    flows = {MAIN_FLOW: GivenFlow([GivenTurn(asked, 2), GivenTurn(asked + _words(rng, 200), 2)])}
    for number in range(agents):
        flows[f"agent{number}"] = GivenFlow([GivenTurn(head + _words(rng, 50 + number), 2, 3.0)], 0, 1)
    other = {MAIN_FLOW: GivenFlow([GivenTurn(_words(rng, 64), 2), GivenTurn(_words(rng, busy), 2, 2.2)])}
    return _unchanged({f"parent{seed}": flows, f"other{seed}": other})


def behind_a_gate(seed: int, *, shared: int = 1024, pause_s: float = 5.0) -> Planted:
    """``late`` begins like ``early``, which has ended; a gate holds it while ``busy`` grows over the whole cache."""
    rng = random.Random(seed)
    head, busy = _words(rng, shared), _words(rng, 1920)
    return _unchanged(
        {
            f"early{seed}": {MAIN_FLOW: GivenFlow([GivenTurn(head + _words(rng, 60), 2)])},
            f"busy{seed}": {
                MAIN_FLOW: GivenFlow([GivenTurn(busy, 2), GivenTurn(busy + _words(rng, 1800), 2, pause_s)])
            },
            f"late{seed}": {MAIN_FLOW: GivenFlow([GivenTurn(head + _words(rng, 70), 2)])},
        }
    )


def think_dropped(render: Render) -> Planted:
    """The last turn leaves out what all answers before it had thought."""

    def history(rng: random.Random, turn: int, turns: int, planted: bool) -> list[Message]:
        messages = _opening(rng, "You write code.")
        for _ in range(turn):
            messages.append({"role": "assistant", "content": _text(rng, 80), "reasoning_content": _text(rng, 30)})
            messages.append({"role": "user", "content": _text(rng, 900)})
        if planted and turn == turns - 1:
            for message in messages:
                message.pop("reasoning_content", None)
        return messages

    return _texts("think", render, history, turns=5, sessions=1)


def argument_order(render: Render) -> Planted:
    """Each turn sends the arguments of the first tool call in another order than the turn before."""

    def history(rng: random.Random, turn: int, turns: int, planted: bool) -> list[Message]:
        messages = _opening(rng, "You use tools.")
        for past in range(turn):
            arguments = {
                "path": f"src/module_{past}.py",
                "pattern": _text(rng, 20),
                "context": "three",
                "glob": "*.py",
                "mode": "lines",
            }
            if planted and past == 0:
                names = list(arguments)
                arguments = {name: arguments[name] for name in names[turn:] + names[:turn]}
            call = {"function": {"name": "search", "arguments": arguments}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": _text(rng, 900)})
        return messages

    return _texts("order", render, history, turns=5, sessions=1)


def nonce(render: Render, *, turns: int = 5) -> Planted:
    """The system prompt names the request, anew in each turn."""

    def history(rng: random.Random, turn: int, turns: int, planted: bool) -> list[Message]:
        number = random.Random(turn if planted else 0).randrange(16**8)
        messages = _opening(rng, f"You help. Request id: {number:08x}. Answer briefly.")
        for _ in range(turn):
            messages.append({"role": "assistant", "content": _text(rng, 60)})
            messages.append({"role": "user", "content": _text(rng, 900)})
        return messages

    return _texts("nonce", render, history, turns=turns, sessions=1)


def _texts(
    name: str,
    render: Render,
    history: Callable[[random.Random, int, int, bool], list[Message]],
    *,
    turns: int,
    sessions: int,
) -> Planted:
    def conversations(planted: bool) -> GivenPrompts:
        return given_prompts(
            {
                # The same seed for each turn: its history is the earlier turns', plus one exchange.
                f"{name}{s}-{'planted' if planted else 'kept'}": {
                    MAIN_FLOW: GivenFlow(
                        [
                            GivenTurn(render(history(random.Random(f"{name}{s}"), t, turns, planted)), 2)
                            for t in range(turns)
                        ]
                    )
                }
                for s in range(sessions)
            }
        )

    return Planted(conversations(True), conversations(False))


def _opening(rng: random.Random, system: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": _text(rng, 300)}]


def _text(rng: random.Random, characters: int) -> str:
    """Words that no rule takes for an id or a time."""
    words: list[str] = []
    while sum(map(len, words)) + len(words) < characters:
        words.append("".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(2, 9))))
    return " ".join(words)


def _words(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(LOW, HIGH) for _ in range(tokens)]


def _unchanged(conversations: Mapping[str, Mapping[str, GivenFlow]]) -> Planted:
    made = given_prompts(conversations)
    return Planted(made, made)
