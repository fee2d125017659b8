"""The onnx backend on tiny graphs made by the product's own converter: held to the contract and to
transformers' generate.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.backends.backend_contract import (
    check_contract,
    check_contradictions,
    check_export,
    check_full_row,
    check_logprobs,
    check_prompt_cache,
    check_scheduled,
    check_seeded,
)
from tests.serving.backends.backend_steps import Make, generate, greedy_unbatched, prompt_of, row
from tests.serving.backends.hf_folders import (
    ONNX,
    generated,
    logprobs_of,
    onnx_folder,
    onnx_source,
)


@pytest.mark.parametrize("name", [name for name in ONNX if name.endswith("-fp32")])
def test_float_graphs_give_the_tokens_of_transformers(make: Make, name: str) -> None:
    backend = make(onnx_folder(name))
    assert "GroupQueryAttention" in backend.info.details["graph"]
    reference = generated(onnx_source(name))
    check_contract(backend, reference)


@pytest.mark.parametrize("name", ["llama-fp32", "qwen3-growing"])
@pytest.mark.parametrize("settings", [{}, {"kv_tokens": 200}], ids=["room", "preempting"])
def test_the_scheduler_gives_the_tokens_of_transformers(
    make: Make, name: str, settings: dict[str, Any]
) -> None:
    scheduler = check_scheduled(make(onnx_folder(name), **settings), generated(onnx_source(name)))
    assert (scheduler.preemptions > 0) == ("kv_tokens" in settings)


@pytest.mark.parametrize("name", ["llama3-fp32", "qwen3-growing"])
def test_logprobs_are_those_of_transformers(make: Make, name: str) -> None:
    check_logprobs(
        make(onnx_folder(name)),
        lambda tokens: logprobs_of(onnx_source(name), tokens),
        tolerance=1e-3,
    )


@pytest.mark.parametrize("name", ["qwen3-growing", "gpt2-growing"])
def test_growing_graphs_give_the_tokens_of_transformers(make: Make, name: str) -> None:
    backend = make(onnx_folder(name))
    assert "copied every step" in backend.info.details["graph"]
    check_contract(backend, generated(onnx_source(name)))


@pytest.mark.parametrize("name", ["llama-int8", "qwen3-int4", "llama3-int8"])
def test_quantized_graphs_give_the_same_tokens_single_and_batched(make: Make, name: str) -> None:
    backend, unbatched = make(onnx_folder(name)), make(onnx_folder(name), slots=1)
    check_contract(backend, greedy_unbatched(unbatched))


def test_long_prompts_cross_the_rope_scaling(make: Make) -> None:
    backend = make(onnx_folder("llama3-fp32"), context_tokens=700, slots=2)
    prompt = prompt_of(backend, 640, 4)  # Llama 3's RoPE scaling takes effect from 512 on
    assert generate(backend, prompt, 5, slot=1) == generated(onnx_source("llama3-fp32"))(prompt, 5)


def test_the_context_can_be_filled_to_the_last_token(make: Make) -> None:
    check_full_row(make, onnx_folder("llama-fp32"), generated(onnx_source("llama-fp32")))


@pytest.mark.parametrize("name", ["qwen2-fp32", "llama-int8", "qwen3-growing"])
def test_a_seeded_request_does_not_depend_on_its_batch_mates(make: Make, name: str) -> None:
    check_seeded(make(onnx_folder(name)))


def test_a_row_that_contradicts_the_cache_ends_the_engine(make: Make) -> None:
    check_contradictions(make(onnx_folder("qwen3-growing")))


def test_short_prompts_of_different_lengths_give_the_same_tokens_in_one_pass(make: Make) -> None:
    backend, unbatched = make(onnx_folder("llama-int8")), make(onnx_folder("llama-int8"), slots=1)
    prompts = [prompt_of(backend, tokens, slot) for slot, tokens in enumerate((9, 12, 11, 10))]
    rows = [row(slot, prompt, 0) for slot, prompt in enumerate(prompts)]
    assert len(backend._graph.group_prompts(rows)) == 1
    first = [result.token for result in backend.step(rows)]
    after = [row(slot, [token], len(prompts[slot])) for slot, token in enumerate(first)]
    second = [result.token for result in backend.step(after)]
    expected = [generate(unbatched, prompt, 2) for prompt in prompts]
    assert [list(pair) for pair in zip(first, second, strict=True)] == expected


def test_an_exported_slot_is_the_same_in_another_slot(make: Make) -> None:
    reference = greedy_unbatched(make(onnx_folder("llama-fp32"), slots=1))
    check_export(make(onnx_folder("llama-fp32")), reference)


def test_a_prompt_cache_gives_the_answers_of_more_slots(make: Make) -> None:
    check_prompt_cache(make, onnx_folder("llama-fp32"))
