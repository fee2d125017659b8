"""Finds the servers of this machine that `crossover quick` can measure, on the usual ports.

    for server in find_local_servers():
        server.url, server.software, server.models

A server is found by its answer to /v1/models. Ports that do not answer, or answer something else,
are left out without an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from crossover.loadtests.errors import TargetUnusable
from crossover.loadtests.load_generator.endpoint_details import (
    ANSWER_SECONDS,
    Software,
    cards_of,
    read_object,
    read_route,
    software_of,
)
from crossover.loadtests.load_generator.http_connection import Pool, connect, fetch, get_bytes
from crossover.loadtests.load_generator.openai_endpoint import (
    MODELS,
    generating_models,
    names_of_models,
    pool_for,
)
from crossover.loadtests.load_generator.target import Target

SOFTWARE_NAMES: dict[Software, str] = {
    "crossover": "Crossover",
    "vllm": "vLLM",
    "llama-server": "llama-server",
    "ollama": "Ollama",
    "lm-studio": "LM Studio",
    "unknown": "an OpenAI-compatible server",
}
# The ports that these servers listen on by default.
USUAL_PORTS: Mapping[int, str] = {
    8000: "Crossover, vLLM",
    8080: "llama-server",
    11434: "Ollama",
    1234: "LM Studio",
}
LOOPBACK = "127.0.0.1"


class LocalServer(NamedTuple):
    """A server of this machine that answers /v1/models."""

    url: str
    software: Software
    # Those that can generate text, unless none can; models in memory first. (): it lists none.
    models: tuple[str, ...]

    @property
    def words(self) -> str:
        """`llama-server at http://127.0.0.1:8080`."""
        return f"{SOFTWARE_NAMES[self.software]} at {self.url}"


def find_local_servers(ports: Iterable[int] = tuple(USUAL_PORTS)) -> list[LocalServer]:
    """Return the servers of this machine that list models as OpenAI's API does, in the order of the
    ports."""
    servers = [look_at(Target(url=f"http://{LOOPBACK}:{port}")) for port in ports]
    return [server for server in servers if server is not None and server.models]


def ports_that_need_a_key(ports: Iterable[int] = tuple(USUAL_PORTS)) -> list[int]:
    """Return the ports of this machine that refuse to list models without an API key.

    No key is sent to them: whoever listens there could keep it.
    """
    refusing = []
    for port in ports:
        with contextlib.suppress(TargetUnusable), connect(f"http://{LOOPBACK}:{port}") as pool:
            status, _, _ = fetch(pool, get_bytes(pool, MODELS), ANSWER_SECONDS)
            if status in (401, 403):
                refusing.append(port)
    return refusing


def look_at(target: Target) -> LocalServer | None:
    """Return the server of a target; None: nothing there answers /v1/models.

    Raises TargetUnusable if an environment variable that the target names is not set.
    """
    with pool_for(target) as pool:
        model_list = read_route(pool, MODELS)
        if model_list is None:
            return None
        try:
            names = names_of_models(model_list)
        except ValueError:
            return None
        software = software_of(model_list)
        if software == "unknown" and "version" in read_object(pool, "/api/version"):
            software = "ollama"  # its older versions name no owner
        in_memory = _models_in_memory(pool, software)
        names = sorted(names, key=lambda name: name not in in_memory)
    return LocalServer(target.url, software, tuple(generating_models(names)))


def _models_in_memory(pool: Pool, software: Software) -> list[str]:
    """Return the models that are loaded, for servers that also list models on the disk; otherwise
    []."""
    if software == "ollama":
        with contextlib.suppress(ValueError):
            return names_of_models(read_object(pool, "/api/ps"))
    if software == "lm-studio":
        cards = cards_of(read_route(pool, "/api/v0/models"))
        return [str(card.get("id")) for card in cards if card.get("state") == "loaded"]
    return []
