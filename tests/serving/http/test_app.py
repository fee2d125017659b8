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
    answer = chat(port)
    assert answer.status == 200
    body = answer.json
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", body["id"])
    assert body["object"] == "chat.completion" and body["model"] == "m"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    prompt = bytes(token for token in supervisor.submitted[0].prompt if token < 256)
    assert prompt == b"user\nhi\nassistant\n"
    assert (
        supervisor.submitted[0].prompt[0] == 257
    )  # the template's mark is one token, not its letters
    assert body["usage"] == {
        "prompt_tokens": len(supervisor.submitted[0].prompt),
        "completion_tokens": 3,
        "total_tokens": len(supervisor.submitted[0].prompt) + 3,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert supervisor.submitted[0].whole  # so that it can begin again on another engine


def test_a_chat_is_streamed_in_openais_order(port: int, supervisor: FakeSupervisor) -> None:
    answer = chat(port, stream=True, stream_options={"include_usage": True})
    assert (
        answer.status == 200
        and answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    )
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": ", "},
        {"content": "world"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 4 + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not supervisor.submitted[0].whole


@pytest.mark.parametrize("path", ["/chat/completions", "/models", "/models/m", "/placement"])
def test_routes_are_there_without_their_version_too(port: int, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else None
    found = ask(port, "POST" if body else "GET", path, body)
    assert found.status == 200
    counted = scraped(ask(port, "GET", "/metrics").body)
    route = "/v1/models/{name}" if path == "/models/m" else f"/v1{path}"
    assert counted["http_responses_total", route, "200"] == 1


def test_without_asking_there_is_no_usage_in_a_stream(port: int) -> None:
    assert all("usage" not in chunk for chunk in complete(port, stream=True).events[:-1])


def test_continuous_usage_counts_along(port: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chat(port, stream=True, stream_options=options).events[:-1]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3, 3]


def test_a_text_is_continued(port: int, supervisor: FakeSupervisor) -> None:
    body = complete(port, max_tokens=2).json
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "Hello, ", "logprobs": None, "finish_reason": "length"}
    ]
    assert supervisor.submitted[0].prompt == [*b"hi"]
    complete(port)
    assert supervisor.submitted[1].max_tokens == 16


def test_what_is_asked_reaches_the_engine(port: int, supervisor: FakeSupervisor) -> None:
    complete(
        port,
        max_tokens=9,
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=11,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={"5": -3.5},
        stop=["END", "STOP"],
        stop_token_ids=[7],
        include_stop_str_in_output=True,
        ignore_eos=True,
        deadline_seconds=5,
    )
    submit = supervisor.submitted[0]
    assert (submit.max_tokens, submit.min_tokens, submit.stop, submit.stop_token_ids) == (
        9,
        3,
        ["END", "STOP"],
        [7],
    )
    assert (submit.include_stop, submit.ignore_eos, submit.deadline_seconds) == (True, True, 5.0)
    drawn = submit.sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p, drawn.seed) == (
        0.5,
        0.9,
        40,
        0.05,
        11,
    )
    assert (drawn.presence_penalty, drawn.frequency_penalty, drawn.repetition_penalty) == (
        0.1,
        0.2,
        1.1,
    )
    assert drawn.logit_bias == {5: -3.5}


@pytest.mark.parametrize("streamed", [False, True])
def test_several_prompts_and_answers_are_numbered_and_counted(
    port: int, supervisor: FakeSupervisor, streamed: bool
) -> None:
    options: dict[str, Any] = (
        {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    )
    answer = complete(port, prompt=[[1, 2, 3], [4]], n=2, seed=5, echo=False, **options)
    if streamed:
        chunks = answer.events[:-1]
        texts = ["", "", "", ""]
        for chunk in chunks[:-1]:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        usage = chunks[-1]["usage"]
    else:
        texts = [choice["text"] for choice in answer.json["choices"]]
        assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]
        usage = answer.json["usage"]
    assert texts == ["Hello, world"] * 4
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
        4,
        12,
    )  # a prompt counts once, whatever n is
    assert [submit.prompt for submit in supervisor.submitted] == [[1, 2, 3], [1, 2, 3], [4], [4]]
    seeds = [submit.sampling.seed for submit in supervisor.submitted]
    assert seeds[0] == seeds[2] == 5 and seeds[1] == seeds[3] != 5


def test_log_probabilities_in_both_shapes(port: int) -> None:
    content = chat(port, seed=0, logprobs=True, top_logprobs=2).json["choices"][0]["logprobs"][
        "content"
    ]
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
    assert found["tokens"] == ["H", ",", "w"] and found["token_logprobs"] == [-0.5] * 3
    assert found["top_logprobs"][0] == {"H": -0.5} and found["text_offset"] == [0, 1, 2]
    streamed = complete(port, logprobs=1, stream=True).events[:-2]
    assert [chunk["choices"][0]["logprobs"]["tokens"] for chunk in streamed] == [
        ["H"],
        [","],
        ["w"],
    ]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in streamed] == [[0], [5], [7]]


def test_a_bos_goes_before_a_text_but_not_before_ids_or_a_chat() -> None:
    supervisor = FakeSupervisor()
    with served(app_on(supervisor, tokenizer=ByteTokenizer(bos_id=0))) as port:
        complete(port, prompt="a")
        complete(port, prompt="a", add_special_tokens=False)
        complete(port, prompt=[97])
        chat(port)
        assert ask(port, "POST", "/tokenize", {"prompt": "a"}).json["tokens"] == [0, 97]
    assert [submit.prompt[0] for submit in supervisor.submitted] == [0, 97, 97, 257]
