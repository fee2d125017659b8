"""The grammar process: matches grammars with llama.cpp on behalf of an engine, so that a hostile grammar can only take this process down.

llama.cpp keeps every way in which a text may match as a stack of its own. For an ambiguous grammar their number grows exponentially,
within one token, in a call that cannot be interrupted; a broken invariant aborts. Here that costs a process that holds nothing but a
vocabulary: the engine gives it a deadline, kills it, and starts another.

Started by serving.grammar as `python -m serving.grammar_helper`. Requests and answers are msgpack in length-prefixed frames on stdin and
stdout, one answer for each request, in order. The first request is the Vocabulary: llama.cpp reads vocabularies from GGUF files only, so
one without weights is written for it and removed again.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from serving.messages import FRAME

MEMORY_BYTES = 1 << 30  # of address space beyond what the start took
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class Vocabulary(msgspec.Struct, tag="vocabulary", array_like=True):
    """The first request: every token's bytes (b"": never allowed), and the token that ends a text. Answered with the vocabulary's size."""

    tokens: list[bytes]
    end: int


class Open(msgspec.Struct, tag="open", array_like=True):
    """A new state under this number; answered with b"" or with why not."""

    state: int
    grammar: str
    accepted: list[int] = []  # tokens to replay, when the process before this one was lost


class Allows(msgspec.Struct, tag="allows", array_like=True):
    """Whether the token may come next: b"1" or b"0"."""

    state: int
    token: int


class Accept(msgspec.Struct, tag="accept", array_like=True):
    """The token came, and must be allowed: b"1", or b"0" where it was not."""

    state: int
    token: int


class Mask(msgspec.Struct, tag="mask", array_like=True):
    """What may come next: one bit for each token of the vocabulary, np.packbits' order."""

    state: int


class Close(msgspec.Struct, tag="close", array_like=True):
    """Forget a state; answered with b""."""

    state: int


Request = Open | Allows | Accept | Mask | Close
encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Request).decode
_decode_vocabulary = msgspec.msgpack.Decoder(Vocabulary).decode


class Matcher:
    """The grammar states of one vocabulary, by number."""

    def __init__(self, llama: Any, vocab: Any) -> None:
        self._llama, self._vocab = llama, vocab
        self.vocabulary: int = llama.llama_vocab_n_tokens(vocab)
        self._states: dict[int, Any] = {}
        self._every = np.zeros(self.vocabulary, _CANDIDATE)
        self._every["id"] = np.arange(self.vocabulary)
        self._one = np.zeros(1, _CANDIDATE)

    def answer(self, request: Request) -> bytes:
        match request:
            case Open():
                return self._open(request)
            case Allows():
                return b"1" if self._allows(request.state, request.token) else b"0"
            case Accept():
                return b"1" if self._accept(request.state, request.token) else b"0"
            case Mask():
                self._every["logit"] = 0.0
                self._apply(request.state, self._every)
                return np.packbits(np.isfinite(self._every["logit"])).tobytes()
            case Close():
                sampler = self._states.pop(request.state, None)
                if sampler is not None:
                    self._llama.llama_sampler_free(sampler)
                return b""

    def _open(self, request: Open) -> bytes:
        sampler = self._llama.llama_sampler_init_grammar(self._vocab, request.grammar.encode(), b"root")
        if not sampler:
            return b"llama.cpp does not accept it"
        self._states[request.state] = sampler
        for token in request.accepted:
            if not self._accept(request.state, token):
                return f"token {token} is not allowed where it was".encode()
        return b""

    def _allows(self, state: int, token: int) -> bool:
        self._one["id"][0], self._one["logit"][0] = token, 0.0
        self._apply(state, self._one)
        return bool(np.isfinite(self._one["logit"][0]))

    def _accept(self, state: int, token: int) -> bool:
        if not self._allows(state, token):  # accepting it would abort
            return False
        self._llama.llama_sampler_accept(self._states[state], token)
        return True

    def _apply(self, state: int, candidates: Any) -> None:
        pointer = candidates.ctypes.data_as(ctypes.POINTER(self._llama.llama_token_data))
        array = self._llama.llama_token_data_array(data=pointer, size=len(candidates), selected=-1, sorted=False)
        self._llama.llama_sampler_apply(self._states[state], ctypes.byref(array))


def main() -> int:
    from serving.backends.llama_cpp_library import library
    from serving.engine import die_with_parent

    die_with_parent()  # also when a request never comes back
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    body = _read(requests)
    if body is None:
        return 0
    llama = library()
    model = _load(llama, _decode_vocabulary(body))
    if not model:
        return 3
    matcher = Matcher(llama, llama.llama_model_get_vocab(model))
    _limit_memory()
    _write(answers, str(matcher.vocabulary).encode())
    while (body := _read(requests)) is not None:
        _write(answers, matcher.answer(_decode(body)))
    return 0


def _load(llama: Any, vocabulary: Vocabulary) -> Any:
    from models.gguf_write import write_tokens

    settings = llama.llama_model_default_params()
    settings.vocab_only = True
    settings.n_gpu_layers = 0
    with tempfile.TemporaryDirectory(prefix="crossover-grammar-") as folder:
        file = Path(folder, "tokens.gguf")
        write_tokens(vocabulary.tokens, vocabulary.end, file)
        return llama.llama_model_load_from_file(str(file).encode(), settings)


def _read(requests: BinaryIO) -> bytes | None:
    """The next frame's body; None where the engine has gone."""
    head = requests.read(FRAME.size)
    return requests.read(FRAME.unpack(head)[0]) if len(head) == FRAME.size else None


def _write(answers: BinaryIO, body: bytes) -> None:
    answers.write(FRAME.pack(len(body)) + body)
    answers.flush()


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))


if __name__ == "__main__":
    raise SystemExit(main())
