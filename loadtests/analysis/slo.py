"""The SLO: when a request is good, and when a level of load meets it.

    >>> requests_to_hold(SLO_PRESETS["chat"])      # 2 s, 0.1 s, 95 %
    52

A request is good when it had no error, TTFT <= ttft_seconds and TPOT <= tpot_seconds. A level
holds when the share of good requests among all that were due is at least `target`, at the stated
confidence; it fails when the share is below `target` at that confidence; else it is unresolved.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from serving.option_help import Positive, Share

Verdict = Literal["holds", "fails", "unresolved"]

# At 99 % the longest prompts of a workload set the capacity: it falls several times faster than
# step times rise, and a level needs 268 requests to confirm a rate (52 at 95 %). Slow CPUs then
# have no answer within minutes.
DEFAULT_TARGET = 0.95


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A latency SLO. None: no limit of that kind."""

    name: str
    ttft_seconds: Positive | None
    tpot_seconds: Positive | None
    target: Share = DEFAULT_TARGET
    confidence: Annotated[float, Meta(gt=0.5, lt=1)] = 0.95
    source: str = ""

    def tighter(self, factor: float) -> Slo:
        """With limits that are lower by a factor."""
        ttft = self.ttft_seconds and self.ttft_seconds / factor
        tpot = self.tpot_seconds and self.tpot_seconds / factor
        return msgspec.structs.replace(self, ttft_seconds=ttft, tpot_seconds=tpot)


SLO_PRESETS: dict[str, Slo] = {
    slo.name: slo
    for slo in (
        Slo("chat", 2.0, 0.100, source="limits of MLPerf v5.1, Llama-3.1-8B, Server"),
        Slo(
            "interactive",
            0.5,
            0.030,
            source="limits of MLPerf Inference v5.1, Llama-3.1-8B, Interactive",
        ),
        Slo("reading", 5.0, 0.200, source="about the speed of silent reading, 5 tokens/s"),
        Slo("batch", None, None, source="no latency limit: throughput and cost only"),
    )
}


def requests_to_hold(slo: Slo) -> int:
    """Return the fewest requests, all good, with which a level can hold.

    52 for a target of 95 %, 268 for 99 %, both at a confidence of 95 %.
    """
    z = NormalDist().inv_cdf(slo.confidence)
    return math.ceil(z * z * slo.target / (1 - slo.target) - 1e-9)
