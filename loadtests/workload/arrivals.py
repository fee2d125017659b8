"""When requests are due: arrival processes as seeded sequences of times.

    >>> times = due_times(Poisson(), rate=20.0, duration_seconds=60.0, seed=1)

Every process has the asked mean rate (requests per second, over whole cycles where it has cycles);
its other settings give the shape. One sequence is drawn for the whole level, and each of the load
generator's processes sends its share of it.

In a campaign file: `arrivals = { kind = "gamma", cv = 2.0 }`. Azure's conversation trace is Poisson
with a moving rate, its code trace on/off; gamma renewal fits neither, and is here because it is
asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from loadtests.errors import LoadError
from loadtests.workload.traces import load_trace

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

    cv: Annotated[float, Meta(gt=0, description="coefficient of variation; 1: Poisson")] = 2.0


class OnOff(_Process, frozen=True, tag="on_off"):
    """Poisson while on, nothing while off; both last exponentially long. In equilibrium."""

    on_seconds: Annotated[float, Meta(gt=0, description="mean time with requests")] = 10.0
    off_seconds: Annotated[float, Meta(gt=0, description="mean time without requests")] = 30.0


class Piecewise(_Process, frozen=True, tag="piecewise"):
    """Poisson whose rate moves in steps, [[seconds, relative rate], ...], repeated."""

    steps: Annotated[
        tuple[
            tuple[Annotated[float, Meta(gt=0)], Annotated[float, Meta(ge=0, le=1e9)]],
            ...,
        ],
        Meta(min_length=1, description="[[seconds, relative rate], ...], repeated"),
    ]

    def __post_init__(self) -> None:
        if not any(weight for _, weight in self.steps):
            raise ValueError("steps has no relative rate above 0: no request would ever be due")


class Trace(_Process, frozen=True, tag="trace"):
    """Replay of recorded stamps, time stretched to the asked rate, repeated when it ends.

    Coarse stamps (Mooncake: 3 s) are spread over their step.
    """

    path: Annotated[str, Meta(description="file with the recorded stamps")]


Arrivals = Constant | Poisson | Gamma | OnOff | Piecewise | Trace


def due_times(arrivals: Arrivals, rate: float, duration_seconds: float, seed: int) -> Times:
    """Ascending times in [0, duration_seconds) at which requests are due: float64 [n], seconds.

    `rate`: mean, requests per second. A longer duration only adds times at the end. Raises
    LoadError for a rate or duration that is not above 0, and for a trace that cannot be replayed.
    """
    for name, value in (("rate", rate), ("duration_seconds", duration_seconds)):
        if not (math.isfinite(value) and value > 0):
            raise LoadError(f"{name} must be above 0, got {value}")
    rng = generator(seed, _STREAM)
    match arrivals:
        case Constant():
            times = np.arange(math.ceil(duration_seconds * rate), dtype=np.float64) / rate
        case Poisson():
            times = _unit_poisson(rng, duration_seconds * rate) / rate
        case Gamma():
            times = _renewal(rng, arrivals.cv, rate, duration_seconds)
        case OnOff():
            times = _on_off(rng, arrivals, rate, duration_seconds)
        case Piecewise():
            times = _piecewise(rng, arrivals, rate, duration_seconds)
        case Trace():
            times = _replay(rng, arrivals, rate, duration_seconds)
    return times[times < duration_seconds]


def process_of(detail: Mapping[str, Any]) -> Arrivals:
    """The process of a journal's entry. LoadError: not a process."""
    try:
        found: Arrivals = msgspec.convert(detail, Arrivals)
        return found
    except msgspec.ValidationError as problem:
        raise LoadError(f"arrivals on record cannot be read: {problem}") from problem


