"""Our side in process: a backend under the scheduler, requests added as they come due, no HTTP.

Driven by tests.bench.peers.jobs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import msgspec

from models.tokenization.tokenizer import load_tokenizer
from serving.backends.backend_interface import EngineConfig
from serving.backends.backend_table import backend_class
from serving.engine.ipc_messages import GenerationRequest, Submit
from serving.engine.scheduler import Scheduler
from tests.bench.peers.jobs import Job, Times, answer_jobs, wait_until


def load(settings: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Job], Times]]:
    """`settings`: an EngineConfig as JSON."""
    config = msgspec.convert(settings, EngineConfig)
    backend = backend_class(config.backend)(config, lambda what, fraction: None)
    tokenizer = load_tokenizer(config.tokenizer_path or config.model_path)
    table = tokenizer.token_bytes()
    table += [b""] * max(0, backend.info.vocabulary - len(table))
    scheduler = Scheduler(backend, table, tokenizer.eos_ids, config)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # as the engine process does
    return msgspec.to_builtins(backend.info), lambda job: run(scheduler, job)


def run(scheduler: Scheduler, job: Job) -> Times:
    """Serve a job's requests, each from its arrival on; no two share a prefix, so nothing is
    reused.
    """
    started = time.perf_counter()
    arrivals: list[float] = job["arrivals"]
    times: Times = [[] for _ in arrivals]
    added = 0
    while added < len(arrivals) or scheduler.busy:
        if not scheduler.busy:
            wait_until(arrivals[added], lambda: time.perf_counter() - started)
        now = time.perf_counter() - started
        while added < len(arrivals) and arrivals[added] <= now:
            refused = scheduler.add(
                Submit(
                    added,
                    GenerationRequest(
                        job["prompts"][added], job["outputs"][added], ignore_eos=True
                    ),
                )
            )
            if refused is not None:
                raise RuntimeError(f"request {added} was refused: {refused.error}")
            added += 1
        deltas = scheduler.step()
        now = time.perf_counter() - started
        for delta in deltas:
            times[delta.id] += [now] * delta.tokens
    return times


if __name__ == "__main__":
    answer_jobs(load)
