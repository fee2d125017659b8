"""When requests are due: arrival processes as seeded sequences of times.

    >>> times = due_times(Poisson(), rate=20.0, duration_seconds=60.0, seed=1)

Every process has the asked mean rate (requests per second, over whole cycles where it has cycles);
its other settings give the shape. One sequence is drawn for the whole level and dealt to the load
generator's processes round-robin (`deal`), so the union over any number of processes is the same.

In a campaign file: `arrivals = { kind = "gamma", cv = 2.0 }`. Azure's conversation trace is Poisson
with a moving rate, its code trace on/off; gamma renewal fits neither, and is here because it is
asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.errors import LoadError
from loadtests.workload.traces import load_trace

Times = npt.NDArray[np.float64]

_STREAM = 0x0A  # keeps the draws of arrivals apart from those of lengths under the same seed

# Hour-of-day request rates over the daily mean, hour 0 first: ServeGen (Alibaba), language/m-small.
SERVEGEN_SMALL_DAY: tuple[float, ...] = (
    *(0.839, 0.714, 0.733, 0.676, 0.714, 0.66, 0.684, 0.855, 1.015, 1.054, 1.125, 1.093),
    *(1.06, 1.073, 1.06, 1.047, 1.091, 1.079, 1.007, 1.229, 1.456, 1.402, 1.27, 1.063),
)


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be above 0, got {value}")


class _Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class Constant(_Process, frozen=True, tag="constant"):
    """One request every 1/rate seconds, the first at 0."""


class Poisson(_Process, frozen=True, tag="poisson"):
    """Independent exponential gaps: many independent users."""


class Gamma(_Process, frozen=True, tag="gamma"):
    """Renewal with gamma gaps of coefficient of variation `cv` (1: Poisson), in equilibrium."""

    cv: float = 2.0  # coefficient of variation of the gaps; 1: Poisson

    def __post_init__(self) -> None:
        _check_positive("cv", self.cv)


class OnOff(_Process, frozen=True, tag="on_off"):
    """Poisson while on, nothing while off; both last exponentially long. In equilibrium."""

    on_seconds: float = 10.0  # mean time with requests
    off_seconds: float = 30.0  # mean time without requests

    def __post_init__(self) -> None:
        _check_positive("on_seconds", self.on_seconds)
        _check_positive("off_seconds", self.off_seconds)


class Piecewise(_Process, frozen=True, tag="piecewise"):
    """Poisson whose rate moves in steps, [[seconds, relative rate], ...], repeated."""

    steps: tuple[tuple[float, float], ...]  # [[seconds, relative rate], ...], repeated

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("steps is empty: give at least one [seconds, weight]")
        for seconds, weight in self.steps:
            _check_positive("seconds in steps", seconds)
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"weight in steps must be 0 or more, got {weight}")
        if not any(weight for _, weight in self.steps):
            raise ValueError("steps has no weight above 0: no request would ever be due")


class Diurnal(_Process, frozen=True, tag="diurnal"):
    """Poisson whose rate follows a day of `period_seconds`; `profile`: rates of equal parts."""

    period_seconds: float = 86_400.0  # length of the day
    profile: tuple[float, ...] = SERVEGEN_SMALL_DAY  # relative rates of equal parts of it

    def __post_init__(self) -> None:
        _check_positive("period_seconds", self.period_seconds)
        self.as_steps()

    def as_steps(self) -> Piecewise:
        """The same process as steps of a rate."""
        part_seconds = self.period_seconds / max(1, len(self.profile))
        return Piecewise(tuple((part_seconds, weight) for weight in self.profile))


class Ramp(_Process, frozen=True, tag="ramp"):
    """Poisson whose rate moves in a straight line over the level, `start` to `end` (relative)."""

    start: float = 0.0  # relative rate at the start of a level
    end: float = 2.0  # relative rate at its end

    def __post_init__(self) -> None:
        total = self.start + self.end
        if min(self.start, self.end) < 0 or not math.isfinite(total) or total == 0:
            raise ValueError(
                f"start and end must be 0 or more and not both 0, got {self.start} and {self.end}"
            )


class Trace(_Process, frozen=True, tag="trace"):
    """Replay of recorded stamps, time stretched to the asked rate, repeated when it ends.

    Coarse stamps (Mooncake: 3 s) are spread within their step: `dither_seconds` None finds the
    step, 0 leaves the stamps alone.
    """

    path: str  # file with the recorded stamps
    dither_seconds: float | None = None  # spread of coarse stamps; none: their step; 0: none

    def __post_init__(self) -> None:
        dither = self.dither_seconds
        if dither is not None and not (math.isfinite(dither) and dither >= 0):
            raise ValueError(f"dither_seconds must be 0 or more, got {dither}")


Arrivals = Constant | Poisson | Gamma | OnOff | Piecewise | Diurnal | Ramp | Trace


def due_times(
    arrivals: Arrivals,
    rate: float,
    duration_seconds: float,
    seed: int,
    follow_seconds: float = 0.0,
    *,
    stamps: Sequence[float] | None = None,
) -> Times:
    """Ascending times in [0, duration_seconds) at which requests are due: float64 [n], seconds.

    `rate`: mean, requests per second. `follow_seconds`: so much longer, without a change to the
    times before; a ramp goes on at the rate of its end. `stamps`: a trace's times in seconds (else
    read from its path). A longer duration only adds times at the end (but for Ramp).
    Raises LoadError for a rate or duration that is not above 0, and for a trace with fewer than
    two stamps.
    """
    for name, value in (("rate", rate), ("duration_seconds", duration_seconds)):
        if not (math.isfinite(value) and value > 0):
            raise LoadError(f"{name} must be above 0, got {value}")
    if isinstance(arrivals, Ramp):
        at_end = rate * 2 * arrivals.end / (arrivals.start + arrivals.end)
        if at_end * follow_seconds > 0:
            ramp = due_times(arrivals, rate, duration_seconds, seed)
            later = due_times(Poisson(), at_end, follow_seconds, seed + 1)
            return np.concatenate([ramp, duration_seconds + later])
    else:
        duration_seconds += follow_seconds
    rng = generator(seed, _STREAM)
    match arrivals:
        case Constant():
            times = np.arange(math.ceil(duration_seconds * rate), dtype=np.float64) / rate
        case Gamma():
            times = _renewal(rng, arrivals.cv, rate, duration_seconds)
        case OnOff():
            times = _on_off(rng, arrivals, rate, duration_seconds)
        case Trace():
            recorded = load_trace(arrivals.path).seconds if stamps is None else np.asarray(stamps)
            times = _replay(rng, recorded, arrivals, rate, duration_seconds)
        case _:
            # Time rescaling: a unit-rate process through the inverse of the expected count.
            expected, inverse = expected_count(arrivals, rate, duration_seconds)
            times = inverse(_unit_poisson(rng, float(expected(np.array([duration_seconds]))[0])))
    return times[times < duration_seconds]


def cycle_seconds(arrivals: Arrivals) -> float | None:
    """How long a cycle lasts, on average, at any rate; None: the arrivals do not come in cycles."""
    match arrivals:
        case OnOff():
            return arrivals.on_seconds + arrivals.off_seconds
        case Piecewise():
            return sum(seconds for seconds, _ in arrivals.steps)
        case Diurnal():
            return arrivals.period_seconds
        case _:
            return None


def phases(arrivals: Arrivals) -> tuple[tuple[float, float], ...]:
    """What a cycle is made of: (share of the requests, rate over the mean) of each kind of time."""
    if isinstance(arrivals, Diurnal):
        arrivals = arrivals.as_steps()
    if isinstance(arrivals, OnOff):
        return ((1.0, (arrivals.on_seconds + arrivals.off_seconds) / arrivals.on_seconds),)
    if isinstance(arrivals, Piecewise):
        seconds, weights = np.array(arrivals.steps).T
        mean = np.dot(seconds, weights) / seconds.sum()
        times = {weight: float(seconds[weights == weight].sum()) for weight in weights.tolist()}
        return tuple(
            (length * weight / float(seconds.sum() * mean), weight / float(mean))
            for weight, length in times.items()
            if weight > 0
        )
    return ((1.0, 1.0),)


def process_of(detail: Mapping[str, Any]) -> Arrivals | None:
    """The process of a level's journal entry; None: closed loop. LoadError: not a process."""
    if detail.get("kind") == "closed":
        return None
    try:
        found: Arrivals = msgspec.convert(detail, Arrivals)
        return found
    except msgspec.ValidationError as problem:
        raise LoadError(f"arrivals on record cannot be read: {problem}") from problem


