"""The wire's words: what known clients send is taken."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from crossover.serving.http.api_errors import ApiError, retry_later
from crossover.serving.http.body_types import CHAT, COMPLETION, decode

TURN = {"role": "user", "content": "hi"}
EXPECTED = {
    "role": "assistant",
    "content": "Hi",
    "refusal": None,
    "annotations": [],
    "audio": None,
    "tool_calls": None,
    "function_call": None,
    "provider_specific_fields": {"refusal": None},
}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
EACH = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
# What known clients send, as read in their sources: nothing of it may be refused.
CHATS: dict[str, dict[str, Any]] = {
    "vllm bench serve": {"messages": PARTS, "max_completion_tokens": 8, **USAGE},
    "aiperf": {"messages": [TURN | {"name": ""}], "min_tokens": 8, "stream": True},
    "langchain": {"n": 1, "stream": False, "temperature": 0.7, "max_completion_tokens": 8},
    "open-webui": {"user": "u", **USAGE},
    "litellm, an answer sent back": {"messages": [TURN, EXPECTED, TURN]},
    "openai, without effect": {
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "modalities": ["text"],
    },
    "openai, no tools": {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
}
TEXTS: dict[str, dict[str, Any]] = {
    "vllm bench serve": {"repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True, **USAGE},
    "guidellm": {"stop": None, "max_tokens": 8, "max_completion_tokens": 8, **EACH},
    "sglang bench": {"temperature": 0.0, "best_of": 1, "max_tokens": 8, "ignore_eos": True},
}


@pytest.mark.parametrize("client", CHATS)
def test_what_known_clients_send_to_a_chat_is_taken(client: str) -> None:
    decode(CHAT, json.dumps({"model": "m", "messages": [TURN], **CHATS[client]}).encode())


@pytest.mark.parametrize("client", TEXTS)
def test_what_known_clients_send_to_completions_is_taken(client: str) -> None:
    decode(COMPLETION, json.dumps({"model": "m", "prompt": "x", **TEXTS[client]}).encode())


def test_retry_after_is_whole_seconds_and_milliseconds() -> None:
    headers = retry_later(429, "full", "x", 2.4).headers
    assert headers == {"Retry-After": "3", "Retry-After-Ms": "2400"}
    assert retry_later(503, "gone", "x", 0.0).headers["Retry-After"] == "1"


@pytest.mark.parametrize(
    ("values", "is_refused"),
    [(b"1.0," * 400_000, False), (b"1.0," * 900_000, True), (b"7," * 1_900_000, True)],
    ids=["400,000 floats", "900,000 floats", "1,900,000 ids"],
)
def test_many_numbers_cost_bounded_time(values: bytes, is_refused: bool) -> None:
    body = b'{"prompt":[' + values.rstrip(b",") + b"]}"
    started = time.process_time()
    try:
        assert len(decode(COMPLETION, body).prompt) == 400_000 and not is_refused
    except ApiError as problem:
        assert is_refused and "more than 500000 values" in problem.body.error.message
    assert time.process_time() - started < (0.1 if is_refused else 2)


@pytest.mark.parametrize(
    ("text", "count", "is_refused"),
    [("a", 99_000, False), ("a", 101_000, True), ('"\\' * 200_000, 2, False)],
    ids=["99,000 texts", "101,000 texts", "quotes within a text"],
)
def test_the_texts_of_a_body_are_counted_before_they_are_decoded(
    text: str, count: int, is_refused: bool
) -> None:
    body = json.dumps({"prompt": [text] * count}).encode()
    started = time.process_time()
    try:
        assert len(decode(COMPLETION, body).prompt) == count and not is_refused
    except ApiError as problem:
        assert is_refused and "more than 100000 texts" in problem.body.error.message
    assert time.process_time() - started < (0.1 if is_refused else 2)
