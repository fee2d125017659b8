"""The record of one request: times, counts and errors, never a statistic.

    RequestRecord(cell="360m", level="360m#1.1", index=0, scheduled_seconds=0.5, ...)

`*_seconds` count from the start of the level (monotonic clock); LevelStarted holds that moment in
Unix seconds. Missing is None: a request that never got a token has `first_content_seconds = None`,
not 0.
"""

from __future__ import annotations

import msgspec


# gc=False: there are hundreds of thousands, without cycles.
class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """One request, from its scheduled time to the end of its stream."""

    cell: str  # Cell.key
    level: str  # LevelStarted.level: unique per attempt
    index: int  # 0.. within the level
    session: int | None = None  # the conversation that the request is a turn of
    turn: int | None = None  # 0.. within the session
    scheduled_seconds: float
    sent_seconds: float | None = None  # just before its first byte was sent; None: never sent
    first_content_seconds: float | None = None
    first_answer_seconds: float | None = None  # first content that is not reasoning
    last_content_seconds: float | None = None
    ended_seconds: float | None = None
    content_seconds: list[float] = []  # when each content chunk arrived, first and last included
    first_chunk_tokens: int | None = None  # if the server counts tokens in every chunk
    requested_prompt_tokens: int | None = None
    requested_output_tokens: int | None = None
    prompt_tokens: int | None = None  # by the server's usage
    cached_tokens: int | None = None  # prompt tokens from the server's cache, by its usage
    added_tokens: int | None = None  # of a turn: prompt tokens that the user added to the history
    history_tokens: int | None = None  # of a turn: prompt tokens that the server had seen before
    output_tokens: int | None = None
    status: int | None = None  # HTTP status; None: no answer
    error: str | None = None  # refused, http_500, timeout, connection, cut_off, stream_error ...
    error_message: str | None = None
    finish_reason: str | None = None
    backend: str | None = None  # X-Crossover-Backend
    engine: int | None = None  # X-Crossover-Engine: which of several engines, from 1
    request_id: str | None = None
