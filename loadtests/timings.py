"""The times of one request, by definition: RequestRecord -> seconds. Missing is None.

TTFT = first content chunk - due time. TPOT = (last content - first content) / (output tokens - tokens of the first chunk). ITL = the gaps
between content chunks as they were. E2E = last content - due time. `usage` and `[DONE]` are not content. Counting from the
due time, not from the send, keeps the wait that an overloaded client would hide; dividing by (tokens - 1), as is usual, is wrong by 5 % for
chunks of four.
"""

from __future__ import annotations

from typing import Literal

from loadtests.records import RequestRecord
from loadtests.slo import Promise

Outcome = Literal["ok", "failed", "unfinished"]


def outcome(record: RequestRecord) -> Outcome:
    """ok: ended without error and with content. unfinished: the record was closed while the request was still open. failed: all else."""
    if record.error is not None or (record.status is not None and record.status >= 400):
        return "failed"
    if record.ended_seconds is None:
        return "unfinished"
    return "ok" if record.first_content_seconds is not None else "failed"


def failure_kind(record: RequestRecord) -> str | None:
    """Why a request is not ok, in one word; None when it is."""
    match outcome(record):
        case "ok":
            return None
        case "unfinished":
            return "unfinished"
    if record.error is not None:
        return record.error
    return "no_content" if record.status is None or record.status < 400 else f"http_{record.status}"


def ttft_seconds(record: RequestRecord) -> float | None:
    """Due to first content."""
    return None if record.first_content_seconds is None else record.first_content_seconds - record.due_seconds


def e2e_seconds(record: RequestRecord) -> float | None:
    """Due to last content, of a request that ended well; None for one that did not."""
    if record.last_content_seconds is None or outcome(record) != "ok":
        return None
    return record.last_content_seconds - record.due_seconds


def itl_seconds(record: RequestRecord) -> list[float]:
    """Gaps between content chunks, in the order they came."""
    stamps = record.content_seconds
    return [later - earlier for earlier, later in zip(stamps, stamps[1:], strict=False)]


def send_lag_seconds(record: RequestRecord) -> float | None:
    """How late the client itself was."""
    return None if record.sent_seconds is None else record.sent_seconds - record.due_seconds


def first_chunk_tokens(record: RequestRecord) -> int | None:
    """Tokens of the first content chunk: as the server said, else the mean over the chunks (at least 1). None: no content or no count."""
    if record.first_chunk_tokens is not None:
        return record.first_chunk_tokens
    if record.output_tokens is None or not record.content_seconds:
        return None
    return max(1, round(record.output_tokens / len(record.content_seconds)))


def tpot_seconds(record: RequestRecord) -> float | None:
    """Seconds per output token after the first chunk. None: one chunk only, no token count, or no content."""
    if record.first_content_seconds is None or record.last_content_seconds is None or record.output_tokens is None:
        return None
    if len(record.content_seconds) == 1:
        return None
    tokens = record.output_tokens - (first_chunk_tokens(record) or 1)
    if tokens <= 0:
        return None
    return (record.last_content_seconds - record.first_content_seconds) / tokens


def is_good(record: RequestRecord, promise: Promise) -> bool:
    """No error, TTFT <= a, TPOT <= b. A request that failed, was refused or was cut off is not good: it is infinitely late.

    An answer of one chunk has no TPOT and cannot break that limit. Without a token count, chunks stand for tokens: a chunk holds at least
    one, so a request is never called good that is not.
    """
    if outcome(record) != "ok":
        return False
    ttft = ttft_seconds(record)
    if promise.ttft_seconds is not None and (ttft is None or ttft > promise.ttft_seconds):
        return False
    if promise.tpot_seconds is None:
        return True
    tpot = tpot_seconds(record)
    if tpot is None and record.output_tokens is None and len(record.content_seconds) > 1:
        gaps = itl_seconds(record)
        tpot = sum(gaps) / len(gaps)
    return tpot is None or tpot <= promise.tpot_seconds
