"""A capacity in words: the only place that words one, for terminal, report and journal alike.

    >>> from loadtests.records.events import Capacity, CapacityStatus, Confirmation
    >>> level = Confirmation(levels=1, seconds=90.0, requests=214)
    >>> found = Capacity(status=CapacityStatus.CONFIRMED, held=2.4, low=2.3, estimate=2.7, high=3.1,
    ...     reason="", confirmed_by=level)
    >>> in_words(found)
    'holds up to 2.4 requests/s (confirmed: a level of 90 s, 214 requests; capacity 2.3–3.1/s by \
the levels)'

"Holds up to" is said of `held` alone: a rate that ran, long enough, and met the SLO.
"""

from __future__ import annotations

from loadtests.records.events import Capacity, CapacityStatus, Confirmation
from models import formatting

AT_NO_RATE = "at no rate"
ALONE_ONLY = "alone only"
UNRESOLVED = "unresolved"


def in_words(found: Capacity | None) -> str:
    """The capacity with what it rests on; None: not measured."""
    if found is None:
        return formatting.NOT_MEASURED
    parts = [part for part in (_ground(found), _by_levels(found), left_out_words(found)) if part]
    match found.status:
        case CapacityStatus.CONFIRMED | CapacityStatus.AT_LEAST:
            return f"{in_short(found)} ({'; '.join(parts)})"
        case CapacityStatus.NONE:
            return f"{in_short(found)}: {found.reason}"
    return f"{in_short(found)}: {'; '.join(parts)}"


def in_short(found: Capacity | None) -> str:
    """The state, with the confirmed rate where there is one."""
    if found is None:
        return formatting.NOT_MEASURED
    held = formatting.requests(found.held, rounded="down")
    match found.status:
        case CapacityStatus.CONFIRMED:
            return f"holds up to {held}"
        case CapacityStatus.AT_LEAST:
            return f"holds up to at least {held}"
        case CapacityStatus.ALONE_ONLY:
            return ALONE_ONLY
        case CapacityStatus.NONE:
            return AT_NO_RATE
    return UNRESOLVED


def confirmed_words(by: Confirmation | None) -> str:
    """`confirmed: a level of 90 s, 214 requests`."""
    if by is None:
        return "confirmed"
    levels = "a level" if by.levels == 1 else f"{by.levels} levels"
    return (
        f"confirmed: {levels} of {formatting.seconds(by.seconds)}, "
        f"{formatting.count(by.requests)} requests"
    )


def left_out_words(found: Capacity) -> str:
    """What an SLO that nobody searched for was not judged by; "" for any other."""
    if not found.left_out:
        return ""
    levels = "1 level is" if found.left_out == 1 else f"{found.left_out} levels are"
    return f"{levels} not counted, cut short under another SLO"


def _ground(found: Capacity) -> str:
    match found.status:
        case CapacityStatus.CONFIRMED:
            return confirmed_words(found.confirmed_by)
        case CapacityStatus.AT_LEAST:
            return f"{confirmed_words(found.confirmed_by)}; no rate was seen to break the SLO"
    return found.reason


def _by_levels(found: Capacity) -> str:
    """The interval; "" where no level bounds the capacity."""
    if found.low is None and found.high is None:
        return ""
    starts = ""
    if found.starts is not None:
        starts = f" of {found.starts} start{'s' if found.starts > 1 else ''}"
    interval = formatting.rate_interval(found.low, found.high, found.held)
    return f"capacity {interval} by the levels{starts}"
