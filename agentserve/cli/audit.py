"""``agentserve audit``: which fast paths of a running server were configured, could run, and ran."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import httpx
import orjson
from rich.console import Console

from agentserve.audit import Metrics, audit_rows
from agentserve.audit.show import audit_table
from agentserve.launch.facts import (
    CheckpointError,
    CheckpointFacts,
    known_config,
    read_draft,
    read_facts,
    resolve_model,
)
from agentserve.launch.plan import PlanError, make_plan
from agentserve.launch.recipe import RecipeError, find_recipe, load_recipe, parse_set
from agentserve.runtime.server_facts import Device
from agentserve.shapes.model import ShapeError
from offload.state import StateError


class AuditError(click.ClickException):
    """What cannot be audited. The message says what to do."""


@click.command("audit")
@click.argument("url")
@click.option("--recipe", "recipe_name", help="Recipe of a server that agentserve did not launch.")
@click.option("--set", "sets", multiple=True, metavar="FIELD=VALUE", help="Field of that recipe that was set.")
@click.option(
    "--since",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Text of URL/metrics saved earlier: count only what came after.",
)
@click.option("--api-key", envvar="AGENTSERVE_API_KEY", help="Bearer token (AGENTSERVE_API_KEY).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    url: str, recipe_name: str | None, sets: tuple[str, ...], since: Path | None, api_key: str | None, as_json: bool
) -> None:
    """Audit the fast paths of the SGLang server at URL: configured, eligible, executed.

    A path is credited only where a counter of the server says that it ran.
    """
    info, text = _ask(url, api_key)
    try:
        metrics = _metrics(text, f"{url}/metrics")
        if since is not None:
            metrics = metrics.since(_metrics(since.read_text(encoding="utf-8"), str(since)))
        environment, device, model = _launched(recipe_name, sets)
        config = known_config(model or str(info.get("model_path", "")))
        rows = audit_rows(info, metrics, config=config, environment=environment, device=device)
    except CheckpointError as error:
        raise AuditError(f"{error}; {error.fix}") from None
    except (RecipeError, PlanError, ShapeError, StateError) as error:
        raise AuditError(str(error)) from None
    if as_json:
        click.echo(orjson.dumps([row.as_dict() for row in rows], option=orjson.OPT_INDENT_2).decode())
    else:
        Console(highlight=False).print(audit_table(rows))


def _ask(url: str, api_key: str | None) -> tuple[dict[str, Any], str]:
    """``/server_info`` and ``/metrics`` of the server."""
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=30, trust_env=False, follow_redirects=True) as http:
            info = http.get("/server_info").raise_for_status().json()
            metrics = http.get("/metrics")
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise AuditError(
            f"{base}/server_info answers {status}: "
            + ("pass --api-key" if status in (401, 403) else "is this the address of an SGLang server?")
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise AuditError(f"{base}: no SGLang server answers /server_info ({error}); is it running there?") from None
    if not isinstance(info, dict):
        raise AuditError(f"{base}/server_info: a JSON object was expected; is this an SGLang server?")
    if metrics.status_code != 200:
        raise AuditError(
            f"{base}/metrics answers {metrics.status_code}: without counters nothing is proved; start the server with "
            f"--enable-metrics (recipe field metrics: true)"
        )
    return info, metrics.text


def _metrics(text: str, source: str) -> Metrics:
    try:
        return Metrics.from_text(text)
    except ValueError as error:
        why = f" ({error})" if str(error) else ""
        raise AuditError(f"{source}: not in the Prometheus text format{why}") from None


def _launched(name: str | None, sets: tuple[str, ...]) -> tuple[Mapping[str, str] | None, Device | None, str | None]:
    """Environment, device and model that a recipe's launch gives its server; None where there is no recipe."""
    if name is None:
        if sets:
            raise AuditError("--set changes a recipe; pass --recipe too")
        return None, None, None
    recipe = load_recipe(find_recipe(name), [parse_set(text) for text in sets])
    try:
        facts: CheckpointFacts | None = read_facts(resolve_model(recipe.model))
    except CheckpointError:
        facts = None
    draft = recipe.eagle3.draft
    plan = make_plan(
        recipe,
        facts,
        model=recipe.model,
        cwd=Path.cwd(),
        draft=read_draft(draft) if draft is not None else None,
    )
    return plan.env, recipe.device, recipe.model
