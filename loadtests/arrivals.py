"""When requests are due: arrival processes as seeded sequences of times, and the check that a sequence is what it claims to be.

    >>> times = due_times(Poisson(), rate=20.0, duration_seconds=60.0, seed=1)
    >>> check(Poisson(), times, rate=20.0, duration_seconds=60.0).as_asked
    True

Every process has the mean rate that is asked (requests per second, over whole cycles where it has cycles); its other settings only give
the shape. One seeded sequence (numpy's Philox) is made for the whole level and dealt out to the load generator's processes round-robin
(`deal`), so the union over any number of processes is the same sequence. Processes that all draw with the same seed are how another
tool's Poisson stops being one.

In a campaign file: `arrivals = { kind = "gamma", cv = 2.0 }`.

Why these: Azure's conversation trace is Poisson with a moving rate, its code trace is on/off; gamma renewal fits neither and is here
because people ask for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.errors import LoadError

Times = npt.NDArray[np.float64]
_OfTimes = Callable[[Times], Times]

CONSTANT_SECONDS = 0.002  # a request that leaves this much early or late is still on time
_STREAM = 0x0A  # keeps the draws of arrivals apart from those of lengths under the same seed

# Hour-of-day request rates over the daily mean, hour 0 first: ServeGen (Alibaba), pool language/m-small, 14 days.
SERVEGEN_SMALL_DAY: tuple[float, ...] = (
    0.839, 0.714, 0.733, 0.676, 0.714, 0.66, 0.684, 0.855, 1.015, 1.054, 1.125, 1.093,
    1.06, 1.073, 1.06, 1.047, 1.091, 1.079, 1.007, 1.229, 1.456, 1.402, 1.27, 1.063,
)  # fmt: skip


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be above 0, got {value}")


class _Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class Constant(_Process, frozen=True, tag="constant"):
    """One request every 1/rate seconds, the first at 0."""


class Poisson(_Process, frozen=True, tag="poisson"):
    """Independent exponential gaps: what many independent users look like."""


class Gamma(_Process, frozen=True, tag="gamma"):
    """Renewal process with gamma gaps of coefficient of variation `cv`: 1 is Poisson, more is burstier. Starts in equilibrium."""

    cv: float = 2.0

    def __post_init__(self) -> None:
        _positive("cv", self.cv)


class OnOff(_Process, frozen=True, tag="on_off"):
    """Poisson while on, nothing while off; on and off last exponentially long with these means. Starts in equilibrium."""

    on_seconds: float = 10.0
    off_seconds: float = 30.0

    def __post_init__(self) -> None:
        _positive("on_seconds", self.on_seconds)
        _positive("off_seconds", self.off_seconds)


class Piecewise(_Process, frozen=True, tag="piecewise"):
    """Poisson whose rate moves in steps, [[seconds, weight], ...], repeated when they end. Weights are relative (time mean 1)."""

    steps: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("steps is empty: give at least one [seconds, weight]")
        for seconds, weight in self.steps:
            _positive("seconds in steps", seconds)
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"weight in steps must be 0 or more, got {weight}")
        if not any(weight for _, weight in self.steps):
            raise ValueError("steps has no weight above 0: no request would ever be due")


class Diurnal(_Process, frozen=True, tag="diurnal"):
    """Poisson whose rate follows a day, squeezed into `period_seconds`; `profile` holds relative rates of equal parts of the day."""

    period_seconds: float = 86_400.0
    profile: tuple[float, ...] = SERVEGEN_SMALL_DAY

    def __post_init__(self) -> None:
        _positive("period_seconds", self.period_seconds)
        self.as_steps()

    def as_steps(self) -> Piecewise:
        """The same process as steps of a rate."""
        part_seconds = self.period_seconds / max(1, len(self.profile))
        return Piecewise(tuple((part_seconds, weight) for weight in self.profile))


class Ramp(_Process, frozen=True, tag="ramp"):
    """Poisson whose rate climbs (or falls) in a straight line over the level, from `start` to `end` (relative: their mean is made 1)."""

    start: float = 0.0
    end: float = 2.0

    def __post_init__(self) -> None:
        if min(self.start, self.end) < 0 or not math.isfinite(self.start + self.end) or self.start + self.end == 0:
            raise ValueError(f"start and end must be 0 or more and not both 0, got {self.start} and {self.end}")


class Trace(_Process, frozen=True, tag="trace"):
    """Replay of recorded stamps (loadtests.traces reads the file), time stretched to the asked rate and repeated when it ends.

    Stamps that were written in coarse steps (Mooncake: 3 s) are spread uniformly within the step: `dither_seconds` None finds the step,
    0 leaves the stamps alone.
    """

    path: str
    dither_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.dither_seconds is not None and not (math.isfinite(self.dither_seconds) and self.dither_seconds >= 0):
            raise ValueError(f"dither_seconds must be 0 or more, got {self.dither_seconds}")


Arrivals = Constant | Poisson | Gamma | OnOff | Piecewise | Diurnal | Ramp | Trace


def due_times(arrivals: Arrivals, rate: float, duration_seconds: float, seed: int, *, stamps: Sequence[float] | None = None) -> Times:
    """Times in [0, duration_seconds) at which requests are due, ascending: float64 [n], seconds.

    `rate` is the mean in requests per second. `stamps` are a trace's recorded times in seconds (else read from `Trace.path`). The same
    arguments give the same times; a longer duration only adds times at the end (for all but Ramp, whose slope belongs to the duration).
    Raises LoadError when rate or duration is not a positive number, or when a trace has fewer than two stamps.
    """
    for name, value in (("rate", rate), ("duration_seconds", duration_seconds)):
        if not (math.isfinite(value) and value > 0):
            raise LoadError(f"{name} must be above 0, got {value}")
    rng = generator(seed, _STREAM)
    match arrivals:
        case Constant():
            times = np.arange(math.ceil(duration_seconds * rate), dtype=np.float64) / rate
        case Gamma():
            times = _renewal(rng, arrivals.cv, rate, duration_seconds)
        case OnOff():
            times = _on_off(rng, arrivals, rate, duration_seconds)
        case Trace():
            if stamps is None:
                from loadtests.traces import load_trace

                recorded = load_trace(arrivals.path).seconds
            else:
                recorded = np.asarray(stamps, dtype=np.float64)
            times = _replay(rng, recorded, arrivals, rate, duration_seconds)
        case _:
            # Time rescaling: a unit-rate Poisson process through the inverse of the expected count.
            expected, inverse = _expected_count(arrivals, rate, duration_seconds)
            times = inverse(_unit_poisson(rng, float(expected(np.array([duration_seconds]))[0])))
    return times[times < duration_seconds]


def process_of(detail: Mapping[str, Any]) -> Arrivals | None:
    """The process as a level's journal entry keeps it; None for a closed loop, which has none. Raises LoadError for what is no process."""
    if detail.get("kind") == "closed":
        return None
    try:
        found: Arrivals = msgspec.convert(detail, Arrivals)
        return found
    except msgspec.ValidationError as problem:
        raise LoadError(f"arrivals on record cannot be read: {problem}") from problem


