"""From a request to what the engine is asked: defaults, refusals by capability, limits and the
context.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serving.backends.backend_interface import CAPABILITIES
from serving.errors import ContextOverflow
from serving.http.api_schemas import ChatRequest, CompletionRequest, Message, TextPart
from serving.http.body_limits import Limits
from serving.http.chat_completions import turns_of
from serving.http.errors import ApiError, as_answer
from serving.http.request_validation import prompts_of, token_limit, validate
from serving.registry.loaded_model import Facts
from serving.sampling.step_rows import Sampling

ALL = Facts("fake", 256, 300, frozenset(CAPABILITIES))
NONE = Facts("plain", 256, 300, frozenset())
LIMITS = Limits()


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"prompt": "x", **fields}, CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)


def sampling(facts: Facts = ALL, **fields: Any) -> Sampling:
    return validate(completion(**fields), facts, LIMITS).sampling


def test_defaults_are_openais() -> None:
    drawn = sampling()
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p, drawn.repetition_penalty) == (
        1.0,
        1.0,
        0,
        0.0,
        1.0,
    )
    assert drawn.logprobs is None and not drawn.needs_logits_work


def test_a_seed_that_is_not_given_is_drawn_and_one_that_is_given_is_kept() -> None:
    assert sampling().seed != sampling().seed
    assert sampling(seed=7).seed == 7
    assert 0 <= sampling(seed=-7).seed < 2**63


def test_temperature_zero_is_greedy_and_so_is_one_next_to_it() -> None:
    assert sampling(temperature=0).is_plain_greedy
    assert sampling(temperature=1e-300).is_plain_greedy
    assert sampling(top_p=0).top_p > 0  # a nucleus of one token, not of none


def test_a_backend_that_only_knows_greedy_is_asked_for_greedy() -> None:
    assert sampling(NONE).is_plain_greedy
    assert sampling(
        NONE, temperature=0, top_p=0.5, top_k=5, min_p=0.1, seed=3
    ).is_plain_greedy  # none of these matters then


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"logprobs": 1}, "logprobs"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_the_backend_cannot_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        sampling(NONE, **fields)
    assert (caught.value.status, caught.value.body.error.param, caught.value.code) == (
        400,
        param,
        "unsupported_parameter",
    )
    assert "plain" in str(caught.value)
    sampling(ALL, **fields)


@pytest.mark.parametrize("field", ["top_p", "top_k", "min_p", "seed"])
def test_each_way_of_shaping_the_draw_is_a_capability_of_its_own(field: str) -> None:
    facts = Facts("partial", 256, 300, frozenset(CAPABILITIES) - {field})
    with pytest.raises(ApiError) as caught:
        sampling(facts, **{field: 1 if field in ("top_k", "seed") else 0.5})
    assert caught.value.body.error.param == field


def test_json_formats_become_a_schema() -> None:
    assert sampling(response_format={"type": "json_object"}).json_schema == '{"type":"object"}'
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}
    assert sampling(response_format=wrapped).json_schema == '{"type":"string"}'
    assert sampling(response_format={"type": "text"}).json_schema is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"logit_bias": {300: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_limits_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validate(completion(**fields), ALL, LIMITS)
    assert (caught.value.status, caught.value.body.error.param) == (400, param)


def test_logprobs_of_a_chat_count_their_alternatives() -> None:
    assert validate(chat(logprobs=True), ALL, LIMITS).sampling.logprobs == 0
    assert validate(chat(logprobs=True, top_logprobs=5), ALL, LIMITS).sampling.logprobs == 5
    with pytest.raises(ApiError, match="needs logprobs"):
        validate(chat(top_logprobs=5), ALL, LIMITS)


def test_the_shorter_deadline_holds() -> None:
    limits = Limits(deadline_seconds=10.0)
    assert validate(completion(), ALL, limits).deadline_seconds == 10.0
    assert validate(completion(deadline_seconds=3), ALL, limits).deadline_seconds == 3.0
    assert validate(completion(deadline_seconds=30), ALL, limits).deadline_seconds == 10.0
    assert validate(completion(), ALL, LIMITS).deadline_seconds is None


def test_max_tokens_defaults_to_16_for_completions_and_to_the_rest_for_chat() -> None:
    assert token_limit(completion(), 100, ALL) == 16
    assert token_limit(completion(), 250, ALL) == 6
    assert token_limit(chat(), 100, ALL) == 156
    assert token_limit(chat(max_completion_tokens=5), 100, ALL) == 5
    assert token_limit(chat(max_completion_tokens=5, max_tokens=5), 100, ALL) == 5
    assert token_limit(completion(max_tokens=-1), 100, ALL) == 156


def test_max_tokens_beyond_the_room_is_cut() -> None:
    assert token_limit(chat(max_tokens=2**31 - 1), 250, ALL) == 6
    with pytest.raises(ApiError, match="min_tokens"):
        token_limit(completion(max_tokens=9, min_tokens=7), 250, ALL)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens"), [(256, None), (1000, None), (256, 7), (256, -1)]
)
def test_a_context_overflow_says_both_numbers(prompt_tokens: int, max_tokens: int | None) -> None:
    with pytest.raises(ContextOverflow) as caught:
        token_limit(chat(max_tokens=max_tokens), prompt_tokens, ALL)
    answer = as_answer(caught.value)
    assert answer is not None and answer.status == 400
    error = answer.body.error
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert f"{prompt_tokens} in the messages" in error.message
    assert "maximum context length is 256 tokens" in error.message


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ApiError, match="differ"):
        token_limit(chat(max_completion_tokens=5, max_tokens=6), 100, ALL)
    with pytest.raises(ApiError, match="min_tokens"):
        token_limit(completion(min_tokens=17), 100, ALL)
    with pytest.raises(ApiError, match="no tokens"):
        token_limit(completion(), 0, ALL)


@pytest.mark.parametrize(
    ("prompt", "found"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_prompts_have_four_shapes(prompt: Any, found: list[Any]) -> None:
    assert prompts_of(completion(prompt=prompt), ALL, LIMITS) == found


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        [[1], []],
        ["a", ""],
        ["a", 1],
        ["a", [1]],
        [1, [2]],
        [300],
        [[1], [2, 999]],
        ["a"] * 129,
    ],
)
def test_prompts_that_cannot_be_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        prompts_of(completion(prompt=prompt), ALL, LIMITS)
    assert (caught.value.status, caught.value.body.error.param) == (400, "prompt")


def test_prompts_times_answers_are_bounded() -> None:
    with pytest.raises(ApiError, match="128 sequences"):
        prompts_of(completion(prompt=["a", "b"], n=65), ALL, LIMITS)


def test_turns_are_texts() -> None:
    parts = Message(
        role="developer", content=[TextPart(type="text", text="a"), TextPart(type="text", text="b")]
    )
    assert turns_of([parts, Message(role="assistant")]) == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": ""},
    ]
    with pytest.raises(ApiError, match=r"messages\[0\].content"):
        turns_of([Message(role="user")])
