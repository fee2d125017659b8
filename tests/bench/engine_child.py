"""A backend in a process of its own, on cores of its own, without scheduler and HTTP: what a step
costs, what memory it takes, and which probabilities it gives to tokens.

    backend, weight_format = engine("onnx:int8")
    with EngineChild(config_of("135m", backend, weight_format), cores=[0]) as child:
        child.facts["load_seconds"], child.ask("decode", rows=4, context=256, steps=64)

The jobs, and what they return:
  decode    `steps` greedy steps of `rows` rows with `context` tokens each -> seconds
  fill      every slot to the end of its context, so the whole KV cache is touched -> memory
  quality   `ids` [sequences, tokens], one token a step, all sequences in one batch, against the
            logits in the file `reference` [sequences, tokens, vocabulary] -> KL and agreement
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.identity.resolve_model import resolve
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.backends.backend_table import backend_class, spec_of
from crossover.serving.hardware.machine_facts import peak_resident_bytes, resident_bytes
from crossover.serving.sampling.step_inputs import Row, Sampling
from crossover.serving.supervisor.engine_process import allocator
from tests.tools.with_settings import engine_config

ROOT = Path(__file__).parents[2]


def engine(text: str) -> tuple[str, str]:
    """Return backend and weight format of "onnx:int4"; used as the type of a command's argument."""
    backend, _, weight_format = text.partition(":")
    if not backend or not weight_format:
        raise argparse.ArgumentTypeError(
            f"an engine is BACKEND:FORMAT, such as onnx:int4, got {text!r}"
        )
    return backend, weight_format


def config_of(model: str, backend: str, weight_format: str, **more: Any) -> EngineConfig:
    """Return the configuration of the engine; its weights are made if they do not exist."""
    found = resolve(model, kind=spec_of(backend).weights or "hf", weight_format=weight_format)
    return engine_config(
        backend=backend,
        model_path=found.path,
        model_name=found.name,
        weight_format=found.weight_format,
        tokenizer_path=found.tokenizer_path,
        **more,
    )


class EngineChild:
    """The engine's process, for as long as the block runs. `facts`: the backend's info,
    load_seconds, memory before and after loading. Raises RuntimeError with the end of its log if it
    dies."""

    def __init__(self, config: EngineConfig, cores: Sequence[int]) -> None:
        self._log = tempfile.TemporaryFile("w+")
        config_json = json.dumps(msgspec.to_builtins(config))
        threads = str(len(cores))
        self._process = subprocess.Popen(
            [
                *("taskset", "-c", ",".join(map(str, cores))),
                sys.executable,
                "-m",
                __name__,
                config_json,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=os.environ
            | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
            | allocator(config.backend),
        )
        try:
            self.facts: dict[str, Any] = self._read()
        except BaseException:
            self.__exit__()
            raise

    def ask(self, what: str, **job: Any) -> Any:
        """Return the result of one job."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **job}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it died of is in its log
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            raise RuntimeError(
                f"the engine ended with status {status}:\n{self._log.read()[-3000:]}"
            )
        return json.loads(line)

    def __enter__(self) -> EngineChild:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


# --- in the process


def main() -> None:
    """Load the engine, then answer each line of JSON with a line of JSON. What libraries print goes
    to standard error."""
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(what: object) -> None:
        print(json.dumps(what), file=wire, flush=True)

    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    before, started = memory(), time.perf_counter()
    work = Work(backend_class(config.backend)(config, lambda what, fraction: None))
    seconds = time.perf_counter() - started
    gc.collect()
    info = msgspec.to_builtins(work.backend.info)
    tell({"info": info, "load_seconds": seconds, "before": before, "loaded": memory()})
    for line in sys.stdin:
        job = json.loads(line)
        tell(getattr(work, job.pop("do"))(**job))


def memory() -> dict[str, int | None]:
    """Return the resident bytes of this process now, and their maximum so far (None: the kernel
    does not say)."""
    return {
        "rss_bytes": resident_bytes() or 0,
        "peak_rss_bytes": peak_resident_bytes(),
    }


class Work:
    """The jobs, as methods."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self._filled: dict[int, int] = {}  # slot -> tokens that it holds for `decode`

    def decode(self, rows: int, context: int, steps: int) -> float:
        for slot in range(rows):
            if self._filled.get(slot) != context:
                self._prefill(context, slot)
                self._filled[slot] = context
        ids = [self._tokens(1, slot) for slot in range(rows)]
        started = time.perf_counter()
        for step in range(steps):
            drawn = self.backend.step(
                [Row(slot, ids[slot], context + step, wants_token=True) for slot in range(rows)]
            )
            ids = [np.array([one.token], np.int32) for one in drawn]
        return time.perf_counter() - started

    def fill(self) -> dict[str, int | None]:
        for slot in range(self.backend.info.settings.slots):
            self._prefill(self.backend.info.settings.context_tokens, slot, sampled=True)
        gc.collect()
        return memory()

    def quality(self, ids: list[list[int]], reference: str) -> dict[str, float]:
        """Return KL(reference || engine) in nats, and the share of equal greedy tokens."""
        logits, tokens = np.load(reference, mmap_mode="r"), np.array(ids, np.int32)
        everything = Sampling(logprobs=self.backend.info.vocabulary)
        divergences, equal = [], []
        for position in range(tokens.shape[1]):
            rows = [
                Row(slot, tokens[slot, position : position + 1], position, True, everything)
                for slot in range(len(tokens))
            ]
            for slot, drawn in enumerate(self.backend.step(rows)):
                assert drawn.logprobs is not None
                theirs = np.empty(self.backend.info.vocabulary)
                theirs[drawn.logprobs.top_ids] = drawn.logprobs.top_values
                true = logits[slot, position].astype(np.float64)
                ours = true - true.max()
                ours -= np.log(np.exp(ours).sum())
                divergences.append(float(np.sum(np.exp(ours) * (ours - theirs))))
                equal.append(drawn.token == int(true.argmax()))
        return {"kl_nats": float(np.mean(divergences)), "agreement": float(np.mean(equal))}

    def _tokens(self, count: int, seed: int) -> npt.NDArray[np.int32]:
        ids = np.random.default_rng(seed).integers(3, self.backend.info.vocabulary, count)
        return ids.astype(np.int32)

    def _prefill(self, count: int, slot: int, sampled: bool = False) -> None:
        ids, most = self._tokens(count, slot), self.backend.info.settings.step_tokens
        for begin in range(0, count, most):
            piece = ids[begin : begin + most]
            wants = sampled and begin + len(piece) == count
            self.backend.step([Row(slot, piece, begin, wants_token=wants)])


if __name__ == "__main__":
    main()
