"""The words for a capacity, which terminal, report and plan share.

    >>> from crossover.loadtests.records.journal_events import Capacity
    >>> capacity = Capacity(state="confirmed", confirmed_rate=2.1, estimated_rate=2.42,
    ...                     low=2.04, high=2.87, method="step_times")
    >>> capacity_in_words(capacity)
    'confirmed 2.1/s, estimated capacity 2.4/s (2.0–2.9)'

Only a rate that ran long enough and met the SLO is called confirmed (`confirmed_rate`). `unit_rate`
is a rate whose unit is used, so that numbers beside each other have the same unit; None: each
number has its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from crossover.loadtests.records.journal_events import Capacity
from crossover.models import formatting

# The part of an estimate that a campaign may confirm later. A unit is chosen to suit that rate too.
CONFIRMABLE_SHARE = 0.7
NO_CAPACITY = "none"  # by the step-time model even single requests miss the SLO


def common_rate(capacities: Iterable[Capacity | None]) -> float | None:
    """Return the rate whose unit suits all of these capacities (`unit_rate`). None: no rate is
    known."""
    return formatting.common_unit_rate(rates_of(capacities))


def rates_of(capacities: Iterable[Capacity | None]) -> list[float]:
    """Return the rates of capacities by which a unit is chosen. Where no rate is confirmed, one
    that may be confirmed later is among them."""
    rates: list[float] = []
    for capacity in filter(None, capacities):
        estimated = capacity.estimated_rate or 0.0
        rates += [capacity.confirmed_rate or CONFIRMABLE_SHARE * estimated, estimated]
    return rates


def capacity_in_words(capacity: Capacity | None, unit_rate: float | None = None) -> str:
    """Return the confirmed rate and the estimated capacity, in one unit. None: not measured."""
    if capacity is None or capacity.state == "misses_slo_unloaded":
        return state_words(capacity)
    unit_rate = unit_rate or common_rate([capacity])
    kind = "estimated capacity" if capacity.method == "step_times" else "capacity"
    return f"{state_words(capacity, unit_rate)}, {kind} {estimate_words(capacity, unit_rate)}"


def state_words(capacity: Capacity | None, unit_rate: float | None = None) -> str:
    """Return `confirmed 2.1/s`, `no rate confirmed` or `misses the SLO unloaded`."""
    if capacity is None:
        return formatting.NOT_MEASURED
    if capacity.state == "confirmed":
        rate = formatting.rate(capacity.confirmed_rate, rounded="down", like=unit_rate)
        return f"confirmed {rate}"
    if capacity.state == "misses_slo_unloaded":
        return "misses the SLO unloaded" + (" (on one start)" if capacity.starts < 2 else "")
    return "no rate confirmed"


def estimate_words(capacity: Capacity | None, unit_rate: float | None = None) -> str:
    """Return the estimated capacity with its 90 % interval: `2.4/s (2.0–2.9)`.

    From load levels alone it is `2.0–2.9/s`, or `not known`. It is `none` if single requests miss
    the SLO by the step-time model, and `–` if the SLO is missed unloaded.
    """
    if capacity is None or capacity.state == "misses_slo_unloaded":
        return "–"
    low, high = capacity.low, capacity.high
    unit_rate = unit_rate or capacity.confirmed_rate
    if capacity.method == "step_times":
        if capacity.estimated_rate is None:
            return NO_CAPACITY
        return formatting.rate_with_interval(capacity.estimated_rate, low, high, unit_rate)
    if low is None and high is None:
        return "not known"
    return formatting.rate_interval(low, high, unit_rate)


def evidence_words(capacity: Capacity) -> str:
    """Return the evidence for the confirmed rate: `90 s, 214 requests, 98 % attainment, 2 starts`,
    or why no rate is confirmed."""
    if not capacity.is_confirmed:
        return capacity.reason
    seconds = formatting.seconds(capacity.confirmed_seconds)
    requests = formatting.count(capacity.confirmed_requests)
    attainment = formatting.share(capacity.confirmed_attainment)
    starts = f", {capacity.starts} starts" if capacity.starts > 1 else ""
    return f"{seconds}, {requests} requests, {attainment} attainment{starts}"


def speed_words(capacity: Capacity) -> str:
    """Return how much the machine's speed changed during the run; "": no change was seen."""
    if not capacity.speed_moved:
        return ""
    return f"this machine's speed changed by {capacity.speed_moved:.0%} during the measurement"


