"""The peers of transformers: ContinuousBatching (of 5.x) and generate() with a static cache.

Driven by tests.bench.peers.jobs.

Runs in whatever environment it is started in: the project's (transformers 4.57), or that of
transformers5.sh.
"""

from __future__ import annotations

import inspect
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.bench.peers.jobs import Job, Times, answer_jobs, static_batches, wait_until
from tests.bench.peers.stopwatch import timed_generate

PAGE_TOKENS = 64


def load(settings: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Job], Times]]:
    """`settings`: folder, threads, device, dtype, mode ("continuous" or "static"), attention,
    slots, context_tokens.
    """
    torch.set_num_threads(settings["threads"])
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as staged:
        for file in Path(settings["folder"]).iterdir():
            Path(staged, file.name).symlink_to(file)
        # Both major versions must read the same model: a folder of ours says RoPE in both versions'
        # words.
        assert "rope_theta" in json.loads(Path(staged, "config.json").read_text(encoding="utf-8"))
        attention = settings["attention"]
        model = transformers.AutoModelForCausalLM.from_pretrained(
            staged,
            dtype=getattr(torch, settings["dtype"]),
            local_files_only=True,
            attn_implementation=attention,
        )
    model.eval().to(settings["device"])
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    facts = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "attention": attention,
        "dtype": settings["dtype"],
    }
    if settings["mode"] == "continuous":
        return facts, continuous(model, settings)
    return facts, lambda job: static_batches(job, lambda *batch: static(model, *batch))


def static(
    model: Any, prompts: list[list[int]], output_tokens: int, clock: Callable[[], float]
) -> list[float]:
    """One generate() call over a batch, its cache allocated once and written in place."""
    # compiling takes 25 to 60 s a shape on a CPU
    return timed_generate(
        model, prompts, output_tokens, clock, cache_implementation="static", disable_compile=True
    )


def continuous(model: Any, settings: dict[str, Any]) -> Callable[[Job], Times]:
    """A manager that lives as long as the process, requests added as they come due."""
    pages = -(-settings["context_tokens"] // PAGE_TOKENS)
    asked = {
        "num_blocks": settings["slots"] * pages + 1,
        "max_batch_tokens": settings["batch_tokens"],
        "max_requests_per_batch": settings["slots"],
        "allow_block_sharing": False,  # no two prompts have a beginning in common
        "auto_switch_to_flash": False,  # the attention is that which is named
    }
    known = inspect.signature(transformers.ContinuousBatchingConfig).parameters
    asked["page_size" if "page_size" in known else "block_size"] = PAGE_TOKENS  # before 5.23
    # Whether it takes CUDA graphs is left to it: with a mask it says they cost more than they save.
    config = transformers.ContinuousBatchingConfig(
        **{name: value for name, value in asked.items() if name in known}
    )
    greedy = transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=64
    )
    manager = model.init_continuous_batching(
        generation_config=greedy, continuous_batching_config=config
    )
    manager.start()
    serial = 0

    def run(job: Job) -> Times:
        nonlocal serial
        started = time.perf_counter()
        names: dict[str, int] = {}
        times: Times = [[] for _ in job["prompts"]]
        added = 0
        outputs = job["outputs"]
        while (
            ended := sum(len(each) == wanted for each, wanted in zip(times, outputs, strict=True))
        ) < len(times):
            now = time.perf_counter() - started
            while added < len(times) and job["arrivals"][added] <= now:
                name = f"r{serial}"
                serial += 1
                names[name] = added
                manager.add_request(
                    job["prompts"][added],
                    name,
                    max_new_tokens=outputs[added],
                    streaming=True,
                    eos_token_id=-1,
                )
                added += 1
            if added == ended:
                wait_until(job["arrivals"][added], lambda: time.perf_counter() - started)
                continue
            due = job["arrivals"][added] - now if added < len(times) else 1.0
            result = manager.get_result(timeout=max(0.001, min(1.0, due)))
            if result is None:
                if not manager.is_running():
                    raise RuntimeError(
                        "ContinuousBatching has stopped: "
                        f"{manager.background_thread_status.fatal_error}"
                    )
                continue
            if result.error is not None:
                raise RuntimeError(f"ContinuousBatching: {result.error}")
            at = time.perf_counter() - started
            mine = times[names[result.request_id]]
            mine += [at] * (len(result.generated_tokens) - len(mine))
        return times

    return run


if __name__ == "__main__":
    answer_jobs(load)
