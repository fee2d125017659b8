"""Steps of the torch backend that are launched before the tokens of the one before are read: on the
CPU, where a launch computes at once; `gpu` tests run launched steps on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from crossover.serving.backends.torch.backend import TorchBackend
from crossover.serving.sampling.step_inputs import NO_TOKEN, Sampling
from tests.serving.backends.backend_contract import check_scheduled
from tests.serving.backends.backend_steps import Make, prompt_of, row
from tests.serving.backends.hf_folders import generated, hf_folder
from tests.tools.device_waits import waits_of_a_launch


def on_device(backend: TorchBackend, chosen: bool = True) -> TorchBackend:
    """Tokens are drawn there."""
    backend._device_sampling = chosen
    return backend


def test_the_scheduler_gives_the_tokens_of_transformers(make: Make) -> None:
    backend = on_device(make(hf_folder("tiny-qwen2")))
    check_scheduled(backend, generated(hf_folder("tiny-qwen2")))


def test_a_token_that_is_no_good_is_left_to_a_step(make: Make) -> None:
    backend = on_device(make(hf_folder("tiny-llama")))
    assert backend._model is not None
    rows = [row(slot, prompt_of(backend, 9, slot), 0) for slot in range(3)]
    flight = backend.launch(rows, None)
    assert flight is not None
    expected = [one.token for one in backend.step(rows)]
    assert [one and one.token for one in flight.tokens()] == expected
    with torch.inference_mode():
        backend._model.weights.norm.fill_(float("nan"))
    flight = backend.launch(rows, None)
    assert flight is not None and flight.tokens() == [None] * 3
    assert [one.token for one in backend.step(rows)] == [NO_TOKEN] * 3


def test_rows_that_the_host_draws_are_not_launched(make: Make) -> None:
    backend = on_device(make(hf_folder("tiny-llama")))
    for sampling in (
        Sampling(logprobs=1),
        Sampling(presence_penalty=0.4),
        Sampling(temperature=1.0, top_k=5000),
    ):
        assert backend.launch([row(0, [5, 6], 0, sampling=sampling)], None) is None
    assert backend._lengths == [0] * 5, "nothing is done"
    off = make(hf_folder("tiny-llama"))
    assert off.launch([row(0, [5, 6], 0)], None) is None, "the CPU gains nothing"


@pytest.mark.parametrize("prompts", [False, True])
def test_a_launch_waits_for_no_copy(prompts: bool) -> None:
    assert waits_of_a_launch("1b", prompts=prompts) == []
