"""The wire's types: what is refused and in which words, what is shown to strangers, how events are
put together.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving.http.api_schemas import (
    CHAT,
    COMPLETION,
    ChatRequest,
    decode,
)
from serving.http.errors import scrubbed, try_again

TURN = {"role": "user", "content": "hi"}


def test_fields_that_change_nothing_are_taken() -> None:
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    empty = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "modalities": ["text"],
    }
    request = decode(CHAT, json.dumps({"messages": [TURN], **fields, **empty}).encode())
    assert isinstance(request, ChatRequest)


def test_an_assistant_turn_is_taken_as_clients_send_it_back() -> None:
    said: dict[str, Any] = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
        "function_call": None,
        "provider_specific_fields": {"refusal": None},
    }
    assert decode(CHAT, json.dumps({"messages": [TURN, said]}).encode()).messages[1].content == "Hi"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "cannot open /home/me/models/secret.gguf: no such file",
            "cannot open <path>: no such file",
        ),
        ("failed to load '/opt/x/y.so'", "failed to load '<path>'"),
        ("segfault at 0x7f00deadbeef in run", "segfault at <address> in run"),
        ("connect to 10.1.2.3:8000 refused", "connect to <address> refused"),
        (r"file C:\Users\me\model.gguf is broken", "file <path> is broken"),
        (
            "llama_cpp/cpu falls back: 3/4 of 1.5 GiB, see /v1/placement",
            "llama_cpp/cpu falls back: 3/4 of 1.5 GiB, see /v1/placement",
        ),
    ],
)
def test_paths_and_addresses_are_not_shown(message: str, shown: str) -> None:
    assert scrubbed(message) == shown


def test_retry_after_is_whole_seconds_and_milliseconds() -> None:
    assert try_again(429, "full", "x", 2.4).headers == {
        "Retry-After": "3",
        "Retry-After-Ms": "2400",
    }
    assert try_again(503, "gone", "x", 0.0).headers["Retry-After"] == "1"


# What known clients send, as read in their sources: nothing of it may be refused.
CLIENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "vllm bench serve, completions": (
        COMPLETION,
        {
            "model": "m",
            "prompt": "x",
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
        },
    ),
    "vllm bench serve, chat": (
        CHAT,
        {
            "model": "m",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "max_completion_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "guidellm": (
        COMPLETION,
        {
            "prompt": "x",
            "model": "m",
            "stream": True,
            "stop": None,
            "ignore_eos": True,
            "max_tokens": 8,
            "max_completion_tokens": 8,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "aiperf": (
        CHAT,
        {
            "messages": [{"role": "user", "name": "", "content": "x"}],
            "model": "m",
            "stream": True,
            "max_completion_tokens": 8,
            "min_tokens": 8,
        },
    ),
    "sglang bench": (
        COMPLETION,
        {
            "model": "m",
            "prompt": "x",
            "temperature": 0.0,
            "best_of": 1,
            "max_tokens": 8,
            "ignore_eos": True,
        },
    ),
    "langchain": (
        CHAT,
        {
            "messages": [TURN],
            "model": "m",
            "n": 1,
            "stream": False,
            "temperature": 0.7,
            "max_completion_tokens": 8,
        },
    ),
    "open-webui": (
        CHAT,
        {
            "messages": [TURN],
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": "u",
        },
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_what_known_clients_send_is_taken(client: str) -> None:
    decoder, body = CLIENTS[client]
    decode(decoder, json.dumps(body).encode())