def disturbance_words(capacity: Capacity, unit_rate: float | None = None) -> str:
    """Return of which machine the estimate is, and what it would be of the other, as a sentence;
    "": other processes did not disturb the measurement."""
    if not capacity.taken_share:
        return ""
    share = f"{capacity.taken_share:.0%}"
    if capacity.method == "levels" and (capacity.low or capacity.high):
        return (
            f"The capacity is of this machine as busy as it was: other processes took {share} of "
            "the CPU time that the engine needed."
        )
    if not capacity.estimated_rate or capacity.busy_rate is None:
        return f"Other processes took {share} of the CPU time that the engine needed."
    unit_rate = unit_rate or common_rate([capacity])
    alone = formatting.rate(capacity.estimated_rate, like=unit_rate)
    if capacity.busy_rate == capacity.estimated_rate:
        return (
            f"The estimate of {alone} is of this machine as busy as it was: other processes took "
            f"{share} of the CPU time that the engine needed."
        )
    if not capacity.busy_rate:
        busy = "it meets the SLO at no rate"
    else:
        busy = f"its capacity is about {formatting.rate(capacity.busy_rate, like=unit_rate)}"
    return (
        f"The estimate of {alone} is of this machine alone. As busy as it was (other processes "
        f"took {share} of the CPU time that the engine needed), {busy}."
    )


def contradiction_words(capacity: Capacity, unit_rate: float | None = None) -> str:
    """Return that a level contradicted the estimate from step times, as a sentence; "": none
    did."""
    if not capacity.contradicted_rate:
        return ""
    unit_rate = unit_rate or common_rate([capacity])
    before = formatting.rate(capacity.contradicted_rate, like=unit_rate)
    met = formatting.rate(capacity.confirmed_rate, like=unit_rate, rounded="down")
    return (
        f"Step times alone gave an estimate of {before}, but a level at {met} met the SLO, so the "
        "estimate was raised."
    )


def check_words(capacity: Capacity) -> str:
    """Return what single requests showed of which the step-time model says that they miss the SLO,
    as a sentence; "": none was sent, or the model was right (then `reason` says it)."""
    if not capacity.checked or not capacity.estimated_rate:
        return ""
    return (
        f"By the step times even single requests would miss the SLO, but {capacity.checked}, so "
        "the estimate is from their times."
    )


def none_words(capacity: Capacity) -> str:
    """Return why there is no capacity, and with which SLO or lengths there would be one, as
    sentences; "": there is one."""
    if not capacity.is_none:
        return ""
    reason = capacity.reason
    sentence = f"{reason.rstrip('.')}." if reason else ""
    return " ".join(filter(None, (sentence, capacity.advice)))


def reuse_words(capacity: Capacity, unit_rate: float | None = None, name: str = "") -> str:
    """Return what prefix reuse is worth, as a sentence: "Prefix caching raises the capacity from 21
    a minute to 38 a minute."; "": not known. `name`: the configuration's, to be mentioned."""
    if capacity.estimated_rate_without_reuse is None or not capacity.estimated_rate:
        return ""
    unit_rate = unit_rate or common_rate([capacity])
    with_reuse = formatting.rate(capacity.estimated_rate, like=unit_rate)
    if not capacity.estimated_rate_without_reuse:
        if not name:
            return "Without prefix caching even one conversation at a time misses the SLO."
        return (
            f"Without prefix caching {name} misses the SLO even with one conversation at a time; "
            f"with it the capacity is {formatting.of_requests(with_reuse)}."
        )
    without_reuse = formatting.rate(capacity.estimated_rate_without_reuse, like=unit_rate)
    subject = f"capacity of {name}" if name else "capacity"
    if without_reuse == with_reuse:
        value = f"({with_reuse})" if name else f"of {with_reuse}"
        return f"Prefix caching does not change the {subject} {value}."
    if name:
        _, unit = formatting.rate_unit(unit_rate)
        without_reuse = without_reuse.removesuffix(unit)
        with_reuse = formatting.of_requests(with_reuse)
    return f"Prefix caching raises the {subject} from {without_reuse} to {with_reuse}."


def users_words(capacity: Capacity) -> str:
    """Return `about 34 users at a time`: the concurrent conversations at the estimated capacity,
    whose users read and think most of the time; "": the workload has no conversations.

    With a prompt cache: `about 34 users at a time (1.2 with no prefix caching, 12 with the slots
    alone)`.
    """
    if capacity.users is None:
        return ""
    users = formatting.significant(capacity.users, 2)
    text = f"about {users} {'user' if users == '1' else 'users'} at a time"
    if capacity.users_without_prompt_cache is None:
        return text
    slots = formatting.significant(capacity.users_without_prompt_cache, 2)
    parts = [f"{slots} without the prompt cache"]
    if capacity.users_without_reuse is not None:
        without_reuse = formatting.significant(capacity.users_without_reuse, 2)
        parts.insert(0, f"{without_reuse} with no prefix caching")
    return f"{text} ({', '.join(parts)})"
