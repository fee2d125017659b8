"""The llama.cpp backend on tiny GGUF files: held to the contract, and to transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from crossover.models.text.tokenizer import load_tokenizer
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.engine.ipc_messages import GenerationRequest, Submit
from crossover.serving.engine.scheduler import Scheduler
from crossover.serving.sampling.grammar import Grammars
from crossover.serving.sampling.step_inputs import Sampling
from tests.gguf_files import gguf_of
from tests.serving.backends.backend_contract import (
    check_churn,
    check_contract,
    check_export,
    check_logprobs,
    check_prompt_cache,
    check_scheduled,
    check_seeded,
)
from tests.serving.backends.backend_steps import (
    Make,
    generate,
    greedy_unbatched,
    near_tie,
    prompt_of,
)
from tests.serving.backends.hf_folders import generated, hf_folder, logprobs_of
from tests.shapes import TINY, TINY_LLAMA, TINY_QWEN2, TINY_QWEN3

POOL = {"kv_tokens": 5 * 256 - 1}  # less than a part for each of the five slots


@pytest.mark.parametrize(
    ("weight_format", "settings"),
    [
        ("Q8_0", {}),
        ("Q4_0", {}),
        ("F16", {"options": {"flash_attention": "on"}}),
        ("F16", {"kv_tokens": 1024}),
        ("F16", {"threads": 2}),
        ("F16", {"slots": 1}),
    ],
)
def test_contract_under_options(make: Make, weight_format: str, settings: dict[str, Any]) -> None:
    unbatched_settings = {key: value for key, value in settings.items() if key != "slots"}
    check_contract(
        make(weight_format=weight_format, **settings),
        greedy_unbatched(make(weight_format=weight_format, **unbatched_settings)),
        seed=1,
    )


@pytest.mark.parametrize("unified", [True, False])
def test_contract_with_quantised_kv_up_to_near_ties(make: Make, unified: bool) -> None:
    settings: dict[str, Any] = {"kv_dtype": "q8_0"} | (POOL if unified else {})
    reference = greedy_unbatched(make(TINY_QWEN3, **settings))
    tie = near_tie(make(TINY_QWEN3, **settings), logits=0.2)
    backend = make(TINY_QWEN3, **settings)
    assert backend.info.details["flash_attention"] == "on"
    check_contract(backend, reference, tie=tie)


@pytest.mark.parametrize("settings", [{}, POOL, {"kv_dtype": "q8_0"}])
def test_an_exported_slot_is_the_same_in_another_slot(make: Make, settings: dict[str, Any]) -> None:
    tie = near_tie(make(TINY_QWEN3, **settings), logits=0.2) if "kv_dtype" in settings else None
    reference = greedy_unbatched(make(TINY_QWEN3, **settings))
    backend = make(TINY_QWEN3, prompt_cache_bytes=1 << 24, **settings)
    check_export(backend, reference, tie=tie)


@pytest.mark.parametrize("cached", [{}, {"kv_tokens": 3 * 256 - 1}])
def test_a_prompt_cache_gives_the_answers_of_more_slots(make: Make, cached: dict[str, Any]) -> None:
    check_prompt_cache(make, TINY_QWEN3, cached=cached)


def test_a_slot_may_be_restored_over_before_its_prefix_reaches_the_other_slot(make: Make) -> None:
    """llama.cpp copies between slots in the next step. Here two prompts are admitted before it: one
    that gets the beginning of slot 0, and one whose stored history replaces what slot 0 holds."""
    size = 32 << 20
    backend = make(slots=2, prompt_cache_bytes=size)
    reference = greedy_unbatched(make(slots=1))
    table = [b" %d" % token for token in range(backend.info.vocabulary)]
    config = EngineConfig("", "", "", prompt_cache_bytes=size)
    scheduler = Scheduler(backend, table, frozenset(), config)

    def answers(*prompts: list[int]) -> list[list[int]]:
        for number, prompt in enumerate(prompts):
            scheduler.add(Submit(number, GenerationRequest(prompt, 8)))
        text = [""] * len(prompts)
        while scheduler.busy:
            for delta in scheduler.step():
                text[delta.id] += delta.text
        return [[int(token) for token in answer.split()] for answer in text]

    first, second = prompt_of(backend, 100, 1), prompt_of(backend, 100, 2)
    shared = prompt_of(backend, 60, 3)
    answers(first)  # in slot 0
    answers(second)  # in slot 1
    answers([*shared, *prompt_of(backend, 80, 4)])  # in slot 0, so that the first is stored
    end = prompt_of(backend, 30, 7)
    prompts = [[*shared, *end], [*first, *prompt_of(backend, 9, 6)]]
    with_other_beginning = reference([*first[:60], *end], 8)
    assert reference(prompts[0], 8) != with_other_beginning, "the answer shows which KV it had"
    assert answers(*prompts) == [reference(prompt, 8) for prompt in prompts]
    stats = scheduler.stats().prompt_cache
    assert stats is not None and stats.restored_tokens == 100


# --- against transformers


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A Hugging Face folder converted to GGUF of the same precision by the product."""
    folder = tmp_path_factory.mktemp("converted")

    def file(shape: str, kind: str = "F32") -> Path:
        path = folder / f"{shape}-{kind}.gguf"
        if not path.exists():
            dtype = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}[kind]
            gguf_of(hf_folder(shape, dtype), TINY[shape], path, kind)
        return path

    return file


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("shape", TINY)
def test_float32_gives_the_tokens_of_transformers(
    make: Make, converted: Callable[..., Path], shape: str, unified: bool
) -> None:
    backend = make(converted(shape), kv_dtype="fp32", **(POOL if unified else {}))
    check_contract(backend, generated(hf_folder(shape)))


