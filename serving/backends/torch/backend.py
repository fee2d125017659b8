"""The torch backend: safetensors on CUDA, on ROCm (which torch calls cuda), and on the CPU.

The CPU is for tests and as a reference. The backend has its own forward pass (forward_pass.py) for
the architectures of hf_config.py, over a KV cache with a fixed part for each slot. Prompt
pieces and decode rows of a step share one pass over the weights. On a GPU, attention uses torch's
flash kernels (varlen_attention.py), steps and draws are CUDA graphs (cuda_graphs.py), and tokens
are drawn on the device (gpu_sampler.py).
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

from crossover.models.shape.hf_config import read_spec
from crossover.models.weights.weights_manifest import Progress
from crossover.serving.backends.backend_interface import (
    BackendInfo,
    EngineConfig,
    check_row,
    check_sizes,
    parse_backend_options,
)
from crossover.serving.backends.torch.cuda_graphs import Graphs, StepGraphs
from crossover.serving.backends.torch.forward_pass import (
    PassLogits,
    SlotModel,
    run_pass,
    to_device,
)
from crossover.serving.backends.torch.gpu_sampler import DeviceSampler, can_draw
from crossover.serving.backends.torch.memory_overhead import captured_tokens
from crossover.serving.backends.torch.torch_weights import (
    DTYPES,
    StoredTensors,
    compute_dtype,
    load,
)
from crossover.serving.backends.torch.varlen_attention import KvCache, why_no_flash
from crossover.serving.errors import BackendUnavailable, EngineFailed, OutOfMemory, Unsupported
from crossover.serving.sampling.batch_sampler import sample
from crossover.serving.sampling.step_inputs import PLACEHOLDER, Row, Sampled, Sampling

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# One of each kind of draw (gpu_sampler.Kind) that requests usually need.
WARM_UP_SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.0, top_k=50),
)
# Words in the errors of torch and of CUDA's libraries that mean that memory ran out.
_OUT_OF_MEMORY = ("not enough memory", "out of memory", "_ALLOC_FAILED", "ERROR_OUT_OF_MEMORY")


class LaunchedStep:
    """A launched step, whose tokens are copied to the host while the device goes on.

    See Launched in crossover.serving.backends.backend_interface.
    """

    def __init__(self, tokens: Tensor, is_valid: Tensor, rows: list[Row]) -> None:
        """`tokens`, `is_valid`: [n] on the device, see DeviceSampler.draw. `rows`: the n rows that
        want a token."""
        self.device_tokens = tokens
        self._index_of_slot = {row.slot: index for index, row in enumerate(rows)}
        both = torch.stack((tokens, is_valid.long()))
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
        tokens, is_valid = self._host.tolist()
        # Backend.step returns tokens in the order of the rows, which is that of their slots.
        indices = [self._index_of_slot[slot] for slot in sorted(self._index_of_slot)]
        return [Sampled(tokens[index]) if is_valid[index] else None for index in indices]

    def with_references(self, rows: list[Row]) -> list[Row]:
        """Return the rows of the next step, in which each PLACEHOLDER is replaced by -1 - n if it
        stands for the n-th token of this step (see forward_pass.resolve_references)."""
        return [self._with_reference(row) if row.tokens[0] == PLACEHOLDER else row for row in rows]

    def _with_reference(self, row: Row) -> Row:
        reference = -1 - self._index_of_slot[row.slot]
        return replace(row, tokens=np.array([reference], np.int32))


class TorchBackend:
    """See crossover.serving.backends.backend_interface.Backend."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        # There are none: any is refused.
        parse_backend_options(msgspec.Struct, config.options, "torch")
        self._device = device = torch_device_of(config.device)
        self._is_gpu = self._device_sampling = is_gpu = config.device == "gpu"
        folder, settings = Path(config.model_path), config.settings
        slots, context = settings.slots, settings.context_tokens
        spec = read_spec(folder, config.model_name)
        checkpoint = StoredTensors(folder)
        weight_format = config.weight_format or checkpoint.weight_format
        supported_formats = ["fp32", "bf16", "fp16"] if is_gpu else ["fp32", "bf16"]
        if weight_format not in supported_formats:
            raise Unsupported(
                f"torch does not support weight_format {weight_format!r} on this device. Formats: "
                f"{', '.join(supported_formats)}",
                "weight_format",
            )
        dtype = compute_dtype(weight_format, device)
        check_sizes(config, spec.context, DTYPE_NAMES[dtype])
        threads = config.threads or len(config.cores) or len(os.sched_getaffinity(0))
        if is_gpu:
            # Since 2.11, torch prefers cuDNN on sm_90 and newer. cuDNN plans every new shape for
            # 40 ms or more, which would stall each step while lengths grow (pytorch issue 191576).
            torch.backends.cuda.enable_cudnn_sdp(False)
        else:
            torch.set_num_threads(threads)
        no_flash_reason = why_no_flash(spec, dtype, device)
        with memory_errors("loading the weights"), torch.inference_mode():
            weights = load(checkpoint, spec, dtype, device, progress)
            cache = KvCache(spec, slots, context, dtype, device)
            model = SlotModel(spec, weights, cache, is_flash=no_flash_reason is None)
        self._model: SlotModel | None = model  # None: closed
        self._lengths = [0] * slots
        self._logits: Tensor | None = None  # the buffer of every step's logits on a GPU
        self._graphs: StepGraphs | None = None
        self._sampler = DeviceSampler(device)
        graphs = "false"  # see _make_graphs
        if is_gpu:
            with memory_errors("making graphs and a first step"), torch.inference_mode():
                self._logits = torch.empty(slots, spec.vocabulary, device=device)
                if no_flash_reason is None:
                    max_tokens = captured_tokens(spec, settings)
                    graphs = self._make_graphs(model, self._logits, max_tokens, progress)
                progress("first step", None)
                self._warm_up(min(settings.step_tokens, context - len(WARM_UP_SAMPLINGS)))
                torch.cuda.synchronize()
        runtime = "CPU"
        if torch.version.hip:
            runtime = f"ROCm {torch.version.hip}"
        elif is_gpu:
            runtime = f"CUDA {torch.version.cuda}"
        self.info = BackendInfo(
            name="torch",
            device=config.device,
            device_name=torch.cuda.get_device_name(device) if is_gpu else "CPU",
            settings=msgspec.structs.replace(
                settings,
                kv_tokens=min(settings.pool_tokens, slots * context),
                kv_dtype=DTYPE_NAMES[dtype],
            ),
            vocabulary=spec.vocabulary,
            weight_format=weight_format,
            details={
                "torch": str(torch.__version__),  # a subclass of str, which msgspec cannot encode
                "kv_dtype": DTYPE_NAMES[dtype],
                "attention": "flash" if no_flash_reason is None else f"sdpa: {no_flash_reason}",
                "graphs": graphs,
                "runtime": runtime,
                "threads": str(threads),
            },
        )

    @torch.inference_mode()
    def step(self, rows: list[Row]) -> list[Sampled]:
        with memory_errors(f"a step of {sum(len(row.tokens) for row in rows)} tokens"):
            logits, sampling_rows = self._run(rows)
            sampled = self._draw(logits, sampling_rows)
        sampled_by_slot = {
            row.slot: token for row, token in zip(sampling_rows, sampled, strict=True)
        }
        return [sampled_by_slot[row.slot] for row in rows if row.wants_token]

    @torch.inference_mode()
    def launch(self, rows: list[Row], after: LaunchedStep | None) -> LaunchedStep | None:
        can_draw_all = all(can_draw(row) for row in rows if row.wants_token)
        if not self._device_sampling or not can_draw_all:
            return None
        previous_tokens = None
        if after is not None:
            rows = after.with_references(rows)
            previous_tokens = after.device_tokens
        with memory_errors(f"a step of {sum(len(row.tokens) for row in rows)} tokens"):
            logits, sampling_rows = self._run(rows, previous_tokens)
            tokens, is_valid = self._sampler.draw(logits, sampling_rows)
            return LaunchedStep(tokens, is_valid, sampling_rows)

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

    def _run(self, rows: list[Row], previous_tokens: Tensor | None = None) -> PassLogits:
        """Run a step as a CUDA graph if there is one for it, otherwise kernel by kernel.
        `previous_tokens`: see forward_pass.resolve_references. Raises EngineFailed."""
        model = self._model
        if model is None:
            raise EngineFailed("the backend is closed")
        for row in rows:
            check_row(row, self._lengths[row.slot], model.width)
            self._lengths[row.slot] = row.position
        if self._graphs is not None:
            replayed = self._graphs.run(rows, previous_tokens)
            if replayed is not None:
                return replayed
        return run_pass(model, rows, self._logits, previous_tokens)

    def _draw(self, logits: Tensor, rows: list[Row]) -> list[Sampled]:
        """Return a token for each row: drawn on the device, or on the host if the device cannot.
        `logits`: float32 [rows, vocabulary]. Waits for the step."""
        if not rows:
            if self._is_gpu:  # else the remaining work would count as time of the next step
                torch.cuda.synchronize()
            return []
        if not self._device_sampling:
            return sample(logits.cpu().numpy(), rows)
        device_tokens, is_valid = self._sampler.draw(logits, rows)
        # Both results in one copy, which waits for the step.
        tokens, valid_flags = torch.stack((device_tokens, is_valid.long())).cpu().tolist()
        samples: list[Sampled] = [Sampled(token) for token in tokens]
        on_host = [
            index for index, row in enumerate(rows) if not valid_flags[index] or not can_draw(row)
        ]
        if on_host:
            host_logits = logits[to_device(np.array(on_host), self._device)].cpu().numpy()
            host_samples = sample(host_logits, [rows[index] for index in on_host])
            for index, sampled in zip(on_host, host_samples, strict=True):
                samples[index] = sampled
        return samples

    def _make_graphs(
        self, model: SlotModel, logits: Tensor, max_tokens: int, progress: Progress
    ) -> str:
        """Capture steps and draws as CUDA graphs. `max_tokens`: see cuda_graphs.step_shapes.

        Return "true" for the backend's details, or "false: " and the reason if they cannot be
        captured. Steps are then slower, but not wrong.
        """
        try:
            graphs = Graphs(is_capturing=True)
            self._graphs = StepGraphs(model, logits, max_tokens, graphs, progress)
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
        for start, sampling in enumerate(WARM_UP_SAMPLINGS, start=count):
            self.step([Row(slot=0, tokens=token, start=start, wants_token=True, sampling=sampling)])
        self.truncate(0, 0)


def torch_device_of(name: str) -> torch.device:
    """Return the torch device of "cpu" or "gpu". Raises BackendUnavailable."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built_for = torch.version.cuda or torch.version.hip or "the CPU only"
        raise BackendUnavailable(f"torch {torch.__version__} finds no GPU (built for {built_for})")
    return torch.device("cuda", 0)


@contextlib.contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turn torch's errors in the body into OutOfMemory if memory ran out, else into EngineFailed.
    `what`: what the body does, for the message."""
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        text = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        is_memory = isinstance(problem, torch.OutOfMemoryError | MemoryError)
        if is_memory or any(words in str(problem) for words in _OUT_OF_MEMORY):
            raise OutOfMemory(f"{what} did not fit in memory: {text}") from problem
        raise EngineFailed(f"torch failed in {what}: {text}") from problem
