"""The model families that people run, each by a tiny file: answers, four at once, second turns,
shared beginnings and memory, on the scheduler as it is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crossover.models.gguf.reader import read_header
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.backends.backend_table import BACKENDS
from crossover.serving.backends.llama_cpp.backend import LlamaCppBackend
from crossover.serving.backends.llama_cpp.cache_layout import keeps_windows_only, kv_bytes
from crossover.serving.backends.llama_cpp.dry_load import reported_memory
from crossover.serving.capacity.scheduler_settings import RequestedSettings, SchedulerSettings
from crossover.serving.engine.ipc_messages import Delta, GenerationRequest, Submit
from crossover.serving.engine.scheduler import Scheduler
from crossover.serving.placement.placement_policy import memory_at
from crossover.serving.sampling.step_inputs import Sampling
from tests.gguf_families import FAMILIES, ROUTED, SIZES, VOCABULARY, Sizes, write_family
from tests.serving.backends.backend_contract import check_prompt_cache
from tests.serving.backends.backend_steps import Make, generate, near_tie

# Of each kind one on every run: dense in parts, experts with windows, latent attention, a hybrid
# with experts, one state in all layers.
ON_EVERY_RUN = ("llama-split", "gpt-oss", "deepseek2", "qwen35", "granitehybrid", "mamba2")
NAMES = [
    pytest.param(name, marks=[] if name in ON_EVERY_RUN else [pytest.mark.slow])
    for name in FAMILIES
]
SLOTS, CONTEXT, ANSWER = 4, 2560, 16
SETTINGS = SchedulerSettings(slots=SLOTS, context_tokens=CONTEXT)
# Two tokens whose logits, alone, are this close are as good as each other. Sums of float32 in
# another order move logits a little; an expert that a router chooses otherwise, by 0.1 to 0.3.
ROUNDING_TIE, ROUTING_TIE = 0.02, 0.5
TABLE = [f" {token}".encode() for token in range(VOCABULARY)]


def sizes_of(name: str) -> Sizes:
    """Windows are short enough for this context to keep the window only."""
    return replace(SIZES.get(name, Sizes()), window=64)


class Chat:
    """A scheduler over a backend, and the tokens that it answers with."""

    def __init__(self, backend: LlamaCppBackend, **changes: bool) -> None:
        config = EngineConfig("llama_cpp", "", "m", settings=SETTINGS, **changes)
        self.scheduler = Scheduler(backend, TABLE, frozenset(), config)
        self.count = 0

    def ask(self, *prompts: Sequence[int]) -> list[tuple[list[int], int]]:
        """Answers to prompts that come together, each with the prompt's tokens that were cached."""
        first, self.count = self.count, self.count + len(prompts)
        for number, prompt in enumerate(prompts, first):
            request = GenerationRequest([*prompt], ANSWER, Sampling())
            assert self.scheduler.add(Submit(number, request)) is None
        deltas: dict[int, list[Delta]] = {}
        while self.scheduler.busy:
            for delta in self.scheduler.step():
                deltas.setdefault(delta.id, []).append(delta)
        answers = []
        for number in range(first, self.count):
            text = "".join(delta.text for delta in deltas[number])
            cached = [one.cached_tokens for one in deltas[number] if one.cached_tokens is not None]
            answers.append(([int(word) for word in text.split()], max(cached, default=0)))
        return answers


def tokens(seed: int, count: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(3, VOCABULARY, count)]


