"""Grammars and JSON schemas, for every backend: what may come next, kept per request in Row.state.

A schema becomes a grammar by llama-cpp-python's converter. serving.gbnf refuses what can be seen to be wrong, with a reason; the rest is
matched by llama.cpp in a process of its own (serving.grammar_helper), started with the first grammar, which is told the tokens' bytes: a
GGUF file is not needed, whatever runs the model. A grammar that is too slow or too big there loses its own request and nobody else's: the
process is killed, and other requests' states are replayed in the next one.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence

import numpy as np

from serving.backends.base import Sampling
from serving.errors import Unsupported
from serving.gbnf import check_grammar, check_schema
from serving.grammar_helper import Accept, Allows, Close, Mask, Open, Request, Vocabulary, encode
from serving.messages import FRAME
from serving.sampling import Logits

START_SECONDS = 30.0
ANSWER_SECONDS = 1.0  # a whole mask of 152k tokens takes 0.03 s


class TooSlow(Exception):
    """The grammar process did not answer in time, or died of the request."""


CAPABILITIES = frozenset({"grammar", "json_schema"})  # of serving.backends.base.CAPABILITIES: what needs llama-cpp-python, on any backend


def has_matcher() -> bool:
    """Whether grammars can be matched at all: llama-cpp-python is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


class Grammars:
    """Makes grammar states for one vocabulary; owns the process that matches them.

    `tokens`: each token's bytes, b"" for those that a grammar may never draw; `ends`: the tokens that end a text.
    """

    def __init__(self, tokens: Sequence[bytes], ends: frozenset[int]) -> None:
        self.ends = ends
        self.generation = 0  # of the process; a state opened in an earlier one must be opened again
        self._tokens = tokens
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._forgotten: list[int] = []

    def open(self, sampling: Sampling) -> GrammarState | None:
        """A new state for a request; None where it asks for no grammar. Raises Unsupported saying what is wrong with it."""
        if sampling.grammar is not None and sampling.json_schema is not None:
            raise Unsupported("a request can have a grammar or a JSON schema, not both", "grammar")
        if not self.ends and (sampling.grammar is not None or sampling.json_schema is not None):
            raise Unsupported("the model names no token that ends a text, so that a grammar could not end", "grammar")
        if sampling.json_schema is not None:
            return self._state(schema_to_gbnf(sampling.json_schema), "json_schema")
        if sampling.grammar is not None:
            return self._state(sampling.grammar, "grammar")
        return None

    def _state(self, text: str, parameter: str) -> GrammarState:
        try:
            check_grammar(text)
            state = GrammarState(self, text, next(self._numbers))
            reason = state.ask(Open(state.number, text)).decode()
        except Unsupported as problem:
            raise Unsupported(str(problem), parameter) from problem
        except TooSlow as problem:
            raise Unsupported(f"the grammar cannot be used: {problem}", parameter) from problem
        if reason:
            raise Unsupported(f"the grammar cannot be used: {reason}", parameter)
        weakref.finalize(state, self._forgotten.append, state.number)
        return state

    def ask(self, request: Request) -> bytes:
        """The grammar process's answer. Raises TooSlow after killing it."""
        if self._process is None:
            self._start()
        while self._forgotten:
            number = self._forgotten.pop()
            self._exchange(Close(number))
        return self._exchange(request)

    def close(self) -> None:
        """End the process; another one starts with the next request."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
            self.generation += 1
            self._forgotten.clear()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "serving.grammar_helper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # llama.cpp prints every grammar that it cannot parse
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        try:
            self._exchange(Vocabulary(list(self._tokens), min(self.ends)), START_SECONDS)
        except TooSlow as problem:
            raise TooSlow("the process that matches grammars does not start") from problem

    def _exchange(self, request: Request | Vocabulary, seconds: float = ANSWER_SECONDS) -> bytes:
        assert self._process is not None and self._process.stdin is not None
        body = encode(request)
        try:
            self._process.stdin.write(FRAME.pack(len(body)) + body)
            self._process.stdin.flush()
        except OSError:
            self.close()
            raise TooSlow("the process that matches grammars has ended") from None
        return self._read(seconds)

    def _read(self, seconds: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        source, deadline, data = self._process.stdout.fileno(), time.monotonic() + seconds, b""
        size = FRAME.size
        while len(data) < size:
            ready, _, _ = select.select([source], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(source, 1 << 16) if ready else b""
            if not piece:
                self.close()
                raise TooSlow("it is too ambiguous: matching it takes too long" if not ready else "matching it takes too much memory")
            data += piece
            if len(data) >= FRAME.size:
                size = FRAME.size + int(FRAME.unpack_from(data)[0])
        return data[FRAME.size :]


class GrammarState:
    """A serving.sampling.Constraint: one request's place in its grammar.

    `error` says why a grammar was given up; such a state allows nothing more, so that its sequence ends.
    """

    def __init__(self, grammars: Grammars, text: str, number: int) -> None:
        self.end_token = min(grammars.ends)
        self.error: str | None = None
        self.number = number
        self._grammars, self._text = grammars, text
        self._accepted: list[int] = []
        self._generation = -1
        self._ended = False

    def allows(self, token: int) -> bool:
        asked = self.end_token if token in self._grammars.ends else token  # the matcher knows one end
        return self._answer(Allows(self.number, asked)) == b"1"

    def mask(self, logits: Logits) -> None:
        bits = self._answer(Mask(self.number))
        if not bits:
            logits[:] = -np.inf
            return
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8)).view(bool)
        allowed[list(self._grammars.ends)] = allowed[self.end_token]
        known = min(len(allowed), len(logits))
        logits[:known][~allowed[:known]] = -np.inf
        logits[known:] = -np.inf

    def accept(self, token: int) -> None:
        if token in self._grammars.ends:
            self._ended = True
        elif self._answer(Accept(self.number, token)) == b"1":
            self._accepted.append(token)

    def ask(self, request: Request) -> bytes:
        """The answer to a request about this state, which is opened again first where its process was lost."""
        if self._generation != -1 and self._generation != self._grammars.generation:
            self._grammars.ask(Open(self.number, self._text, self._accepted))
        answer = self._grammars.ask(request)
        self._generation = self._grammars.generation
        return answer

    def _answer(self, request: Request) -> bytes:
        if self._ended:
            return b""
        try:
            return self.ask(request)
        except TooSlow as problem:
            self._ended, self.error = True, f"the grammar was given up: {problem}"
            return b""


def schema_to_gbnf(text: str) -> str:
    """The grammar of a JSON schema's documents. Raises Unsupported saying what the converter cannot do."""
    schema = check_schema(text)
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        return str(json_schema_to_gbnf(json.dumps(schema)))
    except Exception as problem:  # the converter raises assertions, KeyErrors and recursion errors on schemas it does not know
        raise Unsupported(f"the JSON schema cannot be used: {type(problem).__name__}: {problem}"[:300], "json_schema") from problem
