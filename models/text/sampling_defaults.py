"""The sampling that a model's makers recommend, as its own files state it.

vLLM and SGLang use these values too, for what a request leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

# Keys of GGUF metadata, by the field that they are read as.
GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The values of parameters that a request leaves out. Those of this class are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_sampling_defaults(values: Mapping[str, Any]) -> SamplingDefaults:
    """Return the sampling of a generation_config.json, or of GGUF metadata under the same names.

    A value that is no number, or out of range, counts as absent.
    """
    usable: dict[str, Any] = {}
    for name, highest in (("temperature", math.inf), ("top_p", 1.0), ("min_p", 1.0)):
        number = _number(values.get(name))
        if number is not None and 0 <= number <= highest:
            usable[name] = number
    top_k = _number(values.get("top_k"))
    if top_k is not None:
        usable["top_k"] = max(0, int(top_k))  # -1 keeps all, as 0 does
    penalty = _number(values.get("repetition_penalty"))
    if penalty is not None and penalty > 0:
        usable["repetition_penalty"] = penalty
    return SamplingDefaults(**usable)


def _number(value: Any) -> float | None:
    """Return a finite number; numbers of GGUF metadata are texts here."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
