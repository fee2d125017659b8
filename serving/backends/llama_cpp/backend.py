"""The llama.cpp backend, on the CPU or a GPU, by the low-level API of llama-cpp-python.

There is one context with a sequence per slot. A step is one `llama_decode`, or a few (see
batching.py). The arrays of the batch and the logits are numpy views of llama.cpp's memory.

The KV cache has a separate part for each slot if possible. On one AVX2 core, 8 rows of 135M Q4_0
with 500 tokens of context each decode at 130 tokens/s with separate parts (100 with flash
attention), and at 50 with a unified pool (69). With separate parts, each run of neighboring slots
is one pass over the weights. The worst case, every second slot in use, costs a third.

Flash attention is off on the CPU by default. It sums in half precision for fewer than 64 tokens, so
that the logits depend on how a prompt was split (by up to 1.0 on 135M Q4_0). Without it they are
bit-identical, and `calls_of` saves most of the work on masked tokens too: a prompt of 262 tokens
takes 991 ms in one pass, 860 ms split, and 859 ms with flash attention.

This holds for dense models. In models with a router or gate in float32 (mixtures of experts, Qwen's
delta nets), one row and several rows round differently, so that a near tie may select another
expert and sometimes another greedy token.

A slot cannot be truncated if the model has recurrent layers, or layers that keep only a sliding
window. Then `save` and `restore` (llama_state_seq_get_data_ext with PARTIAL_ONLY) return it exactly
to a checkpoint.

llama.cpp aborts the process on some failures, which is why engines are child processes.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.cpu_names import cpu_name
from crossover.models.weights.weights_manifest import Progress
from crossover.serving.backends.backend_interface import (
    BackendInfo,
    EngineConfig,
    Saved,
    check_row,
)
from crossover.serving.backends.llama_cpp.batching import (
    NEVER,
    NO_TOKEN,
    Batch,
    calls_of,
    dummies,
)
from crossover.serving.backends.llama_cpp.cache_layout import KV_BLOCK, kept_window_tokens
from crossover.serving.backends.llama_cpp.library import LOG, build_details, is_out_of_memory
from crossover.serving.backends.llama_cpp.loading import Loader
from crossover.serving.errors import EngineFailed, KvFull, OutOfMemory
from crossover.serving.sampling.batch_sampler import sample
from crossover.serving.sampling.step_inputs import Row, Sampled

# Round figures of a CPU, to decide whether splitting a step pays off.
READ_BYTES_PER_SECOND = 8e9  # weights that one core reads
FLOPS_PER_THREAD = 40e9
# A prompt of so many tokens for each thread gets a call of its own: its arithmetic then takes
# longer than reading the weights once more.
TOKENS_PER_THREAD_AND_PASS = 4
# Bytes in an exported slot that do not grow with its tokens: a few numbers for each layer.
_STATE_HEADER_BYTES = 1 << 14
# Codes that llama_decode returns. Others: 2 aborted, -1 invalid batch, lower: fatal.
_OK, _KV_FULL = 0, 1


class _StateSizes(NamedTuple):
    """The bytes of a slot's state."""

    token_bytes: int = 0  # of a token in layers that keep the whole context
    window_token_bytes: int = 0  # of a token in layers that keep a window only
    max_window_tokens: int = 0
    recurrent_bytes: int = 0

    def saved_bytes(self, tokens: int) -> int:
        """Return the bytes of the part that cannot be truncated."""
        window_tokens = min(tokens, self.max_window_tokens)
        return self.recurrent_bytes + window_tokens * self.window_token_bytes


class LlamaCppBackend:
    """See crossover.serving.backends.backend_interface.Backend."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        self._model: Any = None
        self._context: Any = None
        self._loader = loader = Loader(config)
        self._llama = llama = loader.llama
        self._threads, self._unified = loader.threads, loader.is_unified
        self._lengths = [0] * config.settings.slots
        self.last_decode_seconds: float | None = None
        # llama_memory_seq_cp copies between separate parts in the next step.
        self.defers_copies = not self._unified
        try:
            self._model, self._context = loader.load(progress)
            self._memory = llama.llama_get_memory(self._context)
            vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
            self._batch = Batch(llama, llama.llama_n_batch(self._context))
            is_recurrent = llama.llama_model_is_recurrent(self._model)
            self._has_state = is_recurrent or llama.llama_model_is_hybrid(self._model)
            has_windows = loader.keeps_windows_only(self._model, config.settings.context_tokens)
            self._why_not_rewinds = ""
            if self._has_state:
                self._why_not_rewinds = "its recurrent layers keep one state for all tokens"
            elif has_windows:
                window = llama.llama_model_n_swa(self._model)
                self._why_not_rewinds = f"some layers keep a window of {window} tokens only"
            self._can_rewind = not self._why_not_rewinds
            # A dummy row's token cannot be removed from a recurrent state. With experts, a dummy
            # row costs as much as any other, because it is routed to experts of its own.
            self._allows_dummies = not (self._has_state or loader.has_experts(self._model))
            self._min_split_tokens = self._tokens_worth_a_split(config)
            self.info = self._describe(config, vocabulary)
            # The first step faults the pages of all weights in. It runs now, so that the first
            # request does not pay for that.
            progress("first step", None)
            self.step([Row(0, np.zeros(1, np.int32), 0, wants_token=True)])
            self._state_sizes = _StateSizes()  # only needed with a prompt cache
            if config.prompt_cache_bytes:
                self._state_sizes = self._measure_state_sizes(config.settings.context_tokens)
            self.truncate(0, 0)
        except BaseException:
            self.close()
            raise

    def step(self, rows: list[Row]) -> list[Sampled]:
        if self._context is None:
            raise EngineFailed("the backend is closed")
        for row in rows:
            check_row(row, self._lengths[row.slot], self.info.settings.context_tokens)
            self.truncate(row.slot, row.start)
        row_of_slot = {row.slot: row for row in rows}
        sampled_by_slot: dict[int, Sampled] = {}
        self.last_decode_seconds = None
        calls = [rows]
        if self._min_split_tokens is not None:
            min_own_call = TOKENS_PER_THREAD_AND_PASS * self._threads
            calls = calls_of(rows, self._min_split_tokens, min_own_call)
        for call in calls:
            started = time.perf_counter()
            self._decode(self._with_dummies(call))
            if all(len(row.tokens) == 1 for row in call):
                self.last_decode_seconds = time.perf_counter() - started
            # Of a row that was split, `call` has only a piece. Sampling needs the row itself.
            sampling_rows = [row_of_slot[piece.slot] for piece in call if piece.wants_token]
            if sampling_rows:
                sampled = sample(self._logits(len(sampling_rows)), sampling_rows)
                for row, token in zip(sampling_rows, sampled, strict=True):
                    sampled_by_slot[row.slot] = token
        return [sampled_by_slot[row.slot] for row in rows if row.wants_token]

    def _decode(self, rows: list[Row]) -> None:
        """Compute one call. Raises KvFull, OutOfMemory, EngineFailed."""
        self._batch.fill(rows)
        code = self._llama.llama_decode(self._context, self._batch.batch)
        if code != _OK:
            raise self._failure(code, f"a step of {self._batch.batch.n_tokens} tokens")
        for row in rows:
            if row.tokens is NO_TOKEN:
                self._llama.llama_memory_seq_rm(self._memory, row.slot, row.start, -1)
            else:
                self._lengths[row.slot] = row.start + len(row.tokens)

    def _logits(self, rows: int) -> npt.NDArray[np.float32]:
        """Return the logits of the last call, float32 [rows, vocabulary]: a view that is valid
        until the next call. Raises EngineFailed."""
        pointer = self._llama.llama_get_logits(self._context)
        if not pointer:
            raise EngineFailed("llama.cpp gave no logits")
        return np.ctypeslib.as_array(pointer, (rows, self.info.vocabulary))

    def _with_dummies(self, call: list[Row]) -> list[Row]:
        """Return a call of decode rows with dummy rows in the gaps between their slots, if these
        save time. The KV entries of dummy rows are removed after the call.

        With separate KV parts, each gap means another pass over the weights, also on a GPU.
        """
        is_decode = all(len(row.tokens) == 1 for row in call)
        if self._unified or not self._allows_dummies or not is_decode:
            return call
        used_slots = {row.slot for row in call}
        context = self.info.settings.context_tokens
        # A dummy token takes a KV entry during the call, so full slots cannot compute one.
        slots_with_room = {slot for slot, tokens in enumerate(self._lengths) if tokens < context}
        dummy_rows = [
            Row(slot, NO_TOKEN, self._lengths[slot], wants_token=False)
            for slot in dummies(used_slots, slots_with_room - used_slots)
        ]
        if not dummy_rows:
            return call
        return sorted([*call, *dummy_rows], key=lambda row: row.slot)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Make the target slot's KV cache the first `tokens` tokens of the source slot's. In a
        unified pool, the slots share the cells, and nothing is copied."""
        assert source != target and tokens <= self._lengths[source]
        llama, memory = self._llama, self._memory
        llama.llama_memory_seq_rm(memory, target, -1, -1)
        if self._unified:
            llama.llama_memory_seq_cp(memory, source, target, 0, tokens)
        else:  # a part can only be copied whole
            llama.llama_memory_seq_cp(memory, source, target, -1, -1)
            llama.llama_memory_seq_rm(memory, target, tokens, -1)
        self._lengths[target] = tokens

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep only the first `tokens` tokens of a slot. Raises EngineFailed if this is
        impossible."""
        slot_tokens = self._lengths[slot]
        if tokens >= slot_tokens:
            return
        is_truncated = False
        if tokens == 0 or self._can_rewind:
            is_truncated = self._llama.llama_memory_seq_rm(self._memory, slot, tokens, -1)
        if not is_truncated:
            raise EngineFailed(
                f"llama.cpp cannot cut slot {slot} back from {slot_tokens} to {tokens} tokens: "
                f"{self._why_not_rewinds or 'it gives no reason'}"
            )
        self._lengths[slot] = tokens

    def save(self, slot: int) -> Saved:
        """Return a checkpoint of the slot: a copy of its recurrent state, or of its windows."""
        flags = self._llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        return Saved(self._lengths[slot], self._state(slot, flags))

    def restore(self, slot: int, saved: Saved, source: int) -> None:
        """Return `slot` to the checkpoint `saved`. The KV of its layers that keep the whole context
        is in the slot `source`, which may be the same. Raises EngineFailed."""
        llama, memory = self._llama, self._memory
        if source != slot:
            # llama_memory_seq_cp would copy between separate parts only in the next step, and
            # overwrite what is restored here.
            whole = self._state(source, llama.LLAMA_STATE_SEQ_FLAGS_NONE)
            self._set_state(slot, whole, llama.LLAMA_STATE_SEQ_FLAGS_NONE)
        self._set_state(slot, saved.data, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        if not llama.llama_memory_seq_rm(memory, slot, saved.tokens, -1):
            raise EngineFailed(f"llama.cpp cannot take slot {slot} back to {saved.tokens} tokens")
        self._lengths[slot] = saved.tokens

    def state_bytes(self, tokens: int) -> int:
        """Return the maximum bytes that `export` writes of a slot with so many tokens."""
        sizes = self._state_sizes
        return _STATE_HEADER_BYTES + tokens * sizes.token_bytes + sizes.saved_bytes(tokens)

    def saved_bytes(self, tokens: int) -> int:
        """Return the maximum bytes of a checkpoint of a slot with so many tokens."""
        return _STATE_HEADER_BYTES + self._state_sizes.saved_bytes(tokens)

    def export(self, slot: int, buffer: npt.NDArray[np.uint8]) -> int:
        """Write what a slot holds to `buffer`. Return the number of bytes. Raises EngineFailed."""
        return self._write_state(slot, buffer, self._llama.LLAMA_STATE_SEQ_FLAGS_NONE)

    def load(self, slot: int, data: npt.NDArray[np.uint8], tokens: int) -> None:
        """Make a slot hold the first `tokens` tokens of what `export` wrote; all of them if it
        cannot be truncated. Raises EngineFailed, also if a unified pool has no room."""
        llama, memory = self._llama, self._memory
        llama.llama_memory_seq_rm(memory, slot, -1, -1)
        self._lengths[slot] = 0
        self._set_state(slot, data, llama.LLAMA_STATE_SEQ_FLAGS_NONE)
        llama.llama_memory_seq_rm(memory, slot, tokens, -1)
        self._lengths[slot] = tokens

    def _measure_state_sizes(self, context_tokens: int) -> _StateSizes:
        """Return what the state of a slot takes, by that of slot 0, which holds one token."""
        llama = self._llama
        whole, part = llama.LLAMA_STATE_SEQ_FLAGS_NONE, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY

        def size(flags: int) -> int:
            return int(llama.llama_state_seq_get_size_ext(self._context, 0, flags))

        whole_bytes, part_bytes = size(whole), size(part)
        self.step([Row(0, np.zeros(1, np.int32), 1, wants_token=False)])
        token_bytes = size(whole) - whole_bytes
        if self._can_rewind:
            return _StateSizes(token_bytes)
        window_token_bytes = size(part) - part_bytes
        return _StateSizes(
            token_bytes=token_bytes - window_token_bytes,
            window_token_bytes=window_token_bytes,
            max_window_tokens=kept_window_tokens(
                llama.llama_model_n_swa(self._model), context_tokens
            ),
            recurrent_bytes=part_bytes - window_token_bytes,
        )

    def _state(self, slot: int, flags: int) -> npt.NDArray[np.uint8]:
        """Return a copy of a slot's state as bytes. Raises EngineFailed."""
        size = self._llama.llama_state_seq_get_size_ext(self._context, slot, flags)
        data = np.empty(size, np.uint8)
        self._write_state(slot, data, flags)
        return data

    def _write_state(self, slot: int, buffer: npt.NDArray[np.uint8], flags: int) -> int:
        """Write a slot's state to `buffer`. Return the number of bytes. Raises EngineFailed."""
        size = int(self._llama.llama_state_seq_get_size_ext(self._context, slot, flags))
        pointer = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        written = 0
        if size <= len(buffer):
            written = self._llama.llama_state_seq_get_data_ext(
                self._context, pointer, size, slot, flags
            )
        if written != size:
            raise EngineFailed(f"llama.cpp cannot copy the state of slot {slot}")
        return size

    def _set_state(self, slot: int, data: npt.NDArray[np.uint8], flags: int) -> None:
        """Overwrite a slot's state with what `_state` returned. Raises EngineFailed."""
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bytes_read = self._llama.llama_state_seq_set_data_ext(
            self._context, pointer, len(data), slot, flags
        )
        if bytes_read == 0:
            raise EngineFailed(f"llama.cpp cannot restore the state of slot {slot}")

    def close(self) -> None:
        if self._context is not None:
            self._llama.llama_free(self._context)
        if self._model is not None:
            self._llama.llama_model_free(self._model)
        self._context = self._model = None

    def _tokens_worth_a_split(self, config: EngineConfig) -> int | None:
        """Return the number of tokens from which on a row is split where its KV block ends, because
        the attention that this saves costs more than another pass over the weights.

        None if steps are never divided into several calls: on a GPU, and with a unified pool, whose
        passes take any mix of rows. NEVER with flash attention, which skips masked tokens itself.
        """
        if config.device != "cpu" or self._unified:
            return None
        if self._loader.attention != "off":
            return NEVER
        llama, model = self._llama, self._model
        width, layers = llama.llama_model_n_embd(model), llama.llama_model_n_layer(model)
        # A token that is split off does not attend to one KV block: two products (scores, values)
        # of 2 operations for each element.
        saved_flops_per_token = 4 * KV_BLOCK * width * layers
        # What the threads could compute while the weights are read once more.
        pass_seconds = llama.llama_model_size(model) / READ_BYTES_PER_SECOND
        pass_flops = pass_seconds * FLOPS_PER_THREAD * self._threads
        tokens: int = round(pass_flops / saved_flops_per_token)
        return min(KV_BLOCK, max(1, tokens))

    def _describe(self, config: EngineConfig, vocabulary: int) -> BackendInfo:
        """Return what the backend reports about itself. `vocabulary`: the ids that have logits."""
        llama, loader = self._llama, self._loader
        ftype = (llama.llama_ftype_name(llama.llama_model_ftype(self._model)) or b"").decode()
        settings = config.settings
        is_gpu = config.device == "gpu"
        return BackendInfo(
            name="llama_cpp",
            device=config.device,
            device_name=(LOG.gpu or "GPU") if is_gpu else (cpu_name() or "CPU"),
            settings=msgspec.structs.replace(
                settings,
                kv_tokens=min(settings.slots * settings.context_tokens, settings.pool_tokens),
                kv_dtype=loader.kv_dtype,
                step_tokens=llama.llama_n_batch(self._context),
            ),
            vocabulary=vocabulary,
            weight_format=config.weight_format or ftype.split(" - ")[0],
            rewinds=self._can_rewind,
            why_not_rewinds=self._why_not_rewinds,
            has_checkpoints=not self._can_rewind,
            has_export=True,
            details={
                **build_details(llama),
                "threads": str(self._threads),
                "flash_attention": loader.attention,
                "kv_unified": str(self._unified).lower(),
                "kv_dtype": loader.kv_dtype,
            },
        )

    def _failure(self, code: int, subject: str) -> Exception:
        """Return the error for a code that llama_decode returned."""
        if code == _KV_FULL:
            return KvFull(f"{subject} found no room among {self.info.settings.kv_tokens} KV tokens")
        reason = LOG.reason()
        if is_out_of_memory(reason):
            return OutOfMemory(f"llama.cpp ran out of memory in {subject}: {reason}")
        return EngineFailed(f"llama_decode returned {code} for {subject}: {reason}")
