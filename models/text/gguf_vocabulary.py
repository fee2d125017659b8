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

from crossover.models.errors import BrokenWeights, UnsupportedModel
from crossover.models.text.chat_template import RendersChat
from crossover.models.text.sampling_defaults import GGUF_KEYS, read_sampling_defaults

_NAMED_TEMPLATE = b"tokenizer.chat_template."  # start of a metadata key
_NO_VOCABULARY = 0  # enum llama_vocab_type
# For most families, llama.cpp splits text with std::regex, which recurses for each character of a
# word. That takes 300 to 450 bytes of stack per character, and a stack overflow is a crash. So
# longer texts are tokenized in a thread with a larger stack.
_MAX_CHARACTERS_ON_STACK = 4096
_STACK_BYTES_PER_CHARACTER = 1024
_STACK_SIZE_LOCK = threading.Lock()  # the stack size of new threads is a setting of the process
_MAX_PIECE_BYTES = 1 << 16  # of the text of one token


class GgufTokenizer(RendersChat):
    """The tokenizer of a GGUF file, by llama.cpp's own code. It has the methods of
    crossover.models.text.tokenizer.HfTokenizer."""

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
        ids = range(self.vocabulary)
        self.special_ids = frozenset(i for i in ids if llama.llama_vocab_is_control(vocab, i))
        self.eos_ids = frozenset(i for i in ids if llama.llama_vocab_is_eog(vocab, i))
        bos, eos = llama.llama_vocab_bos(vocab), llama.llama_vocab_eos(vocab)
        self.bos_id = int(bos) if llama.llama_vocab_get_add_bos(vocab) else None
        self.chat_tokens = {"bos_token": self.token_text(bos), "eos_token": self.token_text(eos)}
        template = llama.llama_model_chat_template(model, None)
        self.chat_template = template.decode(errors="replace") if template else None
        self.other_templates = self._named_templates(model)
        self.sampling_defaults = read_sampling_defaults(self._sampling_values(model))

    def _sampling_values(self, model: Any) -> dict[str, str]:
        """Return the sampling parameters in the metadata, as texts by the names of requests."""
        values: dict[str, str] = {}
        buffer = ctypes.create_string_buffer(64)
        for name, key in GGUF_KEYS.items():
            if self._llama.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer)) > 0:
                values[name] = buffer.value.decode(errors="replace")
        return values

    def _named_templates(self, model: Any) -> dict[str, str]:
        """Return name -> chat template, from the metadata keys tokenizer.chat_template.NAME."""
        llama, key = self._llama, ctypes.create_string_buffer(256)
        templates = {}
        for index in range(llama.llama_model_meta_count(model)):
            size = llama.llama_model_meta_key_by_index(model, index, key, len(key))
            if 0 < size < len(key) and key.value.startswith(_NAMED_TEMPLATE):
                name = key.value.removeprefix(_NAMED_TEMPLATE)
                if text := llama.llama_model_chat_template(model, name):
                    templates[name.decode(errors="replace")] = text.decode(errors="replace")
        return templates

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the token ids without BOS. The text of a control token is plain text unless
        `parse_special`."""
        data = text.encode(errors="replace")
        max_tokens = len(data) + 16  # each token has at least one byte
        ids = (ctypes.c_int32 * max_tokens)()
        arguments = (self._vocab, data, len(data), ids, max_tokens, False, parse_special)
        if len(text) <= _MAX_CHARACTERS_ON_STACK:
            return list(ids[: self._llama.llama_tokenize(*arguments)])
        with ThreadPoolExecutor(1) as executor, _STACK_SIZE_LOCK:
            default_size = threading.stack_size(_STACK_BYTES_PER_CHARACTER * len(text))
            try:
                token_count = executor.submit(self._llama.llama_tokenize, *arguments)
            finally:
                threading.stack_size(default_size)
            return list(ids[: token_count.result()])

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of each id; b"" for control tokens."""
        table = []
        buffer = ctypes.create_string_buffer(_MAX_PIECE_BYTES)
        for index in range(self.vocabulary):
            size = self._llama.llama_token_to_piece(
                self._vocab, index, buffer, _MAX_PIECE_BYTES, 0, False
            )
            table.append(ctypes.string_at(buffer, max(0, size)))
        return table

    def token_text(self, token: int) -> str:
        """Return the token as the vocabulary writes it; "" for ids that it does not have."""
        if not 0 <= token < self.vocabulary:
            return ""
        text = self._llama.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace") if text else ""


# llama.cpp logs a lot while loading; only the last error matters.
_ERRORS: deque[str] = deque(maxlen=1)
_ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR


def _keep_error(level: int, text: bytes, data: object) -> None:
    """Keep an error message, and drop all others. llama.cpp calls this for each line of its log."""
    message = text.decode(errors="replace").strip().rpartition("error loading model: ")[2]
    # The last lines only repeat that the load failed.
    if level == _ERROR_LEVEL and message and "failed to load model" not in message:
        _ERRORS.append(message)


_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_keep_error)


def llama_library() -> Any:
    """Return the llama_cpp module. Raises UnsupportedModel if it is not installed.

    If this is its first use in this process, its log is turned off. An engine that has loaded it
    before keeps its log, which explains failures.
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
        llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp
