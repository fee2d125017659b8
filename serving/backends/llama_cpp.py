"""llama.cpp on the CPU, or on a GPU where it was built for one, through the low-level API of llama-cpp-python.

One context with a sequence per slot; a step is one `llama_decode` over a batch whose arrays are numpy views on llama.cpp's own, and
the logits are a view too. What costs time beside the model is a few numpy assignments and the sampler (serving.sampling).

    config = EngineConfig(backend="llama_cpp", model_path="model.gguf", model_name="m", slots=8, context_tokens=1024)
    backend = LlamaCppBackend(config, lambda what, fraction: None)

Options are llama_cpp_library.LlamaOptions. Measured choices, 135M Q4_0 on one AVX2 core, tokens/s of 8 rows at 500 tokens each: KV parts
of their own 130 without flash attention and 100 with it, a unified pool 50 and 69. With parts, each run of neighbouring slots is a pass
over the weights; the worst case, every second slot, costs a third (8 rows at 128 tokens: 103 instead of 165; unified 141).

Flash attention stays off on the CPU. With it, llama.cpp takes one path for sequences with 64 tokens or more in a pass (tiles, float32
sums) and another for fewer (float16 sums), so that logits depend on how a prompt was cut, which depends on who else was there: on a 135M
Q4_0 model they differ by up to 1.0, and the best token with them. Without it they are the same to the bit. What it saves, skipping what is
masked, `calls_of` saves too (prompt of 262 tokens: 991 ms in one piece, 860 cut, 859 with flash attention).

llama.cpp aborts the process on some failures (a lost GPU, a broken invariant): that is why engines are child processes.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import BrokenWeights, UnsupportedModel
from models.gguf_header import read_header
from serving.backends.base import CAPABILITIES, BackendInfo, EngineConfig, MemoryParts, Row, Sampled
from serving.backends.kv_rows import FLOPS_PER_THREAD
from serving.backends.llama_cpp_calls import KV_BLOCK, NEVER, NO_TOKEN, calls_of, dummies, rides
from serving.backends.llama_cpp_library import (
    FLASH_ATTENTION,
    KV_TYPES,
    LOG,
    QUANTISED_KV,
    LlamaOptions,
    build_details,
    cpu_name,
    dry_run_parts,
    library,
    memory_parts,
    parse_options,
)
from serving.errors import BackendUnavailable, EngineFailed, KvFull, OutOfMemory, Unsupported
from serving.hardware import allowed_cores, cgroup_memory_left, process_memory
from serving.sampling import sample

Progress = Callable[[str, float | None], None]

_OK, _KV_FULL = 0, 1  # of llama_decode; 2 aborted, -1 bad batch, lower: fatal
READ_BYTES_PER_SECOND = 8e9  # of weights, by one core; a round figure like those of serving.backends.kv_rows
CAN = frozenset(CAPABILITIES)


class LlamaCppBackend:
    """See serving.backends.base. Raises Unsupported (options, sizes), BackendUnavailable, OutOfMemory, BrokenWeights, UnsupportedModel."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        self._options = parse_options(config.options)
        self._model: Any = None
        self._context: Any = None
        self._batch: _Batch | None = None
        self._threads = config.threads or len(allowed_cores())
        self._llama = llama = _library(config, self._options, self._threads)
        _check(config, self._options, llama)
        self._unified = _unified(config, self._options)
        self._flash = _flash_attention(config, self._options)
        try:
            predicted = self._dry_run(config) if self._options.dry_run else None
            LOG.record()
            self._model = self._load_model(config, progress)
            self._context = self._make_context(config, self._model)
            measured = memory_parts(LOG.stop())
            self._memory = llama.llama_get_memory(self._context)
            self._vocabulary: int = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
            step_tokens: int = llama.llama_n_batch(self._context)
            self._batch = _Batch(llama, step_tokens)
            self._lengths = [0] * config.slots
            self.last_decode_seconds: float | None = None
            self._can_rewind = not (llama.llama_model_is_recurrent(self._model) or llama.llama_model_is_hybrid(self._model))
            self._least_cut = self._tokens_worth_a_cut(config)
            self._logits = _LogitsView(llama, self._context, config.slots, self._vocabulary)
            self.info = self._describe(config, predicted, measured, step_tokens)
            if self._options.warm_up:
                progress("first step", None)
                self._warm_up()
        except BaseException:
            self.close()
            raise

    # --- the contract -------------------------------------------------------------------------------------------------------

    def step(self, rows: list[Row]) -> list[Sampled]:
        """One llama_decode over all rows' tokens, or a few (`calls_of`). Raises KvFull with the KV as before (but for truncations),
        EngineFailed."""
        for row in rows:
            if row.start != self._lengths[row.slot]:
                self.truncate(row.slot, row.start)
        by_slot = {row.slot: row for row in rows}
        drawn: dict[int, Sampled] = {}
        self.last_decode_seconds = None
        for call in [rows] if self._least_cut is None else calls_of(rows, self._least_cut, 4 * self._threads):
            before = time.perf_counter()
            self._decode(self._filled_up(call))
            if all(len(row.tokens) == 1 for row in call):
                self.last_decode_seconds = time.perf_counter() - before
            asking = [by_slot[piece.slot] for piece in call if piece.wants_token]
            if asking:
                drawn |= zip([row.slot for row in asking], sample(self._logits(len(asking)), asking), strict=True)
        return [drawn[row.slot] for row in rows if row.wants_token]

    def _decode(self, rows: list[Row]) -> None:
        batch = self._batch
        assert batch is not None, "step() after close()"
        batch.fill(rows)
        code = self._llama.llama_decode(self._context, batch.batch)
        if code != _OK:
            self._failed(code, batch.batch.n_tokens)
        for row in rows:
            if row.tokens is NO_TOKEN:
                self._llama.llama_memory_seq_rm(self._memory, row.slot, row.start, -1)
            else:
                self._lengths[row.slot] = row.start + len(row.tokens)

    def _filled_up(self, call: list[Row]) -> list[Row]:
        """A call of single tokens, with the rows that compute for nothing (llama_cpp_calls.dummies): their KV entries are dropped again."""
        if self._least_cut is None or not self._can_rewind or any(len(row.tokens) > 1 for row in call):
            return call
        present = {row.slot for row in call}
        free = {slot for slot, length in enumerate(self._lengths) if slot not in present and length < self.info.context_tokens}
        extra = [Row(slot, NO_TOKEN, self._lengths[slot], wants_token=False) for slot in dummies(present, free)]
        return sorted([*call, *extra], key=lambda row: row.slot) if extra else call

    def rides(self, decoding: Collection[int], slot: int) -> bool:
        """Whether a token of the prompt in `slot` is best computed with those of the decoding slots."""
        return self._least_cut is not None and rides(decoding, slot)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Prefix reuse. In the unified pool the cells are shared, and nothing is moved."""
        if source == target or tokens > self._lengths[source]:
            raise ValueError(f"copy of {tokens} tokens from slot {source} (holding {self._lengths[source]}) to slot {target}")
        llama, memory = self._llama, self._memory
        llama.llama_memory_seq_rm(memory, target, -1, -1)
        if self._unified:
            llama.llama_memory_seq_cp(memory, source, target, 0, tokens)
        else:  # parts of their own can only be copied whole
            llama.llama_memory_seq_cp(memory, source, target, -1, -1)
            llama.llama_memory_seq_rm(memory, target, tokens, -1)
        self._lengths[target] = tokens

    def truncate(self, slot: int, tokens: int) -> None:
        """Drop what the slot holds beyond `tokens`."""
        held = self._lengths[slot]
        if tokens > held:
            raise ValueError(f"slot {slot} holds {held} tokens, and a row starts at {tokens}")
        if tokens < held:
            if not self._llama.llama_memory_seq_rm(self._memory, slot, tokens, -1):
                raise EngineFailed(
                    f"llama.cpp cannot cut slot {slot} back from {held} to {tokens} tokens: this model's state cannot be rewound"
                )
            self._lengths[slot] = tokens

    def close(self) -> None:
        if self._batch is not None:
            self._batch.free()
        if self._context is not None:
            self._llama.llama_free(self._context)
        if self._model is not None:
            self._llama.llama_model_free(self._model)
        self._batch = self._context = self._model = None

    # --- loading ------------------------------------------------------------------------------------------------------------

    def _dry_run(self, config: EngineConfig) -> MemoryParts:
        """Lay everything out without weights, as llama.cpp's own fitting does. Raises OutOfMemory where the machine lacks the room."""
        llama = self._llama
        LOG.record()
        settings = self._model_settings(config)
        settings.no_alloc, settings.load_mode = True, llama.llama_load_mode_from_str(b"none")
        model = llama.llama_model_load_from_file(config.model_path.encode(), settings)
        if not model:
            self._not_loaded(config)
        try:
            weight_bytes: int = llama.llama_model_size(model)
            trained: int = llama.llama_model_n_ctx_train(model)
            if config.context_tokens > trained:
                raise Unsupported(f"context_tokens is {config.context_tokens}, and the model was made for {trained}", "context_tokens")
            context = self._make_context(config, model)
            llama.llama_free(context)
        finally:
            llama.llama_model_free(model)
        parts = dry_run_parts(LOG.stop(), weight_bytes + self._copied_bytes(config))
        if config.device == "cpu":
            _check_memory(parts, Path(config.model_path).name)
        return parts

    def _copied_bytes(self, config: EngineConfig) -> int:
        """What the load adds to a mapped file: 4-bit matrices of the layers, rearranged for the CPU's instructions into a copy."""
        if config.device != "cpu" or not self._options.repack or not self._mapped(config):
            return 0
        tensors = read_header(Path(config.model_path)).tensors
        return sum(t.bytes for name, t in tensors.items() if name.startswith("blk.") and len(t.shape) == 2 and t.type in ("Q4_0", "Q4_K"))

    def _load_model(self, config: EngineConfig, progress: Progress) -> Any:
        problems: list[BaseException] = []
        said = [-1.0]

        def report(fraction: float, _: Any) -> bool:
            if fraction - said[0] >= 0.01 or fraction >= 1.0:
                said[0] = fraction
                try:
                    progress("weights", min(1.0, fraction))
                except BaseException as problem:  # cannot pass through C: it is raised when the aborted load comes back
                    problems.append(problem)
                    return False
            return True

        settings = self._model_settings(config)
        settings.progress_callback = callback = self._llama.llama_progress_callback(report)
        model = self._llama.llama_model_load_from_file(config.model_path.encode(), settings)
        del callback
        if problems:
            if model:
                self._llama.llama_model_free(model)
            raise problems[0]
        if not model:
            self._not_loaded(config)
        return model

    def _mapped(self, config: EngineConfig) -> bool:
        return config.device == "gpu" if self._options.mmap is None else self._options.mmap

    def _model_settings(self, config: EngineConfig) -> Any:
        options, llama = self._options, self._llama
        mode = ("mmap+mlock" if options.mlock else "mmap") if self._mapped(config) else ("mlock" if options.mlock else "none")
        settings = llama.llama_model_default_params()
        settings.load_mode = llama.llama_load_mode_from_str(mode.encode())
        settings.use_extra_bufts = options.repack
        settings.n_gpu_layers = options.gpu_layers if config.device == "gpu" else 0
        return settings

    def _make_context(self, config: EngineConfig, model: Any) -> Any:
        options, llama = self._options, self._llama
        settings = llama.llama_context_default_params()
        settings.n_ctx = config.kv_tokens if config.kv_tokens is not None else config.slots * config.context_tokens
        if not self._unified:
            settings.n_ctx = config.slots * -(-config.context_tokens // 256) * 256
        settings.n_batch = max(options.step_tokens, config.slots)
        settings.n_ubatch = min(options.ubatch_tokens, settings.n_batch)
        settings.n_seq_max = settings.n_outputs_max = config.slots
        settings.n_threads = self._threads
        settings.n_threads_batch = options.prefill_threads or self._threads
        settings.flash_attn_type = FLASH_ATTENTION[self._flash]
        settings.type_k = settings.type_v = KV_TYPES[config.kv_dtype]
        settings.kv_unified = self._unified
        settings.offload_kqv = settings.op_offload = config.device == "gpu"
        settings.no_perf = True
        context = llama.llama_init_from_model(model, settings)
        if not context:
            reason = LOG.reason("no reason given")
            kind = OutOfMemory if _is_memory(reason) else BackendUnavailable
            raise kind(f"llama.cpp cannot make a context of {settings.n_ctx} tokens in {config.slots} slots ({config.kv_dtype}): {reason}")
        return context

    def _not_loaded(self, config: EngineConfig) -> None:
        name, reason = Path(config.model_path).name, LOG.reason("no reason given")
        if _is_memory(reason):
            raise OutOfMemory(f"{name} does not fit in memory: {reason}")
        if "unknown model architecture" in reason:
            raise UnsupportedModel(f"llama.cpp does not know the architecture of {name}: {reason}")
        raise BrokenWeights(f"llama.cpp cannot load {name}: {reason}")

    def _tokens_worth_a_cut(self, config: EngineConfig) -> int | None:
        """From how many tokens on a run is cut where its KV block ends: never with flash attention, which skips what is masked. None where
        a step is best left whole: on a GPU, and in a unified pool, whose passes take any mix of rows."""
        if config.device != "cpu" or self._unified:
            return None
        if self._flash != "off":
            return NEVER
        llama, model = self._llama, self._model
        saved_flops = 4 * KV_BLOCK * llama.llama_model_n_embd(model) * llama.llama_model_n_layer(model)
        another_pass_seconds = llama.llama_model_size(model) / READ_BYTES_PER_SECOND
        tokens: int = round(another_pass_seconds * FLOPS_PER_THREAD * self._threads / saved_flops)
        return min(KV_BLOCK, max(1, tokens))

    def _warm_up(self) -> None:
        self.step([Row(0, np.zeros(1, np.int32), 0, wants_token=True)])
        self.truncate(0, 0)

    def _describe(self, config: EngineConfig, predicted: MemoryParts | None, measured: MemoryParts, step_tokens: int) -> BackendInfo:
        llama, options = self._llama, self._options
        ftype = (llama.llama_ftype_name(llama.llama_model_ftype(self._model)) or b"").decode()
        whole = config.slots * config.context_tokens
        used = process_memory(os.getpid())
        details = build_details(llama) | {
            "threads": str(self._threads),
            "prefill_threads": str(options.prefill_threads or self._threads),
            "flash_attention": _flash_attention_said(LOG.lines, self._flash),
            "kv_unified": str(self._unified).lower(),
            "kv_dtype": config.kv_dtype,
            "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
            "ubatch_tokens": str(llama.llama_n_ubatch(self._context)),
            "repack": "yes" if any("REPACK model buffer" in line for line in LOG.lines) else "no",
            "model_file_type": ftype,
            "model_bytes": str(llama.llama_model_size(self._model)),
            "parameters": str(llama.llama_model_n_params(self._model)),
        }
        if used is not None:
            details["rss_bytes"] = str(used.rss_bytes)
        gpu = next((line.split("device ", 1)[1] for line in LOG.lines if "using device" in line), "GPU")
        return BackendInfo(
            name="llama_cpp",
            device=config.device,
            device_name=cpu_name() if config.device == "cpu" else gpu,
            slots=config.slots,
            context_tokens=config.context_tokens,
            kv_tokens=min(whole, config.kv_tokens or whole),
            vocabulary=self._vocabulary,
            weight_format=config.weight_format or ftype.split(" - ")[0],
            step_tokens=step_tokens,
            predicted=predicted,
            measured=measured,
            capabilities=CAN,
            details=details,
        )

    def _failed(self, code: int, tokens: int) -> None:
        if code == _KV_FULL:
            raise KvFull(f"a step of {tokens} tokens found no room among {self.info.kv_tokens} KV tokens")
        reason = LOG.reason("no reason given")
        if _is_memory(reason):
            raise OutOfMemory(f"llama.cpp ran out of memory in a step of {tokens} tokens: {reason}")
        raise EngineFailed(f"llama_decode returned {code} for a step of {tokens} tokens: {reason}")


class _Batch:
    """llama.cpp's batch with numpy views on its arrays. `seq_id[i]` points into one int32 array, so that a step only writes numbers."""

    def __init__(self, llama: Any, tokens: int) -> None:
        self._llama = llama
        self.batch = llama.llama_batch_init(tokens, 0, 1)
        view = np.ctypeslib.as_array
        self._token = view(self.batch.token, (tokens,))
        self._position = view(self.batch.pos, (tokens,))
        self._wanted = view(self.batch.logits, (tokens,))
        view(self.batch.n_seq_id, (tokens,))[:] = 1
        self._slot = np.zeros(tokens, np.int32)
        self._ours = ctypes.cast(self.batch.seq_id, ctypes.POINTER(ctypes.c_void_p))
        self._theirs = [self._ours[index] for index in range(tokens)]
        address = self._slot.ctypes.data
        for index in range(tokens):
            self._ours[index] = address + 4 * index

    def fill(self, rows: list[Row]) -> None:
        """Write this step's tokens; rows may have any number of tokens each."""
        counts = [len(row.tokens) for row in rows]
        count = sum(counts)
        if count > len(self._token):
            raise ValueError(f"a step of {count} tokens; at most {len(self._token)} fit")
        np.concatenate([row.tokens for row in rows], out=self._token[:count])
        if count == len(rows):
            self._position[:count] = [row.start for row in rows]
            self._slot[:count] = [row.slot for row in rows]
            self._wanted[:count] = [row.wants_token for row in rows]
        else:
            self._wanted[:count] = 0
            end = 0
            for row, length in zip(rows, counts, strict=True):
                begin, end = end, end + length
                self._position[begin:end] = np.arange(row.start, row.start + length)
                self._slot[begin:end] = row.slot
                self._wanted[end - 1] = row.wants_token
        self.batch.n_tokens = count

    def free(self) -> None:
        for index, pointer in enumerate(self._theirs):  # llama_batch_free frees what it allocated, not what we put in its place
            self._ours[index] = pointer
        self._llama.llama_batch_free(self.batch)


class _LogitsView:
    """llama.cpp's logits as a numpy array without a copy, valid until the next step. The array is made anew only when the buffer moves."""

    def __init__(self, llama: Any, context: Any, rows: int, vocabulary: int) -> None:
        self._context, self._shape = context, (rows, vocabulary)
        self._address = -1
        self._view: npt.NDArray[np.float32] = np.empty((0, vocabulary), np.float32)
        self._get = llama.llama_cpp._lib["llama_get_logits"]  # by index: a function object of our own, whose types we may set
        self._get.argtypes, self._get.restype = [ctypes.c_void_p], ctypes.c_void_p

    def __call__(self, rows: int) -> npt.NDArray[np.float32]:
        address = self._get(self._context)
        if not address:
            raise EngineFailed("llama.cpp gave no logits")
        if address != self._address:
            self._view = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), self._shape)
            self._address = address
        return self._view[:rows]


