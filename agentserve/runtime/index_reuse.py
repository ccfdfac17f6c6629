"""Which layers choose key blocks and which take over the choice of an earlier one: settings and pattern, pure.

A *source* computes a selection from its index keys. A *reuser* attends to the blocks that the nearest source before
it chose; it needs no index projections, no index keys and no memory for them. Only sparse layers whose index branch
has no values can share (all of MiniMax-M3's), because there the branch has no output besides the selection.

The grouping of a frequency is SGLang's on ROCm (``SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ``): ordinals among the layers
that can share, the first of every N is a source.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

REUSE_VARIABLE = "AGENTSERVE_INDEX_REUSE"  # how launch tells SGLang's processes
PRODUCERS_VARIABLE = "AGENTSERVE_INDEX_PRODUCERS"  # "keep": share the selection only; for measurements
STORE_VARIABLE = "AGENTSERVE_INDEX_STORE"  # "separate": SGLang's norm and store kernels; for measurements
ROCM_VARIABLE = "SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ"  # SGLang's own switch, which only ROCm listens to


class IndexReuseError(ValueError):
    """A setting that cannot be used. The message says what to write instead."""


@dataclass(frozen=True, slots=True)
class ReusePattern:
    """Who chooses for whom.

    Attributes:
        source_of: for every layer that can share, ascending, the layer whose selection it uses: its own id for a
            source.
    """

    source_of: Mapping[int, int]

    @property
    def sources(self) -> tuple[int, ...]:
        """Layers that choose, and that own index keys."""
        return tuple(layer for layer, source in self.source_of.items() if layer == source)

    @property
    def reusers(self) -> tuple[int, ...]:
        """Layers that take over a selection."""
        return tuple(layer for layer, source in self.source_of.items() if layer != source)


@dataclass(frozen=True, slots=True)
class IndexReuse:
    """The setting: every ``freq``-th layer that can share is a source, or the sources are listed.

    Attributes:
        freq: group size, at least 2; None where layers are listed.
        layers: ids of the sources, ascending; None where a frequency is given.
        keep_producers: reusers go on computing and storing index keys that nobody reads. It exists to measure what
            sharing the selection alone is worth.
        separate_store: reusers use SGLang's two kernels for norm and store instead of one (CUDA only). It exists to
            measure what the one kernel is worth.
    """

    freq: int | None = None
    layers: tuple[int, ...] | None = None
    keep_producers: bool = False
    separate_store: bool = False

    def __str__(self) -> str:
        """The setting as ``parse`` reads it."""
        return f"freq:{self.freq}" if self.layers is None else f"layers:{','.join(map(str, self.layers))}"

    def pattern(self, shareable: Sequence[int]) -> ReusePattern:
        """The pattern for a model whose layers ``shareable`` (ids, ascending) can share.

        Raises:
            IndexReuseError: nothing can share, a listed layer is none of them, the first is not a source, or
                nothing would be reused.
        """
        if not shareable:
            raise IndexReuseError(f"index reuse {self}: the model has no sparse layer without index values")
        if self.layers is None:
            sources = set(shareable[:: self.freq])
        else:
            sources = set(self.layers)
            strangers = sorted(sources - set(shareable))
            if strangers:
                raise IndexReuseError(
                    f"index reuse {self}: layer {strangers[0]} chooses no blocks; layers that do: {_span(shareable)}"
                )
            if shareable[0] not in sources:
                raise IndexReuseError(
                    f"index reuse {self}: layer {shareable[0]} is the first that chooses blocks, no earlier layer can "
                    f"choose for it; list it"
                )
        if len(sources) == len(shareable):
            raise IndexReuseError(f"index reuse {self}: every layer would choose for itself; leave the setting out")
        source_of: dict[int, int] = {}
        latest = shareable[0]
        for layer in shareable:
            if layer in sources:
                latest = layer
            source_of[layer] = latest
        return ReusePattern(source_of)

    def environment(self) -> dict[str, str]:
        """The variables that carry the setting to SGLang's processes."""
        return {
            REUSE_VARIABLE: str(self),
            PRODUCERS_VARIABLE: "keep" if self.keep_producers else "skip",
            STORE_VARIABLE: "separate" if self.separate_store else "fused",
        }


def parse_index_reuse(text: str) -> IndexReuse:
    """``freq:4`` or ``layers:3,7,11``. Raises IndexReuseError."""
    kind, colon, value = text.partition(":")
    numbers = [part.strip() for part in value.split(",")]
    if not colon or kind not in ("freq", "layers") or not all(part.isdecimal() for part in numbers):
        raise IndexReuseError(f"index reuse {text!r}: write freq:N or layers:A,B,..., as freq:4 or layers:3,7,11")
    values = tuple(int(part) for part in numbers)
    if kind == "freq":
        if len(values) != 1 or values[0] < 2:
            raise IndexReuseError(f"index reuse {text!r}: the frequency is one number of at least 2")
        return IndexReuse(freq=values[0])
    if list(values) != sorted(set(values)):
        raise IndexReuseError(f"index reuse {text!r}: list each layer once, ascending")
    return IndexReuse(layers=values)


def settings_from(environment: Mapping[str, str] = os.environ) -> IndexReuse | None:
    """What was asked for; None where nothing was, and then nothing of this may touch SGLang.

    Raises:
        IndexReuseError: a variable cannot be read.
    """
    text = environment.get(REUSE_VARIABLE)
    if not text:
        return None
    reuse = parse_index_reuse(text)
    keep = _either(environment, PRODUCERS_VARIABLE, "skip", "keep")
    separate = _either(environment, STORE_VARIABLE, "fused", "separate")
    return IndexReuse(reuse.freq, reuse.layers, keep_producers=keep, separate_store=separate)


def _either(environment: Mapping[str, str], variable: str, usual: str, other: str) -> bool:
    """Whether a variable says ``other``. Raises IndexReuseError where it says neither."""
    value = environment.get(variable) or usual
    if value not in (usual, other):
        raise IndexReuseError(f"{variable}={value}: write {usual} or {other}")
    return value == other


def required_settings() -> IndexReuse:
    """The settings of this process, where its hooks are registered and so there must be some."""
    settings = settings_from()
    if settings is None:
        raise IndexReuseError(f"{REUSE_VARIABLE} is not set in a process that has index reuse's hooks")
    return settings


def _span(layers: Sequence[int]) -> str:
    return f"{layers[0]}..{layers[-1]}" if list(layers) == list(range(layers[0], layers[-1] + 1)) else f"{list(layers)}"
