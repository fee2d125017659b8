"""Architectures beside the families of tests/gguf_families.py, with other sizes, an odd number of
heads, other weight formats, and files in three parts: memory, answers, reuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossover.models.errors import UnsupportedModel
from crossover.models.gguf.reader import read_header
from crossover.serving.backends.llama_cpp.cache_layout import kv_bytes
from crossover.serving.backends.llama_cpp.dry_load import reported_memory
from crossover.serving.capacity.scheduler_settings import RequestedSettings
from tests.gguf_architectures import write_architecture
from tests.serving.backends.backend_steps import Make, generate, near_tie
from tests.serving.backends.llama_cpp.test_families import (
    ANSWER,
    CONTEXT,
    ROUTING_TIE,
    SLOTS,
    Chat,
    tokens,
)

DENSE = (
    *("arcee", "baichuan", "bloom", "chatglm", "cohere2", "command-r", "ernie4_5", "exaone"),
    *("exaone4", "falcon", "falcon-h1", "gemma", "gemma2", "glm4", "gpt2", "gptneox", "granite"),
    *(
        "hunyuan-dense",
        "internlm2",
        "jamba",
        "lfm2",
        "mamba",
        "minicpm",
        "minicpm3",
        "mpt",
        "nemotron",
    ),
    *(
        "nemotron_h",
        "olmo",
        "olmo2",
        "orion",
        "phi2",
        "phi3",
        "plamo",
        "plamo2",
        "plamo3",
        "plm",
        "qwen",
    ),
    *("qwen2", "seed_oss", "stablelm", "starcoder2", "xverse"),
)
MIXTURES = (
    *("afmoe", "arctic", "bailingmoe", "bailingmoe2", "cohere2moe", "dbrx", "deepseek"),
    *("deepseek2", "deepseek32", "ernie4_5-moe", "exaone-moe", "glm4moe", "granitemoe", "grok"),
    *("grovemoe", "hunyuan-moe", "kimi-linear", "lfm2moe", "llama4", "mimo2", "minimax-m2"),
    *("mistral4", "phimoe", "qwen2moe", "smallthinker"),
)
ON_EVERY_RUN = ("jamba", "kimi-linear", "smallthinker")
FORMATS = ("Q5_0", "Q4_1", "Q8_0", "BF16", "Q5_1", "F16", "Q4_0")
CASES = [
    pytest.param(
        *(name, name in MIXTURES, FORMATS[place % len(FORMATS)], 1 + 2 * (place % 3 == 0)),
        marks=[] if name in ON_EVERY_RUN else [pytest.mark.slow],
        id=name,
    )
    for place, name in enumerate((*DENSE, *MIXTURES))
]
LOG_ROUNDING = 0.02 * 2**20  # llama.cpp says MiB with two decimals


@pytest.mark.parametrize(("name", "with_experts", "weight_format", "parts"), CASES)
def test_an_architecture_is_sized_and_answers_single_batched_and_in_turns(
    name: str, with_experts: bool, weight_format: str, parts: int, make: Make, tmp_path: Path
) -> None:
    file = write_architecture(
        name, tmp_path, with_experts=with_experts, weight_format=weight_format, parts=parts
    )
    header = read_header(file)
    spec = header.spec(name)
    assert (header.weight_format, len(header.files)) == (weight_format, parts)
    assert (spec.experts is not None) == with_experts
    for context in (512, CONTEXT):
        requested = RequestedSettings(slots=2, context_tokens=context)
        (reported,) = reported_memory(str(file), spec, requested, prefix_reuse=False).values()
        counted = kv_bytes(spec, 2 * context, 2, "fp16")
        assert reported.kv_bytes == pytest.approx(counted, rel=0.001, abs=LOG_ROUNDING)
        states = 2 * spec.state_bytes_per_slot
        assert reported.state_bytes == pytest.approx(states, abs=LOG_ROUNDING)

    settings = {"slots": SLOTS, "context_tokens": CONTEXT}
    chat, unbatched = Chat(make(file, **settings)), make(file, **settings)
    is_tie = near_tie(unbatched, ROUTING_TIE)
    prompts = [tokens(2, 40), tokens(3, 300), tokens(4, 7), tokens(5, 90)]
    answers = [answer for answer, _ in chat.ask(*prompts)]
    turn = [*prompts[1], *answers[1], *tokens(6, 30)]
    again, cached = chat.ask(turn)[0]
    assert cached >= len(prompts[1]) - 8
    for prompt, answer in zip((*prompts, turn), (*answers, again), strict=True):
        expected = generate(unbatched, prompt, ANSWER)
        differing = [at for at in range(ANSWER) if answer[at] != expected[at]]
        if differing:
            at = differing[0]
            assert is_tie([*prompt, *answer[:at]], answer[at], expected[at])


def test_an_encoder_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = write_architecture("modern-bert", tmp_path)
    spec = read_header(file).spec("modern-bert")
    with pytest.raises(UnsupportedModel, match=r"keeps nothing of a sequence.*--embeddings"):
        reported_memory(str(file), spec, RequestedSettings(slots=2))
