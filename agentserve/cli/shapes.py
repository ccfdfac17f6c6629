"""``agentserve shapes``: GEMM shapes and bytes of one tensor-parallel rank, as ``agentserve.shapes`` computes them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentserve.launch.facts import CheckpointError, CheckpointFacts, read_draft, read_facts, resolve_model
from agentserve.launch.plan import cache_dtypes, index_sources, served_dtype
from agentserve.launch.recipe import Override, Recipe, RecipeError, find_recipe, load_recipe, parse_set
from agentserve.runtime.index_reuse import IndexReuseError, parse_index_reuse
from agentserve.shapes.linears import Linear
from agentserve.shapes.model import ShapeError
from agentserve.shapes.published import HUB_PREFIX, M3_CONFIG
from agentserve.shapes.report import Cache, Setup, ShapeReport, shape_report
from offload.state import StateError, shareable_layers

_COMPARED_REUSE = "freq:4"  # what published recipes use; shown beside a recipe without index reuse
# Flags of another kind of parallelism than the one that is described.
_OTHER_PARALLELISM = (
    "--ep-size",
    "--ep",
    "--expert-parallel-size",
    "--enable-dp-attention",
    "--pp-size",
    "--attn-cp-size",
)


@click.command("shapes")
@click.argument("recipe_name", metavar="RECIPE")
@click.option("--tp", type=click.IntRange(min=1), help="Tensor-parallel ranks.  [default: the recipe's]")
@click.option("--model", help="Checkpoint folder, or a Hub id that is in the local cache.")
@click.option("--index-reuse", help="Share block selections, e.g. freq:4.  [default: the recipe's]")
@click.option("--eagle3", metavar="DRAFT", help="EAGLE3 draft whose K/V are cached too.  [default: the recipe's]")
@click.option("--memory", type=click.FloatRange(min=0, min_open=True), metavar="GIB", help="Memory of one device, GiB.")
@click.option(
    "--fraction",
    type=click.FloatRange(0, 1, min_open=True),
    help="Of it, for weights and KV cache.  [default: the recipe's kv.memory_fraction]",
)
@click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1, 8, 128, 8192),
    show_default=True,
    help="Tokens of a step for which to show M; several times for several.",
)
@click.option("--set", "sets", multiple=True, metavar="FIELD=VALUE", help="Any field of the recipe.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    recipe_name: str,
    tp: int | None,
    model: str | None,
    index_reuse: str | None,
    eagle3: str | None,
    memory: float | None,
    fraction: float | None,
    tokens: tuple[int, ...],
    sets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Local GEMM shapes, cached bytes, weights and communication of one rank of RECIPE.

    Nothing is started. Where MiniMax-M3's checkpoint is not on this machine, its published geometry is used.
    """
    given = {"tp": tp, "model": model, "index_reuse": index_reuse, "eagle3.draft": eagle3}
    overrides = [
        Override(field, value, "--" + field.removesuffix(".draft").replace("_", "-"))
        for field, value in given.items()
        if value is not None
    ]
    try:
        recipe = load_recipe(find_recipe(recipe_name), [*(parse_set(text) for text in sets), *overrides])
        facts, note = _facts(recipe)
        setup = _setup(recipe, facts, memory=memory, fraction=fraction)
        report = shape_report(facts.config, setup)
    except (RecipeError, CheckpointError, ShapeError, StateError, IndexReuseError) as error:
        fix = f" Fix: {error.fix}." if isinstance(error, CheckpointError) else ""
        click.echo(f"{error}.{fix}", err=True)
        sys.exit(2)
    if as_json:
        answer = {"model": recipe.model, "source": note, "device": recipe.device, **report.as_dict()}
        click.echo(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())
        return
    _show(Console(highlight=False), report, setup, recipe, note, tokens)


def _facts(recipe: Recipe) -> tuple[CheckpointFacts, str]:
    """The checkpoint, and where its sizes come from."""
    try:
        folder = resolve_model(recipe.model)
    except CheckpointError:
        if not recipe.model.startswith(HUB_PREFIX):
            raise
        return CheckpointFacts(Path(recipe.model), M3_CONFIG, (), (), 0), "published geometry, no checkpoint here"
    return read_facts(folder), str(folder / "config.json")


def _setup(recipe: Recipe, facts: CheckpointFacts, *, memory: float | None, fraction: float | None) -> Setup:
    for argument in recipe.extra_args:
        if argument.split("=", 1)[0] in _OTHER_PARALLELISM:
            raise ShapeError(f"the recipe's extra_args hold {argument}; shapes are known for tensor parallelism only")
    share = fraction if fraction is not None else recipe.kv.memory_fraction
    if memory is not None and share is None:
        raise ShapeError("the recipe sets no kv.memory_fraction; pass --fraction, the part for weights and KV cache")
    dtype, draft = served_dtype(recipe, facts), recipe.eagle3.draft
    compared = parse_index_reuse(recipe.index_reuse or _COMPARED_REUSE)
    return Setup(
        tp=recipe.tp,
        fused=recipe.device != "cpu",
        activation=dtype,
        weights=("float32",) if dtype == "float32" else (dtype, "mxfp8"),
        caches=_caches(recipe, facts, dtype),
        index_sources=index_sources(recipe, facts),
        compared_sources=compared.pattern(shareable_layers(facts.config)).sources,
        page_size=recipe.page_size or facts.block_size or 128,
        draft_config=None if draft is None else read_draft(draft).config,
        memory_bytes=memory * share * 2**30 if memory is not None and share is not None else None,
    )


