"""torch: safetensors on CUDA, ROCm (which torch calls cuda) and, for reference, the CPU.

Its own forward pass over a KV cache of a row for each slot (forward_pass.py), for the architectures
of models/hf_config.py. Prompt pieces and decode rows of a step share one pass over the weights.
On a GPU attention is one call of torch's flash kernels (varlen_attention.py), a step of decode rows
only is a CUDA graph (cuda_graphs.py), and tokens are drawn on the device (gpu_sampler.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch
from torch import Tensor

from models.formatting import size
from models.hf_config import read_spec
from models.machine import available_bytes
from models.manifest import Progress
from models.spec import ModelSpec
from serving.backends.backend_interface import (
    CAPABILITIES,
    BackendInfo,
    EngineConfig,
    check_sizes,
    parse_options,
)
from serving.backends.torch import gpu_memory
from serving.backends.torch.cuda_graphs import DecodeGraphs
from serving.backends.torch.device_transfer import fetch, send
from serving.backends.torch.forward_pass import SlotModel, run_pass
from serving.backends.torch.gpu_sampler import always_drawn, draw, drawable
from serving.backends.torch.torch_weights import DTYPES, Checkpoint, compute_dtype, load
from serving.backends.torch.varlen_attention import KvCache, flash_trouble
from serving.errors import BackendUnavailable, EngineFailed, OutOfMemory, Unsupported
from serving.sampling.sampler import sample
from serving.sampling.step_rows import DRAWN, Row, Sampled, Sampling, Tokens

KV_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CPU_PREFILL_CHUNK = 512
KINDS_OF_DRAWS = (
    *(Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)),
    Sampling(temperature=1.0, top_k=50),
)
# What CUDA's libraries say when they find no memory, beside torch's own words.
_MEMORY_WORDS = ("not enough memory", "out of memory", "_ALLOC_FAILED", "ERROR_OUT_OF_MEMORY")


class TorchOptions(msgspec.Struct, frozen=True):
    """`--option key=value` of the torch backend."""

    graphs: bool = True  # CUDA graphs of the decode step, on a GPU
    # Prompt tokens of a pass. None: 2048 on a GPU, 512 on the CPU.
    prefill_chunk: Annotated[int, msgspec.Meta(ge=1, le=8192)] | None = None


class Flight:
    """See Launched in serving.backends.backend_interface. `rows`: those that want a token, in the
    logits' order."""

    def __init__(self, tokens: Tensor, good: Tensor, rows: list[Row]) -> None:
        self.drawn = tokens  # int64 [n] on the device
        self._place = {row.slot: place for place, row in enumerate(rows)}
        self._host, self._copied = fetch(torch.stack((tokens, good.long())))

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
    """See serving.backends.backend_interface.Backend."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        options = parse_options(TorchOptions, config.options, "torch")
        self._device = device = device_of(config.device)
        self._is_gpu = self._device_sampling = is_gpu = config.device == "gpu"
        usual_chunk = gpu_memory.GPU_PREFILL_CHUNK if is_gpu else CPU_PREFILL_CHUNK
        self._chunk = options.prefill_chunk or usual_chunk
        folder, context = Path(config.model_path), config.context_tokens
        spec = read_spec(folder, config.model_name)
        checkpoint = Checkpoint(folder)
        weight_format = config.weight_format or checkpoint.weight_format
        known = ["fp32", "bf16", "fp16"] if is_gpu else ["fp32", "bf16"]
        if weight_format not in known:
            raise Unsupported(
                f"torch has no weight_format {weight_format!r} on this device; it has "
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
        step_tokens = gpu_memory.step_tokens(config.slots, self._chunk)
        slots, doubts = self._slots_that_fit(config, spec, dtype, step_tokens), {}
        if slots < config.slots:
            doubts["slots"] = f"{slots} of {config.slots}: more have no room for their KV cache"
        no_flash = flash_trouble(spec, dtype, device)
        with memory_errors("loading the weights"), torch.inference_mode():
            weights = load(checkpoint, spec, dtype, device, progress)
            cache = KvCache(spec, slots, context, dtype, device, no_flash is None)
            self._model: SlotModel | None = SlotModel(spec, weights, cache)
        self._lengths = [0] * slots
        self._logits: Tensor | None = None  # of every step on a GPU
        self._graphs: DecodeGraphs | None = None
        if is_gpu:
            with memory_errors("making graphs and a first step"), torch.inference_mode():
                self._logits = torch.empty(slots, spec.vocabulary, device=device)
                if no_flash is None and options.graphs:
                    doubts |= self._make_graphs(self._model, self._logits, progress)
                progress("first step", None)
                self._warm_up(context)
                torch.cuda.synchronize()
        for key, what in doubts.items():
            print(f"torch: {key} {what}", file=sys.stderr, flush=True)
        hip, cuda = torch.version.hip, torch.version.cuda
        details = {
            "torch": str(torch.__version__),  # a class of its own, which no message can carry
            "kv_dtype": KV_NAMES[dtype],
            "prefill_chunk": str(self._chunk),
            "attention": "flash" if no_flash is None else f"sdpa: {no_flash}",
            "graphs": str(self._graphs is not None).lower(),
            "runtime": f"ROCm {hip}" if hip else f"CUDA {cuda}" if is_gpu else f"{threads} threads",
        }
        self.info = BackendInfo(
            name="torch",
            device=config.device,
            device_name=torch.cuda.get_device_name(device) if is_gpu else "CPU",
            slots=slots,
            context_tokens=context,
            kv_tokens=min(config.kv_tokens or slots * context, slots * context),
            vocabulary=spec.vocabulary,
            weight_format=weight_format,
            step_tokens=step_tokens,
            capabilities=frozenset(CAPABILITIES),
            details=details | doubts,
        )

    @torch.inference_mode()
    def step(self, rows: list[Row]) -> list[Sampled]:
        with memory_errors(f"a step of {sum(len(row.tokens) for row in rows)} tokens"):
            logits, wanted = self._run(rows)
            tokens = self._draw(logits, wanted)
        drawn = {row.slot: token for row, token in zip(wanted, tokens, strict=True)}
        return [drawn[row.slot] for row in rows if row.wants_token]

    @torch.inference_mode()
    def launch(self, rows: list[Row], after: Flight | None) -> Flight | None:
        wanting = [row for row in rows if row.wants_token]
        if not self._device_sampling or not all(always_drawn(row) for row in wanting):
            return None
        drawn = None
        if after is not None:
            rows, drawn = after.numbered(rows), after.drawn
        with memory_errors(f"a step of {sum(len(row.tokens) for row in rows)} tokens"):
            logits, wanted = self._run(rows, drawn)
            return Flight(*draw(logits, wanted), wanted)

    @torch.inference_mode()
    def copy(self, source: int, target: int, tokens: int) -> None:
        held = self._lengths[source]
        if tokens > held:
            raise EngineFailed(f"slot {source} holds {held} tokens, {tokens} were to be copied")
        if source != target and self._model is not None:
            self._model.cache.copy(source, target, tokens)
        self._lengths[target] = tokens

    def truncate(self, slot: int, tokens: int) -> None:
        self._lengths[slot] = min(tokens, self._lengths[slot])

    def close(self) -> None:
        self._model = self._graphs = self._logits = None
        if self._is_gpu:
            torch.cuda.empty_cache()

    def _run(self, rows: list[Row], drawn: Tensor | None = None) -> tuple[Tensor, list[Row]]:
        """Logits of the rows that want a token, and these rows in the logits' order. `drawn`: see
        forward_pass.known."""
        model = self._model
        if model is None:
            raise EngineFailed("the backend is closed")
        for row in rows:
            held, end = self._lengths[row.slot], row.start + len(row.tokens)
            if row.start > held or end > model.width:
                raise EngineFailed(
                    f"slot {row.slot} holds {held} of {model.width} tokens; "
                    f"a row of {len(row.tokens)} tokens cannot start at {row.start}"
                )
        for row in rows:
            self._lengths[row.slot] = row.start + len(row.tokens)
        if self._graphs is not None and all(len(row.tokens) == 1 for row in rows):
            rows = sorted(rows, key=lambda row: not row.wants_token)
            wanted = [row for row in rows if row.wants_token]
            return self._graphs.run(rows, drawn)[: len(wanted)], wanted
        # One pass over everything, after passes for the beginnings of long prompts.
        pieces = [(row, *self._begun(model, row)) for row in rows]
        return run_pass(model, pieces, self._logits, drawn)

    def _begun(self, model: SlotModel, row: Row) -> tuple[Tokens, int]:
        """Runs all but the last chunk of a row; that chunk, and where it starts."""
        last = (len(row.tokens) - 1) // self._chunk * self._chunk
        if not last:
            return row.tokens, row.start
        silent = replace(row, wants_token=False)
        for first in range(0, last, self._chunk):
            tokens = row.tokens[first : first + self._chunk]
            run_pass(model, [(silent, tokens, row.start + first)])
        return row.tokens[last:], row.start + last

    def _draw(self, logits: Tensor, rows: list[Row]) -> list[Sampled]:
        if not rows:
            if self._is_gpu:  # else what the GPU still has to do would be the next step's time
                torch.cuda.synchronize()
            return []
        if not self._device_sampling:
            return sample(logits.cpu().numpy(), rows)
        tokens, good = draw(logits, rows)
        # One copy to the host, which waits for the step.
        both = torch.stack((tokens, good.long())).cpu().tolist()
        drawn = zip(rows, *both, strict=True)
        found = [Sampled(token) if good and drawable(row) else None for row, token, good in drawn]
        rest = [index for index, one in enumerate(found) if one is None]
        if rest:
            (at,) = send([np.array(rest)], self._device)
            values = logits[at].cpu().numpy()
            late = dict(zip(rest, sample(values, [rows[index] for index in rest]), strict=True))
            found = [late.get(index, one) for index, one in enumerate(found)]
        return [one for one in found if one is not None]

    def _slots_that_fit(
        self, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, step_tokens: int
    ) -> int:
        """Slots that have room, on a GPU beside the largest step. Raises OutOfMemory."""
        if not config.check_memory:
            return config.slots
        weights = spec.parameters * dtype.itemsize
        if not self._is_gpu:  # pages of the KV cache count when they are written
            needed, usable, slots = weights, available_bytes(), config.slots
            what = f"{size(usable)} are available"
        else:
            row = config.context_tokens * spec.kv_bytes_per_token(KV_NAMES[dtype])
            largest = gpu_memory.working_bytes(spec, config.slots, step_tokens, dtype.itemsize)
            free, total = torch.cuda.mem_get_info()
            usable = int(free * (1 - gpu_memory.GPU_MARGIN))
            what = f"{size(free)} of the GPU's {size(total)} are free"
            needed = weights + largest + row
            slots = min(config.slots, (usable - weights - largest) // row)
        if needed > usable:
            raise OutOfMemory(
                f"weights of {size(weights)}, with the largest step and a slot {size(needed)}, do "
                f"not fit: {what}; fewer slots or a shorter context need less"
            )
        return slots

    def _make_graphs(self, model: SlotModel, logits: Tensor, progress: Progress) -> dict[str, str]:
        """The decode step; without graphs where they cannot be captured, which is told: eager steps
        are slower, not wrong."""
        try:
            self._graphs = DecodeGraphs(model, len(logits), logits, True, progress)
        except RuntimeError as problem:
            torch.cuda.empty_cache()
            why = (str(problem).splitlines() or [type(problem).__name__])[0]
            return {"graphs": f"false: the decode step could not be captured: {why}"}
        return {}

    def _warm_up(self, room: int) -> None:
        """A prompt and draws of each kind: what they load and build must not fall on the first
        request. `room`: tokens of a slot."""
        count = max(1, min(self._chunk, room - len(KINDS_OF_DRAWS)))
        self.step([Row(0, np.zeros(count, np.int32), 0, True)])
        for index, sampling in enumerate(KINDS_OF_DRAWS[: room - count]):
            self.step([Row(0, np.zeros(1, np.int32), count + index, True, sampling)])
        self.truncate(0, 0)


def device_of(name: str) -> torch.device:
    """The torch device. Raises Unsupported, BackendUnavailable."""
    if name == "cpu":
        return torch.device("cpu")
    if name != "gpu":
        raise Unsupported(f"device must be cpu or gpu, got {name!r}", "device")
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
