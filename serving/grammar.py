"""Grammars and JSON schemas for models that llama.cpp loaded: what may come next, kept per request in Row.state.

A schema becomes a grammar by llama-cpp-python's converter, a grammar is matched by llama.cpp. Both see only what serving.gbnf let through.
"""

from __future__ import annotations

import ctypes
import json
import time
import weakref
from typing import Any

import numpy as np

from serving.backends.base import Sampling
from serving.errors import Unsupported
from serving.gbnf import check_grammar, check_schema
from serving.sampling import Logits

MASK_SECONDS = 2.0  # a grammar whose mask takes longer is given up: ambiguous ones get slower exponentially
ACCEPT_SECONDS = 0.2
_CHUNK = 2048  # candidates between two looks at the clock

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class Grammars:
    """Makes grammar states for one vocabulary."""

    def __init__(self, llama: Any, vocab: Any, vocabulary: int) -> None:
        self.llama, self.vocab, self.vocabulary = llama, vocab, vocabulary
        self.one = _Candidates(llama, 1)
        self._all: _Candidates | None = None
        ends = [token for token in (llama.llama_vocab_eos(vocab), llama.llama_vocab_eot(vocab)) if token >= 0]
        self.end_token: int = ends[0] if ends else 0

    @property
    def all(self) -> _Candidates:
        """Every token as a candidate; made when the first mask is needed."""
        if self._all is None:
            self._all = _Candidates(self.llama, self.vocabulary)
        return self._all

    def open(self, sampling: Sampling) -> GrammarState | None:
        """A new state for a request; None where it asks for no grammar. Raises Unsupported saying what is wrong with it."""
        if sampling.grammar is not None and sampling.json_schema is not None:
            raise Unsupported("a request can have a grammar or a JSON schema, not both", "grammar")
        if sampling.json_schema is not None:
            return self._state(schema_to_gbnf(sampling.json_schema), "json_schema")
        if sampling.grammar is not None:
            return self._state(sampling.grammar, "grammar")
        return None

    def _state(self, text: str, parameter: str) -> GrammarState:
        try:
            check_grammar(text)
        except Unsupported as problem:
            raise Unsupported(str(problem), parameter) from problem
        sampler = self.llama.llama_sampler_init_grammar(self.vocab, text.encode(), b"root")
        if not sampler:
            raise Unsupported("the grammar cannot be used: llama.cpp does not accept it", parameter)
        return GrammarState(self, sampler)


class GrammarState:
    """A serving.sampling.Constraint: one request's place in its grammar.

    `error` says why a grammar was given up; such a state allows nothing more, so that the sequence ends.
    """

    def __init__(self, grammars: Grammars, sampler: Any) -> None:
        self.end_token = grammars.end_token
        self.error: str | None = None
        self._grammars, self._sampler = grammars, sampler
        self._ended = False
        weakref.finalize(self, grammars.llama.llama_sampler_free, sampler)

    def allows(self, token: int) -> bool:
        if self._ended:
            return False
        one = self._grammars.one
        one.data["id"][0], one.data["logit"][0] = token, 0.0
        self._grammars.llama.llama_sampler_apply(self._sampler, one.pointer)
        return bool(np.isfinite(one.data["logit"][0]))

    def mask(self, logits: Logits) -> None:
        if self._ended:
            logits[:] = -np.inf
            return
        every = self._grammars.all
        every.data["logit"] = 0.0
        started = time.perf_counter()
        for part in every.parts:
            self._grammars.llama.llama_sampler_apply(self._sampler, part)
            if time.perf_counter() - started > MASK_SECONDS:
                self._give_up(MASK_SECONDS, "a mask")
                logits[:] = -np.inf
                return
        logits[: len(every.data)][~np.isfinite(every.data["logit"])] = -np.inf
        logits[len(every.data) :] = -np.inf

    def accept(self, token: int) -> None:
        """`token` must be allowed: llama.cpp aborts the process otherwise."""
        llama, vocab = self._grammars.llama, self._grammars.vocab
        if llama.llama_vocab_is_eog(vocab, token):
            self._ended = True
            return
        started = time.perf_counter()
        llama.llama_sampler_accept(self._sampler, token)
        if time.perf_counter() - started > ACCEPT_SECONDS:
            self._give_up(ACCEPT_SECONDS, "a token")

    def _give_up(self, seconds: float, what: str) -> None:
        self._ended = True
        self.error = f"the grammar is too ambiguous: {what} took more than {seconds} s"


class _Candidates:
    """llama_token_data_arrays over a numpy array of ours, _CHUNK candidates each."""

    def __init__(self, llama: Any, count: int) -> None:
        self.data = np.zeros(count, _CANDIDATE)
        self.data["id"] = np.arange(count)
        kind = ctypes.POINTER(llama.llama_token_data)
        self._arrays = [
            llama.llama_token_data_array(
                data=self.data[begin:].ctypes.data_as(kind), size=min(_CHUNK, count - begin), selected=-1, sorted=False
            )
            for begin in range(0, count, _CHUNK)
        ]
        self.parts = [ctypes.byref(array) for array in self._arrays]
        self.pointer = self.parts[0]


def schema_to_gbnf(text: str) -> str:
    """The grammar of a JSON schema's documents. Raises Unsupported saying what the converter cannot do."""
    schema = check_schema(text)
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        return str(json_schema_to_gbnf(json.dumps(schema)))
    except Exception as problem:  # the converter raises assertions, KeyErrors and recursion errors on schemas it does not know
        raise Unsupported(f"the JSON schema cannot be used: {type(problem).__name__}: {problem}"[:300], "json_schema") from problem
