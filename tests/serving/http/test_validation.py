"""From a request to what the engine is asked: defaults, refusals and limits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from crossover.models.text.sampling_defaults import SamplingDefaults
from crossover.serving.http.api_errors import ApiError
from crossover.serving.http.body_types import ChatRequest, CompletionRequest
from crossover.serving.http.request_validation import prompts_of, token_limit, validate
from crossover.serving.registry.served_model import EngineLimits
from crossover.serving.sampling.step_inputs import Sampling

FACTS = EngineLimits(256, 300)


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"prompt": "x", **fields}, CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)


def sampling(**fields: Any) -> Sampling:
    return validate(
        completion(**fields), FACTS, SamplingDefaults(), fields.get("logprobs")
    ).sampling


def test_defaults_are_openais() -> None:
    assert sampling(seed=7) == Sampling(temperature=1.0, seed=7)
    assert sampling().seed != sampling().seed
    assert 0 <= sampling(seed=-7).seed < 2**63


def test_temperature_zero_is_greedy_and_so_is_one_next_to_it() -> None:
    assert sampling(temperature=0).is_plain_greedy
    assert sampling(temperature=1e-300).is_plain_greedy
    assert sampling(top_p=0).top_p > 0  # a nucleus of one token, not of none


def test_json_formats_become_a_schema() -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}
    formats = [{"type": "json_object"}, wrapped, {"type": "text"}]
    found = [sampling(response_format=form).json_schema for form in formats]
    assert found == ['{"type":"object"}', '{"type":"string"}', None]


@pytest.mark.parametrize(
    ("body", "prompt_tokens", "most"),
    [
        (completion(), 100, 16),
        (completion(), 250, 6),
        (chat(), 100, 156),
        (chat(max_completion_tokens=5), 100, 5),
        (chat(max_completion_tokens=5, max_tokens=5), 100, 5),
        (chat(max_tokens=2**31 - 1), 250, 6),
    ],
)
def test_max_tokens_is_bounded_by_the_request_and_the_context(
    body: Any, prompt_tokens: int, most: int
) -> None:
    assert token_limit(body, prompt_tokens, FACTS) == most


@pytest.mark.parametrize(
    ("prompt", "found"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_prompts_have_four_shapes(prompt: Any, found: list[Any]) -> None:
    assert prompts_of(completion(prompt=prompt), FACTS) == found


@pytest.mark.parametrize(
    "prompt",
    [["a", [1]], [1, [2]], [[1], [2, 999]], ["a"] * 129],
)
def test_prompts_that_cannot_be_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        prompts_of(completion(prompt=prompt), FACTS)
    assert (caught.value.status, caught.value.body.error.param) == (400, "prompt")
