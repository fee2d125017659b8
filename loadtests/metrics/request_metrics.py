"""Times of one request: RequestRecord -> seconds. Missing is None.

TTFT = first content chunk - due time. E2E = last content - due time. ITL = gaps between chunks.
TPOT = (last content - first content) / (output tokens - tokens of the first chunk); dividing by
(tokens - 1), as is usual, is wrong by 5 % for chunks of four. `usage` and `[DONE]` are not content.
Times count from the due time, not the send: else the wait of an overloaded client is hidden.
"""

from __future__ import annotations

from typing import Literal

from loadtests.metrics.slo import Slo
from loadtests.records.schema import RequestRecord

Outcome = Literal["ok", "failed", "unfinished"]


def outcome(record: RequestRecord) -> Outcome:
    """ok: ended with content and no error. unfinished: still open when recorded. Else failed."""
    if record.error is not None or (record.status is not None and record.status >= 400):
        return "failed"
    if record.ended_seconds is None:
        return "unfinished"
    return "ok" if record.first_content_seconds is not None else "failed"


def failure_kind(record: RequestRecord) -> str | None:
    """Why a request is not ok, in one word; None when it is."""
    found = outcome(record)
    if found == "ok":
        return None
    if found == "unfinished":
        return "unfinished"
    if record.error is not None:
        return record.error
    return "no_content" if record.status is None or record.status < 400 else f"http_{record.status}"


def ttft_seconds(record: RequestRecord) -> float | None:
    """Due to first content."""
    if record.first_content_seconds is None:
        return None
    return record.first_content_seconds - record.due_seconds


def e2e_seconds(record: RequestRecord) -> float | None:
    """Due to last content; None where the request is not ok."""
    if record.last_content_seconds is None or outcome(record) != "ok":
        return None
    return record.last_content_seconds - record.due_seconds


def itl_seconds(record: RequestRecord) -> list[float]:
    """Gaps between content chunks, in the order they came."""
    stamps = record.content_seconds
    return [later - earlier for earlier, later in zip(stamps, stamps[1:], strict=False)]


def send_lag_seconds(record: RequestRecord) -> float | None:
    """How late the client sent."""
    return None if record.sent_seconds is None else record.sent_seconds - record.due_seconds


def first_chunk_tokens(record: RequestRecord) -> int | None:
    """Tokens of the first content chunk: as the server said, else the mean chunk (at least 1).

    None: no content, or no token count.
    """
    if record.first_chunk_tokens is not None:
        return record.first_chunk_tokens
    if record.output_tokens is None or not record.content_seconds:
        return None
    return max(1, round(record.output_tokens / len(record.content_seconds)))


def tpot_seconds(record: RequestRecord) -> float | None:
    """Seconds per output token after the first chunk. None: one chunk, or no token count."""
    first, last = record.first_content_seconds, record.last_content_seconds
    if first is None or last is None or record.output_tokens is None:
        return None
    if len(record.content_seconds) == 1:
        return None
    tokens = record.output_tokens - (first_chunk_tokens(record) or 1)
    return (last - first) / tokens if tokens > 0 else None


def judged_tpot_seconds(record: RequestRecord) -> float | None:
    """TPOT as the SLO judges it: without a token count, a chunk stands for one token.

    A chunk holds at least one, so no request is called good that is not. None: one chunk only.
    """
    if record.output_tokens is None and len(record.content_seconds) > 1:
        gaps = itl_seconds(record)
        return sum(gaps) / len(gaps)
    return tpot_seconds(record)


def is_good(record: RequestRecord, slo: Slo) -> bool:
    """ok, and TTFT and TPOT within the limits. An answer of one chunk cannot break TPOT."""
    if outcome(record) != "ok":
        return False
    if slo.ttft_seconds is not None:
        ttft = ttft_seconds(record)
        if ttft is None or ttft > slo.ttft_seconds:
            return False
    if slo.tpot_seconds is None:
        return True
    tpot = judged_tpot_seconds(record)
    return tpot is None or tpot <= slo.tpot_seconds
