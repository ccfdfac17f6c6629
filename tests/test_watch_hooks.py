"""What the watch page relies on in the installed SGLang, and that nothing is touched unasked."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentserve.launch.plan import make_plan
from agentserve.launch.recipe import Recipe
from agentserve.runtime import torchvision_operators
from agentserve.watch.settings import WATCH_VARIABLE, asked_for

torchvision_operators.declare()

from agentserve.runtime import sglang_plugin  # noqa: E402
from tests.registry import Registered  # noqa: E402
from tests.test_sglang_hooks import parameters, target_of  # noqa: E402

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (_SCHEDULER, ["self", "running_batch"]),
        ("sglang.srt.utils.common.add_prometheus_middleware", ["app"]),
        (
            "sglang.srt.utils.auth.decide_request_auth",
            ["method", "path", "authorization_header", "api_key", "admin_api_key", "auth_level"],
        ),
        ("sglang.srt.utils.auth.auth_level", ["level"]),
        ("sglang.srt.runtime_context.get_observability", []),
        ("sglang.srt.runtime_context.get_parallel", []),
        ("sglang.srt.runtime_context.get_serving", []),
        ("sglang.srt.entrypoints.http_server.get_global_state", []),
    ],
)
def test_what_we_hook_or_call_is_still_there(target: str, names: list[str]) -> None:
    assert [name for name, _ in parameters(target_of(target))] == names


def test_every_watch_hook_resolves_and_says_why() -> None:
    for hook in sglang_plugin.watch_hooks():
        assert callable(target_of(hook.target))
        assert hook.kind == "after"
        assert len(hook.reason) > 20


def test_upstream_still_does_what_we_rely_on() -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.schedule_batch import Req

    # The middleware's function is called with the application, in each process that serves HTTP.
    assert "add_prometheus_middleware(app)" in inspect.getsource(http_server.lifespan)
    assert "batch_to_run=" in inspect.getsource(target_of(_SCHEDULER))
    made = inspect.getsource(Req.__init__)
    for attribute in ("cached_tokens", "origin_input_ids", "output_ids", "extra_key", "cache_salt", "rid"):
        assert f"self.{attribute}" in made, attribute
    assert callable(Req.finished)
    # Why there is a page of ours: SGLang has none, and no way to add one.
    assert "/agentserve" not in inspect.getsource(http_server)


def test_nothing_is_registered_unless_asked_for(registered_by: dict[str, Registered]) -> None:
    middleware = "sglang.srt.utils.common.add_prometheus_middleware"
    assert not {_SCHEDULER, middleware} & set(registered_by["nothing"].hooks)
    assert {_SCHEDULER, middleware} <= set(registered_by["watch"].hooks)


def test_the_recipe_asks_for_it() -> None:
    fields = {"model": "m", "device": "cpu", "kv": {"capacity_tokens": 4096}, "page_size": 128}
    watched = make_plan(Recipe.model_validate(fields | {"watch": True}), None, model="m", cwd=Path("/"))
    assert asked_for(watched.env)
    plain = make_plan(Recipe.model_validate(fields), None, model="m", cwd=Path("/"))
    assert not asked_for(plain.env)
    assert WATCH_VARIABLE in plain.unset
    with pytest.raises(ValidationError, match="set metrics to true, or drop watch"):
        Recipe.model_validate(fields | {"watch": True, "metrics": False})
