"""Whether an EAGLE3 draft fits its target, from the two configurations alone. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

DRAFT_ARCHITECTURE = "LlamaForCausalLMEagle3"


def draft_faults(
    target: Mapping[str, Any], draft: Mapping[str, Any], architecture: str, layers: Sequence[int] | None
) -> Iterator[tuple[str, str]]:
    """What keeps the pair from running, each with what to do.

    Args:
        target: the text configuration of the target.
        draft: the draft's ``config.json``.
        architecture: the first of its ``architectures``.
        layers: the capture layers that the recipe names; None: the draft's own.
    """
    another = "use the draft that was trained for this target"
    if architecture != DRAFT_ARCHITECTURE:
        yield f"field 'architectures' is {architecture or 'empty'}, not {DRAFT_ARCHITECTURE}", another
        return
    hidden = draft.get("target_hidden_size") or draft.get("hidden_size")
    if hidden != target.get("hidden_size"):
        yield f"it reads hidden states of {hidden}, but the target's have {target.get('hidden_size')}", another
    if draft.get("vocab_size") != target.get("vocab_size"):
        yield (
            (
                f"field 'vocab_size' is {draft.get('vocab_size')}, but the target's is {target.get('vocab_size')}: the "
                "draft uses the target's embedding"
            ),
            another,
        )
    eagle = draft.get("eagle_config") or {}
    own = eagle.get("eagle_aux_hidden_state_layer_ids")
    named = layers or own
    count = draft.get("num_aux_hidden_states") or (len(own) if own else 3)
    if named and len(named) != count:
        yield f"{len(named)} capture layers are named, but its weights take {count}", "name as many layers"
    beyond = [layer for layer in named or () if not 0 <= layer < int(target.get("num_hidden_layers") or 0)]
    if beyond:
        yield (
            f"capture layers {beyond} are not layers of the target, which has {target.get('num_hidden_layers')}",
            "set eagle3.capture_layers, or " + another,
        )
