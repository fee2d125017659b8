"""Request records and samples as tests need them."""

from __future__ import annotations

from typing import Any

import msgspec

from loadtests.records.schema import RequestRecord, ResourceSample


def request(
    index: int = 0,
    due: float = 0.0,
    *,
    lag: float = 0.0,
    ttft: float = 0.5,
    gap: float = 0.05,
    tokens: int = 10,
    chunk: int = 1,
    **changes: Any,
) -> RequestRecord:
    """A request that went well: `tokens` in chunks of `chunk`, every `gap` seconds."""
    stamps = [due + ttft + gap * k for k in range(-(-tokens // chunk))]
    record = RequestRecord(
        cell="c",
        level="l",
        index=index,
        due_seconds=due,
        sent_seconds=due + lag,
        first_content_seconds=stamps[0],
        last_content_seconds=stamps[-1],
        ended_seconds=stamps[-1],
        content_seconds=stamps,
        prompt_tokens=100,
        output_tokens=tokens,
        first_chunk_tokens=chunk,
        status=200,
        backend="fake/cpu",
    )
    return msgspec.structs.replace(record, **changes)


def failed(index: int = 0, due: float = 0.0, kind: str = "timeout") -> RequestRecord:
    return RequestRecord(
        cell="c",
        level="l",
        index=index,
        due_seconds=due,
        sent_seconds=due,
        ended_seconds=due + 1,
        error=kind,
    )


def sample(at: float, **fields: Any) -> ResourceSample:
    return ResourceSample(cell="c", unix_seconds=at, **fields)
