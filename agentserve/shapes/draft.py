"""Weights of an EAGLE3 draft on one rank (``LlamaForCausalLMEagle3``, SGLang 0.5.23: ``srt/models/llama_eagle3.py``).

The draft reads the target's embedding, so it has none where hidden sizes agree; its LM head is its own, of a smaller
vocabulary, unless the config names none. ``tests/test_shapes_upstream.py`` builds the real class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentserve.shapes.linears import padded_rows, split, split_or_replicate
from agentserve.shapes.model import ShapeError, bad_fields

_Positive = Annotated[int, Field(ge=1)]


class _Eagle(BaseModel):
    model_config = ConfigDict(frozen=True)

    eagle_aux_hidden_state_layer_ids: list[int] = []
    norm_before_fc: bool = False


class DraftSizes(BaseModel):
    """Global sizes of a draft, in the config's own field names."""

    model_config = ConfigDict(frozen=True)

    hidden_size: _Positive
    num_hidden_layers: _Positive
    num_attention_heads: _Positive
    num_key_value_heads: _Positive
    head_dim: _Positive
    intermediate_size: _Positive
    vocab_size: _Positive
    draft_vocab_size: _Positive | None = None  # None: the target's LM head is used
    target_hidden_size: _Positive | None = None
    num_aux_hidden_states: _Positive | None = None
    tie_word_embeddings: bool = False
    bias: bool = False  # of the matrix that joins the captured hidden states, and of o
    attention_bias: bool = False  # of o alone: q, k and v have none
    norm_before_fc: bool = False
    fc_norm: bool | None = None
    use_aux_norm: bool = False
    eagle_config: _Eagle = _Eagle()

    @property
    def captured(self) -> int:
        """Hidden states of the target that a position is read from."""
        return self.num_aux_hidden_states or len(self.eagle_config.eagle_aux_hidden_state_layer_ids) or 3

    @property
    def captured_size(self) -> int:
        """Elements of one of them."""
        return self.target_hidden_size or self.hidden_size


def read_draft_sizes(config: Mapping[str, Any]) -> DraftSizes:
    """Sizes from a draft's parsed ``config.json``. Raises ShapeError naming each bad field."""
    given = {name: value for name, value in config.items() if value is not None}
    hidden, heads = given.get("hidden_size"), given.get("num_attention_heads")
    if "head_dim" not in given and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        given["head_dim"] = hidden // heads
    try:
        return DraftSizes.model_validate(given)
    except ValidationError as error:
        raise ShapeError(f"EAGLE3 draft: {bad_fields(error)}; is it the config.json of an EAGLE3 draft?") from None


def draft_weight_bytes(sizes: DraftSizes, tp: int, element_bytes: int) -> int:
    """Bytes of the draft's weights on one of ``tp`` ranks.

    Args:
        element_bytes: of an element of its type; drafts are published in 16 bits beside quantized targets too.

    Raises:
        ShapeError: a size does not split over the ranks.
    """
    hidden = sizes.hidden_size
    query = split("the draft's num_attention_heads", sizes.num_attention_heads, tp)
    kv = split_or_replicate("the draft's num_key_value_heads", sizes.num_key_value_heads, tp)
    mlp = split("the draft's intermediate_size", sizes.intermediate_size, tp)
    elements = 0
    for layer in range(sizes.num_hidden_layers):
        read = 2 * hidden if layer == 0 else hidden  # the first reads embedding and hidden state side by side
        elements += (query + 2 * kv) * sizes.head_dim * read + hidden * query * sizes.head_dim
        elements += 3 * mlp * hidden
        elements += (3 + int(sizes.bias or sizes.attention_bias)) * hidden  # norms, bias of o
    joined = sizes.captured * sizes.captured_size
    elements += joined * hidden + (hidden if sizes.bias else 0)  # on every rank whole
    elements += hidden  # the last norm
    before = sizes.norm_before_fc or sizes.eagle_config.norm_before_fc
    elements += joined * (int(before) + int(bool(sizes.fc_norm or sizes.use_aux_norm)))
    own_embedding = sizes.captured_size != hidden
    if own_embedding:
        elements += padded_rows(sizes.vocab_size, tp) // tp * hidden
    if sizes.draft_vocab_size is not None and not sizes.tie_word_embeddings:
        elements += padded_rows(sizes.draft_vocab_size, tp) // tp * hidden
    return elements * element_bytes
