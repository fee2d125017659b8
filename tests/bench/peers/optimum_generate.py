"""The peer optimum: ORTModelForCausalLM.generate over its own export of the graph, static batches. Driven by tests.bench.peers.jobs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForCausalLM

from tests.bench.peers.jobs import Job, Times, answer_jobs, static_batches
from tests.bench.peers.stopwatch import Stopwatch


def load(settings: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Job], Times]]:
    """`settings`: folder, threads, and use_io_binding (null: optimum's own choice)."""
    torch.set_num_threads(settings["threads"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings["threads"]
    options.log_severity_level = 3
    model = ORTModelForCausalLM.from_pretrained(
        settings["folder"], session_options=options, use_io_binding=settings.get("use_io_binding"), local_files_only=True
    )

    def run_batch(prompts: list[list[int]], output_tokens: int, clock: Callable[[], float]) -> list[float]:
        ids, watch = torch.tensor(prompts), Stopwatch(clock)
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_tokens,
                min_new_tokens=output_tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[watch],
            )
        return watch.times

    facts = {name: importlib.metadata.version(name) for name in ("optimum", "optimum-onnx", "onnxruntime", "transformers", "torch")}
    return {**facts, "io_binding": bool(model.use_io_binding)}, lambda job: static_batches(job, run_batch)


if __name__ == "__main__":
    answer_jobs(load)
