"""Chats and completions over a real port: answers in OpenAI's shapes, whole and streamed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.serving.fakes import (
    ByteTokenizer,
    FakeSupervisor,
    app_on,
    ask,
    chat,
    complete,
    scraped,
    served,
)


def test_a_chat_is_answered_whole(port: int, supervisor: FakeSupervisor) -> None:
    body = chat(port).json
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", body["id"])
    assert body["object"] == "chat.completion" and body["model"] == "m"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    (submitted,) = supervisor.submitted
    assert bytes(token for token in submitted.prompt if token < 256) == b"user\nhi\nassistant\n"
    assert submitted.prompt[0] == 257  # the template's mark is one token, not its letters
    assert submitted.whole  # so that it can begin again on another engine
    assert body["usage"] == {
        "prompt_tokens": len(submitted.prompt),
        "completion_tokens": 3,
        "total_tokens": len(submitted.prompt) + 3,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_a_chat_is_streamed_in_openais_order(port: int, supervisor: FakeSupervisor) -> None:
    answer = chat(port, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, last, done = answer.events
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": ", "},
        {"content": "world"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    assert not supervisor.submitted[0].whole


@pytest.mark.parametrize("words", [["usage", "id", "logprobs", "é\n\u2028"], ['"a"', "\\", "b"]])
def test_any_text_comes_as_it_is(supervisor: FakeSupervisor, words: list[str]) -> None:
    supervisor.words = words
    with served(app_on(supervisor)) as port:
        *chunks, _ = chat(port, stream=True).events
        texts = [chunk["choices"][0]["text"] for chunk in complete(port, stream=True).events[:-1]]
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1]] == words
    assert texts == [*words, ""]
    assert len({frozenset(chunk) for chunk in chunks}) == 1


def test_usage_stands_in_each_chunk_or_in_none(port: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chat(port, stream=True, stream_options=options).events[:-1]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3, 3]
    assert all("usage" not in chunk for chunk in complete(port, stream=True).events[:-1])


@pytest.mark.parametrize("path", ["/chat/completions", "/models", "/placement"])
def test_routes_are_there_without_their_version_too(port: int, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else None
    assert ask(port, "POST" if body else "GET", path, body).status == 200
    counted = scraped(ask(port, "GET", "/metrics").body)
    assert counted["http_responses_total", f"/v1{path}", "200"] == 1


def test_a_text_is_continued(port: int, supervisor: FakeSupervisor) -> None:
    body = complete(port, max_tokens=2).json
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "Hello, ", "logprobs": None, "finish_reason": "length"}
    ]
    complete(port)
    assert [one.prompt for one in supervisor.submitted] == [[*b"hi"]] * 2
    assert supervisor.submitted[1].max_tokens == 16


def test_every_option_of_a_request_reaches_the_engine(
    port: int, supervisor: FakeSupervisor
) -> None:
    drawn = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 11,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    }
    rest: dict[str, Any] = {"max_tokens": 9, "min_tokens": 3, "stop": ["END", "STOP"]}
    rest |= {"stop_token_ids": [7], "ignore_eos": True, "cache_salt": "of a tenant"}
    more: dict[str, Any] = {"include_stop_str_in_output": True, "deadline_seconds": 5.0}
    complete(port, logit_bias={"5": -3.5}, **more, **drawn, **rest)
    (submit,) = supervisor.submitted
    assert 4 < (submit.deadline_seconds or 0) < 5  # what is left of it
    assert {key: getattr(submit, key) for key in rest} == rest and submit.include_stop
    assert {key: getattr(submit.sampling, key) for key in drawn} == drawn
    assert submit.sampling.logit_bias == {5: -3.5}


@pytest.mark.parametrize("streamed", [False, True])
def test_several_prompts_and_answers_are_numbered_and_counted(
    port: int, supervisor: FakeSupervisor, streamed: bool
) -> None:
    more: Any = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    answer = complete(port, prompt=[[1, 2, 3], [4]], n=2, seed=5, **more)
    parts = answer.events[:-1] if streamed else [answer.json]
    texts = ["", "", "", ""]
    for choice in (choice for part in parts for choice in part["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == ["Hello, world"] * 4
    usage = parts[-1]["usage"]  # a prompt counts once, whatever n is
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 12)
    assert [submit.prompt for submit in supervisor.submitted] == [[1, 2, 3], [1, 2, 3], [4], [4]]
    seeds = [submit.sampling.seed for submit in supervisor.submitted]
    assert seeds[0] == seeds[2] == 5 and seeds[1] == seeds[3] != 5


def test_log_probabilities_in_both_shapes(port: int) -> None:
    choice = chat(port, seed=0, logprobs=True, top_logprobs=2).json["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", ",", "w"]
    assert content[0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "token_id:256", "logprob": -9999.0, "bytes": None},  # JSON has no -inf
        ],
    }
    found = complete(port, seed=0, logprobs=1).json["choices"][0]["logprobs"]
    assert found == {
        "tokens": ["H", ",", "w"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"H": -0.5}, {",": -0.5}, {"w": -0.5}],
    }
    streamed = complete(port, logprobs=1, stream=True).events[:-2]
    shown = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [each["tokens"] for each in shown] == [["H"], [","], ["w"]]


def test_a_bos_goes_before_a_text_but_not_before_ids_or_a_chat() -> None:
    supervisor = FakeSupervisor()
    with served(app_on(supervisor, tokenizer=ByteTokenizer(bos_id=0))) as port:
        complete(port, prompt="a")
        complete(port, prompt="a", add_special_tokens=False)
        complete(port, prompt=[97])
        chat(port)
        assert ask(port, "POST", "/tokenize", {"prompt": "a"}).json["tokens"] == [0, 97]
    assert [submit.prompt[0] for submit in supervisor.submitted] == [0, 97, 97, 257]
