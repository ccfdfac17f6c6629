"""A recipe: everything that decides how the server is started, as one validated YAML file.

A recipe names settings in the terms of this project; ``agentserve.launch.plan`` turns them into SGLang's
arguments. What has no field here goes into ``extra_args`` and ``env`` unchanged.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from agentserve.launch.explain import explain
from agentserve.launch.offload import Offload
from agentserve.runtime.index_reuse import parse_index_reuse
from agentserve.runtime.policy_settings import PolicySettings
from agentserve.runtime.speculation import VARIABLES, golden_length

# SGLang's own policies (srt/arg_groups/choices.py: RADIX_EVICTION_POLICY_CHOICES in 0.5.23).
EvictionPolicy = Literal["lru", "lfu", "slru", "priority", "tlru"]

# Flags the plan writes from a field. In extra_args they would silently win over, or lose against, the field.
MANAGED_FLAGS = {
    "--model": "model",
    "--model-path": "model",
    "--served-model-name": "served_name",
    "--device": "device",
    "--dtype": "dtype",
    "--tp": "tp",
    "--tp-size": "tp",
    "--tensor-parallel-size": "tp",
    "--context-length": "context_length",
    "--page-size": "page_size",
    "--max-total-tokens": "kv.capacity_tokens",
    "--mem-fraction-static": "kv.memory_fraction",
    "--kv-cache-dtype": "kv.dtype",
    "--chunked-prefill-size": "prefill_chunk",
    "--max-running-requests": "max_running_requests",
    "--host": "host",
    "--port": "port",
    "--attention-backend": "attention_backend",
    "--radix-eviction-policy": "radix.eviction_policy",
    "--disable-radix-cache": "radix.disable",
    "--radix-cache-backend": "radix.policy",
    "--enable-cache-report": "cache_report",
    "--enable-metrics": "metrics",
    "--kv-events-config": "kv_events",
    "--enable-lmcache": "offload.backend",
    "--lmcache-config-file": "offload",
    "--speculative-algorithm": "eagle3.draft",
    "--speculative-draft-model-path": "eagle3.draft",
    "--speculative-num-steps": "eagle3.steps",
    "--speculative-num-draft-tokens": "eagle3.steps",
    "--speculative-eagle-topk": "eagle3.steps",
    "--speculative-draft-attention-backend": "eagle3.attention_backend",
}


class RecipeError(ValueError):
    """A recipe that cannot be used. The message names file and field, one problem a line."""


def _scalar_to_str(value: Any) -> Any:
    # YAML reads `OMP_NUM_THREADS: 1` as a number; to a process it is a string all the same.
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value) if isinstance(value, int | float) else value


def _acceptance(value: Any) -> Any:
    if value is None or value == "golden":
        return value
    try:
        length = float(value)
    except (TypeError, ValueError):
        length = 0.0
    if not length >= 1:
        raise ValueError(f"write tokens a verification, 1 or more, or golden; got {value!r}")
    return length


_Text = Annotated[str, BeforeValidator(_scalar_to_str)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KvCache(_Model):
    """How much KV cache. Give one of the two amounts, or neither to let SGLang decide (GPU only)."""

    capacity_tokens: int | None = Field(default=None, ge=1)
    memory_fraction: float | None = Field(default=None, gt=0, lt=1)  # weights + KV over GPU memory
    dtype: Literal["auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = "auto"  # auto: the model's

    @model_validator(mode="after")
    def _one_amount(self) -> Self:
        if self.capacity_tokens is not None and self.memory_fraction is not None:
            raise ValueError("give capacity_tokens or memory_fraction, not both")
        return self


class RadixCache(_Model):
    """SGLang's own policy, or one of ours (docs/design/live-policies.md) instead of it."""

    eviction_policy: EvictionPolicy = "lru"
    policy: str | None = None  # ours, as gittins or ttl:handicap=30; None: SGLang's, untouched
    admission: str = "none"  # which session may start, as gate:0.9; needs a policy
    truncate: bool = True  # ours only: the last victim loses the pages that are needed, not the whole node
    disable: bool = False

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        if self.policy is None:
            if self.admission != "none":
                raise ValueError(f"admission {self.admission!r} needs policy; set it to lru to keep SGLang's order")
            return self
        PolicySettings(self.policy, self.admission, self.truncate).check()
        if self.disable:
            raise ValueError("policy needs the radix cache; drop disable or policy")
        if self.eviction_policy != "lru":
            raise ValueError(f"give eviction_policy {self.eviction_policy!r} or policy, not both")
        return self


