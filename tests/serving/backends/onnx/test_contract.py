"""The onnx backend on tiny graphs made by the product's own converter: held to the contract and to
transformers' generate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serving.sampling.step_rows import Row, Sampling
from tests.serving.backends.backend_contract import (
    check_churn,
    check_contract,
    check_contradictions,
    check_prompt_scores,
    check_scheduled,
    check_seeded,
)
from tests.serving.backends.backend_steps import generate, greedy_alone, prompt_of, row
from tests.serving.backends.hf_folders import generated, logprobs_of, onnx_folder, onnx_source
from tests.serving.backends.onnx.engines import Make

# --- the right tokens


@pytest.mark.parametrize(
    "name", ["llama-fp32", "llama3-fp32", "qwen2-fp32", "qwen3-fp32", "mistral-fp32"]
)
def test_float_graphs_give_the_tokens_of_transformers(make: Make, name: str) -> None:
    backend = make(onnx_folder(name))
    assert "GroupQueryAttention" in backend.info.details["graph"]
    reference = generated(onnx_source(name))
    check_contract(backend, reference)
    check_churn(backend, reference, seed=1, requests=32, steps=2000)


@pytest.mark.parametrize("name", ["llama-fp32", "qwen3-growing"])
@pytest.mark.parametrize("settings", [{}, {"kv_tokens": 200}], ids=["room", "preempting"])
def test_the_scheduler_gives_the_tokens_of_transformers(
    make: Make, name: str, settings: dict[str, Any]
) -> None:
    scheduler = check_scheduled(make(onnx_folder(name), **settings), generated(onnx_source(name)))
    assert (scheduler.preemptions > 0) == ("kv_tokens" in settings)


@pytest.mark.parametrize("name", ["llama3-fp32", "qwen3-growing"])
def test_prompt_logprobs_are_those_of_transformers(make: Make, name: str) -> None:
    check_prompt_scores(
        make(onnx_folder(name)),
        lambda tokens: logprobs_of(onnx_source(name), tokens),
        tolerance=1e-3,
    )


@pytest.mark.parametrize("name", ["qwen3-growing", "gpt2-growing"])
def test_growing_graphs_give_the_tokens_of_transformers(make: Make, name: str) -> None:
    backend = make(onnx_folder(name))
    assert "copied every step" in backend.info.details["graph"]
    check_contract(backend, generated(onnx_source(name)))
    check_churn(backend, generated(onnx_source(name)), seed=2, requests=32, steps=2000)


@pytest.mark.parametrize("name", ["llama-int8", "qwen3-int4", "llama3-int8"])
def test_quantised_graphs_give_the_same_tokens_alone_and_batched(make: Make, name: str) -> None:
    backend, alone = make(onnx_folder(name)), make(onnx_folder(name), slots=1)
    check_contract(backend, greedy_alone(alone))
    check_churn(backend, greedy_alone(alone), seed=3, requests=32, steps=2000)


def test_a_foreign_dynamic_graph_says_that_it_depends_on_the_batch(make: Make) -> None:
    """One with a scale for the whole batch, as quantisers write them; ours have one a token."""
    assert "batch_dependent" not in make(onnx_folder("llama3-int8")).info.details
    backend = make(onnx_folder("gpt2-growing-int8"))
    assert backend.info.details["batch_dependent"] == "true"
    prompt = prompt_of(backend, 20, 1)
    assert generate(backend, prompt, 6) == generate(backend, prompt, 6, slot=3)  # alone it repeats


def test_long_context_and_prompts_longer_than_the_chunk(make: Make) -> None:
    folder = onnx_folder("llama3-fp32")
    backend = make(folder, context_tokens=700, slots=2, options={"prefill_chunk": 100})
    prompt = prompt_of(
        backend, 640, 4
    )  # beyond the 512 tokens from which Llama 3's RoPE scaling takes effect
    assert generate(backend, prompt, 5, slot=1) == generated(onnx_source("llama3-fp32"))(prompt, 5)


def test_the_context_can_be_filled_to_the_last_token(make: Make) -> None:
    backend = make(onnx_folder("llama-fp32"), context_tokens=64, slots=3)
    full = prompt_of(backend, 64, 5)
    reference = generated(onnx_source("llama-fp32"))
    assert backend.step([row(1, full, 0)])[0].token == reference(full, 1)[0]
    # A full row between two that decode has no room for a dummy token and must be moved out of the
    # way.
    others = {slot: prompt_of(backend, 9, slot) for slot in (0, 2)}
    last = {slot: backend.step([row(slot, others[slot], 0)])[0].token for slot in others}
    results = backend.step([row(slot, [last[slot]], 9) for slot in (0, 2)])
    assert [result.token for result in results] == [
        reference(others[slot], 2)[1] for slot in (0, 2)
    ]
    assert backend.step([row(1, full[63:], 63)])[0].token == reference(full, 1)[0]


@pytest.mark.parametrize("name", ["qwen2-fp32", "llama-int8", "qwen3-growing"])
def test_a_seeded_request_does_not_depend_on_its_batch_mates(make: Make, name: str) -> None:
    check_seeded(make(onnx_folder(name)))


def test_logprobs_and_penalties_reach_the_sampler(make: Make) -> None:
    backend = make(onnx_folder("llama-fp32"))
    prompt = prompt_of(backend, 10, 7)
    greedy = backend.step([row(0, prompt, 0, sampling=Sampling(logprobs=3))])[0]
    assert (
        greedy.logprobs is not None
        and greedy.logprobs.top_ids[0] == greedy.token
        and greedy.logprobs.logprob < 0
    )
    banned = Row(0, np.array(prompt, np.int32), 0, True, banned=(greedy.token,))
    assert backend.step([banned])[0].token == greedy.logprobs.top_ids[1]


def test_a_row_that_contradicts_the_cache_ends_the_engine(make: Make) -> None:
    for name in ("llama-fp32", "qwen3-growing"):
        check_contradictions(make(onnx_folder(name)))


def test_short_prompts_of_unlike_lengths_in_one_pass_are_as_each_alone(make: Make) -> None:
    backend, alone = make(onnx_folder("llama-int8")), make(onnx_folder("llama-int8"), slots=1)
    prompts = [prompt_of(backend, tokens, slot) for slot, tokens in enumerate((9, 12, 11, 10))]
    rows = [row(slot, prompt, 0) for slot, prompt in enumerate(prompts)]
    assert backend._graph is not None and len(backend._graph._neighbours(rows, 512)) == 1  # type: ignore[union-attr]
    first = [result.token for result in backend.step(rows)]
    after = [row(slot, [token], len(prompts[slot])) for slot, token in enumerate(first)]
    second = [result.token for result in backend.step(after)]
    expected = [generate(alone, prompt, 2) for prompt in prompts]
    assert [list(pair) for pair in zip(first, second, strict=True)] == expected