@pytest.mark.parametrize("name", NAMES)
def test_a_family_answers_single_batched_in_turns_and_from_a_shared_prefix(
    name: str, make: Make, tmp_path: Path
) -> None:
    file = write_family(name, tmp_path, sizes_of(name))
    settings = {"slots": SLOTS, "context_tokens": CONTEXT}
    backend, unbatched = make(file, **settings), make(file, **settings)
    tie = near_tie(unbatched, ROUTING_TIE if name in ROUTED else ROUNDING_TIE)

    def check(prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The answer is that of the prompt alone, in a slot without a past."""
        expected = generate(unbatched, prompt, ANSWER)
        for at, (one, other) in enumerate(zip(answer, expected, strict=True)):
            if one != other:
                prefix = [*prompt, *answer[:at]]
                # A router may also have chosen otherwise at an earlier token, which decoding
                # computed by itself: as alone, with one token in each step.
                as_decoded = name in ROUTED and generate(unbatched, prefix, 1, chunk=1) == [one]
                assert as_decoded or tie(prefix, one, other)
                return

    chat = Chat(backend)
    beginning = tokens(1, 150)
    prompts = [tokens(2, 40), tokens(3, 300), tokens(4, 7), tokens(5, 90)]
    for prompt, (answer, cached) in zip(prompts, chat.ask(*prompts), strict=True):
        assert cached == 0
        check(prompt, answer)

    turn, cached_before = [*prompts[1]], 0
    for seed in (6, 7):  # each turn goes on from the one before, and others come between
        answer = chat.ask(turn)[0][0]
        chat.ask(tokens(seed + 20, 60))
        turn = [*turn, *answer, *tokens(seed, 30)]
        answer, cached = chat.ask(turn)[0]
        assert cached >= len(prompts[1]) - 8 and cached > cached_before
        check(turn, answer)
        cached_before = cached

    for seed in (8, 9, 10, 11):
        prompt = [*beginning, *tokens(seed, 40)]
        answer, cached = chat.ask(prompt)[0]
        assert (cached >= len(beginning)) == (seed >= (10 if backend.info.has_checkpoints else 9))
        check(prompt, answer)
    both = [[*beginning, *tokens(seed, 25)] for seed in (12, 13)]
    for prompt, (answer, cached) in zip(both, chat.ask(*both), strict=True):
        assert cached >= len(beginning)
        check(prompt, answer)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_answers_alike_with_a_prompt_cache_and_with_a_slot_for_each_user(
    name: str, make: Make, tmp_path: Path
) -> None:
    file = write_family(name, tmp_path, sizes_of(name))
    unbatched = make(file, slots=SLOTS, context_tokens=CONTEXT)

    def tie(prefix: Sequence[int], one: int, other: int) -> bool:
        """A router may have chosen otherwise at an earlier token in either of the two, of which the
        one that did not answers as the prefix alone."""
        return name in ROUTED and generate(unbatched, prefix, 1)[0] in (one, other)

    check_prompt_cache(make, file, context_tokens=CONTEXT, tie=tie)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("context", [512, CONTEXT])
def test_the_layers_of_the_header_are_what_llama_cpp_allocates(
    name: str, context: int, tmp_path: Path
) -> None:
    """KV cache, windows and states by the header alone, as other machines are planned with; the
    buffer of a step without a file, in ModelSpec's terms."""
    file = write_family(name, tmp_path, sizes_of(name))
    spec = read_header(file).spec(name)
    requested = RequestedSettings(slots=2, context_tokens=context)
    (reported,) = reported_memory(str(file), spec, requested, prefix_reuse=False).values()
    log_rounding = 0.02 * 2**20  # llama.cpp says MiB with two decimals
    counted = kv_bytes(spec, 2 * context, 2, "fp16")
    assert reported.kv_bytes == pytest.approx(counted, rel=0.001, abs=log_rounding)
    assert reported.state_bytes == 2 * spec.state_bytes_per_slot
    keeps = any(one.window and keeps_windows_only(one.window, context) for one in spec.cache_groups)
    assert keeps == (context == CONTEXT and name in ("gemma3", "gemma4", "gpt-oss"))
    if name != "mamba2":  # the formula without a file knows attention only
        buffer = BACKENDS["llama_cpp"].buffer_bytes(spec, context, 2)
        assert buffer == pytest.approx(reported.buffer_bytes, rel=0.15, abs=2**21)


def test_without_a_context_both_sides_of_the_windows_edge_are_sized(
    tmp_path: Path,
) -> None:
    file = write_family("gpt-oss", tmp_path, sizes_of("gpt-oss"))
    spec = read_header(file).spec("gpt-oss")
    reported = reported_memory(str(file), spec, RequestedSettings(slots=2), prefix_reuse=False)
    assert list(reported) == [2048, 2304, 2305, 4096]
    for context in (2100, 2304, 2305, 3000):
        counted = kv_bytes(spec, 2 * -(-context // 256) * 256, 2, "fp16")
        assert memory_at(reported, context).kv_bytes == pytest.approx(counted, rel=0.05)
