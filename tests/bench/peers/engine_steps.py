"""A backend in a process of its own, without a scheduler: what a step costs, what its memory is,
what it thinks of given tokens.

Driven by tests.bench.peers.jobs; a job names what to `do`:
  prefill   `tokens` prompt tokens into the last slot -> {"seconds"}
  decode    `steps` greedy steps of `rows` rows that hold `context` tokens each -> {"seconds"}
  fill      every slot to the end of its context, so the whole KV cache is touched -> process memory
  quality   `ids` [sequences, tokens], one token a step, all sequences in one batch, against the
            logits in the file `reference` [sequences, tokens, vocabulary] -> KL and agreement
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from serving.backends.backend_interface import Backend, EngineConfig
from serving.backends.backend_table import backend_class
from serving.hardware.machine_facts import peak_resident_bytes, resident_bytes
from serving.sampling.step_rows import Row, Sampling
from tests.bench.peers.jobs import Job, answer_jobs


def load(settings: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Job], Any]]:
    """`settings`: an EngineConfig as JSON."""
    config = msgspec.convert(settings, EngineConfig)
    chosen = backend_class(config.backend)
    before = memory()
    started = time.perf_counter()
    backend = chosen(config, lambda what, fraction: None)
    seconds = time.perf_counter() - started
    gc.collect()
    facts = {
        "info": msgspec.to_builtins(backend.info),
        "load_seconds": seconds,
        "before": before,
        "loaded": memory(),
    }
    filled: dict[int, int] = {}
    doing: dict[str, Callable[[Job], Any]] = {
        "prefill": lambda job: {"seconds": prefill(backend, job["tokens"], backend.info.slots - 1)},
        "decode": lambda job: {
            "seconds": decode(backend, job["rows"], job["context"], job["steps"], filled)
        },
        "fill": lambda job: fill(backend),
        "quality": lambda job: quality(
            backend, np.array(job["ids"], np.int32), np.load(job["reference"], mmap_mode="r")
        ),
    }
    return facts, lambda job: doing[job["do"]](job)


def memory() -> dict[str, int]:
    """This process now: resident bytes, and the most there ever were."""
    return {
        "rss_bytes": resident_bytes() or 0,
        "peak_rss_bytes": peak_resident_bytes(),
    }


def tokens(backend: Backend, count: int, seed: int) -> npt.NDArray[np.int32]:
    """Seeded token ids."""
    return np.random.default_rng(seed).integers(3, backend.info.vocabulary, count).astype(np.int32)


def prefill(backend: Backend, count: int, slot: int, sampled: bool = True) -> float:
    """Seconds that a prompt of `count` tokens takes."""
    ids, most = tokens(backend, count, slot), backend.info.step_tokens
    started = time.perf_counter()
    for begin in range(0, count, most):
        piece = ids[begin : begin + most]
        backend.step([Row(slot, piece, begin, wants_token=sampled and begin + len(piece) == count)])
    return time.perf_counter() - started


def decode(backend: Backend, rows: int, context: int, steps: int, filled: dict[int, int]) -> float:
    """Seconds of `steps` greedy steps after `context` tokens, which are filled once; `filled`:
    which slots have them already.
    """
    for slot in range(rows):
        if filled.get(slot) != context:
            prefill(backend, context, slot, sampled=False)
            filled[slot] = context
    ids = [tokens(backend, 1, slot) for slot in range(rows)]
    started = time.perf_counter()
    for step in range(steps):
        drawn = backend.step(
            [Row(slot, ids[slot], context + step, wants_token=True) for slot in range(rows)]
        )
        ids = [np.array([one.token], np.int32) for one in drawn]
    return time.perf_counter() - started


def fill(backend: Backend) -> dict[str, int]:
    """All slots full, and what the process takes then."""
    for slot in range(backend.info.slots):
        prefill(backend, backend.info.context_tokens, slot)
    gc.collect()
    return memory()


def quality(
    backend: Backend, ids: npt.NDArray[np.int32], reference: npt.NDArray[np.float32]
) -> dict[str, float]:
    """KL(reference || engine) in nats and the share of equal greedy tokens, over every position."""
    everything = Sampling(logprobs=backend.info.vocabulary)
    divergences, equal = [], []
    for position in range(ids.shape[1]):
        rows = [
            Row(slot, ids[slot, position : position + 1], position, True, everything)
            for slot in range(len(ids))
        ]
        for slot, drawn in enumerate(backend.step(rows)):
            assert drawn.logprobs is not None
            theirs = np.empty(backend.info.vocabulary)
            theirs[drawn.logprobs.top_ids] = drawn.logprobs.top_values
            logits = reference[slot, position].astype(np.float64)
            ours = logits - logits.max()
            ours -= np.log(np.exp(ours).sum())
            divergences.append(float(np.sum(np.exp(ours) * (ours - theirs))))
            equal.append(drawn.token == int(logits.argmax()))
    return {
        "kl_nats": float(np.mean(divergences)),
        "agreement": float(np.mean(equal)),
        "positions": len(equal),
    }


if __name__ == "__main__":
    answer_jobs(load)
