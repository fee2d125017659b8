"""The wire's types: what is refused and in which words, what is shown to strangers, how events are
put together.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.http.wire.decoding import CHAT, COMPLETION, DETOKENIZE, REFUSED, TOKENIZE, decode
from serving.http.wire.errors import ApiError, scrubbed, try_again
from serving.http.wire.requests import ChatRequest, CompletionRequest
from serving.http.wire.responses import ChatChunk, ChatChunkChoice, ChatDelta
from serving.http.wire.sse import MARK, content_frame, encode, event

PATIENT = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # the machine may be busy
TURN = {"role": "user", "content": "hi"}


def refusal(decoder: Any, body: dict[str, Any] | bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(decoder, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.status == 400
    return caught.value


def test_an_unknown_field_is_refused_by_its_name() -> None:
    problem = refusal(CHAT, {"messages": [TURN], "temprature": 1})
    assert (problem.message, problem.param) == ("unknown field 'temprature'", "temprature")
    problem = refusal(CHAT, {"messages": [{**TURN, "colour": "red"}]})
    assert problem.param == "messages[0].colour"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", -1),
        ("n", 0),
        ("n", 10**9),
        ("n", 10**40),
        ("max_tokens", -2),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("seed", 2**63),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"one": 1}),
        ("stop_token_ids", [-1]),
        ("deadline_seconds", 0),
        ("stream", "yes"),
    ],
)
def test_a_value_out_of_range_names_its_field(field: str, value: Any) -> None:
    problem = refusal(COMPLETION, {"prompt": "x", field: value})
    assert problem.param is not None and problem.param.startswith(field)
    assert problem.message.startswith(field)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"])
def test_numbers_that_are_none_are_refused(number: bytes) -> None:
    refusal(COMPLETION, b'{"prompt": "x", "temperature": ' + number + b"}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("tool_choice", "any"),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("prediction", {"type": "content"}),
        ("service_tier", "flex"),
    ],
)
def test_what_this_server_cannot_do_is_refused_in_words(field: str, value: Any) -> None:
    assert refusal(CHAT, {"messages": [TURN], field: value}).message == REFUSED[field]


def test_a_suffix_is_refused_unless_it_changes_nothing() -> None:
    assert refusal(COMPLETION, {"prompt": "x", "suffix": "end"}).message == REFUSED["suffix"]
    assert decode(COMPLETION, b'{"prompt": "x", "best_of": 1, "suffix": null}').suffix is None


@pytest.mark.parametrize(
    ("biases", "words"),
    [
        ({"5": 1, "one": 1}, "'one' is no token id"),
        ({"5": 1, "1.5": 1}, "'1.5' is no token id"),
        ({"5": 1, "6": 101}, "of '6', not a number from -100 to 100"),
        ({"6": None}, "of '6', not a number"),
    ],
)
def test_a_wrong_bias_is_named(biases: dict[str, Any], words: str) -> None:
    problem = refusal(COMPLETION, {"prompt": "x", "logit_bias": biases})
    assert problem.param == "logit_bias" and words in problem.message


def test_a_role_that_is_not_there_is_told_which_are() -> None:
    problem = refusal(CHAT, {"messages": [{"role": "function", "content": "x"}]})
    assert (
        problem.param == "messages[0].role"
        and "user" in problem.message
        and "'function'" in problem.message
    )


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
        "functions": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "audio": None,
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
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {}},
    ],
)
def test_parts_that_are_not_text_are_refused(part: dict[str, Any]) -> None:
    problem = refusal(CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert "only parts of type 'text' are supported" in problem.message
    assert problem.param == "messages[0].content[0].type"


DEEP = (
    b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "x", '
    b'"schema": {"a": ' + b"[" * 100_000
)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (DEEP, "nested_too_deeply"),
    ],
)
def test_what_is_not_json_is_a_400(body: bytes, code: str) -> None:
    assert refusal(COMPLETION, body).code == code


@PATIENT
@given(st.binary(max_size=300))
def test_no_body_raises_anything_but_an_api_error(body: bytes) -> None:
    decoders: list[msgspec.json.Decoder[Any]] = [CHAT, COMPLETION, TOKENIZE, DETOKENIZE]
    for decoder in decoders:
        try:
            decode(decoder, body)
        except ApiError as problem:
            assert problem.status == 400


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@PATIENT
@given(
    st.dictionaries(st.sampled_from(sorted(CompletionRequest.__struct_fields__)), _json, max_size=6)
)
def test_no_json_raises_anything_but_an_api_error(body: dict[str, Any]) -> None:
    try:
        decode(COMPLETION, json.dumps({"prompt": "x", **body}).encode())
    except ApiError as problem:
        assert problem.status == 400 and problem.message


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


@PATIENT
@given(st.text())
def test_a_content_frame_with_its_text_is_the_encoded_chunk(text: str) -> None:
    def chunk(content: str) -> ChatChunk:
        choice = ChatChunkChoice(0, ChatDelta(content=content))
        return ChatChunk(id='a"\n', created=1, model="m\u2028", choices=[choice])

    head, tail = content_frame(chunk(MARK))
    data = head + encode(text) + tail
    assert data == event(chunk(text))
    assert data.startswith(b"data: ") and data.count(b"\n") == 2 and data.endswith(b"\n\n")
    assert msgspec.json.decode(data[6:])["choices"][0]["delta"] == {"content": text}


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
