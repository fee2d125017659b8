"""What the server says of its model and of itself: tokens, health, placement, the document."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.engine.ipc_messages import PromptCacheStats
from crossover.serving.errors import Cause
from crossover.serving.hardware.machine_facts import resident_bytes
from crossover.serving.http import status_routes
from crossover.serving.http.routes import ROUTES, document
from crossover.serving.supervisor.engine_supervisor import EngineEvent
from tests.serving.fakes import FakeSupervisor, app_on, ask, served


def test_models_lists_the_one_that_is_served(port: int) -> None:
    listed = ask(port, "GET", "/v1/models").json
    assert listed["object"] == "list" and len(listed["data"]) == 1
    card = listed["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("m", "model", 256)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/tokenize", "prompt"),
        ("/detokenize", "tokens"),
    ],
)
def test_another_model_is_a_404(port: int, path: str, key: str) -> None:
    values = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "tokens": [1]}
    answer = ask(port, "POST", path, {"model": "gpt-4", key: values[key]})
    assert answer.status == 404
    assert (answer.error["code"], answer.error["param"]) == ("model_not_found", "model")


def test_tokenize_and_detokenize_are_each_others_inverse(port: int) -> None:
    found = ask(port, "POST", "/tokenize", {"prompt": "hé"}).json
    assert found == {"tokens": [*"hé".encode()], "count": 3, "max_model_len": 256}
    assert ask(port, "POST", "/detokenize", {"tokens": found["tokens"]}).json == {"prompt": "hé"}


def test_many_tokens_are_tokenized_as_few_are(port: int) -> None:
    for size in (1, 4096, 4097, 10_000):
        found = ask(port, "POST", "/tokenize", {"prompt": "a" * size}).json
        assert found == {"tokens": [97] * size, "count": size, "max_model_len": 256}


def test_health_and_ready(port: int, supervisor: FakeSupervisor) -> None:
    assert ask(port, "GET", "/health").json == {"status": "ok"}
    ready = ask(port, "GET", "/ready")
    assert ready.status == 200
    assert (ready.json["state"], ready.json["backend"]) == ("ready", "fake/cpu")
    supervisor.state = "restarting"
    supervisor.reason = "engine_died: killed"
    answer = ask(port, "GET", "/ready")
    assert (answer.status, answer.error["code"]) == (503, "restarting")
    assert "engine_died: killed" in answer.error["message"]
    assert answer.headers["retry-after"] == "3"
    assert ask(port, "GET", "/health").status == 200


def test_the_only_model_unloaded_by_an_administrator_is_not_ready(
    supervisor: FakeSupervisor,
) -> None:
    supervisor.state = "unloaded"
    app = app_on(supervisor)
    with served(app) as port:
        assert ask(port, "GET", "/ready").status == 200  # a request loads it
        app.registry.first.on_demand = False
        answer = ask(port, "GET", "/ready")
    assert (answer.status, answer.json["error"]["code"]) == (503, "unloaded")


def test_placement_shows_what_runs_where(supervisor: FakeSupervisor) -> None:
    supervisor.events = [EngineEvent(0.0, "fell_back", "fake/cpu", "text", Cause.load_oom)]
    placed = {"reasons": ["no GPU"]}
    with served(app_on(supervisor, placement=placed)) as port:
        answer = ask(port, "GET", "/v1/placement")
    found = answer.json
    assert found["explanation"] == placed
    assert (found["engine"]["backend"], found["engine"]["device"]) == ("fake", "cpu")
    assert found["memory"] == {
        "predicted": None,
        "rss_bytes": 10_000,
        "peak_rss_bytes": 20_000,
        "share_on_nodes": None,
    }
    assert (found["events"][0]["kind"], found["events"][0]["cause"]) == ("fell_back", "load_oom")
    assert "model_path" not in found["engine"] and "tokenizer_path" not in found["engine"]


def test_the_smallest_share_on_a_node_is_reported_also_if_it_is_none(
    supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {(0,): 0.0, (1,): 0.98, (): None}  # by the engine's nodes
    supervisor.engines = [
        SimpleNamespace(
            pid=1,
            alive=True,
            name="fake/cpu",
            ready=None,
            in_flight=0,
            config=EngineConfig("fake", "", "m", memory_nodes=nodes),
        )
        for nodes in shares
    ]
    monkeypatch.setattr(status_routes, "memory_share_on", lambda nodes, pid: shares[nodes])
    with served(app_on(supervisor)) as port:
        found = ask(port, "GET", "/v1/placement").json
    assert found["memory"]["share_on_nodes"] == 0.0
    assert [one["share_on_nodes"] for one in found["engine_processes"]] == [0.0, 0.98, None]


def test_memory_is_that_of_now_not_of_the_load(supervisor: FakeSupervisor) -> None:
    supervisor.engine_pid = os.getpid()
    with served(app_on(supervisor)) as port:
        memory = ask(port, "GET", "/v1/placement").json["memory"]
    own = resident_bytes()
    assert own is not None and memory["peak_rss_bytes"] >= memory["rss_bytes"] > 1_000_000
    assert memory["rss_bytes"] == pytest.approx(own, rel=0.2)


@pytest.mark.parametrize(
    ("is_enabled", "facts", "words"),
    [
        (True, {}, "any common prefix"),
        (
            True,
            {"settings": SchedulerSettings(stored_tokens=500)},
            "any common prefix, also of 64 MiB of earlier sequences",
        ),
        (False, {}, "nothing: prefix_reuse is off"),
        (
            True,
            {"rewinds": False, "has_checkpoints": True, "why_not_rewinds": "it is recurrent"},
            "from checkpoints, .* end of each prompt .* two prompts diverge, since it is recurrent",
        ),
        (
            True,
            {
                "rewinds": False,
                "has_checkpoints": True,
                "why_not_rewinds": "it is recurrent",
                "settings": SchedulerSettings(stored_tokens=500),
            },
            "from checkpoints, .* diverge, also of 64 MiB of earlier sequences, since it is recurr",
        ),
        (
            True,
            {"rewinds": False, "why_not_rewinds": "it is recurrent"},
            "nothing: it is recurrent",
        ),
    ],
)
def test_placement_explains_what_of_earlier_prompts_is_reused(
    supervisor: FakeSupervisor, is_enabled: bool, facts: dict[str, Any], words: str
) -> None:
    assert supervisor.ready is not None
    supervisor.ready.info = msgspec.structs.replace(supervisor.ready.info, **facts)
    supervisor.config = msgspec.structs.replace(
        supervisor.config, prefix_reuse=is_enabled, prompt_cache_bytes=64 << 20
    )
    with served(app_on(supervisor)) as port:
        assert re.match(words, ask(port, "GET", "/v1/placement").json["prefix_reuse"])


def test_placement_says_how_much_of_the_prompt_cache_is_used(supervisor: FakeSupervisor) -> None:
    assert supervisor.ready is not None and supervisor.requests.stats is not None
    with served(app_on(supervisor)) as port:
        assert ask(port, "GET", "/v1/placement").json["prompt_cache"] is None
        settings = msgspec.structs.replace(supervisor.ready.info.settings, stored_tokens=500)
        supervisor.ready.info = msgspec.structs.replace(supervisor.ready.info, settings=settings)
        supervisor.config = msgspec.structs.replace(supervisor.config, prompt_cache_bytes=64 << 20)
        supervisor.requests.stats.prompt_cache = PromptCacheStats(
            max_bytes=64 << 20, used_bytes=5 << 20, sequences=3
        )
        found = ask(port, "GET", "/v1/placement").json["prompt_cache"]
    assert found == {"bytes": 64 << 20, "used_bytes": 5 << 20, "sequences": 3}


def test_placement_before_an_engine_is_there(supervisor: FakeSupervisor) -> None:
    supervisor.state, supervisor.ready = "loading", None
    with served(app_on(supervisor)) as port:
        found = ask(port, "GET", "/v1/placement").json
        assert ask(port, "POST", "/tokenize", {"prompt": "a"}).json["count"] == 1
        assert ask(port, "GET", "/v1/models").status == 200
        assert ask(port, "GET", "/metrics").status == 200
    assert found["state"] == "loading" and found["memory"] is None and found["explanation"] is None


def test_the_document_describes_every_route_and_resolves(port: int) -> None:
    answer = ask(port, "GET", "/openapi.json")
    found = answer.json
    assert found == msgspec.json.decode(
        msgspec.json.encode(document(ROUTES, app_on(FakeSupervisor()).registry))
    )
    assert found["openapi"] == "3.1.0"
    for path, operations in found["paths"].items():
        for method in ("get", "post"):
            body = {} if method == "post" else None
            status = ask(port, method.upper(), path.replace("{model}", "m"), body).status
            assert (status != 405) == (method in operations), (method, path)
    references = set(re.findall(rb'"\$ref":"#/components/schemas/(\w+)"', answer.body))
    assert {name.decode() for name in references} <= set(found["components"]["schemas"])
    assert found["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False
