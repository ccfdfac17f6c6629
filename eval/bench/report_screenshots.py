"""The report's page in a real browser: ``python -m eval.bench.report_screenshots`` checks it and takes the pictures of
``docs/screenshots``.

The run is a generated trace played by the simulator in too small a cache, written as a replay writes it: nobody's data.
"""

from __future__ import annotations

import hashlib
import io
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import click
from PIL import Image

from agentserve.cli.report import command as report
from agentserve.shapes.published import M3_CONFIG
from eval.bench.browser import Browser, BrowserError
from eval.bench.report_scale import as_run, write_run
from eval.bench.simulator_workload import workload_from_sessions
from eval.report.figures.base import BLUE, DARK, GREEN, GREY, ORANGE, PINK, SKY, VERMILLION
from offload.state import bytes_per_token, prefix_state_planes
from radix_cache.attribution.simulated import explain
from radix_cache.simulator import Setting, simulate
from traces.readers import open_trace

COLOURS = (BLUE, DARK, GREEN, GREY, ORANGE, PINK, SKY, VERMILLION)
WIDTHS = (1280, 390)  # CSS pixels: a laptop, a phone
TRACE = "generated:sessions=10,seed=3"
LARGEST = 300_000  # bytes of a picture in the repository
TALLEST = 4_500  # pixels of a picture; a page is a few of them
_COLOURS = 48  # beside those of the figures


def demo_run(folder: Path, *, trace: str = TRACE, clients: int = 5, of_live: float = 1.0) -> Path:
    """Write the run directory of a generated trace in a cache of ``of_live`` times the live contexts."""
    workload = workload_from_sessions(open_trace(trace), page_size=64)
    setting = Setting(sessions=clients, think_cap=120.0)
    capacity = int(of_live * simulate(workload, setting).mean_context)
    outcome = simulate(
        workload, Setting(sessions=clients, think_cap=120.0, capacity=capacity, truncate=False), log_evictions=True
    )
    header, records, events = as_run(workload, outcome, explain(workload, outcome), seconds=True)
    header = header.model_copy(
        update={
            "run_id": "demo",
            "trace": trace,
            "trace_format": "generated",
            "trace_sha256": hashlib.sha256(trace.encode()).hexdigest(),
            "started_unix": 1_767_225_600.0,
        }
    )
    write_run(folder, header, records, events)
    return folder


def page_of(run: Path) -> Path:
    """Write the run's report; returns its page. A token's bytes are those of M3 in bfloat16."""
    planes = prefix_state_planes(M3_CONFIG, kv_dtype="bfloat16", index_dtype="bfloat16", tp=1)
    page = run / "report.html"
    arguments = [str(run), "--bytes-per-token", str(bytes_per_token(planes)), "--slo-ttft", "5", "--html", str(page)]
    report.main([*arguments, "--json", str(run / "report.json")], standalone_mode=False)
    return page


def look(browser: Browser, page: Path, width: int) -> list[str]:
    """Show the page at a width; returns what is wrong with it."""
    browser.resize(width, 900)
    browser.open(page)
    return faults(browser)


def faults(browser: Browser, *, server: str | None = None) -> list[str]:
    """What is wrong with the page that is shown, and was in its console since the last call.

    Args:
        server: address that the page came from and may ask; None: the page is a file and may ask nobody.
    """
    wrong = [f"console, {message.level}: {message.text}" for message in browser.messages() if message.level != "INFO"]
    outside = [url for url in browser.outside() if server is None or not url.startswith(f"{server}/")]
    wrong += [f"asked for {url}" for url in outside]
    wide, shown = browser.run("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    if wide > shown:
        wrong.append(f"{wide} pixels wide at {shown}")
    empty = browser.run(
        "return [...document.querySelectorAll('.plot')].filter(p => !p.querySelector('.main-svg')).map(p => p.id)"
    )
    return wrong + [f"figure {key} is empty" for key in empty]


def pictures(png: bytes) -> list[bytes]:
    """A page's picture as some of at most ``TALLEST`` pixels, with few colours: lines and text need no more."""
    whole = Image.open(io.BytesIO(png)).convert("RGB")
    adaptive = whole.quantize(colors=_COLOURS, dither=Image.Dither.NONE).getpalette() or []
    palette = Image.new("P", (1, 1))
    figures = [int(colour[i : i + 2], 16) for colour in COLOURS for i in (1, 3, 5)]
    palette.putpalette([*figures, *adaptive[: 3 * _COLOURS]])
    found = []
    for top in range(0, whole.height, TALLEST):
        part = whole.crop((0, top, whole.width, min(top + TALLEST, whole.height)))
        out = io.BytesIO()
        part.quantize(palette=palette, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
        found.append(out.getvalue())
    return found


def store(png: bytes, out: Path, name: str) -> list[str]:
    """Write a page's picture as ``NAME-1.png`` and so on; returns which parts are too large for a repository."""
    wrong = []
    for number, picture in enumerate(pictures(png), start=1):
        file = out / f"{name}-{number}.png"
        file.write_bytes(picture)
        click.echo(f"{file}: {len(picture):,} bytes")
        if len(picture) > LARGEST:
            wrong.append(f"{file.name} has {len(picture):,} bytes, more than {LARGEST:,}")
    return wrong


def photograph(show: Callable[[Browser, int], list[str]], widths: Sequence[int], out: Path, name: str) -> list[str]:
    """Take the pictures of a page; returns what is wrong with it or with them.

    Args:
        show: opens the page at a width; returns what is wrong with it.
        name: the pictures are called ``NAME-WIDTH-1.png`` and so on.
    """
    wrong: list[str] = []
    with Browser() as browser:
        for width in widths:
            wrong += [f"{width} px: {fault}" for fault in show(browser, width)]
            wrong += store(browser.screenshot(), out, f"{name}-{width}")
    return wrong


def leave(wrong: Sequence[str]) -> NoReturn:
    """Say what is wrong, and exit with 1 where anything is."""
    for fault in wrong:
        click.echo(fault, err=True)
    sys.exit(1 if wrong else 0)


@click.command()
@click.option("--out", default="docs/screenshots", show_default=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--page", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Look at this page [default: the report of a simulated run].")  # fmt: skip
@click.option("--width", "widths", multiple=True, type=click.IntRange(min=200), default=WIDTHS, show_default=True)
def main(out: Path, page: Path | None, widths: tuple[int, ...]) -> None:
    """Make a report of a simulated run, look at it in headless Chromium, and take pictures at each width."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            shown = page or page_of(demo_run(Path(folder) / "run"))
            wrong = photograph(lambda browser, width: look(browser, shown, width), widths, out, "report")
    except BrowserError as error:
        raise click.ClickException(str(error)) from None
    leave(wrong)


if __name__ == "__main__":
    main()
