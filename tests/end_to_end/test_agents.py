"""Clients with which people build agents, unchanged: five turns with tools and streams.

Each runs against a model that calls tools right (tests/scripted_backend.py, behind the real engine
and HTTP), and against SmolLM2-135M-Instruct, whose chat template has no tools. None of them is a
dependency: `make clients` installs them into environments of their own and runs these tests;
without it they are skipped. docs/clients.md has what each of them needs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crossover.models.text.tokenizer import write_shipped
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from tests.end_to_end.test_clients import program, ran
from tests.serving.cli.test_serve import server
from tests.serving.http.test_app_engine import serving

VOCABULARY = 2048
# Hermes' form, cut down to what the model reads.
TEMPLATE = (
    '{% if tools %}{# <tool_call>{"name": <n>, "arguments": <a>}</tool_call> #}'
    "[system]\n{{ tools | tojson }}[end]\n{% endif %}"
    '{% for m in messages %}[{{ m.role }}]\n{{ m.content or "" }}'
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "[end]\n{% endfor %}[assistant]\n"
)
# Client -> its environment. The last has no tools of its own.
CLIENTS = {
    **dict.fromkeys(("langchain", "pydantic_ai", "openai_agents", "smolagents"), "agents-1"),
    **dict.fromkeys(("instructor", "llm"), "agents-1"),
    "aider": "aider-1",
}
CITIES = ["Paris", "Oslo", "Lima", "Cairo", "Quito"]
DEGREES = [11, 3, 18, 27, 14]


def agent_config(folder: Path) -> EngineConfig:
    """The engine of the model that calls tools right."""
    write_shipped(folder, VOCABULARY, 512)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return EngineConfig(
        "tool_calling",
        "",
        "m",
        tokenizer_path=str(folder),
        settings=SchedulerSettings(slots=4, context_tokens=8192),
        options={"vocabulary": VOCABULARY, "texts": [""], "step_seconds": 0.002},
    )


@pytest.fixture(scope="module")
def wanted() -> None:
    """Skips the tests before a server starts, where nobody asked for them."""
    if not os.environ.get("CROSSOVER_CLIENTS"):
        pytest.skip("five turns of each client take their time; `make clients` runs them")


@pytest.fixture(scope="module")
def agent(wanted: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(agent_config(tmp_path_factory.mktemp("agent"))) as (port, _):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def real(wanted: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("real")
    options = ("--context", "4096", "--slots", "2")
    with server(folder, *options, model="smollm2-135m-instruct") as one:
        yield one.wait_ready()["url"]


def session(client: str, url: str, model: str, *words: str) -> dict[str, Any]:
    """What a client did in its five turns."""
    python = program(CLIENTS[client], "python")
    output = ran(python, "clients/agent_sessions.py", client, url, model, *words)
    found: dict[str, Any] = json.loads(output.rpartition("\x1e")[2])
    assert len(found["answers"]) == len(found["pieces"]) == 5
    return found


@pytest.mark.parametrize("client", [name for name in CLIENTS if name != "aider"])
def test_a_client_calls_tools_in_five_turns_and_shows_their_results(
    agent: str, client: str
) -> None:
    found = session(client, agent, "m")
    assert found["calls"] == CITIES
    for answer, degrees in zip(found["answers"], DEGREES, strict=True):
        assert f"{degrees} degrees" in answer
    assert min(found["pieces"]) > 1, "answers are shown as they are written"


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_talks_to_a_real_model_for_five_turns(real: str, client: str) -> None:
    found = session(client, real, "smollm2-135m-instruct", "plain")
    assert all(found["answers"])
    assert min(found["pieces"]) > 1, "answers are shown as they are written"
