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
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from crossover.serving.faults import fault_of
from crossover.serving.option_help import Positive, Share

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Verdict = Literal["meets", "misses", "unresolved"]

# At 99 % the longest prompts of a workload set the capacity: it falls several times faster than
# step times rise, and a level needs 268 requests to confirm a rate (52 at 95 %). Slow CPUs then
# have no answer within minutes.
DEFAULT_TARGET = 0.95


class Times(Protocol):
    """The times of requests in seconds: a level of load, or a simulation. Each is an array of the
    shape [requests]; inf: the request failed; nan: it has no such time."""

    @property
    def ttft(self) -> Floats: ...
    @property
    def tpot(self) -> Floats: ...
    @property
    def ttfa(self) -> Floats: ...
    @property
    def e2e(self) -> Floats: ...


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that an SLO may have. None: no limit of that kind."""

    ttft_seconds: Positive | None = None
    tpot_seconds: Positive | None = None
    ttfa_seconds: Positive | None = None
    e2e_seconds: Positive | None = None

    @classmethod
    def field_texts(cls) -> dict[str, str]:
        """Return what files say of these keys."""
        return {
            f"{name}_seconds": f"Limit of the {limited.title}, in seconds."
            for name, limited in LIMITED_TIMES.items()
        }


class LimitedTime(NamedTuple):
    """A time of a request that an SLO may limit."""

    title: str  # the time
    words: str  # the limit, where {} stands for its value
    includes_queue: bool = True  # whether the time grows while the request waits for a slot


# The short name of each time, as in "ttft=2", which is also its column of `Times`. A request that
# misses several limits is counted under the first of them.
LIMITED_TIMES = {
    "ttft": LimitedTime("time to first token", "first token within {}"),
    "tpot": LimitedTime("time per output token", "then {} a token", includes_queue=False),
    "ttfa": LimitedTime(
        "time to first token of the answer, after reasoning",
        "first token of the answer itself within {}",
    ),
    "e2e": LimitedTime("time of the whole answer", "whole answer within {}"),
}
_TITLES = [f"{name} ({limited.title})" for name, limited in LIMITED_TIMES.items()]
LIMITS_HELP = f"limits in seconds of {', '.join(_TITLES[:-1])} and {_TITLES[-1]}"


class Slo(Limits, frozen=True, forbid_unknown_fields=True):
    """A latency SLO."""

    name: str
    target: Share = DEFAULT_TARGET
    confidence: Annotated[float, Meta(gt=0.5, lt=1)] = 0.95
    source: str = ""

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, in seconds, by the short name of the time."""
        limits = {name: getattr(self, f"{name}_seconds") for name in LIMITED_TIMES}
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def shortest_queueing_limit(self) -> float | None:
        """The shortest limit of a time that grows while requests wait; None: there is none."""
        limits = self.limits.items()
        return min(
            (limit for name, limit in limits if LIMITED_TIMES[name].includes_queue), default=None
        )

    def with_limits(self, **limits: float | None) -> Slo:
        """Return the SLO with other limits, which are given by the short name of the time."""
        return msgspec.structs.replace(
            self, **{f"{name}_seconds": limit for name, limit in limits.items()}
        )

    def tighter(self, factor: float, fixed_seconds: float = 0.0) -> Slo:
        """Return the SLO with all limits divided by a factor. `fixed_seconds`: the part of every
        time but the TPOT to which the factor does not apply."""

        def tighter_limit(name: str, limit: float) -> float:
            fixed = 0.0 if name == "tpot" else fixed_seconds
            return max((limit - fixed) / factor + fixed, 1e-9)

        return self.with_limits(
            **{name: tighter_limit(name, limit) for name, limit in self.limits.items()}
        )

    def met_limits(self, times: Times) -> dict[str, Flags]:
        """Return which requests, [n], meet each of the limits, by the short name of the time."""
        return {name: ~(getattr(times, name) > limit) for name, limit in self.limits.items()}

    def met_by(self, times: Times) -> Flags:
        """Return which requests meet the SLO: they did not fail and meet all limits. A request
        without a time, such as the TPOT of an answer of one token, meets the limit of that time."""
        met = np.isfinite(times.e2e)
        for is_met in self.met_limits(times).values():
            met &= is_met
        return met

    def largest_share(self, times: Times) -> Floats:
        """Return, by request, its time divided by the limit, of the limit that this is largest of;
        above 1: the request misses the SLO. A time that a request has not counts as almost 0."""
        largest = np.full(len(times.e2e), 1e-9)
        for name, limit in self.limits.items():
            largest = np.fmax(largest, getattr(times, name) / limit)
        return largest

    def is_same_promise(self, other: Slo) -> bool:
        """Return whether a rate meets both SLOs or neither, whatever they are called."""
        own = self.limits, self.target, self.confidence
        return own == (other.limits, other.target, other.confidence)

    def longest_answer_seconds(self, output_tokens: float) -> float | None:
        """Return the longest time of an answer that meets the SLO; None: nothing limits it."""
        first_token = [limit for limit in (self.ttft_seconds, self.ttfa_seconds) if limit]
        bounds = [] if self.e2e_seconds is None else [self.e2e_seconds]
        if first_token and self.tpot_seconds is not None:
            bounds.append(min(first_token) + self.tpot_seconds * output_tokens)
        return min(bounds, default=None)


