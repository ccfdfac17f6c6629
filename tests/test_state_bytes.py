"""Bytes per token of an M3 prefix against sizes seen on real SGLang."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from offload.state import StateError, bytes_per_token, prefix_state_planes

# MiniMax-M3's published shapes: 60 layers, the first three dense.
M3: dict[str, Any] = {
    "text_config": {
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_size": 6144,
        "sparse_attention_config": {
            "sparse_attention_freq": [0] * 3 + [1] * 57,
            "sparse_disable_index_value": [0] * 3 + [1] * 57,
            "sparse_index_dim": 128,
            "sparse_block_size": 128,
        },
    },
}
BF16 = {"kv_dtype": "bfloat16", "index_dtype": "bfloat16"}


def sizes(config: dict[str, Any], **kwargs: Any) -> dict[str, int]:
    return {plane.name: plane.bytes_per_token for plane in prefix_state_planes(config, **kwargs)}


def test_real_m3_in_bf16() -> None:
    by_plane = sizes(M3, **BF16)
    assert by_plane["K"] + by_plane["V"] == 122_880
    assert by_plane["index-K"] == 14_592
    assert set(by_plane) == {"K", "V", "index-K"}
    assert bytes_per_token(prefix_state_planes(M3, **BF16)) == 122_880 + 14_592


def test_kv_heads_split_over_ranks_then_replicate_and_index_replicates_always() -> None:
    assert sizes(M3, **BF16, tp=4)["K"] == 61_440 // 4
    assert sizes(M3, **BF16, tp=8)["K"] == 61_440 // 4
    assert sizes(M3, **BF16, tp=8)["index-K"] == 14_592


def test_dtypes_are_separate() -> None:
    by_plane = sizes(M3, kv_dtype="fp8_e4m3", index_dtype="bfloat16")
    assert (by_plane["K"], by_plane["index-K"]) == (30_720, 14_592)


def test_index_reuse_needs_15_of_57_layers_at_frequency_4() -> None:
    (index,) = [p for p in prefix_state_planes(M3, **BF16, index_topk_freq=4) if p.name == "index-K"]
    assert index.layers == tuple(range(3, 60, 4))
    assert len(index.layers) == 15


def test_index_value_where_not_disabled_and_never_shared() -> None:
    config = copy.deepcopy(M3)
    config["text_config"]["sparse_attention_config"]["sparse_disable_index_value"] = [0] * 10 + [1] * 50
    planes = {p.name: p for p in prefix_state_planes(config, **BF16, index_topk_freq=4)}
    assert planes["index-V"].layers == tuple(range(3, 10))
    assert set(range(3, 10)) < set(planes["index-K"].layers)
    assert len(planes["index-K"].layers) == 7 + 13


def test_draft_planes_and_derived_head_dim() -> None:
    draft = {"num_hidden_layers": 1, "num_key_value_heads": 8, "num_attention_heads": 64, "hidden_size": 8192}
    by_plane = sizes(M3, **BF16, draft_config=draft)
    assert by_plane["draft-K"] == by_plane["draft-V"] == 8 * 128 * 2


def test_flat_config_is_accepted() -> None:
    assert sizes(M3["text_config"], **BF16) == sizes(M3, **BF16)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("num_key_value_heads",), None, "num_key_value_heads"),
        (("num_hidden_layers",), 59, "one flag for each of 59 layers"),
        (("sparse_attention_config",), None, "sparse_attention_config"),
        (("sparse_attention_config", "sparse_index_dim"), 0, "sparse_index_dim"),
    ],
)
def test_faulty_config_names_the_field(path: tuple[str, ...], value: object, message: str) -> None:
    config = copy.deepcopy(M3)
    target = config["text_config"]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(StateError, match=message):
        prefix_state_planes(config, **BF16)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(StateError, match="tp=3"):
        prefix_state_planes(M3, **BF16, tp=3)


def test_unknown_dtype() -> None:
    with pytest.raises(StateError, match="nvfp4"):
        bytes_per_token(prefix_state_planes(M3, kv_dtype="nvfp4", index_dtype="bfloat16"))
