"""Steps of the torch backend that are launched before the tokens of the one before are read: on the
CPU, where a launch computes at once, and with a stand-in for CUDA's graphs. Never run on a GPU.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch

from serving.backends.torch.backend import TorchBackend
from serving.engine.ipc_messages import GenerationRequest, Submit
from serving.sampling.step_rows import DRAWN, NO_TOKEN, Sampling
from tests.serving.backends.backend_contract import check_scheduled, scheduler_on
from tests.serving.backends.backend_steps import Make, prompt_of, row
from tests.serving.backends.hf_folders import generated, hf_folder
from tests.tools.device_waits import waits_of_a_launch
from tests.tools.fake_cuda import FakeCuda, install_flash

KINDS = (
    *(Sampling(), Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.8, top_k=20)),
    *(Sampling(temperature=1.2, top_p=0.7), Sampling(temperature=1.1)),
    Sampling(logprobs=1),
    Sampling(presence_penalty=0.4),
)


def on_device(backend: TorchBackend, chosen: bool = True) -> TorchBackend:
    """Tokens are drawn there."""
    backend._device_sampling = chosen
    return backend


def answers(backend: TorchBackend, seed: int) -> tuple[dict[int, list[str]], list[int]]:
    """Texts, ends and log-probabilities of a load made of the seed, and the rows of each launched
    step that held tokens not known yet."""
    rng, ahead, launch = random.Random(seed), [], backend.launch

    def seen(rows: Any, after: Any) -> Any:
        flight = launch(rows, after)
        if flight is not None:
            ahead.append(sum(row.tokens[0] == DRAWN for row in rows))
        return flight

    backend.launch = seen  # type: ignore[method-assign]
    scheduler = scheduler_on(backend, prefill_tokens=24)
    out: dict[int, list[str]] = {}
    shared, number = prompt_of(backend, 30, seed), 0
    while number < 24 or scheduler.busy:
        for _ in range(rng.choice([0, 0, 1, 2]) if number < 24 else 0):
            prompt = shared[: rng.choice([0, 30])] + prompt_of(backend, rng.randint(1, 40), number)
            kind = rng.choice(KINDS)
            sampling = msgspec.structs.replace(kind, seed=number)
            asked = GenerationRequest(
                *(prompt, rng.randint(1, 25), sampling),
                stop=["7 "] if rng.random() < 0.3 else [],
                min_tokens=rng.choice([0, 0, 0, 4]),
            )
            assert scheduler.add(Submit(number, asked)) is None
            number += 1
        for delta in scheduler.step():
            details = "".join(f"{one.logprob:.3f} " for one in delta.details)
            out.setdefault(delta.id, []).append(delta.text + details + str(delta.finish or ""))
    del backend.launch
    return {key: ["".join(parts)] for key, parts in out.items()}, ahead


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_steps_that_are_waited_for(make: Make, seed: int) -> None:
    folder = hf_folder("tiny-llama")
    found, ahead = answers(on_device(make(folder)), seed)
    expected, none = answers(make(folder), seed)
    assert found == expected
    assert sum(ahead) > 5 and not none


def test_so_they_are_in_graphs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    was = torch.backends.cuda.cudnn_sdp_enabled()
    cuda = FakeCuda().install(monkeypatch)
    install_flash(monkeypatch)
    settings = {"device": "gpu", "weight_format": "fp32"}
    one, other = (make(hf_folder("tiny-qwen3"), **settings) for _ in range(2))
    (mine, ahead), (theirs, none) = answers(one, 7), answers(on_device(other, False), 7)
    torch.backends.cuda.enable_cudnn_sdp(was)
    assert mine == theirs and sum(ahead) > 5 and not none
    assert sum(graph.replays for graph in cuda.graphs) > 50


def test_they_are_those_of_transformers(make: Make) -> None:
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
    for sampling in (*KINDS[-2:], Sampling(temperature=1.0, top_k=5000)):
        assert backend.launch([row(0, [5, 6], 0, sampling=sampling)], None) is None
    assert backend._lengths == [0] * 5, "nothing is done"
    off = make(hf_folder("tiny-llama"))
    assert off.launch([row(0, [5, 6], 0)], None) is None, "the CPU gains nothing"


@pytest.mark.parametrize("prompts", [False, True])
def test_a_launch_waits_for_no_copy(prompts: bool) -> None:
    assert waits_of_a_launch("1b", prompts=prompts) == []
