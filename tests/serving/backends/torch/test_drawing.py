"""What torch draws on the device: the tokens of the host, and what is left to it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from crossover.serving.backends.torch.gpu_sampler import DeviceSampler, can_draw
from crossover.serving.sampling.batch_sampler import sample
from crossover.serving.sampling.step_inputs import Sampling
from tests.serving.backends.backend_steps import Make, prompt_of, row
from tests.serving.backends.hf_folders import hf_folder

CPU = DeviceSampler(torch.device("cpu"))
KINDS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.6),
    Sampling(temperature=0.9, top_p=0.9, top_k=50),
    Sampling(temperature=0.8, top_k=1),
)


@pytest.mark.parametrize("sampling", KINDS, ids=str)
@pytest.mark.parametrize("vocabulary", [300, 6000])
@pytest.mark.parametrize("has_ties", [False, True])
def test_the_device_draws_what_the_host_draws(
    sampling: Sampling, vocabulary: int, has_ties: bool
) -> None:
    logits = np.random.default_rng(1).normal(0, 3, (64, vocabulary)).astype(np.float32)
    if has_ties:  # as a model in bf16 gives them
        logits = torch.from_numpy(logits).bfloat16().float().numpy()
    logits[7] = float("nan")  # harms no other row
    rows = [
        row(0, [1], at, sampling=msgspec.structs.replace(sampling, seed=at * 31))
        for at in range(64)
    ]
    tokens, good = CPU.draw(torch.from_numpy(logits), rows)
    assert not good[7] and 0 <= tokens[7] < vocabulary, "the next step may have begun with it"
    assert good.float().mean() > 0.9, "proposals of a peaked row may all be refused"
    fine = [at for at in range(64) if good[at]]
    host = sample(logits[fine], [rows[at] for at in fine])
    assert tokens[fine].tolist() == [one.token for one in host]


def test_the_device_reports_when_it_cannot_sample() -> None:
    flat = torch.zeros(2, 9000)  # half of the mass is more than the candidates that are looked at
    flat[1, 0] = float("nan")
    rows = [row(0, [1], 3, sampling=Sampling(temperature=1.0, top_p=0.9, seed=1)), row(1, [1], 3)]
    _, good = CPU.draw(flat, rows)
    assert good.tolist() == [False, False]
    assert not can_draw(row(0, [1], 0, sampling=Sampling(logprobs=1)))
    assert not can_draw(row(0, [1], 0, sampling=Sampling(presence_penalty=0.5)))
    assert not can_draw(row(0, [1], 0, sampling=Sampling(temperature=1.0, min_p=0.1)))
    assert not can_draw(replace(row(0, [1], 0), banned=(3,)))


def test_rows_that_the_device_cannot_draw_go_to_the_host(make: Make) -> None:
    backend, other = make(hf_folder("tiny-llama")), make(hf_folder("tiny-llama"))
    backend._device_sampling = True
    samplings = [
        Sampling(temperature=1.0, seed=1),
        Sampling(logprobs=2),
        Sampling(temperature=1.0, seed=2, logit_bias={7: 30.0}),
        Sampling(),
    ]
    rows = [
        row(slot, prompt_of(backend, 9, slot), 0, sampling=sampling)
        for slot, sampling in enumerate(samplings)
    ]
    mixed, host = backend.step(rows), other.step(rows)
    assert [result.token for result in mixed] == [result.token for result in host]
    assert mixed[1].logprobs is not None and mixed[2].token == 7
