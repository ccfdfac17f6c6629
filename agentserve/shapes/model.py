"""The sizes of an M3 checkpoint that decide local shapes, read from its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_Positive = Annotated[int, Field(ge=1)]


class ShapeError(ValueError):
    """A config or a split that does not work. The message names the field and says what to do."""


class _Sparse(BaseModel):
    model_config = ConfigDict(frozen=True)

    sparse_attention_freq: list[int]
    sparse_disable_index_value: list[int] = []
    sparse_num_index_heads: _Positive
    sparse_index_dim: _Positive


class M3Sizes(BaseModel):
    """Global sizes, in the config's own field names; what shapes do not depend on is left out."""

    model_config = ConfigDict(frozen=True)

    hidden_size: _Positive
    num_hidden_layers: _Positive
    num_attention_heads: _Positive
    num_key_value_heads: _Positive
    head_dim: _Positive
    intermediate_size: _Positive  # of one expert, routed or shared
    dense_intermediate_size: _Positive
    n_shared_experts: Annotated[int, Field(ge=0)] = 0
    num_local_experts: _Positive
    num_experts_per_tok: _Positive
    moe_layer_freq: list[int]
    vocab_size: _Positive
    sparse_attention_config: _Sparse

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with sparse attention, and so with index projections."""
        return _flagged(self.sparse_attention_config.sparse_attention_freq)

    @property
    def index_value_layers(self) -> tuple[int, ...]:
        """Sparse layers whose index branch has values and an output projection; none in M3."""
        off = self.sparse_attention_config.sparse_disable_index_value or [0] * self.num_hidden_layers
        return tuple(layer for layer in self.sparse_layers if not off[layer])

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return _flagged(self.moe_layer_freq)

    @model_validator(mode="after")
    def _flags(self) -> Self:
        sparse = self.sparse_attention_config
        lists = {
            "moe_layer_freq": self.moe_layer_freq,
            "sparse_attention_config.sparse_attention_freq": sparse.sparse_attention_freq,
        }
        if sparse.sparse_disable_index_value:
            lists["sparse_attention_config.sparse_disable_index_value"] = sparse.sparse_disable_index_value
        for name, flags in lists.items():
            if len(flags) != self.num_hidden_layers:
                raise ValueError(f"{name} lists {len(flags)} layers, num_hidden_layers is {self.num_hidden_layers}")
        return self


def read_sizes(config: Mapping[str, Any]) -> M3Sizes:
    """Sizes from a parsed config, with or without a ``text_config`` level. Raises ShapeError naming each bad field."""
    text = dict(config.get("text_config") or config)
    if "sparse_attention_config" not in text and "sparse_attention_config" in config:
        text["sparse_attention_config"] = config["sparse_attention_config"]
    if not text.get("head_dim") and text.get("hidden_size") and text.get("num_attention_heads"):
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    try:
        return M3Sizes.model_validate(text)
    except ValidationError as error:
        raise ShapeError(f"{bad_fields(error)}; is it the config.json of a MiniMax-M3 checkpoint?") from None


def bad_fields(error: ValidationError) -> str:
    """What is wrong with each field of a config, in a line."""
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        lines.append(f"config field '{field}': {text[0].lower()}{text[1:]}" if field else f"config: {text}")
    return "; ".join(lines)


def _flagged(flags: list[int]) -> tuple[int, ...]:
    return tuple(layer for layer, flag in enumerate(flags) if flag)