# llama.cpp rounds what it multiplies 16-bit weights with to 16 bits as well: a token may differ
# where transformers in float32 finds the two nearly as likely, up to so many nats.
@pytest.mark.parametrize(
    ("shape", "kind", "nats"),
    [
        ("tiny-llama", "F16", 0.01),
        ("tiny-qwen3", "BF16", 0.1),
        pytest.param("tiny-llama", "BF16", 0.1, marks=pytest.mark.slow),
        pytest.param("tiny-qwen3", "F16", 0.01, marks=pytest.mark.slow),
    ],
)
def test_sixteen_bits_give_the_tokens_of_transformers_up_to_ties(
    make: Make, converted: Callable[..., Path], shape: str, kind: str, nats: float
) -> None:
    backend = make(converted(shape, kind), kv_dtype="fp32")
    folder = hf_folder(shape, {"F16": "fp16", "BF16": "bf16"}[kind])

    def tie(prefix: Sequence[int], one: int, other: int) -> bool:
        last = logprobs_of(folder, prefix)[-1]
        return bool(abs(last[one] - last[other]) < nats)

    prompts = [prompt_of(backend, 5 + 9 * seed, seed) for seed in range(8)]
    reference = generated(folder)
    equal = sum(generate(backend, one, 8) == reference(one, 8) for one in prompts)
    assert equal >= 6, "ties are rare"
    check_churn(backend, reference, tie=tie, seed=1, requests=32, steps=2000)


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_tokens": 256}, POOL],
    ids=["parts", "preempting", "pool"],
)
def test_the_scheduler_gives_the_tokens_of_transformers(
    make: Make, converted: Callable[..., Path], settings: dict[str, Any]
) -> None:
    backend = make(converted("tiny-qwen2"), kv_dtype="fp32", **settings)
    scheduler = check_scheduled(backend, generated(hf_folder("tiny-qwen2")))
    assert (scheduler.preemptions > 0) == (settings == {"kv_tokens": 256})


def test_long_prompts_cross_the_rope_scaling(make: Make, converted: Callable[..., Path]) -> None:
    """Llama 3's takes effect from 512 tokens on."""
    settings = {"context_tokens": 768, "slots": 2}
    backend = make(converted("tiny-llama3"), kv_dtype="fp32", **settings)
    prompt = prompt_of(backend, 640, 4)
    assert generate(backend, prompt, 5, slot=1) == generated(hf_folder("tiny-llama3"))(prompt, 5)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3"])
def test_logprobs_are_those_of_transformers(
    make: Make, converted: Callable[..., Path], shape: str
) -> None:
    backend = make(converted(shape), kv_dtype="fp32")
    folder = hf_folder(shape)
    check_logprobs(backend, lambda tokens: logprobs_of(folder, tokens), tolerance=1e-3)


# --- sampling through the backend


@pytest.mark.parametrize("unified", [True, False])
def test_a_seeded_request_gives_the_same_tokens_in_any_company(make: Make, unified: bool) -> None:
    check_seeded(make(TINY_QWEN2, **(POOL if unified else {})))


def test_a_grammar_is_kept_through_the_scheduler(
    make: Make, gguf_file: Callable[..., Path]
) -> None:
    """Greedy, drawn and truncated draws in one batch, one of them a JSON schema; a request without
    a grammar decodes beside them.
    """
    tokenizer = load_tokenizer(gguf_file(TINY_LLAMA))
    grammars = Grammars(tokenizer.token_bytes(), tokenizer.eos_ids)
    backend = make(TINY_LLAMA)
    config = EngineConfig("llama_cpp", "", "m", settings=backend.info.settings)
    scheduler = Scheduler(backend, tokenizer.token_bytes(), tokenizer.eos_ids, config)
    grammar = 'root ::= [a-c] [0-9]{2} (" yes" | " no") "."'
    kinds = {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": kinds, "required": ["kind", "age"]}
    samplings = [
        Sampling(grammar=grammar),
        Sampling(grammar=grammar, temperature=1.0, seed=4),
        Sampling(grammar=grammar, temperature=1.0, top_k=5, seed=5),
        Sampling(
            json_schema=json.dumps(schema | {"additionalProperties": False}),
            temperature=0.8,
            seed=1,
        ),
        Sampling(temperature=1.0, seed=2),
    ]
    for number, sampling in enumerate(samplings):
        submit = Submit(number, GenerationRequest([20, 21, 22 + number], 120, sampling))
        matcher = grammars.open(sampling) if sampling.is_constrained else None
        assert scheduler.add(submit, matcher) is None
    text, finish = [""] * len(samplings), [""] * len(samplings)
    while scheduler.busy:
        for delta in scheduler.step():
            text[delta.id] += delta.text
            finish[delta.id] = delta.finish or ""
    assert finish[:4] == ["stop"] * 4
    assert all(re.fullmatch(r"[a-c][0-9]{2} (yes|no)\.", found) for found in text[:3])
    document = json.loads(text[3])
    assert document["kind"] in ("cat", "dog") and document["age"] <= 99
