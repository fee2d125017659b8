"""What a stranger may send: bodies that ask for too much or for nonsense.

The attacks and their tests are listed in tests/serving/http/attacked.py.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.serving.fakes import ask, chat, complete
from tests.serving.http.attacked import port, refused, target

__all__ = ["port", "target"]

HUGE = (10**3, 2**31 - 1, 2**31, 2**63, 10**100)


@pytest.mark.parametrize("field", ["n", "best_of", "logprobs", "min_tokens"])
def test_huge_numbers_are_refused_by_name(port: int, field: str) -> None:
    for number in HUGE:
        error = refused(complete(port, **{field: number}))
        assert error["code"] == "context_length_exceeded" or error["param"] == field


def test_huge_numbers_of_a_chat_are_refused_by_name(port: int) -> None:
    for number in HUGE:
        refused(chat(port, logprobs=True, top_logprobs=number), "top_logprobs")
        refused(chat(port, n=number), "n")
    for number in HUGE[2:]:  # less is cut to what the context leaves
        refused(complete(port, max_tokens=number), "max_tokens")
    refused(complete(port, prompt=["x"] * 100, n=2), "n")
    refused(complete(port, prompt=["x"] * 1000), "prompt")
    assert (
        complete(port, top_k=2**31 - 1, max_tokens=2).status == 200
    )  # all tokens, however many are asked for


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[1], []], None, {}])
def test_nothing_is_no_prompt(port: int, prompt: Any) -> None:
    refused(complete(port, prompt=prompt), "prompt")


def test_no_messages_are_no_chat(port: int) -> None:
    for messages in (
        [],
        None,
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [None],
        "hi",
    ):
        refused(chat(port, messages=messages), "messages")


@pytest.mark.parametrize("token", [-1, 8192, 2**31 - 1, 2**31, 2**64, 10**300])
def test_token_ids_that_are_not_there(port: int, token: int) -> None:
    refused(complete(port, prompt=[1, token]), "prompt")
    refused(complete(port, stop_token_ids=[token]), "stop_token_ids")
    refused(complete(port, logit_bias={str(token): 1}), "logit_bias")
    refused(ask(port, "POST", "/detokenize", {"tokens": [token]}), "tokens")


@pytest.mark.parametrize(
    "number",
    ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-0.001", "0x10", "1_000", "--1", ".5"],
)
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "deadline_seconds"]
)
def test_numbers_that_are_none(port: int, field: str, number: str) -> None:
    refused(
        ask(port, "POST", "/v1/completions", f'{{"prompt": "x", "{field}": {number}}}'.encode())
    )


def test_a_bias_that_is_no_number(port: int) -> None:
    """It was a 500, with a traceback in the log."""
    deep = b'7, "user": ' + b"[" * 50_000
    for bias in (b"1e400", b'{"1": 1e400}', b'{"1": NaN}', b'"\xff"', deep):
        refused(ask(port, "POST", "/v1/completions", b'{"prompt":"x","logit_bias":%s}' % bias))


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
def test_deep_json(port: int, path: str) -> None:
    for opening, closing in (
        (b"[", b"]"),
        (b'{"a":', b"}"),
        (b'{"response_format":', b"}"),
        (b'{"messages":[', b"]}"),
    ):
        for depth in (10_000, 200_000):
            refused(
                ask(
                    port,
                    "POST",
                    path,
                    b'{"prompt":' + opening * depth + b"1" + closing * depth + b"}",
                )
            )
            refused(ask(port, "POST", path, opening * depth))  # never closed


def test_deep_json_inside_a_schema(port: int) -> None:
    for depth in (100, 5_000, 100_000):
        schema = b'{"items":' * depth + b"{}" + b"}" * depth
        body = (
            b'{"prompt":"x","response_format":{"type":"json_schema","json_schema":{"name":"x","schema":'
            + schema
            + b"}}}"
        )
        refused(ask(port, "POST", "/v1/completions", body))


MILLIONS: dict[str, bytes] = {
    "stop": b'{"prompt":"x","stop":[' + b'"a",' * 999_999 + b'"a"]}',
    "stop_token_ids": b'{"prompt":"x","stop_token_ids":[' + b"1," * 999_999 + b"1]}",
    "logit_bias": b'{"prompt":"x","logit_bias":{'
    + b",".join(b'"%d":1' % i for i in range(390_000))
    + b"}}",
    "prompt": b'{"prompt":[' + b"[1]," * 999_999 + b"[1]]}",
    "prompt as ids": b'{"prompt":[' + b"1," * 999_999 + b"1]}",
    "prompt as text": b'{"prompt":"' + b"x" * 4_000_000 + b'"}',
    "prompt of escapes": b'{"prompt":"' + b"\\u0000" * 600_000 + b'"}',
    "seed": b'{"prompt":"x","seed":' + b"9" * 4_000_000 + b"}",
    "an unknown key": b'{"prompt":"x","' + b"k" * 4_000_000 + b'":1}',
    "unknown keys": b'{"prompt":"x",' + b",".join(b'"k%d":1' % i for i in range(300_000)) + b"}",
    "one key again and again": b'{"prompt":"x",' + b'"n":1,' * 600_000 + b'"n":1000}',
}


@pytest.mark.parametrize("what", MILLIONS)
def test_a_million_of_everything(port: int, what: str) -> None:
    asked = time.monotonic()
    error = refused(ask(port, "POST", "/v1/completions", MILLIONS[what]))
    assert time.monotonic() - asked < 20.0, "quadratic work on a million takes minutes"
    if " " not in what:
        assert error["param"] == what or error["code"] in (
            "context_length_exceeded",
            "too_many_values",
        )


def test_a_million_turns(port: int) -> None:
    turns = b",".join([b'{"role":"user","content":""}'] * 100_000)
    turned = ask(port, "POST", "/v1/chat/completions", b'{"messages":[' + turns + b"]}")
    assert refused(turned)["code"] == "too_many_values"
    parts = b",".join([b'{"type":"text","text":"a"}'] * 100_000)
    assert (
        ask(
            port,
            "POST",
            "/v1/chat/completions",
            b'{"messages":[{"role":"user","content":[' + parts + b"]}]}",
        ).status
        == 400
    )
    full = [
        {"role": "user", "content": "x"}
    ] * 4096  # as many as are allowed: rendered, counted, and too long
    assert refused(chat(port, messages=full))["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "key",
    [
        "X - at `$." + "[" * 1_000_000,
        "X - at `$" * 100_000,
        "a`" * 500_000,
        "/a" * 500_000,
        "\n" * 1_000_000,
    ],
)
def test_an_error_message_is_not_a_regular_expressions_playground(port: int, key: str) -> None:
    """The message repeats a key, and its place in the request was once looked for in it by an
    expression that took hours.
    """
    asked = time.monotonic()
    refused(ask(port, "POST", "/v1/completions", json.dumps({"prompt": "x", key: 1}).encode()))
    refused(complete(port, model=key), "model", 404)
    refused(complete(port, response_format={"type": key}))
    assert time.monotonic() - asked < 20.0
