"""The peer onnxruntime-genai: its own Generator over the same graph, static batches, greedy.

Driven by tests.bench.peers.jobs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime_genai

from tests.bench.peers.jobs import Job, Times, answer_jobs, static_batches


def load(settings: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Job], Times]]:
    """`settings`: folder, threads."""
    config = onnxruntime_genai.Config(settings["folder"])
    config.overlay(
        json.dumps(
            {
                "model": {
                    "decoder": {"session_options": {"intra_op_num_threads": settings["threads"]}}
                }
            }
        )
    )
    model = onnxruntime_genai.Model(config)

    def run_batch(
        prompts: list[list[int]], output_tokens: int, clock: Callable[[], float]
    ) -> list[float]:
        params = onnxruntime_genai.GeneratorParams(model)
        length = len(prompts[0]) + output_tokens
        # The minimum keeps every row going to the end, as ignore_eos does on our side.
        params.set_search_options(
            max_length=length, min_length=length, batch_size=len(prompts), do_sample=False
        )
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        times = []
        for _ in range(output_tokens):
            generator.generate_next_token()
            generator.get_next_tokens()  # a server would hand them on
            times.append(clock())
        return times

    return {"onnxruntime-genai": onnxruntime_genai.__version__}, lambda job: static_batches(
        job, run_batch
    )


if __name__ == "__main__":
    answer_jobs(load)