def _check(config: EngineConfig, options: LlamaOptions, llama: Any) -> None:
    """What can be refused before anything is loaded."""
    most: int = llama.llama_max_parallel_sequences()
    if not 1 <= config.slots <= most:
        raise Unsupported(f"slots must be from 1 to {most} with llama.cpp, got {config.slots}", "slots")
    if config.context_tokens < 1:
        raise Unsupported(f"context_tokens must be at least 1, got {config.context_tokens}", "context_tokens")
    if config.kv_dtype not in KV_TYPES:
        raise Unsupported(f"kv_dtype must be one of {', '.join(KV_TYPES)} with llama.cpp, got {config.kv_dtype!r}", "kv_dtype")
    if config.kv_dtype in QUANTISED_KV and options.flash_attention == "off":
        raise Unsupported(f"kv_dtype {config.kv_dtype} needs flash attention, and option flash_attention is off", "flash_attention")
    if config.kv_tokens is not None and options.kv_unified is False and config.kv_tokens != config.slots * config.context_tokens:
        raise Unsupported(
            "kv_tokens is a size of the unified pool; with option kv_unified = false each slot has its context_tokens", "kv_tokens"
        )
    if config.kv_tokens is not None and config.kv_tokens < config.context_tokens:
        raise Unsupported(
            f"kv_tokens is {config.kv_tokens}, less than one sequence's context_tokens = {config.context_tokens}", "kv_tokens"
        )
    if config.device not in ("cpu", "gpu"):
        raise Unsupported(f"device must be cpu or gpu, got {config.device!r}", "device")
    if config.device == "gpu" and not llama.llama_supports_gpu_offload():
        build = build_details(llama)
        raise BackendUnavailable(
            f"{build['package']} ({build['wheel']}) was built without GPU support; "
            "CMAKE_ARGS=-DGGML_CUDA=on pip install --no-binary llama-cpp-python --force-reinstall llama-cpp-python builds it with CUDA"
        )
    if not Path(config.model_path).is_file():
        raise BrokenWeights(f"there is no GGUF file {Path(config.model_path).name}")


