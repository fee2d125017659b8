"""The tokenizer inside a GGUF file, read by llama.cpp without loading weights."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from crossover.models.chat_template import RendersChat
from crossover.models.errors import BrokenWeights, UnsupportedModel

_NAMED_TEMPLATE = b"tokenizer.chat_template."
_NO_VOCABULARY = 0  # enum llama_vocab_type
# For most families llama.cpp splits text with std::regex, which recurses for each character of a
# word: 300 to 450 bytes of stack per character, and a crash when the stack overflows.
_PLAIN_CHARACTERS = 4096
_CHARACTER_STACK = 1024
_STACK_SIZE = threading.Lock()


class GgufTokenizer(RendersChat):
    """As crossover.models.tokenizer.HfTokenizer, over llama.cpp's own vocabulary code."""

    def __init__(self, file: Path) -> None:
        self._llama = llama = llama_library()
        params = llama.llama_model_default_params()
        params.vocab_only = True
        model = llama.llama_model_load_from_file(str(file).encode(), params)
        if not model:
            why = f": {_ERRORS[-1]}" if _ERRORS else ""
            raise BrokenWeights(f"llama.cpp cannot read the header of {file.name}{why}")
        weakref.finalize(self, llama.llama_model_free, model)
        self._vocab = vocab = llama.llama_model_get_vocab(model)
        if llama.llama_vocab_type(vocab) == _NO_VOCABULARY:
            raise UnsupportedModel(f"{str(file)!r} contains no tokenizer")
        self.vocabulary = int(llama.llama_vocab_n_tokens(vocab))
        self.special_ids, self.eos_ids = (
            frozenset(index for index in range(self.vocabulary) if has(vocab, index))
            for has in (llama.llama_vocab_is_control, llama.llama_vocab_is_eog)
        )
        bos, eos = llama.llama_vocab_bos(vocab), llama.llama_vocab_eos(vocab)
        self.bos_id = int(bos) if llama.llama_vocab_get_add_bos(vocab) else None
        self.chat_tokens = {"bos_token": self.token_text(bos), "eos_token": self.token_text(eos)}
        template = llama.llama_model_chat_template(model, None)
        self.chat_template = template.decode(errors="replace") if template else None
        self.other_templates = self._named_templates(model)

    def _named_templates(self, model: Any) -> dict[str, str]:
        """Return name -> chat template, of the keys tokenizer.chat_template.NAME."""
        llama, room = self._llama, ctypes.create_string_buffer(256)
        found = {}
        for index in range(llama.llama_model_meta_count(model)):
            size = llama.llama_model_meta_key_by_index(model, index, room, len(room))
            if 0 < size < len(room) and room.value.startswith(_NAMED_TEMPLATE):
                name = room.value.removeprefix(_NAMED_TEMPLATE)
                if text := llama.llama_model_chat_template(model, name):
                    found[name.decode(errors="replace")] = text.decode(errors="replace")
        return found

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        data = text.encode(errors="replace")
        room = len(data) + 16  # tokens are bytes at least
        ids = (ctypes.c_int32 * room)()
        arguments = (self._vocab, data, len(data), ids, room, False, parse_special)
        if len(text) <= _PLAIN_CHARACTERS:
            return list(ids[: self._llama.llama_tokenize(*arguments)])
        with ThreadPoolExecutor(1) as deep, _STACK_SIZE:
            usual = threading.stack_size(_CHARACTER_STACK * len(text))
            try:
                counted = deep.submit(self._llama.llama_tokenize, *arguments)
            finally:
                threading.stack_size(usual)
            return list(ids[: counted.result()])

    def token_bytes(self) -> list[bytes]:
        """Control tokens have none."""
        table, longest = [], 1 << 16
        buffer = ctypes.create_string_buffer(longest)
        for index in range(self.vocabulary):
            size = self._llama.llama_token_to_piece(self._vocab, index, buffer, longest, 0, False)
            table.append(ctypes.string_at(buffer, max(0, size)))
        return table

    def token_text(self, token: int) -> str:
        if not 0 <= token < self.vocabulary:
            return ""
        text = self._llama.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace") if text else ""


# llama.cpp logs a lot while loading; only the last error matters.
_ERRORS: deque[str] = deque(maxlen=1)
_ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR


def _heard(level: int, text: bytes, data: object) -> None:
    message = text.decode(errors="replace").strip().rpartition("error loading model: ")[2]
    # The last lines only repeat that the load failed.
    if level == _ERROR_LEVEL and message and "failed to load model" not in message:
        _ERRORS.append(message)


_quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_heard)


def llama_library() -> Any:
    """Return the llama_cpp module. Raises UnsupportedModel where it is missing.

    Silenced where nobody has loaded it: an engine that has keeps its log, which explains failures.
    """
    is_loaded = "llama_cpp" in sys.modules
    try:
        import llama_cpp
    except ImportError as problem:
        raise UnsupportedModel(
            f"GGUF files need llama.cpp ({problem}). Install it: pip install "
            "'llm-crossover[llama-cpp]'"
        ) from problem
    if not is_loaded:
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp
