"""The torch backend on tiny folders: held to the contract, and to transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from crossover.serving.errors import BackendUnavailable
from tests.serving.backends.backend_contract import (
    check_contract,
    check_logprobs,
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
from tests.shapes import TINY

ON_EVERY_RUN = ("tiny-llama3", "tiny-qwen3")
SHAPES = [
    pytest.param(name, marks=[] if name in ON_EVERY_RUN else [pytest.mark.slow]) for name in TINY
]


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_gives_the_tokens_of_transformers(make: Make, shape: str) -> None:
    backend = make(hf_folder(shape))
    check_contract(backend, generated(hf_folder(shape)))


def test_bfloat16_gives_the_same_tokens_single_and_batched_up_to_ties(make: Make) -> None:
    folder = hf_folder("tiny-qwen2", "bf16")
    backend, unbatched, judge = make(folder), make(folder, slots=1), make(folder, slots=1)
    assert backend.info.weight_format == "bf16"
    check_contract(backend, greedy_unbatched(unbatched), tie=near_tie(judge, 0.3))
    prompt = prompt_of(backend, 30, 2)
    close = near_tie(judge, 0.3)
    expected = generated(folder)(prompt, 1)[0]  # of the same rounded weights, computed in float32
    token = generate(backend, prompt, 1)[0]
    assert token == expected or close(prompt, token, expected)


def test_long_prompts_cross_the_rope_scaling(make: Make) -> None:
    backend = make(hf_folder("tiny-llama3"), context_tokens=700, slots=3)
    prompt = prompt_of(backend, 640, 4)
    assert generate(backend, prompt, 3) == generated(hf_folder("tiny-llama3"))(prompt, 3)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_seeded_request_does_not_depend_on_its_batch_mates(make: Make, on_device: bool) -> None:
    backend = make(hf_folder("tiny-qwen3"))
    backend._device_sampling = on_device
    check_seeded(backend)


@pytest.mark.parametrize("settings", [{}, {"kv_tokens": 200}], ids=["room", "preempting"])
def test_the_scheduler_gives_the_tokens_of_transformers(
    make: Make, settings: dict[str, Any]
) -> None:
    scheduler = check_scheduled(
        make(hf_folder("tiny-qwen2"), **settings), generated(hf_folder("tiny-qwen2"))
    )
    assert (scheduler.preemptions > 0) == ("kv_tokens" in settings)


@pytest.mark.parametrize("on_device", [False, True])
def test_logprobs_are_those_of_transformers(make: Make, on_device: bool) -> None:
    backend = make(hf_folder("tiny-llama3"))
    backend._device_sampling = on_device
    check_logprobs(
        backend, lambda tokens: logprobs_of(hf_folder("tiny-llama3"), tokens), tolerance=1e-3
    )


def test_a_gpu_that_does_not_exist_is_refused(make: Make) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(BackendUnavailable, match="finds no GPU"):
        make(hf_folder("tiny-llama"), device="gpu")
