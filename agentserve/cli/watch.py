"""``agentserve watch``: what a running server's cache does now, in the terminal."""

from __future__ import annotations

import time
from typing import Any

import click
import httpx
import orjson
from rich.console import Console
from rich.live import Live

from agentserve.watch.settings import PAGE
from agentserve.watch.snapshot import SCHEMA_VERSION
from agentserve.watch.terminal import render


@click.command("watch")
@click.argument("url")
@click.option("--once", is_flag=True, help="Print one look and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one look as JSON.")
@click.option("--every", default=2.0, show_default=True, type=click.FloatRange(min=0.2), help="Seconds between looks.")
@click.option("--sessions", default=15, show_default=True, type=click.IntRange(min=0), help="Sessions listed.")
@click.option("--api-key", envvar="AGENTSERVE_API_KEY", help="Bearer token (AGENTSERVE_API_KEY).")
def command(url: str, once: bool, as_json: bool, every: float, sessions: int, api_key: str | None) -> None:
    """Watch the server at URL: hit rate, causes, sessions, tiers. The same as a page: URL/agentserve/watch.

    The server must have been launched with --set watch=true.
    """
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1").removesuffix(PAGE)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=base, headers=headers, timeout=30, trust_env=False) as client:
        seen = look(client)
        if as_json:
            click.echo(orjson.dumps(seen, option=orjson.OPT_INDENT_2).decode())
            return
        console = Console(highlight=False)
        if once or not console.is_terminal:
            console.print(render(seen, sessions))
            return
        with Live(render(seen, sessions), console=console, screen=True) as live:
            try:
                while True:
                    time.sleep(every)
                    live.update(render(look(client), sessions))
            except KeyboardInterrupt:
                return


def look(client: httpx.Client) -> dict[str, Any]:
    """The server's snapshot. Raises ClickException saying what to do."""
    base = str(client.base_url).rstrip("/")
    try:
        answer = client.get(f"{PAGE}.json")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise click.ClickException(f"{base}: no server answers ({error}); is it running there?") from None
    if answer.status_code == 401:
        raise click.ClickException(f"{base} wants a key: pass --api-key")
    if answer.status_code == 404:
        raise click.ClickException(
            f"{base} has no watch page: launch it with agentserve launch RECIPE --set watch=true (and metrics on)"
        )
    if answer.status_code != 200:
        raise click.ClickException(f"{base}{PAGE}.json answers {answer.status_code}: {answer.text[:200]}")
    try:
        seen = answer.json()
    except ValueError:
        seen = None
    if not isinstance(seen, dict) or seen.get("schema_version") != SCHEMA_VERSION:
        raise click.ClickException(
            f"{base}{PAGE}.json is not what this version reads (schema {SCHEMA_VERSION}): use the server's agentserve"
        )
    return seen
