"""What clients saw while another engine took over: the requests before, during and after.

    fallback_of(records)    # Fallback, or None where one backend gave all answers

By the backend that each answer names (X-Crossover-Backend). `during` are the requests that were
due from the first one that the lost engine left without a good answer until the other's first
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from loadtests.metrics.distribution import Distribution, distribution
from loadtests.metrics.request_metrics import outcome, tpot_seconds, ttft_seconds
from loadtests.records.schema import RequestRecord

Part = Literal["before", "during", "after"]


class FallbackPart(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that were due before, during or after it."""

    part: Part
    due: int
    failed: int
    ttft: Distribution  # of the good answers, seconds
    tpot: Distribution


class FallbackPoint(msgspec.Struct, frozen=True):
    """One request: when it was due, and how long its first token took; None: it failed."""

    due_seconds: float
    part: Part
    ttft_seconds: float | None


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the engine within a level; seconds since the level began."""

    lost: str  # the backend that gave the first answers
    took_over: str
    lost_seconds: float  # due time of the first request that felt it
    back_seconds: float  # the other's first token
    parts: tuple[FallbackPart, ...]
    points: tuple[FallbackPoint, ...]


def fallback_of(records: Sequence[RequestRecord]) -> Fallback | None:
    """The first change of backend among the requests of one level."""
    ordered = sorted(records, key=lambda one: (one.due_seconds, one.index))
    good = [one for one in ordered if outcome(one) == "ok" and one.backend is not None]
    first = next((one.backend for one in good), None)
    others = [one for one in good if one.backend != first and one.first_content_seconds is not None]
    if first is None or not others:
        return None
    other = min(others, key=lambda one: one.first_content_seconds or 0.0)
    back = other.first_content_seconds or 0.0
    felt = [one for one in ordered if one.due_seconds <= back and not _is_of(one, first)]
    lost = min(one.due_seconds for one in felt)

    def part_of(one: RequestRecord) -> Part:
        if one.due_seconds >= back:
            return "after"
        return "before" if one.due_seconds < lost else "during"

    parts: dict[Part, list[RequestRecord]] = {"before": [], "during": [], "after": []}
    for one in ordered:
        parts[part_of(one)].append(one)
    return Fallback(
        lost=first,
        took_over=other.backend or "",
        lost_seconds=lost,
        back_seconds=back,
        parts=tuple(_part(name, those) for name, those in parts.items()),
        points=tuple(
            FallbackPoint(
                one.due_seconds, part_of(one), ttft_seconds(one) if outcome(one) == "ok" else None
            )
            for one in ordered
        ),
    )


def _is_of(one: RequestRecord, backend: str) -> bool:
    return outcome(one) == "ok" and one.backend == backend


def _part(name: Part, records: Sequence[RequestRecord]) -> FallbackPart:
    good = [one for one in records if outcome(one) == "ok"]
    return FallbackPart(
        part=name,
        due=len(records),
        failed=len(records) - len(good),
        ttft=distribution(ttft_seconds(one) for one in good),
        tpot=distribution(tpot_seconds(one) for one in good),
    )
