"""What a device's memory really gives: a copy between two buffers far larger than any cache.

Driven by tests.bench.peers.jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from tests.bench.peers.jobs import Job, answer_jobs

COPIES = 20


def load(settings: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Job], Any]]:
    """`settings`: device ("cpu" or "cuda"), threads, bytes of each buffer.

    A job gives {"bytes_per_second"}: read and written together,
    the best of COPIES copies (the STREAM benchmark's copy)."""
    torch.set_num_threads(settings["threads"])
    device = torch.device(settings["device"])
    source = torch.ones(settings["bytes"] // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"

    def once() -> float:
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def run(job: Job) -> dict[str, float]:
        return {"bytes_per_second": 2 * source.nbytes / min(once() for _ in range(COPIES))}

    return {"device": name, "torch": str(torch.__version__)}, run


if __name__ == "__main__":
    answer_jobs(load)
