"""The SLO: when a request meets it, and when a level of load does.

    >>> requests_to_hold(SLO_PRESETS["chat"])      # 2 s, 0.1 s, 95 %
    52

A request meets the SLO if it had no error and met every limit: time to first token (TTFT), time per
output token (TPOT, over reasoning and answer alike), time to the first token of the answer itself
(TTFA), and time of the complete answer (E2E). SLO attainment is the share of all scheduled requests
that do. A level meets the SLO if the attainment is at least `target` at the stated confidence, it
misses the SLO if the attainment is below `target` at that confidence, and else it is unresolved.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from crossover.serving.faults import fault_of
from crossover.serving.option_help import Positive, Share

Verdict = Literal["meets", "misses", "unresolved"]

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
    # Of the first token of the answer itself, behind all reasoning; and of the whole answer.
    ttfa_seconds: Positive | None = None
    e2e_seconds: Positive | None = None

    def tighter(self, factor: float) -> Slo:
        """Return the SLO with all limits divided by a factor."""
        limits = {name: getattr(self, name) for name in LIMITS.values()}
        tighter_limits = {
            name: None if limit is None else limit / factor for name, limit in limits.items()
        }
        return msgspec.structs.replace(self, **tighter_limits)


# Limits of the 99th percentiles of TTFT and of the time between tokens.
CATALOG = "limits of inference-perf's workload catalog"
# The short name of each limit, as in "ttft=2", and its field.
LIMITS = {name: f"{name}_seconds" for name in ("ttft", "tpot", "ttfa", "e2e")}


def parse_slo(text: str) -> Slo:
    """Return the SLO of a preset ("chat") or of limits in seconds that a request must meet:
    "ttft=2,tpot=0.1,ttfa=10,e2e=60,target=0.95". Raises ValueError.
    """
    if text in SLO_PRESETS:
        return SLO_PRESETS[text]
    values: dict[str, float] = {}
    for part in text.split(","):
        name, sign, value = part.strip().partition("=")
        field = LIMITS.get(name, name)
        if not sign or field not in (*LIMITS.values(), "target"):
            presets = ", ".join(SLO_PRESETS)
            if "=" not in text:
                raise ValueError(
                    f"SLO preset {text!r} does not exist. Available presets: {presets}. Your own "
                    "limits look like ttft=2,tpot=0.1."
                )
            raise ValueError(
                f"{text!r} has no valid limit {name!r}. Limits are {', '.join(LIMITS)} and target, "
                f"in seconds, such as ttft=2,tpot=0.1; or use a preset: {presets}."
            )
        try:
            values[field] = float(value)
        except ValueError:
            raise ValueError(f"{text!r}: {name} must be a number, got {value!r}") from None
    try:
        return msgspec.convert(
            {"name": "own", "ttft_seconds": None, "tpot_seconds": None, **values}, Slo
        )
    except msgspec.ValidationError as problem:
        fault = fault_of(str(problem), Slo)
        name = fault.place.removesuffix("_seconds")
        raise ValueError(f"{text!r}: {fault.sentence(name, values[fault.place])}") from None


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
        Slo("conversation", 0.5, 0.050, 0.99, source=f"{CATALOG}, interactive-chat"),
        Slo("reasoning", 2.0, 0.100, 0.99, source=f"{CATALOG}, reasoning"),
        Slo("agent", 10.0, 0.100, 0.99, source=f"{CATALOG}, deep-research"),
        Slo("batch", None, None, source="no latency limit: throughput and cost only"),
    )
}


DEFAULT_SLO = SLO_PRESETS["chat"]


def requests_to_hold(slo: Slo) -> int:
    """Return the smallest number of requests, all of which meet the SLO, that confirm a rate.

    52 for a target of 95 %, 268 for 99 %, both at a confidence of 95 %. Wilson's lower bound of a
    share of which all n requests are part is n / (n + z**2), and must reach the target.
    """
    z = NormalDist().inv_cdf(slo.confidence)
    rounding_error = 1e-9
    return math.ceil(z * z * slo.target / (1 - slo.target) - rounding_error)
