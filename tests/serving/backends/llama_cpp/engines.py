"""Tiny models for llama.cpp, and what makes an engine of one."""

from __future__ import annotations

from collections.abc import Callable

from serving.backends.llama_cpp.backend import LlamaCppBackend
from tests.shapes import TINY_LLAMA, TINY_LLAMA3, TINY_QWEN2, TINY_QWEN3

Make = Callable[..., LlamaCppBackend]
SHAPES = {spec.name: spec for spec in (TINY_LLAMA, TINY_LLAMA3, TINY_QWEN2, TINY_QWEN3)}
