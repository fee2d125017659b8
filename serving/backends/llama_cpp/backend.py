"""llama.cpp on the CPU or a GPU, by the low-level API of llama-cpp-python.

One context with a sequence per slot. A step is one `llama_decode`, or a few (see batching.py), over
a batch whose arrays are numpy views on llama.cpp's own; the logits are a view too.

Measured, 135M Q4_0 on one AVX2 core, tokens/s of 8 rows at 500 tokens each: a KV part per slot 130
without flash attention and 100 with it, a unified pool 50 and 69. With parts, each run of
neighbouring slots is a pass over the weights; the worst case, every second slot, costs a third.

Flash attention stays off on the CPU: it sums in half precision for fewer than 64 tokens, so that
logits depend on how a prompt was cut (by up to 1.0 on 135M Q4_0). Without it they are the same to
the bit, and `calls_of` skips what is masked as well (prompt of 262 tokens: 991 ms in one piece,
860 cut, 859 with flash attention). That is true of dense models; where a router or a gate is a
float32 matrix (mixtures of experts, Qwen's delta nets), one row and several round differently, and
a near tie may fall otherwise: another expert, and now and then another greedy token.

A slot cannot be cut back where layers are recurrent, or keep a sliding window only. `save` and
`restore` (llama_state_seq_get_data_ext with PARTIAL_ONLY) take it back to a point, exactly.

llama.cpp aborts the process on some failures, which is why engines are child processes.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.machine_limits import cpu_name
from crossover.models.weights_manifest import Progress
from crossover.serving.backends.backend_interface import BackendInfo, EngineConfig, check_row
from crossover.serving.backends.llama_cpp.batching import (
    KV_BLOCK,
    NEVER,
    NO_TOKEN,
    Batch,
    calls_of,
    dummies,
)
from crossover.serving.backends.llama_cpp.library import LOG, build_details, is_memory
from crossover.serving.backends.llama_cpp.loading import Loader
from crossover.serving.errors import EngineFailed, KvFull, OutOfMemory
from crossover.serving.sampling.batch_sampler import sample
from crossover.serving.sampling.step_inputs import Row, Sampled

READ_BYTES_PER_SECOND = 8e9  # of weights, by one core; round figures
FLOPS_PER_THREAD = 40e9
_OK, _KV_FULL = 0, 1  # of llama_decode; 2 aborted, -1 bad batch, lower: fatal


class SavedState(NamedTuple):
    """See crossover.serving.backends.backend_interface.Saved."""

    tokens: int
    data: npt.NDArray[np.uint8]


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
            # A dummy row's token cannot be taken out of a state, and costs as much as any row where
            # it draws experts of its own.
            self._takes_dummies = not (self._has_state or loader.has_experts(self._model))
            self._least_cut = self._tokens_worth_a_cut(config)
            self.info = self._describe(config, vocabulary)
            progress("first step", None)  # which takes the page faults
            self.step([Row(0, np.zeros(1, np.int32), 0, wants_token=True)])
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
        by_slot = {row.slot: row for row in rows}
        samples: dict[int, Sampled] = {}
        self.last_decode_seconds = None
        calls = [rows]
        if self._least_cut is not None:
            calls = calls_of(rows, self._least_cut, 4 * self._threads)
        for call in calls:
            started = time.perf_counter()
            self._decode(self._filled_up(call))
            if all(len(row.tokens) == 1 for row in call):
                self.last_decode_seconds = time.perf_counter() - started
            sampling_rows = [by_slot[piece.slot] for piece in call if piece.wants_token]
            if sampling_rows:
                tokens = sample(self._logits(len(sampling_rows)), sampling_rows)
                samples |= zip([row.slot for row in sampling_rows], tokens, strict=True)
        return [samples[row.slot] for row in rows if row.wants_token]

    def _decode(self, rows: list[Row]) -> None:
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
        """Those of the last call, a view that is valid until the next one."""
        pointer = self._llama.llama_get_logits(self._context)
        if not pointer:
            raise EngineFailed("llama.cpp gave no logits")
        return np.ctypeslib.as_array(pointer, (rows, self.info.vocabulary))

    def _filled_up(self, call: list[Row]) -> list[Row]:
        """Return a call of single tokens with dummy rows, whose KV entries are dropped again: each
        gap between rows with parts of their own is another pass over the weights, on a GPU too."""
        is_decode = all(len(row.tokens) == 1 for row in call)
        if self._unified or not self._takes_dummies or not is_decode:
            return call
        used_slots, lengths = {row.slot for row in call}, self._lengths
        context = self.info.settings.context_tokens
        free_slots = {slot for slot, held in enumerate(lengths) if held < context}
        dummy_slots = dummies(used_slots, free_slots - used_slots)
        rows = [Row(slot, NO_TOKEN, lengths[slot], wants_token=False) for slot in dummy_slots]
        return sorted([*call, *rows], key=lambda row: row.slot) if rows else call

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Prefix reuse. The unified pool shares the cells, and nothing is moved."""
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
        slot_tokens = self._lengths[slot]
        if tokens < slot_tokens:
            is_possible = tokens == 0 or self._can_rewind
            if not (
                is_possible and self._llama.llama_memory_seq_rm(self._memory, slot, tokens, -1)
            ):
                raise EngineFailed(
                    f"llama.cpp cannot cut slot {slot} back from {slot_tokens} to {tokens} tokens: "
                    f"{self._why_not_rewinds or 'it gives no reason'}"
                )
            self._lengths[slot] = tokens

    def save(self, slot: int) -> SavedState:
        """Return the slot's recurrent state, or its windows, as they are now."""
        flags = self._llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        return SavedState(self._lengths[slot], self._state(slot, flags))

    def restore(self, slot: int, saved: SavedState, source: int) -> None:
        """Make `slot` hold the tokens of `saved`; `source` holds the rest of their KV."""
        llama, memory = self._llama, self._memory
        if source != slot:
            # Not by llama_memory_seq_cp: between parts it copies at the next step, over what is
            # restored here.
            whole = self._state(source, llama.LLAMA_STATE_SEQ_FLAGS_NONE)
            self._set_state(slot, whole, llama.LLAMA_STATE_SEQ_FLAGS_NONE)
        self._set_state(slot, saved.data, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        if not llama.llama_memory_seq_rm(memory, slot, saved.tokens, -1):
            raise EngineFailed(f"llama.cpp cannot take slot {slot} back to {saved.tokens} tokens")
        self._lengths[slot] = saved.tokens

    def _state(self, slot: int, flags: int) -> npt.NDArray[np.uint8]:
        size = self._llama.llama_state_seq_get_size_ext(self._context, slot, flags)
        data = np.empty(size, np.uint8)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        written = self._llama.llama_state_seq_get_data_ext(
            self._context, pointer, size, slot, flags
        )
        if written != size:
            raise EngineFailed(f"llama.cpp cannot copy the state of slot {slot}")
        return data

    def _set_state(self, slot: int, data: npt.NDArray[np.uint8], flags: int) -> None:
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

    def _tokens_worth_a_cut(self, config: EngineConfig) -> int | None:
        """From how many tokens on a run is cut where its KV block ends; None: steps stay whole.

        NEVER with flash attention, which skips what is masked. Whole on a GPU, and in a unified
        pool, whose passes take any mix of rows.
        """
        if config.device != "cpu" or self._unified:
            return None
        if self._loader.attention != "off":
            return NEVER
        llama, model = self._llama, self._model
        width, layers = llama.llama_model_n_embd(model), llama.llama_model_n_layer(model)
        saved_flops = 4 * KV_BLOCK * width * layers
        another_pass_seconds = llama.llama_model_size(model) / READ_BYTES_PER_SECOND
        tokens: int = round(another_pass_seconds * FLOPS_PER_THREAD * self._threads / saved_flops)
        return min(KV_BLOCK, max(1, tokens))

    def _describe(self, config: EngineConfig, vocabulary: int) -> BackendInfo:
        llama, loader = self._llama, self._loader
        ftype = (llama.llama_ftype_name(llama.llama_model_ftype(self._model)) or b"").decode()
        settings = config.settings
        whole = settings.slots * settings.context_tokens
        on_gpu = config.device == "gpu"
        return BackendInfo(
            name="llama_cpp",
            device=config.device,
            device_name=(LOG.gpu or "GPU") if on_gpu else (cpu_name() or "CPU"),
            settings=msgspec.structs.replace(
                settings,
                kv_tokens=min(whole, settings.pool_tokens),
                kv_dtype=loader.kv_dtype,
                step_tokens=llama.llama_n_batch(self._context),
            ),
            vocabulary=vocabulary,
            weight_format=config.weight_format or ftype.split(" - ")[0],
            rewinds=self._can_rewind,
            why_not_rewinds=self._why_not_rewinds,
            saves=not self._can_rewind,
            details={
                **build_details(llama),
                "threads": str(self._threads),
                "flash_attention": loader.attention,
                "kv_unified": str(self._unified).lower(),
                "kv_dtype": loader.kv_dtype,
            },
        )

    def _failure(self, code: int, subject: str) -> Exception:
        if code == _KV_FULL:
            return KvFull(f"{subject} found no room among {self.info.settings.kv_tokens} KV tokens")
        reason = LOG.reason()
        if is_memory(reason):
            return OutOfMemory(f"llama.cpp ran out of memory in {subject}: {reason}")
        return EngineFailed(f"llama_decode returned {code} for {subject}: {reason}")
