"""One request of recorded traffic, as a line of a trace file has it (trace_file.py)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_TOKENS = 10_000_000  # of a prompt or an answer: the longest context on the market
MAX_SECONDS = 1e18  # of a timestamp; large enough for nanoseconds since 1970
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | Annotated[float, Meta(ge=0, le=MAX_TOKENS)]
BLOCK_TOKENS = 512  # of a prompt, which one of `hash_ids` names


class TraceRow(msgspec.Struct):
    """One request of the file. See the docstring of trace_file.py."""

    prompt_tokens: _Tokens
    output_tokens: _Tokens
    seconds: Annotated[float, Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)] | None = None
    session: str | int | None = None
    think_seconds: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    hash_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_TOKENS // BLOCK_TOKENS)] = ()
