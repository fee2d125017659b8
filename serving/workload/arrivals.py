"""Arrival processes: the scheduled times of requests, drawn with a seed.

    >>> times = due_times(Poisson(), rate=20.0, duration_seconds=60.0, seed=1)

Every process has the requested mean rate (requests per second). Its settings define how the gaps
between requests vary.

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

_STREAM = 0x0A  # so that arrivals and lengths get independent random numbers from the same seed
_DRAWN_GAPS = 1024  # drawn at a time


class _Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """The base of all arrival processes; `kind` names the process in a file."""


class Constant(_Process, frozen=True, tag="constant"):
    """One request every 1/rate seconds, the first at 0."""


class Poisson(_Process, frozen=True, tag="poisson"):
    """Independent exponential gaps, as of many independent users."""


class Gamma(_Process, frozen=True, tag="gamma"):
    """A renewal process in equilibrium, with gamma-distributed gaps. Their coefficient of variation
    is `cv`: 1 is a Poisson process, and larger values give bursts."""

    cv: Annotated[float, Meta(gt=0)] = 2.0


class Trace(_Process, frozen=True, tag="trace"):
    """Replays recorded timestamps. Their time is scaled to the nominal rate, and the trace starts
    over at its end.

    Coarse timestamps (every 3 s in the Mooncake trace) are spread randomly over their interval.
    """

    path: str


Arrivals = Constant | Poisson | Gamma | Trace


def due_times(arrivals: Arrivals, rate: float, duration_seconds: float, seed: int) -> Times:
    """Return the scheduled times of requests in seconds, float64 [n], ascending, in
    [0, duration_seconds).

    `rate` is the mean number of requests per second. With the same seed, a longer duration only
    adds times at the end.

    Raises WorkloadError if the rate or the duration is not above 0, or a trace cannot be replayed.
    """
    for name, value in (("rate", rate), ("duration_seconds", duration_seconds)):
        if not (math.isfinite(value) and value > 0):
            raise WorkloadError(f"{name} must be above 0, got {value}")
    rng = generator(seed, _STREAM)
    match arrivals:
        case Constant():
            times = np.arange(math.ceil(duration_seconds * rate), dtype=np.float64) / rate
        case Poisson():
            # In units of the mean gap. The 0.0 at which the sums begin is no request.
            sums = _running_sums(rng.standard_exponential, 0.0, duration_seconds * rate)
            times = sums[1:] / rate
        case Gamma():
            times = _renewal(rng, arrivals.cv, rate, duration_seconds)
        case Trace():
            times = _replay(rng, arrivals, rate, duration_seconds)
    return times[times < duration_seconds]


def recorded_arrivals(detail: Mapping[str, Any]) -> Arrivals:
    """Return the arrival process that is recorded in a journal. Raises WorkloadError if it cannot
    be read."""
    try:
        arrivals: Arrivals = msgspec.convert(detail, Arrivals)
        return arrivals
    except msgspec.ValidationError as problem:
        raise WorkloadError(f"The recorded arrivals cannot be read: {problem}") from problem


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Return a random generator (Philox) that is independent for every (seed, *stream)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed % 2**64, *stream])))


def _running_sums(draw_gaps: Callable[[int], Times], first: float, until: float) -> Times:
    """Return `first` and the running sums of gaps after it, at least until they exceed `until`.

    `draw_gaps(n)` returns n gaps, float64 [n].
    """
    parts = [np.array([first])]
    while parts[-1][-1] < until:
        parts.append(parts[-1][-1] + np.cumsum(draw_gaps(_DRAWN_GAPS)))
    return np.concatenate(parts)


def _renewal(rng: np.random.Generator, cv: float, rate: float, duration_seconds: float) -> Times:
    """Return the times of a renewal process with gamma gaps, at least up to the duration."""
    shape = 1.0 / cv**2
    scale = 1.0 / (shape * rate)
    # In equilibrium, time 0 falls into a gap with a probability proportional to the gap's length,
    # which makes that gap gamma-distributed with shape + 1. A uniform part of it remains.
    first = float(rng.random() * rng.gamma(shape + 1.0)) / (shape * rate)
    return _running_sums(lambda n: rng.gamma(shape, scale, n), first, duration_seconds)


def _replay(rng: np.random.Generator, trace: Trace, rate: float, duration_seconds: float) -> Times:
    """Return the trace's times at this rate, at least up to the duration. Raises WorkloadError."""
    stamps = load_trace(trace.path).seconds
    if len(stamps) < 2 or stamps[-1] <= 0:
        raise WorkloadError(
            f"The trace {trace.path} has too few timestamps to replay ({len(stamps)}). It needs at "
            "least two different ones"
        )
    # If at least half of the stamps equal the one before, they were rounded to this resolution.
    gaps = np.diff(stamps)
    resolution = np.min(gaps[gaps > 0]) if np.mean(gaps == 0) >= 0.5 else 0.0
    # One replay takes as long as the trace, and one gap more before it starts over.
    replay_seconds = stamps[-1] + (resolution or np.mean(gaps))
    stretch = len(stamps) / (replay_seconds * rate)  # scales time to the rate
    replays = np.arange(math.ceil(duration_seconds / (replay_seconds * stretch)))
    unrounded = np.sort(stamps + rng.random(len(stamps)) * resolution)
    times_by_replay = (unrounded + replays[:, None] * replay_seconds) * stretch
    times: Times = times_by_replay.ravel()
    return times
