"""The words for a capacity, in the terminal, the report and the plan alike.

    >>> from crossover.loadtests.records.journal_events import Capacity
    >>> found = Capacity(state="confirmed", confirmed_rate=2.1, estimated_rate=2.42,
    ...                  low=2.04, high=2.87, method="step_times")
    >>> in_words(found)
    'confirmed 2.1/s, estimated capacity 2.4/s (2.0–2.9)'

Only a rate that ran long enough and met the SLO is called confirmed (`confirmed_rate`).
"""

from __future__ import annotations

from collections.abc import Iterable

from crossover.loadtests.records.journal_events import Capacity
from crossover.models import formatting

# The share of an estimate that may be confirmed later; the unit is chosen to suit that rate, too.
CONFIRMABLE_SHARE = 0.7


def common_rate(found: Iterable[Capacity | None]) -> float | None:
    """Return the rate whose unit (`like`) all of these are shown in, so that they can be compared:
    per second if none is below 1/s, else per minute, or per hour if none reaches ten a minute."""
    both = [
        (
            capacity.confirmed_rate or CONFIRMABLE_SHARE * (capacity.estimated_rate or 0.0),
            capacity.estimated_rate,
        )
        for capacity in found
        if capacity
    ]
    known = [rate for rates in both for rate in rates if rate]
    if not known or min(known) >= 0.9995:
        return max(known, default=None)
    return min(max(known), 0.5)


def in_words(found: Capacity | None, like: float | None = None) -> str:
    """Return the confirmed rate and the estimated capacity in one unit; None: not measured."""
    if found is None or found.state == "misses_slo_unloaded":
        return state_words(found)
    like = like or common_rate([found])
    kind = "estimated capacity" if found.method == "step_times" else "capacity"
    return f"{state_words(found, like)}, {kind} {limit(found, like)}"


def state_words(found: Capacity | None, like: float | None = None) -> str:
    """Return `confirmed 2.1/s`, `no rate confirmed` or `misses the SLO unloaded`."""
    if found is None:
        return formatting.NOT_MEASURED
    if found.state == "confirmed":
        return f"confirmed {formatting.rate(found.confirmed_rate, rounded='down', like=like)}"
    if found.state == "misses_slo_unloaded":
        return "misses the SLO unloaded" + (" (on one start)" if found.starts < 2 else "")
    return "no rate confirmed"


def limit(found: Capacity | None, like: float | None = None) -> str:
    """Return the capacity with its 90 % interval: `2.4/s (2.0–2.9)`; from load levels alone
    `2.0–2.9/s`; `none` if single requests miss the SLO by the step-time model; `not known`; `–` if
    the SLO is missed unloaded."""
    if found is None or found.state == "misses_slo_unloaded":
        return "–"
    low, high, like = found.low, found.high, like or found.confirmed_rate
    if found.method == "step_times":
        known = found.estimated_rate is not None
        return (
            formatting.rate_with_interval(found.estimated_rate, low, high, like)
            if known
            else "none"
        )
    return (
        "not known" if low is None and high is None else formatting.rate_interval(low, high, like)
    )


def held_words(found: Capacity) -> str:
    """Return the evidence for the confirmed rate: `90 s, 214 requests, 98 % attainment, 2 starts`,
    or why there is none."""
    if not found.is_confirmed:
        return found.reason
    seconds = formatting.seconds(found.confirmed_seconds)
    requests = formatting.count(found.confirmed_requests)
    attainment = formatting.share(found.confirmed_attainment)
    starts = f", {found.starts} starts" if found.starts > 1 else ""
    return f"{seconds}, {requests} requests, {attainment} attainment{starts}"


def speed_words(found: Capacity) -> str:
    """Return how much the machine's speed changed during the run; "": no change was seen."""
    moved = found.speed_moved
    return f"this machine's speed changed by {moved:.0%} during the measurement" if moved else ""


def reuse_words(found: Capacity, like: float | None = None, name: str = "") -> str:
    """Return what reused prefixes are worth: "Prefix caching raises the capacity from 21 a minute
    to 38 a minute."; "" where it is not known. `name`: of the configuration, for the sentence."""
    if found.estimated_rate_without_reuse is None or not found.estimated_rate:
        return ""
    like = like or common_rate([found])
    if not found.estimated_rate_without_reuse:
        if not name:
            return "Without prefix caching even one conversation at a time misses the SLO."
        after = formatting.of_requests(formatting.rate(found.estimated_rate, like=like))
        return (
            f"Without prefix caching {name} misses the SLO even with one conversation at a time; "
            f"with it the capacity is {after}."
        )
    before, after = (
        formatting.rate(rate, like=like)
        for rate in (found.estimated_rate_without_reuse, found.estimated_rate)
    )
    capacity = f"capacity of {name}" if name else "capacity"
    if before == after:
        same = f"({after})" if name else f"of {after}"
        return f"Prefix caching does not change the {capacity} {same}."
    if name:
        _, unit = formatting.rate_unit(like)
        before, after = before.removesuffix(unit), formatting.of_requests(after)
    return f"Prefix caching raises the {capacity} from {before} to {after}."


def users_words(found: Capacity) -> str:
    """`about 34 users at a time`: conversations under way at the estimated capacity, whose users
    read and think for most of the time; "" where the requests are no conversations."""
    if found.users is None:
        return ""
    users = formatting.significant(found.users, 2)
    return f"about {users} {'user' if users == '1' else 'users'} at a time"
