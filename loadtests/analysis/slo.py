"""The SLO: when a request is good, and when a level of load meets it.

    >>> requests_to_hold(SLO_PRESETS["chat"])      # 2 s, 0.1 s, 99 %
    268

A request is good when it had no error, TTFT <= ttft_seconds and TPOT <= tpot_seconds. A level
holds when the share of good requests among all that were due is at least `target`, at the stated
confidence; it fails when the share is below `target` at that confidence; else it is unresolved.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Literal

import msgspec

Verdict = Literal["holds", "fails", "unresolved"]


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A latency SLO. None: no limit of that kind."""

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

    def tighter(self, factor: float) -> Slo:
        """With limits that are lower by a factor."""
        ttft = self.ttft_seconds and self.ttft_seconds / factor
        tpot = self.tpot_seconds and self.tpot_seconds / factor
        return msgspec.structs.replace(self, ttft_seconds=ttft, tpot_seconds=tpot)


_MLPERF = "MLPerf Inference v5.1"

SLO_PRESETS: dict[str, Slo] = {
    slo.name: slo
    for slo in (
        Slo("chat", 2.0, 0.100, source=f"{_MLPERF}, Llama-3.1-8B, Server"),
        Slo("interactive", 0.5, 0.030, source=f"{_MLPERF}, Llama-3.1-8B, Interactive"),
        Slo("70b-server", 2.0, 0.200, source=f"{_MLPERF}, Llama-2-70B, Server"),
        Slo("70b-interactive", 0.45, 0.040, source=f"{_MLPERF}, Llama-2-70B, Interactive"),
        Slo("405b-server", 6.0, 0.175, source=f"{_MLPERF}, Llama-3.1-405B, Server"),
        Slo("405b-interactive", 4.5, 0.080, source=f"{_MLPERF}, Llama-3.1-405B, Interactive"),
        Slo("reading", 5.0, 0.200, source="about the speed of silent reading, 5 tokens/s"),
        Slo("batch", None, None, source="no latency limit: throughput and cost only"),
    )
}


def requests_to_hold(slo: Slo) -> int:
    """The fewest requests, all good, with which a level can hold: 268 for 99 % at 95 %."""
    z = NormalDist().inv_cdf(slo.confidence)
    return math.ceil(z * z * slo.target / (1 - slo.target) - 1e-9)