class Eagle3(_Model):
    """Speculative decoding by a linear chain of drafts (docs/design/eagle3.md); off without a draft."""

    draft: str | None = Field(default=None, min_length=1)  # folder or cached Hub id of a LlamaForCausalLMEagle3
    steps: int = Field(default=3, ge=1, le=16)  # drafts per verification
    attention_backend: str | None = None  # of the draft, never the target's; None: torch_native on a CPU, else triton
    capture_layers: list[Annotated[int, Field(ge=0)]] | None = None  # None: those that the draft's config names
    # Tokens per verification as if the draft were that good; "golden": as measured for this number of steps. What is
    # written is then not what the model would write. None: real verification.
    synthetic_length: Annotated[float | Literal["golden"] | None, BeforeValidator(_acceptance)] = None
    radix_keys: Literal["token", "pair"] = "token"  # pair: SGLang's own, which loses a page a prefix

    @property
    def length(self) -> float | None:
        """The synthetic acceptance length; None for real verification."""
        return golden_length(self.steps) if self.synthetic_length == "golden" else self.synthetic_length

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.draft is None:
            if self.model_fields_set:
                raise ValueError(f"{', '.join(sorted(self.model_fields_set))}: set draft too, or pass --eagle3 DRAFT")
            return self
        if self.length is not None and self.length > self.steps + 1:
            raise ValueError(f"synthetic_length {self.length:g} is above {self.steps} steps + 1")
        return self


class Cpu(_Model):
    omp_threads: int = Field(default=1, ge=1)  # per rank; more than one slows decode down on shared cores
    threads_bind: str | None = None  # cores of each rank, as "0|1" or "0-3|4-7"; None: by rank where tp > 1


class Recipe(_Model):
    """One way to start the server. Amounts are in tokens unless a name says otherwise."""

    model: str = Field(min_length=1)  # folder, relative to the working directory, or a cached Hub id
    served_name: str | None = None
    device: Literal["cpu", "cuda", "rocm"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tp: int = Field(default=1, ge=1)
    context_length: int | None = Field(default=None, ge=1)  # None: the checkpoint's
    page_size: int | None = Field(default=None, ge=1)  # None: the checkpoint's sparse block size
    kv: KvCache = KvCache()
    prefill_chunk: int | None = Field(default=None, ge=1)
    max_running_requests: int | None = Field(default=None, ge=1)
    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=30000, ge=1, le=65535)
    attention_backend: str | None = None
    radix: RadixCache = RadixCache()
    eagle3: Eagle3 = Eagle3()
    offload: Offload = Offload()
    # Sparse layers take over the block selection of an earlier one: freq:4 or layers:3,7,11. None: each chooses.
    index_reuse: str | None = None
    cache_report: bool = True
    metrics: bool = True
    watch: bool = False  # a page of the server: hit rate, causes, sessions (docs/design/watch.md); needs metrics
    kv_events: str | None = None  # ZMQ endpoint of the KV event publisher, as tcp://*:5557; None: off
    env: dict[str, _Text] = Field(default_factory=dict)
    extra_args: list[_Text] = Field(default_factory=list)
    cpu: Cpu = Cpu()

    @field_validator("index_reuse")
    @classmethod
    def _readable_reuse(cls, text: str | None) -> str | None:
        if text is not None:
            parse_index_reuse(text)
        return text

    @field_validator("kv_events")
    @classmethod
    def _zmq_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.startswith(("tcp://", "ipc://")):
            raise ValueError(f"{endpoint!r} is no ZMQ endpoint; write tcp://*:PORT")
        return endpoint

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.device == "cpu" and self.kv.capacity_tokens is None:
            raise ValueError(
                "device cpu needs kv.capacity_tokens: a fraction of memory that others share is no fixed size"
            )
        if self.offload.backend is not None:
            if self.radix.disable:
                raise ValueError("offload needs the radix cache; drop it or radix.disable")
            if self.eagle3.draft is not None and self.device == "rocm":
                raise ValueError("EAGLE3 with offload has been tried on a CPU and on CUDA only; drop offload or eagle3")
            if self.eagle3.draft is not None and self.eagle3.radix_keys == "pair":
                raise ValueError("offload needs a radix tree keyed by tokens; drop it or eagle3.radix_keys")
        if self.watch and not self.metrics:
            raise ValueError("watch shows the server's counters: set metrics to true, or drop watch")
        bind = self.cpu.threads_bind
        if bind is not None and len(bind.split("|")) != self.tp:
            raise ValueError(f"cpu.threads_bind must list cores for tp={self.tp} ranks, separated by '|'; got {bind!r}")
        if self.index_reuse is not None and parse_index_reuse(self.index_reuse).layers and self.device == "rocm":
            raise ValueError("index_reuse on rocm is SGLang's own, which takes a frequency: write freq:N")
        behind = sorted(set(self.env) & set(VARIABLES))
        if behind:
            raise ValueError(
                f"env holds {', '.join(behind)}: results would carry the wrong label; set eagle3.synthetic_length"
            )
        for argument in self.extra_args:
            field = MANAGED_FLAGS.get(argument.split("=", 1)[0])
            if field is not None:
                raise ValueError(f"extra_args holds {argument.split('=', 1)[0]}; set the field '{field}' instead")
        return self


