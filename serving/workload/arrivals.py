"""Arrival processes: when requests are scheduled, as seeded sequences of times.

    >>> times = due_times(Poisson(), rate=20.0, duration_seconds=60.0, seed=1)

Every process has the requested mean rate (requests per second); its settings define the shape.

In a campaign file: `arrivals = { kind = "gamma", cv = 2.0 }`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from crossover.serving.errors import WorkloadError
from crossover.serving.workload.trace_file import load_trace

Times = npt.NDArray[np.float64]

_STREAM = 0x0A  # keeps the draws of arrivals apart from those of lengths under the same seed


class _Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class Constant(_Process, frozen=True, tag="constant"):
    """One request every 1/rate seconds, the first at 0."""


class Poisson(_Process, frozen=True, tag="poisson"):
    """Independent exponential gaps: many independent users."""


class Gamma(_Process, frozen=True, tag="gamma"):
    """Renewal with gamma gaps of coefficient of variation `cv` (1: Poisson), in equilibrium."""

    cv: Annotated[float, Meta(gt=0, description="Coefficient of variation; 1: Poisson.")] = 2.0


class Trace(_Process, frozen=True, tag="trace"):
    """Replays recorded timestamps, stretched in time to the offered rate and repeated at the end.

    Coarse timestamps (Mooncake: 3 s) are spread over their step.
    """

    path: Annotated[str, Meta(description="File with the recorded timestamps.")]


Arrivals = Constant | Poisson | Gamma | Trace


def due_times(arrivals: Arrivals, rate: float, duration_seconds: float, seed: int) -> Times:
    """Return the scheduled times of requests in [0, duration_seconds), ascending: float64 [n].

    `rate`: mean requests per second. A longer duration only adds times at the end. Raises
    WorkloadError for a rate or duration that is not above 0, and for a trace that cannot be
    replayed.
    """
    for name, value in (("rate", rate), ("duration_seconds", duration_seconds)):
        if not (math.isfinite(value) and value > 0):
            raise WorkloadError(f"{name} must be above 0, got {value}")
    rng = generator(seed, _STREAM)
    match arrivals:
        case Constant():
            times = np.arange(math.ceil(duration_seconds * rate), dtype=np.float64) / rate
        case Poisson():
            times = _summed(rng.standard_exponential, 0.0, duration_seconds * rate)[1:] / rate
        case Gamma():
            times = _renewal(rng, arrivals.cv, rate, duration_seconds)
        case Trace():
            times = _replay(rng, arrivals, rate, duration_seconds)
    return times[times < duration_seconds]


def process_of(detail: Mapping[str, Any]) -> Arrivals:
    """Return the process of a journal's entry. WorkloadError: not a process."""
    try:
        found: Arrivals = msgspec.convert(detail, Arrivals)
        return found
    except msgspec.ValidationError as problem:
        raise WorkloadError(f"The recorded arrivals cannot be read: {problem}") from problem


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Yield a random generator (Philox) of its own for (seed, stream)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed % 2**64, *stream])))


def _summed(draw: Callable[[int], Times], first: float, until: float) -> Times:
    """`first`, then the running sums of drawn gaps, till they pass `until`."""
    parts = [np.array([first])]
    while parts[-1][-1] < until:
        parts.append(parts[-1][-1] + np.cumsum(draw(1024)))
    return np.concatenate(parts)


def _renewal(rng: np.random.Generator, cv: float, rate: float, duration_seconds: float) -> Times:
    shape = 1.0 / cv**2
    # In equilibrium the first gap is met in proportion to its length, and a uniform part is left.
    first = float(rng.random() * rng.gamma(shape + 1.0)) / (shape * rate)
    return _summed(lambda n: rng.gamma(shape, 1.0 / (shape * rate), n), first, duration_seconds)


def _replay(rng: np.random.Generator, trace: Trace, rate: float, duration_seconds: float) -> Times:
    stamps = load_trace(trace.path).seconds
    if len(stamps) < 2 or stamps[-1] <= 0:
        raise WorkloadError(
            f"The trace {trace.path} has too few timestamps to replay ({len(stamps)}). It needs at "
            "least two different ones"
        )
    # The step that stamps were rounded to, where half coincide with another.
    gaps = np.diff(stamps)
    step = np.min(gaps[gaps > 0]) if np.mean(gaps == 0) >= 0.5 else 0.0
    lap = stamps[-1] + (step or np.mean(gaps))  # the last stamp has a gap after it as well
    stretch = len(stamps) / (lap * rate)
    laps = np.arange(math.ceil(duration_seconds / (lap * stretch)))
    spread = np.sort(stamps + rng.random(len(stamps)) * step)
    times: Times = ((spread + laps[:, None] * lap) * stretch).ravel()
    return times
