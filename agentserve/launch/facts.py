"""What a checkpoint's files say of it, read without torch or transformers."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agentserve.shapes.published import HUB_PREFIX, M3_CONFIG
from offload.state import Plane, prefix_state_planes

# SGLang's test for M3 (srt/configs/model_config.py: is_minimax_sparse in 0.5.23).
M3_ARCHITECTURES = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")


class CheckpointError(ValueError):
    """A checkpoint that cannot be served. ``str`` says what is wrong with which file, ``fix`` what to do."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A local checkpoint.

    Attributes:
        path: its folder.
        config: the parsed ``config.json``.
        weight_files: the safetensors files of the index, or those of the folder where there is no index.
        missing_files: files that the index names and the folder lacks.
        weight_bytes: size of the present weight files together.
    """

    path: Path
    config: Mapping[str, Any]
    weight_files: tuple[str, ...]
    missing_files: tuple[str, ...]
    weight_bytes: int

    @property
    def architecture(self) -> str:
        return str((self.config.get("architectures") or [""])[0])

    @property
    def is_m3(self) -> bool:
        return self.architecture in M3_ARCHITECTURES

    @property
    def text_config(self) -> Mapping[str, Any]:
        text: Mapping[str, Any] = self.config.get("text_config") or self.config
        return text

    @property
    def block_size(self) -> int | None:
        """Tokens per sparse block; None where the config does not say."""
        sparse = self.text_config.get("sparse_attention_config") or self.config.get("sparse_attention_config") or {}
        return sparse.get("sparse_block_size")

    @property
    def max_positions(self) -> int | None:
        return self.text_config.get("max_position_embeddings")

    @property
    def dtype(self) -> str:
        """Element type of unquantized weights; as in SGLang, float32 where the config does not say."""
        for section in (self.config, self.text_config):
            for name in ("dtype", "torch_dtype"):
                if section.get(name):
                    return str(section[name]).removeprefix("torch.")
        return "float32"

    @property
    def capture_layers(self) -> list[int] | None:
        """Of an EAGLE3 draft: target layers whose hidden states it reads; None where the config does not say."""
        layers = (self.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        return [int(layer) for layer in layers] if layers else None

    @property
    def quantized(self) -> bool:
        return bool(self.config.get("quantization_config") or self.text_config.get("quantization_config"))

    def planes(
        self,
        *,
        kv_dtype: str,
        index_dtype: str,
        tp: int,
        index_sources: Collection[int] | None = None,
        draft: CheckpointFacts | None = None,
    ) -> list[Plane]:
        """The planes of a cached prefix on one rank, with those of a draft. Raises ``offload.state.StateError``."""
        return prefix_state_planes(
            self.config,
            kv_dtype=kv_dtype,
            index_dtype=index_dtype,
            tp=tp,
            index_sources=index_sources,
            draft_config=draft.config if draft else None,
        )


def resolve_model(model: str) -> Path:
    """The folder of a checkpoint: a path, or the local snapshot of a Hugging Face Hub id.

    Nothing is downloaded: 400 GB are not fetched because a name was mistyped.

    Raises:
        CheckpointError: it is neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"model '{model}' is a file", "give the folder that holds config.json")
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        try:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(model, local_files_only=True))
        except (ImportError, OSError, ValueError):
            # Not cached, or no hub client: the same advice serves both.
            pass
        raise CheckpointError(
            f"model '{model}' is no folder and not in the Hugging Face cache",
            f"download it with `hf download {model}`, or pass --model FOLDER",
        )
    raise CheckpointError(
        f"model folder '{model}' does not exist",
        f"write a tiny one with `agentserve checkpoint tiny {model}`, or pass --model FOLDER",
    )


def read_facts(path: Path) -> CheckpointFacts:
    """Read config and weight index of a checkpoint folder.

    Raises:
        CheckpointError: ``config.json`` or the index is missing or not readable.
    """
    config = _read_json(path / "config.json", "it is not a checkpoint folder; pass another one with --model")
    index_path = path / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = _read_json(index_path, "download or write the checkpoint again").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path}: field 'weight_map' is missing or empty", "download it again")
        names = tuple(sorted({str(name) for name in weight_map.values()}))
    else:
        names = tuple(sorted(file.name for file in path.glob("*.safetensors")))
    missing = tuple(name for name in names if not (path / name).is_file())
    size = sum(os.stat(path / name).st_size for name in names if name not in missing)
    return CheckpointFacts(path, config, names, missing, size)


def read_draft(draft: str) -> CheckpointFacts:
    """The facts of an EAGLE3 draft, given as a model is. Raises CheckpointError that speaks of a draft."""
    try:
        return read_facts(resolve_model(draft))
    except CheckpointError as error:
        fix = error.fix.replace("--model", "--eagle3").replace("checkpoint tiny ", "checkpoint tiny-eagle3 ")
        raise CheckpointError(f"EAGLE3 draft: {error}", fix) from None


def known_config(model: str) -> Mapping[str, Any] | None:
    """The config of a model that is on this machine, or M3's published geometry; None where neither."""
    try:
        return read_facts(resolve_model(model)).config
    except CheckpointError:
        return M3_CONFIG if model.startswith(HUB_PREFIX) else None


def _read_json(path: Path, fix: str) -> dict[str, Any]:
    try:
        data = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", fix) from None
    except (OSError, orjson.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: {error}", fix) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object", fix)
    return data
