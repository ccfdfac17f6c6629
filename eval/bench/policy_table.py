"""Eviction and admission on a real trace: one command writes the tables of ``docs/design/policies.md``.

    python -m eval.bench.policy_table TRACES --sessions 28 --out docs/results

Sessions are dealt into two halves by a rule that looks at nothing but their names (``in_report_half``). Constants of
policies may be chosen on the half ``tune`` alone; the tables show the half ``report``. Four parts:

``policies``: every policy, service model ``parallel``: a miss takes prefill time, as on a server.
``known_order``: service model ``fixed``: requests come in the same order whatever hits, so Belady's rule is exact.
``shares``: part of what Belady's rule wins over LRU that gittins wins too; both halves and the whole trace.
``admission``: prefill as one queue: hit rate, throughput and waiting times of a gate and of parking.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eval.bench.policy_waits import run_waits
from eval.bench.simulator_grid import BELADY, Axes, Result, closed_share, mean_over_orders, parse_capacity, run_grid
from eval.bench.simulator_workload import workload_from_sessions
from radix_cache.simulator import Service, Setting, Workload, simulate
from radix_cache.simulator.run import unbounded
from traces.model import Session, TraceError
from traces.readers import open_trace

HALVES = ("report", "tune", "all")
POLICIES = ("lru", "fifo", "lfu", "slru", "tlru", "ttl", "gittins:inf", "gittins", BELADY)
# Where a miss takes no time, the time that it takes is no reason to keep anything.
OWN = {Service.PARALLEL: "gittins", Service.FIXED: "gittins:inf"}
CONTROLS = (  # eviction, admission
    ("lru", "none"),
    ("gittins", "none"),
    ("lru", "gate:0.9"),
    ("gittins", "gate:0.9"),
    ("gittins", "parking:1.1"),
)

Say = Callable[[str], None]
Line = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to run. Capacities are written as in ``eval.bench.simulator_grid``."""

    sessions: int = 28
    think_cap: float = 60.0
    orders: int = 3
    capacities: tuple[str, ...] = ("0.5x", "0.75x", "1.0x", "1.25x", "1.5x")
    share_capacities: tuple[str, ...] = ("1.0x", "1.25x")
    admission_capacities: tuple[str, ...] = ("0.5x", "1.0x")
    policies: tuple[str, ...] = POLICIES

    @property
    def runs(self) -> int:
        """Runs of the simulator, those of unbounded caches included."""
        shares = 2 * 2 * (1 + 3 * len(self.share_capacities))  # those of the report half are in the tables already
        tables = 2 + (len(self.policies) + 4) * len(self.capacities)
        return self.orders * (tables + shares + 1 + len(CONTROLS) * len(self.admission_capacities))


def in_report_half(session_id: str) -> bool:
    """Whether results are reported on a session: the SHA-256 of its name begins with an odd byte."""
    return hashlib.sha256(session_id.encode()).digest()[0] % 2 == 1


def halves(sessions: Iterable[Session]) -> dict[str, Workload]:
    """The workloads ``report``, ``tune`` and ``all``.

    Raises:
        ValueError: a half without sessions.
    """
    every = list(sessions)
    parts = {
        "report": [s for s in every if in_report_half(s.id)],
        "tune": [s for s in every if not in_report_half(s.id)],
        "all": every,
    }
    for name, part in parts.items():
        if not part:
            raise ValueError(f"no session of the trace falls into the half {name!r}: it needs more than {len(every)}")
    return {name: workload_from_sessions(part) for name, part in parts.items()}


def policy_tables(workloads: dict[str, Workload], plan: Plan, say: Say) -> Line:
    """The parts ``policies``, ``known_order`` and ``shares``; see the module's docstring."""
    report: Line = {"shares": []}
    for part, service in (("policies", Service.PARALLEL), ("known_order", Service.FIXED)):
        base = Setting(sessions=plan.sessions, think_cap=plan.think_cap, service=service)
        for half in HALVES:
            whole = half == "report"
            few = ("lru", OWN[service], BELADY)
            policies = plan.policies if service == Service.PARALLEL else ("lru", "ttl", OWN[service], BELADY)
            capacities = plan.capacities if whole else plan.share_capacities
            axes = Axes(policies if whole else few, capacities, ("none",), plan.orders)
            result = run_grid(workloads[half], axes, base, progress=partial(_say_where, say, f"{part}, {half}"))
            if whole:
                report[part] = _policy_part(result)
            for capacity in plan.share_capacities:
                report["shares"].append(_share(result, service, half, capacity))
    return report