def generator(seed: int, *stream: int) -> np.random.Generator:
    """A random generator (Philox) of its own for (seed, stream)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed % 2**64, *stream])))


def _summed(draw: Callable[[int], Times], first: float, until: float) -> Times:
    """`first`, then the running sums of drawn gaps, till they pass `until`."""
    parts = [np.array([first])]
    while parts[-1][-1] < until:
        parts.append(parts[-1][-1] + np.cumsum(draw(1024)))
    return np.concatenate(parts)


def _unit_poisson(rng: np.random.Generator, until: float) -> Times:
    """Arrival times of a unit-rate Poisson process in [0, until)."""
    times = _summed(rng.standard_exponential, 0.0, until)[1:]
    return times[times < until]


def _renewal(rng: np.random.Generator, cv: float, rate: float, duration_seconds: float) -> Times:
    shape = 1.0 / cv**2
    # In equilibrium the first gap is met in proportion to its length, and a uniform part is left.
    first = float(rng.random() * rng.gamma(shape + 1.0)) / (shape * rate)
    scale = 1.0 / (shape * rate)
    return _summed(lambda n: rng.gamma(shape, scale, n), first, duration_seconds)


def _on_off(
    rng: np.random.Generator, process: OnOff, rate: float, duration_seconds: float
) -> Times:
    on_mean, off_mean = process.on_seconds, process.off_seconds
    is_on = bool(rng.random() < on_mean / (on_mean + off_mean))
    now = 0.0
    busy = 0.0  # of `now`, spent on
    periods: list[tuple[float, float]] = []  # (busy, now) at the start of each on period
    while now < duration_seconds:
        length = float(rng.exponential(on_mean if is_on else off_mean))
        if is_on:
            periods.append((busy, now))
            busy += length
        now += length
        is_on = not is_on
    if not periods:
        return np.empty(0)
    # A stream of its own for the arrivals: a longer level keeps the times of a shorter one.
    rate_on = rate * (on_mean + off_mean) / on_mean
    at_busy = _unit_poisson(rng.spawn(1)[0], busy * rate_on) / rate_on
    befores, starts = np.array(periods).T
    period = np.searchsorted(befores, at_busy, side="right") - 1
    times: Times = starts[period] + (at_busy - befores[period])
    return times


def _piecewise(
    rng: np.random.Generator, process: Piecewise, rate: float, duration_seconds: float
) -> Times:
    """Time rescaling: a unit-rate process through the inverse of the expected count."""
    seconds, weights = np.array(process.steps).T
    scale = rate * seconds.sum() / np.dot(seconds, weights)
    laps = math.ceil(duration_seconds / seconds.sum())
    knots = np.concatenate([[0.0], np.cumsum(np.tile(seconds, laps))])
    counts = np.concatenate([[0.0], np.cumsum(np.tile(seconds * weights * scale, laps))])
    unit = _unit_poisson(rng, float(np.interp(duration_seconds, knots, counts)))
    # Stretches of zero rate are skipped.
    right = np.clip(np.searchsorted(counts, unit, side="right"), 1, len(counts) - 1)
    left = right - 1
    part = (unit - counts[left]) / np.maximum(counts[right] - counts[left], 1e-300)
    times: Times = knots[left] + part * (knots[right] - knots[left])
    return times


def _replay(rng: np.random.Generator, trace: Trace, rate: float, duration_seconds: float) -> Times:
    stamps = load_trace(trace.path).seconds
    if len(stamps) < 2 or stamps[-1] <= 0:
        raise LoadError(
            f"trace {trace.path}: {len(stamps)} stamps are too few to replay: "
            "at least two different ones are needed"
        )
    # The step that stamps were rounded to, where half coincide with another.
    gaps = np.diff(stamps)
    step = float(np.min(gaps[gaps > 0])) if np.mean(gaps == 0) >= 0.5 else 0.0
    last = float(stamps[-1])
    span = last + (step or last / (len(stamps) - 1))  # the last stamp has a gap after it as well
    stretch = len(stamps) / (span * rate)
    parts: list[Times] = []
    for lap in range(math.ceil(duration_seconds / (span * stretch))):
        spread = rng.random(len(stamps)) * step if step else 0.0
        parts.append((np.sort(stamps + spread) + lap * span) * stretch)
    return np.concatenate(parts)