def deal(times: Times, worker: int, workers: int) -> tuple[npt.NDArray[np.int64], Times]:
    """The share of one of `workers` load generator processes: indices within the level, and their due times."""
    if not 0 <= worker < workers:
        raise LoadError(f"worker must be 0..{workers - 1}, got {worker}")
    indices = np.arange(worker, len(times), workers, dtype=np.int64)
    return indices, times[indices]


def generator(seed: int, *stream: int) -> np.random.Generator:
    """A random generator of its own for (seed, stream): counter-based, so that streams do not overlap."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed % 2**64, *stream])))


class Dispersion(msgspec.Struct, frozen=True):
    """Index of dispersion of counts: variance / mean of the number of arrivals in windows of this length. Poisson: 1."""

    window_seconds: float
    windows: int
    index: float


class ArrivalCheck(msgspec.Struct, frozen=True):
    """What a sequence of times looks like, beside what it should look like. None: too few arrivals to say.

    `ks_p` is the p-value of a Kolmogorov-Smirnov test of the gaps (for a moving rate: rescaled to unit rate) against the process
    with the asked rate, where that is a distribution we know; `as_asked` is false when the sequence contradicts the process at 0.1 %.
    """

    count: int
    rate: float  # as it came out
    cv: float | None
    lag1: float | None  # autocorrelation of consecutive gaps
    dispersion: list[Dispersion]
    ks_p: float | None
    as_asked: bool | None
    against: Literal["exponential", "gamma", "constant", "none"]


def check(arrivals: Arrivals, times: Times, rate: float, duration_seconds: float, late_seconds: float = 0.0) -> ArrivalCheck:
    """Test a sequence (due or sent times, seconds) against the process it was drawn from. Needs 20 arrivals to say anything.

    `late_seconds` is how late requests leave: of gaps shorter than that only the number is tested, since their lengths are the sender's.
    """
    times = np.sort(np.asarray(times, dtype=np.float64))
    gaps = np.diff(times)
    against, ks_p, lag1_rescaled = _against(arrivals, times, rate, duration_seconds, max(late_seconds, 1e-9))
    known = len(times) >= 20
    as_asked: bool | None = None
    if known and against == "constant":
        off_seconds = np.quantile(np.abs(gaps - 1.0 / rate), 0.99)
        as_asked = bool(off_seconds < max(0.01 / rate, CONSTANT_SECONDS))
    elif known and ks_p is not None:
        as_asked = ks_p >= 0.001 and abs(lag1_rescaled or 0.0) * math.sqrt(len(gaps)) < 3.3
    return ArrivalCheck(
        count=len(times),
        rate=len(times) / duration_seconds,
        cv=float(np.std(gaps) / np.mean(gaps)) if known and np.mean(gaps) > 0 else None,
        lag1=_lag1(gaps) if known else None,
        dispersion=[d for w in _windows(rate, duration_seconds) if (d := _dispersion(times, w, duration_seconds)) is not None],
        ks_p=ks_p if known else None,
        as_asked=as_asked,
        against=against,
    )


def _against(arrivals: Arrivals, times: Times, rate: float, duration_seconds: float, finest_seconds: float) -> tuple[
    Literal["exponential", "gamma", "constant", "none"], float | None, float | None
]:  # fmt: skip
    if isinstance(arrivals, Constant):
        return "constant", None, None
    if isinstance(arrivals, OnOff | Trace):
        return "none", None, None
    if len(times) < 2:
        return ("gamma" if isinstance(arrivals, Gamma) else "exponential"), None, None
    from scipy import stats

    if isinstance(arrivals, Gamma):
        shape = 1.0 / arrivals.cv**2
        gaps = np.diff(times)
        law = stats.gamma(shape, scale=1.0 / (shape * rate))
        unit = _uniform_below(np.asarray(law.cdf(gaps)), float(law.cdf(finest_seconds)))
        return "gamma", float(stats.kstest(unit, stats.uniform.cdf).pvalue), _lag1(gaps)
    expected, _ = _expected_count(arrivals, rate, duration_seconds)
    gaps = np.diff(expected(times))
    unit = _uniform_below(-np.expm1(-gaps), -math.expm1(-finest_seconds * rate))
    return "exponential", float(stats.kstest(unit, stats.uniform.cdf).pvalue), _lag1(gaps)


def _uniform_below(unit: Times, finest: float) -> Times:
    """Uniform numbers whose values below `finest` are spread evenly there: of what is not resolved only the number is tested."""
    tiny = unit < finest
    spread = unit.copy()
    spread[tiny] = (np.arange(int(tiny.sum())) + 0.5) / max(1, int(tiny.sum())) * finest
    return spread


def _lag1(gaps: Times) -> float | None:
    if len(gaps) < 3 or np.ptp(gaps) < 1e-9 * float(np.mean(gaps)):
        return None
    centred = gaps - gaps.mean()
    return float(np.dot(centred[1:], centred[:-1]) / np.dot(centred, centred))


def _windows(rate: float, duration_seconds: float) -> list[float]:
    """Windows of 1, 10, 60, 300 s and of 10 mean gaps, as far as twenty of them fit."""
    return sorted({w for w in (10.0 / rate, 1.0, 10.0, 60.0, 300.0) if 0.5 / rate <= w <= duration_seconds / 20})


def _dispersion(times: Times, window_seconds: float, duration_seconds: float) -> Dispersion | None:
    windows = int(duration_seconds / window_seconds)
    counts, _ = np.histogram(times, bins=windows, range=(0.0, windows * window_seconds))
    if counts.mean() == 0:
        return None
    return Dispersion(window_seconds, windows, float(counts.var(ddof=1) / counts.mean()))


def _unit_poisson(rng: np.random.Generator, until: float) -> Times:
    """Arrival times of a unit-rate Poisson process in [0, until)."""
    parts: list[Times] = []
    last = 0.0
    while last < until:
        part = last + np.cumsum(rng.standard_exponential(1024))
        parts.append(part)
        last = float(part[-1])
    times = np.concatenate(parts) if parts else np.empty(0)
    return times[times < until]


def _renewal(rng: np.random.Generator, cv: float, rate: float, duration_seconds: float) -> Times:
    shape = 1.0 / cv**2
    # In equilibrium the first arrival comes after a uniform part of a gap met in proportion to its length: gamma(shape + 1).
    last = float(rng.random() * rng.gamma(shape + 1.0)) / (shape * rate)
    parts = [np.array([last])]
    while last < duration_seconds:
        part = last + np.cumsum(rng.gamma(shape, 1.0 / (shape * rate), 1024))
        parts.append(part)
        last = float(part[-1])
    return np.concatenate(parts)


def _on_off(rng: np.random.Generator, process: OnOff, rate: float, duration_seconds: float) -> Times:
    on_mean, off_mean = process.on_seconds, process.off_seconds
    is_on = bool(rng.random() < on_mean / (on_mean + off_mean))
    now, busy = 0.0, 0.0  # wall time, and the part of it spent on
    starts: list[tuple[float, float]] = []  # (busy time before this on period, its wall-clock start)
    while now < duration_seconds:
        length = float(rng.exponential(on_mean if is_on else off_mean))
        if is_on:
            starts.append((busy, now))
            busy += length
        now += length
        is_on = not is_on
    if not starts:
        return np.empty(0)
    # A stream of its own for the arrivals, so that a longer level keeps the times of a shorter one.
    unit = _unit_poisson(rng.spawn(1)[0], busy * rate * (on_mean + off_mean) / on_mean)
    at_busy = unit / (rate * (on_mean + off_mean) / on_mean)
    befores = np.array([before for before, _ in starts])
    walls = np.array([wall for _, wall in starts])
    period = np.searchsorted(befores, at_busy, side="right") - 1
    times: Times = walls[period] + (at_busy - befores[period])
    return times


def _replay(rng: np.random.Generator, stamps: Times, trace: Trace, rate: float, duration_seconds: float) -> Times:
    if len(stamps) < 2 or np.ptp(stamps) <= 0:
        raise LoadError(f"trace {trace.path}: {len(stamps)} stamps are too few to replay: at least two different ones are needed")
    stamps = np.sort(stamps) - np.min(stamps)
    step = trace.dither_seconds if trace.dither_seconds is not None else stamp_step_seconds(stamps)
    span = float(stamps[-1]) + (step or float(stamps[-1]) / (len(stamps) - 1))  # the last stamp has a gap after it as well
    stretch = len(stamps) / (span * rate)
    parts: list[Times] = []
    for lap in range(math.ceil(duration_seconds / (span * stretch))):
        spread = rng.random(len(stamps)) * step if step else 0.0
        parts.append((np.sort(stamps + spread) + lap * span) * stretch)
    return np.concatenate(parts)


def stamp_step_seconds(stamps: Times) -> float:
    """The step that stamps were rounded to, where most of them coincide with another; 0.0 where they do not."""
    gaps = np.diff(np.sort(stamps))
    if len(gaps) == 0 or np.mean(gaps == 0) < 0.5:
        return 0.0
    return float(np.min(gaps[gaps > 0], initial=np.inf)) if np.any(gaps > 0) else 0.0


def _expected_count(arrivals: Arrivals, rate: float, duration_seconds: float) -> tuple[_OfTimes, _OfTimes]:
    """Expected number of arrivals before a time, and its inverse, for the Poisson processes: two functions of arrays."""
    if isinstance(arrivals, Diurnal):
        arrivals = arrivals.as_steps()
    if isinstance(arrivals, Piecewise):
        seconds = np.array([s for s, _ in arrivals.steps])
        weights = np.array([w for _, w in arrivals.steps])
        scale = rate * seconds.sum() / np.dot(seconds, weights)
        laps = math.ceil(duration_seconds / seconds.sum())
        knots = np.concatenate([[0.0], np.cumsum(np.tile(seconds, laps))])
        counts = np.concatenate([[0.0], np.cumsum(np.tile(seconds * weights * scale, laps))])
        return (lambda t: np.interp(t, knots, counts)), (lambda n: _inverse(n, counts, knots))
    if isinstance(arrivals, Ramp):
        first = rate * 2 * arrivals.start / (arrivals.start + arrivals.end)
        slope = (rate * 2 * arrivals.end / (arrivals.start + arrivals.end) - first) / duration_seconds
        if slope == 0:
            return (lambda t: t * rate), (lambda n: n / rate)
        return (
            (lambda t: first * t + slope * t * t / 2),
            (lambda n: 2 * n / (first + np.sqrt(np.maximum(first * first + 2 * slope * n, 0.0)))),
        )
    return (lambda t: t * rate), (lambda n: n / rate)


def _inverse(count: Times, counts: Times, knots: Times) -> Times:
    """Times at which the expected count reaches `count`; a stretch of zero rate is jumped over."""
    right = np.clip(np.searchsorted(counts, count, side="right"), 1, len(counts) - 1)
    left = right - 1
    part = (count - counts[left]) / np.maximum(counts[right] - counts[left], 1e-300)
    times: Times = knots[left] + part * (knots[right] - knots[left])
    return times
