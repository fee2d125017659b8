"""The promise (SLO): when a request is good, and when a level of load holds.

    >>> chat = PROMISES["chat"]
    >>> chat.ttft_seconds, chat.tpot_seconds, chat.target
    (2.0, 0.1, 0.99)
    >>> verdict(good=300, due=300, promise=chat), verdict(good=50, due=50, promise=chat), verdict(good=45, due=50, promise=chat)
    ('holds', 'unresolved', 'fails')

A request is good when it had no error, TTFT <= ttft_seconds and TPOT <= tpot_seconds. A level holds when the share of good requests among
all that were due is at least `target`, with the stated confidence (Wilson's score interval); it fails when that share is below `target`
with the same confidence; between the two it is unresolved, and more requests are needed.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Literal

import msgspec

Verdict = Literal["holds", "fails", "unresolved"]


class Promise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A latency promise. None: no limit of that kind."""

    name: str
    ttft_seconds: float | None
    tpot_seconds: float | None
    target: float = 0.99
    confidence: float = 0.95
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("ttft_seconds", "tpot_seconds"):
            limit = getattr(self, name)
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise ValueError(f"{name} must be above 0 (leave it out for no limit), got {limit}")
        if not 0 < self.target < 1:
            raise ValueError(f"target must be between 0 and 1, got {self.target}")
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence must be between 0.5 and 1, got {self.confidence}")


PROMISES: dict[str, Promise] = {
    p.name: p
    for p in (
        Promise("chat", 2.0, 0.100, source="MLPerf Inference v5.1, Llama-3.1-8B, Server"),
        Promise("interactive", 0.5, 0.030, source="MLPerf Inference v5.1, Llama-3.1-8B, Interactive"),
        Promise("70b-server", 2.0, 0.200, source="MLPerf Inference v5.1, Llama-2-70B, Server"),
        Promise("70b-interactive", 0.45, 0.040, source="MLPerf Inference v5.1, Llama-2-70B, Interactive"),
        Promise("405b-server", 6.0, 0.175, source="MLPerf Inference v5.1, Llama-3.1-405B, Server"),
        Promise("405b-interactive", 4.5, 0.080, source="MLPerf Inference v5.1, Llama-3.1-405B, Interactive"),
        Promise("reading", 5.0, 0.200, source="about the speed of silent reading, 5 tokens/s"),
        Promise("batch", None, None, source="no latency limit: throughput and cost only"),
    )
}


def verdict(good: int, due: int, promise: Promise) -> Verdict:
    """Whether a level with `good` of `due` requests holds the promise at its confidence; 'unresolved': too few requests to say."""
    low, high = wilson(good, due, promise.confidence)
    if low >= promise.target:
        return "holds"
    return "fails" if high < promise.target else "unresolved"


def requests_to_hold(promise: Promise) -> int:
    """The fewest requests, all good, with which a level can hold: 268 for a target of 99 % at 95 % confidence."""
    z = NormalDist().inv_cdf(promise.confidence)
    return math.ceil(z * z * promise.target / (1 - promise.target) - 1e-9)


def is_hopeless(bad: int, planned: int, promise: Promise) -> bool:
    """True once so many requests of a level are bad that it fails even if all the others of the `planned` ones turn out good."""
    return bad > 0 and verdict(max(planned - bad, 0), max(planned, bad), promise) == "fails"


def wilson(good: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """One-sided lower and upper bounds of a proportion, each at `confidence` (Wilson 1927, score interval).

    Returns (0.0, 1.0) for total = 0: nothing is known. Raises ValueError for counts that cannot be.
    """
    if total < 0 or not 0 <= good <= total:
        raise ValueError(f"{good} good of {total} cannot be")
    if total == 0:
        return 0.0, 1.0
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    z = NormalDist().inv_cdf(confidence)
    share = good / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)