def deal(times: Times, worker: int, workers: int) -> tuple[npt.NDArray[np.int64], Times]:
    """One of `workers` processes' share: indices within the level, and their due times."""
    if not 0 <= worker < workers:
        raise LoadError(f"worker must be 0..{workers - 1}, got {worker}")
    indices = np.arange(worker, len(times), workers, dtype=np.int64)
    return indices, times[indices]


def generator(seed: int, *stream: int) -> np.random.Generator:
    """A random generator (Philox) of its own for (seed, stream)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed % 2**64, *stream])))


def _summed(draw: Callable[[int], Times], first: Sequence[float], until: float) -> Times:
    """Running sums of drawn gaps, from the last of `first`, till they pass `until`."""
    parts = [np.array(first)]
    last = float(parts[0][-1]) if len(first) else 0.0
    while last < until:
        parts.append(last + np.cumsum(draw(1024)))
        last = float(parts[-1][-1])
    return np.concatenate(parts)


def _unit_poisson(rng: np.random.Generator, until: float) -> Times:
    """Arrival times of a unit-rate Poisson process in [0, until)."""
    times = _summed(rng.standard_exponential, (), until)
    return times[times < until]


def _renewal(rng: np.random.Generator, cv: float, rate: float, duration_seconds: float) -> Times:
    shape = 1.0 / cv**2
    # In equilibrium the first gap is met in proportion to its length, and a uniform part is left.
    first = float(rng.random() * rng.gamma(shape + 1.0)) / (shape * rate)
    scale = 1.0 / (shape * rate)
    return _summed(lambda n: rng.gamma(shape, scale, n), (first,), duration_seconds)


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


def _replay(
    rng: np.random.Generator, stamps: Times, trace: Trace, rate: float, duration_seconds: float
) -> Times:
    if len(stamps) < 2 or np.ptp(stamps) <= 0:
        raise LoadError(
            f"trace {trace.path}: {len(stamps)} stamps are too few to replay: "
            "at least two different ones are needed"
        )
    stamps = np.sort(stamps) - np.min(stamps)
    step = stamp_step_seconds(stamps) if trace.dither_seconds is None else trace.dither_seconds
    last = float(stamps[-1])
    span = last + (step or last / (len(stamps) - 1))  # the last stamp has a gap after it as well
    stretch = len(stamps) / (span * rate)
    parts: list[Times] = []
    for lap in range(math.ceil(duration_seconds / (span * stretch))):
        spread = rng.random(len(stamps)) * step if step else 0.0
        parts.append((np.sort(stamps + spread) + lap * span) * stretch)
    return np.concatenate(parts)


def stamp_step_seconds(stamps: Times) -> float:
    """The step that stamps were rounded to; 0.0 where fewer than half coincide with another."""
    gaps = np.diff(np.sort(stamps))
    if len(gaps) == 0 or np.mean(gaps == 0) < 0.5 or not np.any(gaps > 0):
        return 0.0
    return float(np.min(gaps[gaps > 0]))


def expected_count(
    arrivals: Arrivals, rate: float, duration_seconds: float
) -> tuple[Callable[[Times], Times], Callable[[Times], Times]]:
    """Expected arrivals of a Poisson process before a time, and the inverse."""
    if isinstance(arrivals, Diurnal):
        arrivals = arrivals.as_steps()
    if isinstance(arrivals, Piecewise):
        seconds, weights = np.array(arrivals.steps).T
        scale = rate * seconds.sum() / np.dot(seconds, weights)
        laps = math.ceil(duration_seconds / seconds.sum())
        knots = np.concatenate([[0.0], np.cumsum(np.tile(seconds, laps))])
        counts = np.concatenate([[0.0], np.cumsum(np.tile(seconds * weights * scale, laps))])
        return (lambda t: np.interp(t, knots, counts)), (lambda n: _inverse(n, counts, knots))
    if isinstance(arrivals, Ramp):
        total = arrivals.start + arrivals.end
        first = rate * 2 * arrivals.start / total
        slope = (rate * 2 * arrivals.end / total - first) / duration_seconds
        if slope != 0:
            return (
                (lambda t: first * t + slope * t * t / 2),
                (lambda n: 2 * n / (first + np.sqrt(np.maximum(first**2 + 2 * slope * n, 0.0)))),
            )
    return (lambda t: t * rate), (lambda n: n / rate)


def _inverse(count: Times, counts: Times, knots: Times) -> Times:
    """Times at which the expected count reaches `count`; stretches of zero rate are skipped."""
    right = np.clip(np.searchsorted(counts, count, side="right"), 1, len(counts) - 1)
    left = right - 1
    part = (count - counts[left]) / np.maximum(counts[right] - counts[left], 1e-300)
    times: Times = knots[left] + part * (knots[right] - knots[left])
    return times