# Limits of the 99th percentiles of TTFT and of the time between tokens.
CATALOG = "limits of inference-perf's workload catalog"


def parse_slo(text: str) -> Slo:
    """Return the SLO of a preset ("chat") or of limits in seconds that a request must meet:
    "ttft=2,tpot=0.1,ttfa=10,e2e=60,target=0.95". Raises ValueError.
    """
    if text in SLO_PRESETS:
        return SLO_PRESETS[text]
    values: dict[str, float] = {}
    for part in text.split(","):
        name, sign, value = part.strip().partition("=")
        if not sign or name not in (*LIMITED_TIMES, "target"):
            presets = ", ".join(SLO_PRESETS)
            if "=" not in text:
                raise ValueError(
                    f"SLO preset {text!r} does not exist. Available presets: {presets}. Your own "
                    "limits look like ttft=2,tpot=0.1."
                )
            raise ValueError(
                f"{text!r} has no valid limit {name!r}. Limits are {', '.join(LIMITED_TIMES)} and "
                f"target, in seconds, such as ttft=2,tpot=0.1; or use a preset: {presets}."
            )
        key = name if name == "target" else f"{name}_seconds"
        if key in values:
            raise ValueError(f"{text!r}: {name} is given twice")
        try:
            values[key] = float(value)
        except ValueError:
            raise ValueError(f"{text!r}: {name} must be a number, got {value!r}") from None
    try:
        return msgspec.convert({"name": "own", **values}, Slo)
    except msgspec.ValidationError as problem:
        fault = fault_of(str(problem), Slo)
        name = fault.place.removesuffix("_seconds")
        raise ValueError(f"{text!r}: {fault.sentence(name, values[fault.place])}") from None


SLO_PRESETS: dict[str, Slo] = {
    slo.name: slo
    for slo in (
        Slo(
            "chat",
            ttft_seconds=2.0,
            tpot_seconds=0.100,
            source="limits of MLPerf v5.1, Llama-3.1-8B, Server",
        ),
        Slo(
            "interactive",
            ttft_seconds=0.5,
            tpot_seconds=0.030,
            source="limits of MLPerf Inference v5.1, Llama-3.1-8B, Interactive",
        ),
        Slo(
            "reading",
            ttft_seconds=5.0,
            tpot_seconds=0.200,
            source="about the speed of silent reading, 5 tokens/s",
        ),
        Slo(
            "conversation",
            0.99,
            ttft_seconds=0.5,
            tpot_seconds=0.050,
            source=f"{CATALOG}, interactive-chat",
        ),
        Slo(
            "reasoning",
            0.99,
            ttft_seconds=2.0,
            tpot_seconds=0.100,
            source=f"{CATALOG}, reasoning",
        ),
        Slo(
            "agent",
            0.99,
            ttft_seconds=10.0,
            tpot_seconds=0.100,
            source=f"{CATALOG}, deep-research",
        ),
        Slo("batch", source="no latency limit: throughput and cost only"),
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