@dataclass(frozen=True, slots=True)
class Override:
    """A value that replaces one of the recipe's.

    Attributes:
        field: dotted, as ``kv.capacity_tokens``.
        value: as YAML would read it.
        origin: the option that gave it, for messages.
    """

    field: str
    value: Any
    origin: str


def parse_set(text: str) -> Override:
    """``kv.capacity_tokens=65536`` as an override; the value is YAML. Raises RecipeError."""
    field, equals, raw = text.partition("=")
    if not equals or not all(field.split(".")):
        raise RecipeError(f"--set {text}: write it as field=value, for example --set kv.capacity_tokens=65536")
    try:
        return Override(field, yaml.safe_load(raw), f"--set {text}")
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {text}: the value is not YAML: {error}") from None


def shipped_recipes() -> dict[str, Path]:
    """The recipes in the package, by name."""
    folder = Path(str(files("agentserve"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """The file of a shipped recipe's name or of a path. Raises RecipeError that lists what there is."""
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if path.is_file():
        return path
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise RecipeError(f"recipe '{name}' is neither a file nor a shipped recipe ({', '.join(shipped)}){hint}")


def load_recipe(path: Path, overrides: Iterable[Override] = ()) -> Recipe:
    """Read a recipe, apply overrides in order and validate.

    Raises:
        RecipeError: naming the file (or the option that overrode) and the field.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path}: cannot read the recipe: {error}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of fields, got {type(data).__name__}")
    origins: dict[str, str] = {}
    for override in overrides:
        _apply(data, override, str(path))
        origins[override.field] = override.origin
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(explain(error, Recipe, str(path), origins)) from None


def _apply(data: dict[str, Any], override: Override, file: str) -> None:
    *parents, leaf = override.field.split(".")
    target = data
    for parent in parents:
        child = target.setdefault(parent, {})
        if child is None:
            child = target[parent] = {}
        if not isinstance(child, dict):
            raise RecipeError(f"{file}, {override.origin}: '{parent}' has no fields of its own")
        target = child
    # The two amounts of KV cache exclude each other: choosing one on the command line drops the file's other.
    rival = {"capacity_tokens": "memory_fraction", "memory_fraction": "capacity_tokens"}.get(leaf)
    if parents == ["kv"] and rival and override.value is not None:
        target.pop(rival, None)
    target[leaf] = override.value