def _check_memory(parts: MemoryParts, name: str) -> None:
    import psutil

    needed = parts.total_bytes or 0
    left = cgroup_memory_left()
    available = min(psutil.virtual_memory().available, left) if left is not None else psutil.virtual_memory().available
    if needed > available:
        mib = [f"{(part or 0) >> 20} MiB of {what}" for part, what in ((parts.weight_bytes, "weights"), (parts.kv_bytes, "KV cache"))]
        raise OutOfMemory(f"{name} needs {needed >> 20} MiB ({', '.join(mib)}), and {available >> 20} MiB are available")


def _is_memory(reason: str) -> bool:
    lower = reason.lower()
    return any(words in lower for words in ("failed to allocate", "unable to allocate", "out of memory", "bad_alloc", "cannot allocate"))


def _library(config: EngineConfig, options: LlamaOptions, threads: int) -> Any:
    if options.wait_policy != "auto":
        return library(options.wait_policy)
    shared = not config.cores and 1 < threads >= (os.cpu_count() or 1)  # someone else will want one of these cores
    return library("passive" if shared else "default", must=False)


def _unified(config: EngineConfig, options: LlamaOptions) -> bool:
    if options.kv_unified is not None:
        return options.kv_unified
    return config.kv_tokens is not None and config.kv_tokens < config.slots * config.context_tokens


def _flash_attention(config: EngineConfig, options: LlamaOptions) -> str:
    if options.flash_attention != "auto" or config.device == "gpu":
        return options.flash_attention
    return "on" if config.kv_dtype in QUANTISED_KV else "off"


def _flash_attention_said(lines: list[str], asked: str) -> str:
    """What became of "auto", in llama.cpp's words."""
    said = [line.rpartition("Flash Attention ")[2].strip() for line in lines if "Flash Attention " in line]
    return said[-1] if said and asked == "auto" else asked
