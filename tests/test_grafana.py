"""The Grafana dashboard and the documented metrics, against a live server's own names and labels."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import httpx
import pytest

from tests.conftest import REPOSITORY
from tests.servers import TinyServer

DASHBOARD = json.loads((REPOSITORY / "docs" / "grafana" / "agentserve.json").read_text())
METRICS_PAGE = REPOSITORY / "docs" / "design" / "watch.md"
NAME = re.compile(r"\b(?:sglang:|agentserve_)[a-z0-9_]+")
# What a server registers only with the feature; made in a process of its own, as a scheduler does.
REGISTER = """
import json
from agentserve.runtime.offload_counters import OffloadCounters
from agentserve.runtime.policy_counters import PolicyCounters
from agentserve.runtime.speculation import SpeculationSettings
from agentserve.runtime.speculation_counters import SpeculationCounters
from agentserve.runtime.watch_counters import WatchCounters
PolicyCounters("p", enabled=True); OffloadCounters(0, enabled=True); WatchCounters()
SpeculationCounters(SpeculationSettings(), 3, enabled=True)
from prometheus_client import REGISTRY
found = {}
for metric in set(REGISTRY._collector_to_names):
    if getattr(metric, "_name", "").startswith("agentserve"):
        found[metric._name + ("_total" if metric._type == "counter" else "")] = list(metric._labelnames)
print(json.dumps(found))
"""


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def ours() -> dict[str, list[str]]:
    done = subprocess.run([sys.executable, "-c", REGISTER], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    # Index reuse registers its counters where a model is built; its names are checked by test_audit.py.
    source = (REPOSITORY / "agentserve" / "runtime" / "index_reuse_counters.py").read_text()
    for name in re.findall(r'"(agentserve_index_[a-z_]+)"', source):
        found.setdefault(f"{name}_total", [])
    return found


def live(server: TinyServer) -> dict[str, set[str]]:
    """Names and labels that a scrape shows after a hit."""
    from prometheus_client.parser import text_string_to_metric_families

    prompt = [(17 * i) % 300 + 3 for i in range(400)]
    for _ in range(2):
        server.generate(prompt, 4)
    # Times between tokens are there once an answer has come in pieces.
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 16, "ignore_eos": True}, "stream": True}
    assert httpx.post(server.url + "/generate", json=body, timeout=120).text.count("data: {") > 1
    text = httpx.get(server.url + "/metrics", follow_redirects=True, timeout=60).text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.server
def test_every_expression_names_what_a_live_server_has(tiny_server: TinyServer) -> None:
    known = live(tiny_server) | {name: set(labels) for name, labels in ours().items()}
    used = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(used) > 20
    assert sorted(used - set(known)) == []
    # SGLang's names are all from the scrape, and so are ours of the watch page.
    assert {name for name in used if name.startswith(("sglang:", "agentserve_prompt"))} <= set(live(tiny_server))
    for expression in expressions():
        (labels,) = {frozenset.union(*(frozenset(known[n]) for n in NAME.findall(expression)))}
        grouped = re.findall(r"by \(([a-z_, ]+)\)", expression)
        asked = {label.strip() for group in grouped for label in group.split(",")}
        asked |= set(re.findall(r"[{,]([a-z_]+)=", expression))
        assert asked <= labels | {"le"}, expression


def test_expressions_are_balanced_and_rates_are_of_counters() -> None:
    for expression in expressions():
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression
        for name in re.findall(r"rate\(([a-z_:]+)", expression):
            assert name.endswith(("_total", "_bucket")), expression
        assert "cache_hit_rate" not in expression  # every batch overwrites it


def test_the_file_is_one_that_grafana_imports() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]+)", json.dumps(DASHBOARD["panels"]))) <= variables

    def uids(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["uid"]} if value.get("type") == "prometheus" else set()
            return own.union(*(uids(v) for v in value.values()), set())
        return set().union(*(uids(v) for v in value)) if isinstance(value, list) else set()

    assert uids(DASHBOARD["panels"]) == {"${datasource}"}  # no data source of somebody's own


def test_every_metric_of_ours_is_documented() -> None:
    text = METRICS_PAGE.read_text()
    assert [name for name in sorted(ours()) if f"`{name}" not in text] == []
