"""The watch page of a live server in a real browser: ``python -m eval.bench.watch_screenshots`` checks it and takes the
pictures of ``docs/screenshots``.

The server is the tiny M3 with a policy, a gate and too little memory, so that the page has something to show; the
traffic is a replay of a generated trace, nobody's data. Looked at is while requests run. Wrong is a message in the
console, a request to anywhere but the server, a page wider than the screen, a word of trouble on the page, or a page
that shows no hit, no loss or no session.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from agentserve.launch.host import free_port
from agentserve.launch.tiny import tiny_server
from agentserve.watch.settings import PAGE
from eval.bench.browser import Browser, BrowserError
from eval.bench.report_screenshots import WIDTHS, faults, leave, photograph

TRACE = "generated:preset=tiny,sessions=12,seed=4"
CAPACITY = 4_096  # tokens: about three of its sessions
CLIENTS = 6
_SHOWN_S = 60.0  # a page that shows nothing by then never will
_FILLED = """
const text = document.body.innerText, count = id => document.getElementById(id).rows.length;
return Number(document.body.dataset.looks || 0) >= 2 && document.querySelectorAll('#series polyline').length > 0
  && count('sessions') > 1 && count('victims') > 1 && /lost|not in the cache/.test(text);
"""


def traffic(url: str, out: Path) -> subprocess.Popen[bytes]:
    """Start a replay of the trace, in a process of its own: it handles signals."""
    arguments = ["--url", url, "--out", str(out), "--concurrency", str(CLIENTS), "--think", "capped:0.5"]
    code = "from agentserve.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "replay", TRACE, *arguments, "--max-output", "16", "--quiet"],
        stdout=subprocess.DEVNULL,
    )


def show(browser: Browser, url: str, width: int) -> list[str]:
    """Show the page at a width, wait until it is filled; returns what is wrong with it."""
    browser.resize(width, 900)
    browser.open(url + PAGE)
    deadline = time.monotonic() + _SHOWN_S
    while not browser.run(_FILLED):
        if time.monotonic() > deadline:
            return [f"shows too little after {_SHOWN_S:.0f} s: {browser.run('return document.body.innerText')[:300]!r}"]
        time.sleep(0.5)
    trouble = browser.run("return document.getElementById('trouble').textContent")
    return faults(browser, server=url) + ([f"it says: {trouble}"] if trouble else [])


@click.command()
@click.option("--out", default="docs/screenshots", show_default=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--width", "widths", multiple=True, type=click.IntRange(min=200), default=WIDTHS, show_default=True)
@click.option("--run", "run", type=click.Path(path_type=Path), help="Keep the replay's run directory here; new.")
@click.option(
    "--warm", default=30.0, show_default=True, type=click.FloatRange(min=0), help="Seconds of traffic before."
)
def main(out: Path, widths: tuple[int, ...], run: Path | None, warm: float) -> None:
    """Serve the tiny M3, send it traffic, look at its watch page in headless Chromium, and take pictures."""
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "watch": True,
        "kv.capacity_tokens": CAPACITY,
        "radix.policy": "gittins",
        "radix.admission": "gate:1.3",
        "kv_events": f"tcp://*:{free_port()}",
    }
    try:
        with tempfile.TemporaryDirectory() as folder, tiny_server(settings) as server:
            sent = traffic(server.plan.url, run or Path(folder) / "run")
            try:
                time.sleep(warm)
                ended = sent.poll() is not None
                url = server.plan.url
                wrong = photograph(lambda browser, width: show(browser, url, width), widths, out, "watch")
                code = sent.wait()
            finally:
                sent.terminate()
    except BrowserError as error:
        raise click.ClickException(str(error)) from None
    if ended:
        wrong.append(f"the traffic was over before the page was looked at: give --warm less than {warm:g}")
    if code:
        wrong.append(f"the replay ended with {code}")
    leave(wrong)


if __name__ == "__main__":
    main()
