"""``agentserve checkpoint``: write small random checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from agentserve.checkpoint.folder import CheckpointFolderError


@click.group()
def command() -> None:
    """Write small random checkpoints in the published form."""


@command.command(short_help="Write a tiny MiniMax-M3.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--seed", default=0, show_default=True, help="Seed of the weights.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True,
              help="Element type of the weights.")  # fmt: skip
@click.option("--layers", type=click.IntRange(2), default=None, help="Layers in all; the first one is dense.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is already there.")
def tiny(folder: Path, seed: int, dtype: str, layers: int | None, overwrite: bool) -> None:
    """Write a tiny MiniMax-M3 (six layers, 128-token sparse blocks, byte-level tokenizer) to FOLDER."""
    from agentserve.checkpoint.config import TinyM3Shape
    from agentserve.checkpoint.tiny import write_tiny_checkpoint

    default = TinyM3Shape()
    shape = TinyM3Shape(dtype=dtype, num_layers=layers or default.num_layers)
    with _refusals(folder):
        write_tiny_checkpoint(folder, seed=seed, shape=shape, overwrite=overwrite)
    click.echo(f"wrote {folder}: tiny M3, {shape.num_layers} layers, {shape.dtype}, seed {seed}")


@command.command("tiny-eagle3", short_help="Write an EAGLE3 draft for it.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--seed", default=0, show_default=True, help="Seed of the weights.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True,
              help="Element type of the weights.")  # fmt: skip
@click.option("--layers", type=click.IntRange(2), default=None, help="Layers of the tiny M3 that it is for.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is already there.")
def tiny_eagle3(folder: Path, seed: int, dtype: str, layers: int | None, overwrite: bool) -> None:
    """Write a random EAGLE3 draft for the tiny MiniMax-M3 to FOLDER."""
    from agentserve.checkpoint.config import TinyM3Shape
    from agentserve.checkpoint.tiny_eagle3 import TinyDraftShape, write_tiny_eagle3

    target = TinyM3Shape(dtype=dtype, num_layers=layers or TinyM3Shape().num_layers)
    shape = TinyDraftShape(target)
    with _refusals(folder):
        write_tiny_eagle3(folder, seed=seed, shape=shape, overwrite=overwrite)
    click.echo(
        f"wrote {folder}: EAGLE3 draft for a tiny M3 of {target.num_layers} layers, hidden states after layers "
        f"{', '.join(map(str, shape.capture_layers))}, {dtype}, seed {seed}"
    )


@contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointFolderError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:  # a full disk, a file that may not be replaced
        raise click.ClickException(f"{folder}: {error}; name a folder that can be written") from None
