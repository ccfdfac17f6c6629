"""Policies as users write them: ``name``, ``name:0.9`` or ``name:key=value,key=value``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Built = TypeVar("Built")


def build_from_spec(kind: str, spec: str, builders: Mapping[str, Callable[..., Built]]) -> Built:
    """Build what ``spec`` names.

    Args:
        kind: what is being named, for the error message ("eviction policy").
        spec: the user's text; arguments are numbers, positional or by name.
        builders: name -> function of those numbers.

    Raises:
        ValueError: unknown name, an argument that is no number, or one that the policy does not take.
    """
    name, _, text = spec.partition(":")
    builder = builders.get(name)
    if builder is None:
        raise ValueError(f"unknown {kind} {name!r}; choose from {', '.join(sorted(builders))}")
    positional: list[float] = []
    named: dict[str, float] = {}
    for part in text.split(",") if text else []:
        key, equals, value = part.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            message = f"{kind} {spec!r}: {value!r} is not a number; write {name}:0.9 or {name}:key=0.9"
            raise ValueError(message) from None
        if equals:
            named[key.strip()] = number
        else:
            positional.append(number)
    try:
        return builder(*positional, **named)
    except TypeError as error:
        raise ValueError(f"{kind} {spec!r}: {error}") from None
