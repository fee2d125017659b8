"""Steps of a loaded backend: prompts, greedy tokens, and when two tokens are as good as equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossover.serving.backends.backend_interface import Backend
from crossover.serving.sampling.step_inputs import Row, Sampling

Make = Callable[..., Any]  # the fixture of conftest.py
Reference = Callable[[Sequence[int], int], list[int]]
# (prefix, one token, another) -> equally good after the prefix?
Tie = Callable[[Sequence[int], int, int], bool]
GREEDY = Sampling()


def row(
    slot: int,
    tokens: Sequence[int],
    start: int,
    *,
    wants_token: bool = True,
    sampling: Sampling = GREEDY,
) -> Row:
    """A Row from a plain list of token ids."""
    return Row(slot, np.asarray(tokens, np.int32), start, wants_token, sampling)


def prompt_of(backend: Backend, length: int, seed: int) -> list[int]:
    """A seeded prompt of `length` token ids, the lowest three (usually special tokens) left out."""
    low = min(3, backend.info.vocabulary - 1)
    ids = np.random.default_rng((seed, length)).integers(low, backend.info.vocabulary, length)
    return [int(token) for token in ids]


def generate(
    backend: Backend,
    prompt: Sequence[int],
    count: int,
    *,
    slot: int = 0,
    start: int = 0,
    chunk: int | None = None,
) -> list[int]:
    """`count` greedy tokens after `prompt`, of which `start` tokens are in the KV already."""
    most = min(chunk or len(prompt), backend.info.settings.step_tokens)
    position, out = start, []
    while position < len(prompt):
        piece = prompt[position : position + most]
        last = position + len(piece) == len(prompt)
        results = backend.step([row(slot, piece, position, wants_token=last)])
        assert len(results) == int(last)
        out = [result.token for result in results]
        position += len(piece)
    while len(out) < count:
        out += [result.token for result in backend.step([row(slot, out[-1:], position)])]
        position += 1
    return out[:count]


def near_tie(backend: Backend, logits: float, slot: int = 0) -> Tie:
    """A tie: the logits of the two tokens after the prefix, alone, are less than `logits` apart."""

    def tie(prefix: Sequence[int], one: int, other: int) -> bool:
        position = 0
        while position < len(prefix):
            piece = prefix[position : position + backend.info.settings.step_tokens]
            position += len(piece)
            start, last = position - len(piece), position == len(prefix)
            request_row = row(slot, piece, start, wants_token=last, sampling=Sampling(logprobs=20))
            results = backend.step([request_row])
        report = results[0].logprobs
        assert report is not None
        values = dict(zip(report.top_ids, report.top_values, strict=True))
        return one in values and other in values and abs(values[one] - values[other]) < logits

    return tie


def greedy_unbatched(backend: Backend, slot: int = 0) -> Reference:
    """A reference made of a second instance of the backend, one sequence at a time."""
    known: dict[tuple[int, ...], list[int]] = {}

    def reference(prompt: Sequence[int], count: int) -> list[int]:
        key = tuple(prompt)
        if len(known.get(key, ())) < count:
            known[key] = generate(backend, prompt, count, slot=slot)
        return known[key][:count]

    return reference