def _caches(recipe: Recipe, facts: CheckpointFacts, dtype: str) -> tuple[tuple[str, str], ...]:
    """The recipe's own element types first, then the others that SGLang offers."""
    others = () if dtype == "float32" else ((dtype, dtype), ("fp8_e4m3", dtype), ("fp8_e4m3", "fp8_e4m3"))
    return tuple(dict.fromkeys((cache_dtypes(recipe, facts), *others)))


def _show(
    console: Console, report: ShapeReport, setup: Setup, recipe: Recipe, note: str, tokens: tuple[int, ...]
) -> None:
    heads = report.heads
    console.print(
        f"{escape(recipe.model)} ({escape(note)}), {recipe.device}, tp {report.tp}: {heads.query} query, {heads.kv} KV "
        f"and {heads.index} index head(s) a rank",
        soft_wrap=True,
    )
    console.print(_linear_table(report.linears, tokens))
    for dtype, parts in report.weights.items():
        largest = sorted(parts.items(), key=lambda part: -part[1])
        named = ", ".join(f"{name} {_size(size)}" for name, size in largest)
        console.print(f"weights in {dtype}: {_size(sum(parts.values()))} a rank ({named})", soft_wrap=True)
    reuse = recipe.index_reuse or _COMPARED_REUSE
    console.print(_cache_table(report.caches, reuse))
    if setup.memory_bytes is not None:
        console.print(_capacity_table(report.caches, reuse, setup.memory_bytes))
        for dtype, parts in report.weights.items():
            if sum(parts.values()) >= setup.memory_bytes:
                console.print(
                    f"weights in {dtype} do not fit: {_size(sum(parts.values()))} a rank; take more ranks (--tp), or a "
                    "device with more memory",
                    soft_wrap=True,
                )
    if recipe.device == "rocm":
        console.print(
            "on ROCm, SGLang's own index reuse leaves every layer its index keys: no memory is saved", soft_wrap=True
        )
    _show_communication(console, report, recipe, tokens)


def _show_communication(console: Console, report: ShapeReport, recipe: Recipe, tokens: tuple[int, ...]) -> None:
    sent = report.communication
    if not sent.all_reduces:
        console.print("communication: none, there is one rank")
        return
    console.print(
        f"communication: {sent.all_reduces} all-reduces a step of {sent.message_bytes:,} B a token "
        f"({sent.bytes_per_token:,} B a token; a rank sends {sent.sent_bytes_per_token:,.0f} B with rings), "
        f"logits {sent.logit_bytes:,} B a sequence",
        soft_wrap=True,
    )
    sizes = ", ".join(f"{count * sent.message_bytes / 2**20:,.2f} MiB at {count:,}" for count in tokens)
    console.print(f"each all-reduce by tokens a step: {sizes}", soft_wrap=True)
    if recipe.device == "rocm":
        limits = ", ".join(f"{codec} {floor:,}" for codec, floor in report.quick_reduce_tokens.items())
        console.print(
            f"large enough for QuickReduce from tokens a step: {limits or 'never at this tp'}", soft_wrap=True
        )


def _linear_table(linears: Iterable[Linear], tokens: tuple[int, ...]) -> Table:
    table = Table(title="Local GEMMs of one rank, [M, K] x [K, N]", title_justify="left")
    table.add_column("linear", no_wrap=True)
    for title in ("layers", "copies", "N", "K", "M is", *(f"at {count:,}" for count in tokens)):
        table.add_column(title, justify="right", no_wrap=title != "M is")
    for linear in linears:
        # How many sequences a step's tokens belong to is not known here.
        known = linear.rows != "sequences"
        rows = [f"{linear.m(count, 0):,.{0 if linear.copies == 1 else 2}f}" if known else "" for count in tokens]
        layers = str(len(linear.layers)) if linear.layers else ""
        table.add_row(
            linear.name, layers, f"{linear.copies}", f"{linear.n:,}", f"{linear.k:,}", f"{linear.rows}", *rows
        )
    return table


def _cache_table(caches: Sequence[Cache], reuse: str) -> Table:
    table = Table(title=f"Cached bytes per token and rank, and with index reuse {reuse}", title_justify="left")
    names = [plane.name for plane in caches[0].planes]
    table.add_column("K/V type")
    table.add_column("index type")
    for title in (*names, "all", f"index-K, {reuse}", f"all, {reuse}", "tokens in the same bytes"):
        table.add_column(title, justify="right")
    for cache in caches:
        shared = sum(plane.bytes_per_token for plane in cache.reuse_planes if plane.name == "index-K")
        planes = (*(plane.bytes_per_token for plane in cache.planes), cache.total, shared, cache.reuse_total)
        numbers = (f"{size:,}" for size in planes)
        table.add_row(cache.kv_dtype, cache.index_dtype, *numbers, f"x {cache.reuse_gain:.4f}")
    return table


def _capacity_table(caches: Sequence[Cache], reuse: str, memory: float) -> Table:
    title = f"Tokens that fit beside the weights in {memory / 2**30:,.1f} GiB ({_size(int(memory))})"
    table = Table(title=title, title_justify="left")
    for title in ("weights", "K/V type", "index type"):
        table.add_column(title)
    for title in ("tokens", reuse):
        table.add_column(title, justify="right")
    for cache in caches:
        for dtype, count in cache.tokens.items():
            table.add_row(dtype, cache.kv_dtype, cache.index_dtype, f"{count:,}", f"{cache.reuse_tokens[dtype]:,}")
    return table


def _size(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"