def _say_where(say: Say, where: str, name: str) -> None:
    if name:  # else the end of a grid
        say(f"{where}: {name}")


def _policy_part(result: Result) -> Line:
    rows = mean_over_orders(result.rows)
    return {"live_contexts": result.live_contexts, "theoretical": result.theoretical, "rows": rows}


def _share(result: Result, service: Service, half: str, capacity: str) -> Line:
    own = OWN[service]
    by_order = [
        closed_share([r for r in result.rows if r.order == order], own, capacity)
        for order in dict.fromkeys(r.order for r in result.rows)
    ]
    known = [share for share in by_order if share is not None]
    rates = {
        policy: fmean(r.rate for r in result.rows if (r.policy, r.capacity) == (policy, capacity))
        for policy in ("lru", own, BELADY)
    }
    return {
        "service": service.name.lower(),
        "half": half,
        "capacity": capacity,
        "policy": own,
        "lru": rates["lru"],
        "own": rates[own],
        "belady": rates[BELADY],
        "share": closed_share(result.rows, own, capacity),
        "share_min": min(known, default=None),
        "share_max": max(known, default=None),
    }


def admission_table(workload: Workload, plan: Plan, say: Say) -> Line:
    """The part ``admission``: means over the orders. Waits in seconds, rates 0..1."""
    base = Setting(sessions=plan.sessions, think_cap=plan.think_cap, service=Service.QUEUED)
    references = []
    for order in range(plan.orders):
        say(f"admission: unbounded cache, order {order}")
        references.append(simulate(workload, unbounded(replace(base, order_seed=order))))
    live = fmean(reference.mean_context for reference in references)
    rows = []
    for capacity in plan.admission_capacities:
        for policy, admission in CONTROLS:
            runs = []
            for order in range(plan.orders):
                say(f"admission: {policy}, {admission}, {capacity}, order {order}")
                tokens = parse_capacity(capacity, live)
                setting = replace(base, policy=policy, admission=admission, capacity=tokens, order_seed=order)
                outcome = simulate(workload, setting)
                waits = run_waits(workload, outcome)
                line = {"rate": outcome.rate, "requests_per_s": outcome.throughput, "parkings": outcome.parkings}
                line |= {"rejected": outcome.rejected, "requests": outcome.requests}
                line |= {"sessions_waiting": waits.sessions_waiting, "requests_waiting": waits.requests_waiting}
                line |= {f"turn_{name}": value for name, value in asdict(waits.turns).items()}
                runs.append(line | {f"start_{name}": value for name, value in asdict(waits.starts).items()})
            means = {name: fmean(run[name] for run in runs) for name in runs[0]}
            rows.append({"policy": policy, "admission": admission, "capacity": capacity, **means})
    return {
        "live_contexts": live,
        "theoretical": fmean(r.rate for r in references),
        "unbounded_requests_per_s": fmean(r.throughput for r in references),
        "rows": rows,
    }


