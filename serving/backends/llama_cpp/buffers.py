"""numpy views on the arrays of llama.cpp's batch and logits."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.errors import EngineFailed
from serving.sampling.step_rows import Row


class Batch:
    """llama.cpp's batch. `seq_id[i]` points into one int32 array, so a step only writes numbers."""

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
        """Write the tokens of these rows."""
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
        """llama_batch_free frees the pointers that it allocated: put them back first."""
        for index, pointer in enumerate(self._theirs):
            self._ours[index] = pointer
        self._llama.llama_batch_free(self.batch)


class LogitsView:
    """llama.cpp's logits without a copy, valid until the next step; rebuilt when they move."""

    def __init__(self, llama: Any, context: Any, rows: int, vocabulary: int) -> None:
        self._context = context
        self._shape = (rows, vocabulary)
        self._address = -1
        self._view: npt.NDArray[np.float32] = np.empty((0, vocabulary), np.float32)
        # By index: a function object of our own, whose types may be set.
        self._get = llama.llama_cpp._lib["llama_get_logits"]
        self._get.argtypes = [ctypes.c_void_p]
        self._get.restype = ctypes.c_void_p

    def __call__(self, rows: int) -> npt.NDArray[np.float32]:
        address = self._get(self._context)
        if not address:
            raise EngineFailed("llama.cpp gave no logits")
        if address != self._address:
            pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
            self._view = np.ctypeslib.as_array(pointer, self._shape)
            self._address = address
        return self._view[:rows]
