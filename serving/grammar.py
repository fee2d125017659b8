"""Grammars and JSON schemas for models that llama.cpp loaded: what may come next, kept per request in Row.state.

A schema becomes a grammar by llama-cpp-python's converter, a grammar is matched by llama.cpp. Both see only what serving.gbnf let through.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from serving.backends.base import Sampling
from serving.errors import Unsupported
from serving.gbnf import check_grammar, check_schema
from serving.sampling import Logits

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
    """A serving.sampling.Constraint: one request's place in its grammar."""

    def __init__(self, grammars: Grammars, sampler: Any) -> None:
        self.end_token = grammars.end_token
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
        self._grammars.llama.llama_sampler_apply(self._sampler, every.pointer)
        logits[: len(every.data)][~np.isfinite(every.data["logit"])] = -np.inf
        logits[len(every.data) :] = -np.inf

    def accept(self, token: int) -> None:
        """`token` must be allowed: llama.cpp aborts the process otherwise."""
        llama, vocab = self._grammars.llama, self._grammars.vocab
        if llama.llama_vocab_is_eog(vocab, token):
            self._ended = True
        else:
            llama.llama_sampler_accept(self._sampler, token)


class _Candidates:
    """A llama_token_data_array over a numpy array of ours."""

    def __init__(self, llama: Any, count: int) -> None:
        self.data = np.zeros(count, _CANDIDATE)
        self.data["id"] = np.arange(count)
        pointer = self.data.ctypes.data_as(ctypes.POINTER(llama.llama_token_data))
        self._array = llama.llama_token_data_array(data=pointer, size=count, selected=-1, sorted=False)
        self.pointer = ctypes.byref(self._array)


def schema_to_gbnf(text: str) -> str:
    """The grammar of a JSON schema's documents. Raises Unsupported saying what the converter cannot do."""
    check_schema(text)
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        return str(json_schema_to_gbnf(text))
    except Exception as problem:  # the converter raises assertions, KeyErrors and recursion errors on schemas it does not know
        raise Unsupported(f"the JSON schema cannot be used: {type(problem).__name__}: {problem}"[:300], "json_schema") from problem
