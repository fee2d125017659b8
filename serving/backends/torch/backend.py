"""torch: safetensors on CUDA, ROCm (which torch calls cuda) and, for reference, the CPU.

Its own forward pass over a KV cache of a row for each slot (forward_pass.py), for the architectures
of models/hf_config.py. Prompt pieces and decode rows of a step share one pass over the weights.
On a GPU attention is torch's flash kernels (varlen_attention.py), steps and draws are CUDA graphs
(cuda_graphs.py), and tokens are drawn on the device (gpu_sampler.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from crossover.models.hf_config import read_spec
from crossover.models.weights_manifest import Progress
from crossover.serving.backends.backend_interface import (
    BackendInfo,
    EngineConfig,
    check_row,
    check_sizes,
    parse_options,
)
from crossover.serving.backends.torch.cuda_graphs import Graphs, StepGraphs
from crossover.serving.backends.torch.forward_pass import SlotModel, run_pass, to_device
from crossover.serving.backends.torch.gpu_sampler import DeviceSampler, drawable
from crossover.serving.backends.torch.memory_overhead import captured_tokens
from crossover.serving.backends.torch.torch_weights import DTYPES, Checkpoint, compute_dtype, load
from crossover.serving.backends.torch.varlen_attention import KvCache, flash_trouble
from crossover.serving.errors import BackendUnavailable, EngineFailed, OutOfMemory, Unsupported
from crossover.serving.sampling.batch_sampler import sample
from crossover.serving.sampling.step_inputs import DRAWN, Row, Sampled, Sampling

KV_NAMES = {dtype: name for name, dtype in DTYPES.items()}
KINDS_OF_DRAWS = (
    *(Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)),
    Sampling(temperature=1.0, top_k=50),
)
# What CUDA's libraries say when they find no memory, beside torch's own words.
_MEMORY_WORDS = ("not enough memory", "out of memory", "_ALLOC_FAILED", "ERROR_OUT_OF_MEMORY")


class InFlightStep:
    """See Launched in crossover.serving.backends.backend_interface. `rows`: those that want a
    token, in the logits' order."""

    def __init__(self, tokens: Tensor, good: Tensor, rows: list[Row]) -> None:
        self.drawn = tokens  # int64 [n] on the device
        self._place = {row.slot: place for place, row in enumerate(rows)}
        both = torch.stack((tokens, good.long()))
        self._host = torch.empty(both.shape, dtype=both.dtype, pin_memory=both.is_cuda)
        self._host.copy_(both, non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if both.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def tokens(self) -> list[Sampled | None]:
        with memory_errors("a step that was launched"):
            if self._copied is not None:
                self._copied.synchronize()
        tokens, good = self._host.tolist()
        places = [self._place[slot] for slot in sorted(self._place)]
        return [Sampled(tokens[place]) if good[place] else None for place in places]

    def numbered(self, rows: list[Row]) -> list[Row]:
        """The rows of the next step with -1 - n for the n-th token that this one draws."""
        return [
            replace(row, tokens=np.array([-1 - self._place[row.slot]], np.int32))
            if row.tokens[0] == DRAWN
            else row
            for row in rows
        ]


class TorchBackend:
    """See crossover.serving.backends.backend_interface.Backend."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        parse_options(msgspec.Struct, config.options, "torch")  # it has none
        self._device = device = device_of(config.device)
        self._is_gpu = self._device_sampling = is_gpu = config.device == "gpu"
        folder, settings = Path(config.model_path), config.settings
        slots, context = settings.slots, settings.context_tokens
        spec = read_spec(folder, config.model_name)
        checkpoint = Checkpoint(folder)
        weight_format = config.weight_format or checkpoint.weight_format
        known = ["fp32", "bf16", "fp16"] if is_gpu else ["fp32", "bf16"]
        if weight_format not in known:
            raise Unsupported(
                f"torch does not support weight_format {weight_format!r} on this device. Formats: "
                f"{', '.join(known)}",
                "weight_format",
            )
        dtype = compute_dtype(weight_format, device)
        check_sizes(config, spec.context, KV_NAMES[dtype])
        threads = config.threads or len(config.cores) or len(os.sched_getaffinity(0))
        if is_gpu:
            # From torch 2.11 on cuDNN comes first on sm_90 and newer, and builds a plan of 40 ms or
            # more for every new shape: a stall a step where lengths grow (pytorch issue 191576).
            torch.backends.cuda.enable_cudnn_sdp(False)
        else:
            torch.set_num_threads(threads)
        no_flash = flash_trouble(spec, dtype, device)
        with memory_errors("loading the weights"), torch.inference_mode():
            weights = load(checkpoint, spec, dtype, device, progress)
            cache = KvCache(spec, slots, context, dtype, device)
            self._model: SlotModel | None = SlotModel(spec, weights, cache, no_flash is None)
        self._lengths = [0] * slots
        self._logits: Tensor | None = None  # of every step on a GPU
        self._graphs: StepGraphs | None = None
        self._sampler = DeviceSampler(device)
        graphs = "false"
        if is_gpu:
            with memory_errors("making graphs and a first step"), torch.inference_mode():
                self._logits = torch.empty(slots, spec.vocabulary, device=device)
                if no_flash is None:
                    limit = captured_tokens(spec, settings)
                    graphs = self._make_graphs(self._model, self._logits, limit, progress)
                progress("first step", None)
                self._warm_up(min(settings.step_tokens, context - len(KINDS_OF_DRAWS)))
                torch.cuda.synchronize()
        hip, cuda = torch.version.hip, torch.version.cuda
        self.info = BackendInfo(
            name="torch",
            device=config.device,
            device_name=torch.cuda.get_device_name(device) if is_gpu else "CPU",
            settings=msgspec.structs.replace(
                settings,
                kv_tokens=min(settings.pool_tokens, slots * context),
                kv_dtype=KV_NAMES[dtype],
            ),
            vocabulary=spec.vocabulary,
            weight_format=weight_format,
            details={
                "torch": str(torch.__version__),  # a class of its own, which no message can carry
                "kv_dtype": KV_NAMES[dtype],
                "attention": "flash" if no_flash is None else f"sdpa: {no_flash}",
                "graphs": graphs,
                "runtime": f"ROCm {hip}" if hip else f"CUDA {cuda}" if is_gpu else "CPU",
                "threads": str(threads),
            },
        )

    @torch.inference_mode()
    def step(self, rows: list[Row]) -> list[Sampled]:
        with memory_errors(f"a step of {sum(len(row.tokens) for row in rows)} tokens"):
            logits, wanted = self._run(rows)
            tokens = self._draw(logits, wanted)
        drawn = {row.slot: token for row, token in zip(wanted, tokens, strict=True)}
        return [drawn[row.slot] for row in rows if row.wants_token]

    @torch.inference_mode()
    def launch(self, rows: list[Row], after: InFlightStep | None) -> InFlightStep | None:
        wanting = [row for row in rows if row.wants_token]
        if not self._device_sampling or not all(drawable(row) for row in wanting):
            return None
        drawn = None
        if after is not None:
            rows, drawn = after.numbered(rows), after.drawn
        with memory_errors(f"a step of {sum(len(row.tokens) for row in rows)} tokens"):
            logits, wanted = self._run(rows, drawn)
            return InFlightStep(*self._sampler.draw(logits, wanted), wanted)

    @torch.inference_mode()
    def copy(self, source: int, target: int, tokens: int) -> None:
        assert tokens <= self._lengths[source] and self._model is not None
        self._model.cache.copy(source, target, tokens)
        self._lengths[target] = tokens

    def truncate(self, slot: int, tokens: int) -> None:
        self._lengths[slot] = min(tokens, self._lengths[slot])

    def close(self) -> None:
        self._model = self._graphs = self._logits = None
        if self._is_gpu:
            torch.cuda.empty_cache()

    def _run(self, rows: list[Row], drawn: Tensor | None = None) -> tuple[Tensor, list[Row]]:
        """Return the logits of the rows that want a token, and these rows in the logits' order.
        `drawn`: see forward_pass.known."""
        model = self._model
        if model is None:
            raise EngineFailed("the backend is closed")
        for row in rows:
            check_row(row, self._lengths[row.slot], model.width)
            self._lengths[row.slot] = row.position
        replayed = None if self._graphs is None else self._graphs.run(rows, drawn)
        return replayed or run_pass(model, rows, self._logits, drawn)

    def _draw(self, logits: Tensor, rows: list[Row]) -> list[Sampled]:
        if not rows:
            if self._is_gpu:  # otherwise the next step would be charged for the GPU's open work
                torch.cuda.synchronize()
            return []
        if not self._device_sampling:
            return sample(logits.cpu().numpy(), rows)
        tokens, good = self._sampler.draw(logits, rows)
        # One copy to the host, which waits for the step.
        both = torch.stack((tokens, good.long())).cpu().tolist()
        drawn = zip(rows, *both, strict=True)
        samples = [Sampled(token) if good and drawable(row) else None for row, token, good in drawn]
        on_host = [index for index, sampled in enumerate(samples) if sampled is None]
        if on_host:
            values = logits[to_device(np.array(on_host), self._device)].cpu().numpy()
            host_samples = sample(values, [rows[index] for index in on_host])
            for index, sampled in zip(on_host, host_samples, strict=True):
                samples[index] = sampled
        return [sampled for sampled in samples if sampled is not None]

    def _make_graphs(self, model: SlotModel, logits: Tensor, limit: int, progress: Progress) -> str:
        """Capture steps and draws as CUDA graphs. Return "true", or "false: " and the reason, for
        the backend's details: without graphs, steps are slower and not wrong."""
        try:
            graphs = Graphs(is_capturing=True)
            self._graphs = StepGraphs(model, logits, limit, graphs, progress)
            self._sampler = DeviceSampler(self._device, logits, graphs)
        except RuntimeError as problem:
            self._graphs = None
            torch.cuda.empty_cache()
            why = (str(problem).splitlines() or [type(problem).__name__])[0]
            print(f"torch: steps cannot be captured: {why}", file=sys.stderr, flush=True)
            return f"false: steps cannot be captured: {why}"
        return "true"

    def _warm_up(self, count: int) -> None:
        """Run the longest prompt piece, of `count` tokens, and one draw of each kind, so that the
        first request does not pay for what they load and build. Raises OutOfMemory if the memory is
        too small for them."""
        prompt = np.zeros(count, np.int32)
        self.step([Row(slot=0, tokens=prompt, start=0, wants_token=True)])
        token = np.zeros(1, np.int32)
        for start, sampling in enumerate(KINDS_OF_DRAWS, start=count):
            self.step([Row(slot=0, tokens=token, start=start, wants_token=True, sampling=sampling)])
        self.truncate(0, 0)


def device_of(name: str) -> torch.device:
    """Return the torch device of "cpu" or "gpu". Raises BackendUnavailable."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built_for = torch.version.cuda or torch.version.hip or "the CPU only"
        raise BackendUnavailable(f"torch {torch.__version__} finds no GPU (built for {built_for})")
    return torch.device("cuda", 0)


@contextlib.contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turns torch's out-of-memory errors into OutOfMemory, its other ones into EngineFailed."""
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        text = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        is_memory = isinstance(problem, torch.OutOfMemoryError | MemoryError)
        if is_memory or any(word in str(problem) for word in _MEMORY_WORDS):
            raise OutOfMemory(f"{what} did not fit in memory: {text}") from problem
        raise EngineFailed(f"torch failed in {what}: {text}") from problem
