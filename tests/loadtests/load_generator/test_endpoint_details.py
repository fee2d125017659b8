"""What running servers say of themselves beside OpenAI's API, as bytes of each."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crossover.loadtests.load_generator.endpoint_details import ask_details, shape_by_name
from crossover.loadtests.load_generator.find_servers import (
    find_local_servers,
    look_at,
    ports_that_need_a_key,
)
from crossover.loadtests.load_generator.target import Target
from crossover.models.identity.identify_model import name_of
from crossover.models.identity.model_ladder import ladder_model
from crossover.models.weights.random_weights import write_gguf
from tests.loadtests.load_generator.scripted_endpoint import (
    Handler,
    ReceivedRequest,
    answered,
    scripted,
)
from tests.shapes import TINY_LLAMA


def server(
    owner: str | None, models: list[str], routes: dict[str, Any] | None = None
) -> Callable[[ReceivedRequest], bytes]:
    """A server that lists models, and has these other routes."""
    cards = [{"id": name} | ({"owned_by": owner} if owner else {}) for name in models]

    def handler(request: ReceivedRequest) -> bytes:
        path = request.path.partition("?")[0]
        if path == "/v1/models":
            return answered({"object": "list", "data": cards})
        if routes is None or path not in routes:
            return answered({"error": "not found"}, status=404)
        body = routes[path]
        return answered(body.encode() if isinstance(body, str) else body)

    return handler


OLLAMA = {
    "/api/version": {"version": "0.5.7"},
    "/api/ps": {"models": [{"name": "smollm2:135m"}]},
    "/api/show": {
        "model_info": {
            "general.architecture": "llama",
            "llama.block_count": 30,
            "llama.embedding_length": 576,
            "llama.feed_forward_length": 1536,
        }
    },
}
STUDIO = {
    "/api/v0/models": {
        "data": [
            {"id": "other-7b", "state": "not-loaded"},
            {"id": "smollm2-135m-instruct", "state": "loaded"},
        ]
    }
}
STUDIO_MODELS = ["text-embedding-nomic-embed-text-v1.5", "other-7b", "smollm2-135m-instruct"]
VLLM_METRICS = """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="2000"} 1.0
"""
LLAMA_PROPS = {
    "total_slots": 4,
    "default_generation_settings": {"n_ctx": 2048},
    "model_path": "/nowhere/SmolLM2-135M-Instruct-Q4_K_M.gguf",
}
# Handler, software, the first model, slots, KV tokens.
SERVERS: dict[str, tuple[Handler, str, str, int | None, int | None]] = {
    "Ollama": (
        server("library", ["llama3:8b", "smollm2:135m"], OLLAMA),
        *("ollama", "smollm2:135m", None, None),
    ),
    "Ollama, older": (
        server(None, ["smollm2:135m"], OLLAMA),
        *("ollama", "smollm2:135m", None, None),
    ),
    "LM Studio": (
        server("organization_owner", STUDIO_MODELS, STUDIO),
        *("lm-studio", "smollm2-135m-instruct", None, None),
    ),
    "llama-server": (
        server("llamacpp", ["SmolLM2-135M-Instruct-Q4_K_M.gguf"], {"/props": LLAMA_PROPS}),
        *("llama-server", "SmolLM2-135M-Instruct-Q4_K_M.gguf", 4, 8192),
    ),
    "vLLM": (
        server("vllm", ["HuggingFaceTB/SmolLM2-135M-Instruct"], {"/metrics": VLLM_METRICS}),
        *("vllm", "HuggingFaceTB/SmolLM2-135M-Instruct", None, 32000),
    ),
    "any": (server("x", ["smollm2-135m"]), "unknown", "smollm2-135m", None, None),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_is_identified_and_its_loaded_model_comes_first(name: str) -> None:
    handler, software, model, slots, kv_tokens = SERVERS[name]
    with scripted(handler) as url:
        found = look_at(Target(url=url))
        assert found is not None
        assert (found.software, found.models[0]) == (software, model)
        details = ask_details(Target(url=url), model)
    assert (details.slots, details.kv_tokens) == (slots, kv_tokens)
    assert details.spec is not None
    assert details.spec.parameters == ladder_model("135m").spec.parameters


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'{"data": 3}', b"null"])
def test_an_unknown_server_gives_no_details_and_no_output(body: bytes) -> None:
    """Whatever else listens on one of the ports, and answers all routes."""
    with scripted(lambda request: answered(body)) as url:
        port = int(url.rpartition(":")[2])
        assert find_local_servers([port]) == []
        details = ask_details(Target(url=url), "m")
    assert (details.slots, details.spec, details.placement) == (None, None, None)


def test_a_server_behind_a_key_is_known_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str | None] = []

    def handler(request: ReceivedRequest) -> bytes:
        sent.append(request.headers.get("authorization"))
        if sent[-1] != "Bearer secret":
            return answered({"error": "Unauthorized"}, status=401)
        return server("vllm", ["m"])(request)

    monkeypatch.setenv("MY_KEY", "secret")
    with scripted(handler) as url:
        port = int(url.rpartition(":")[2])
        assert find_local_servers([port]) == [] and ports_that_need_a_key([port]) == [port]
        assert set(sent) == {None}, "whoever listens on a usual port gets no key"
        found = look_at(Target(url=url, api_key_env="MY_KEY"))
    assert found is not None and found.software == "vllm"


def test_a_port_without_a_listener_has_no_server() -> None:
    with socket.socket() as one:  # bound, and nobody listens
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        assert find_local_servers([port]) == [] == ports_that_need_a_key([port])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("smollm2:135m", "135m"),
        ("smollm2:135m-instruct-q4_K_M", "135m"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "135m"),
        ("llama3.2:1b", "1b"),
        ("meta-llama/Llama-3.2-1B-Instruct", "1b"),
        ("/models/Llama-3.2-3B-Instruct-Q8_0.gguf", "3b"),
        ("Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", "8b"),
        ("qwen3:30b-a3b", "qwen3-30b-a3b"),
        ("gpt-4o", None),
        ("llama3.2:latest", None),  # the tag does not say its size
        ("my-finetune-1b", None),
        ("", None),
    ],
)
def test_a_served_name_stands_for_a_shape_where_it_surely_does(
    name: str, shape: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = shape_by_name(name)
    if shape is None:
        assert found is None
    elif shape == "qwen3-30b-a3b":
        assert found is not None and found.name == shape
    else:
        assert found is not None and found.parameters == ladder_model(shape).spec.parameters


def test_a_name_of_an_endpoint_is_never_opened_as_a_path(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # whoever opens it waits for its writer
    file = tmp_path / "smollm2-135m.gguf"
    write_gguf(TINY_LLAMA, file)
    assert shape_by_name(str(pipe)) is None
    assert name_of(str(pipe)) == "pipe"
    shape = shape_by_name(str(file))
    assert shape is not None and shape.name == "smollm2-135m" and shape.layers == 30
