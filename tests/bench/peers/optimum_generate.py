"""The peer optimum: ORTModelForCausalLM.generate over its own export of the graph, static batches.

Driven by tests.bench.peers.jobs.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForCausalLM

from tests.bench.peers.jobs import Job, Times, answer_jobs, static_batches
from tests.bench.peers.stopwatch import timed_generate


def load(settings: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Job], Times]]:
    """`settings`: folder, threads, and use_io_binding (null: optimum's own choice)."""
    torch.set_num_threads(settings["threads"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings["threads"]
    options.log_severity_level = 3
    model = ORTModelForCausalLM.from_pretrained(
        settings["folder"],
        session_options=options,
        use_io_binding=settings.get("use_io_binding"),
        local_files_only=True,
    )

    facts = {
        name: importlib.metadata.version(name)
        for name in ("optimum", "optimum-onnx", "onnxruntime", "transformers", "torch")
    }
    return {**facts, "io_binding": bool(model.use_io_binding)}, lambda job: static_batches(
        job, partial(timed_generate, model)
    )


if __name__ == "__main__":
    answer_jobs(load)