def as_markdown(report: Line) -> str:
    """The report as tables; rates and shares in percent."""
    lines = [f"Printed by `{report['command']}`.", ""]
    for part, title in (
        ("policies", "A miss takes prefill time (`parallel`)"),
        ("known_order", "Requests in the same order whatever hits (`fixed`): Belady's rule is exact"),
    ):
        content = report[part]
        capacities = list(dict.fromkeys(row["capacity"] for row in content["rows"]))
        lines += [f"## {title}", ""]
        lines += [
            f"Hit rate in %, theoretical {100 * content['theoretical']:.2f}; "
            f"1.0x is {content['live_contexts']:,.0f} tokens, the mean of the live contexts.",
            "",
        ]
        lines += _table(["policy", *capacities], _policy_lines(content["rows"], capacities))
    lines += ["## Share of what Belady's rule wins over LRU", ""]
    columns = ["service", "sessions", "capacity", "policy", "lru", "own", "belady", "share", "range over orders"]
    lines += _table(columns, [_share_line(row) for row in report["shares"]])
    content = report["admission"]
    lines += ["## Admission, prefill as one queue (`queued`)", ""]
    lines += [
        f"Theoretical {100 * content['theoretical']:.2f} % and {content['unbounded_requests_per_s']:.3f} requests/s "
        f"with an unbounded cache; 1.0x is {content['live_contexts']:,.0f} tokens. Waits in s, from the wish to the "
        "first token; "
        "`start`: first requests of sessions, from when a client was free.",
        "",
    ]
    columns = ["capacity", "eviction", "admission", "hit %", "requests/s", "wait mean", "p50", "p90", "p99"]
    columns += ["start mean", "p50", "p90", "p99", "sessions waiting", "requests waiting", "parkings", "rejected"]
    lines += _table(columns, [_admission_line(row) for row in content["rows"]])
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *rows)] + [""]


def _policy_lines(rows: Sequence[Line], capacities: Sequence[str]) -> list[list[str]]:
    rates = {(row["policy"], row["capacity"]): f"{100 * row['rate']:.2f}" for row in rows}
    return [[policy, *(rates[policy, c] for c in capacities)] for policy in dict.fromkeys(r["policy"] for r in rows)]


def _share_line(row: Line) -> list[str]:
    def percent(value: float | None) -> str:
        return "none to close" if value is None else f"{100 * value:.1f}"

    rates = [f"{100 * row[name]:.2f}" for name in ("lru", "own", "belady")]
    span = f"{percent(row['share_min'])} to {percent(row['share_max'])}"
    return [row["service"], row["half"], row["capacity"], row["policy"], *rates, percent(row["share"]), span]


def _admission_line(row: Line) -> list[str]:
    waits = [f"{row[f'{kind}_{name}']:.1f}" for kind in ("turn", "start") for name in ("mean", "p50", "p90", "p99")]
    rates = [f"{100 * row['rate']:.2f}", f"{row['requests_per_s']:.3f}"]
    ends = [f"{row['sessions_waiting']:.1f}", f"{row['requests_waiting']:.1f}"]
    counts = [f"{row['parkings']:.0f}", f"{row['rejected']:.0f}"]
    return [row["capacity"], row["policy"], row["admission"], *rates, *waits, *ends, *counts]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path")
@click.option("--sessions", type=click.IntRange(min=1), default=Plan.sessions, show_default=True, help="At once.")
@click.option("--think-cap", type=click.FloatRange(min=0), default=Plan.think_cap, show_default=True, help="Seconds.")
@click.option("--orders", type=click.IntRange(min=1), default=Plan.orders, show_default=True, help="Of the sessions.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write simulator-tables.{json,md} there.")
def command(path: str, sessions: int, think_cap: float, orders: int, out: Path | None) -> None:
    """Print the tables of eviction and admission policies for the trace PATH."""
    plan = Plan(sessions=sessions, think_cap=think_cap, orders=orders)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=plan.runs)

        def say(name: str) -> None:
            progress.update(task, description=name, advance=1)

        try:
            workloads = halves(open_trace(path))
            report = policy_tables(workloads, plan, say)
            report["admission"] = admission_table(workloads["report"], plan, say)
        except (TraceError, ValueError, OSError) as error:
            raise click.ClickException(str(error)) from error
    options = f"--sessions {sessions} --think-cap {think_cap:g} --orders {orders}"
    report = {"command": f"python -m eval.bench.policy_table {Path(path).name} {options}", **report}
    text = as_markdown(report)
    click.echo(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "simulator-tables.json").write_text(json.dumps(report, indent=1) + "\n")
        (out / "simulator-tables.md").write_text("# Eviction and admission, simulated\n\n" + text)


if __name__ == "__main__":
    command()
