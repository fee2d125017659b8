"""A capacity in words: the only place that words one, for terminal, report and plan alike.

    >>> from loadtests.records.journal_events import Capacity
    >>> found = Capacity(state="holds", held=2.1, limit=2.42, low=2.04, high=2.87, method="law")
    >>> in_words(found)
    'holds 2.1/s, limit about 2.4/s (2.0–2.9)'

"Holds" is said of `held` alone: a rate that ran, long enough, and met the SLO.
"""

from __future__ import annotations

from collections.abc import Iterable

from loadtests.records.journal_events import Capacity
from models import formatting

NEAR = 0.7  # of a limit: what may be confirmed later is read in the same unit


def common_rate(found: Iterable[Capacity | None]) -> float | None:
    """The rate in whose unit (`like`) all of these are read, so that they can be compared: per
    second where none is below 1/s, else a minute, or an hour where none reaches ten a minute."""
    both = [(one.held or NEAR * (one.limit or 0.0), one.limit) for one in found if one]
    known = [rate for rates in both for rate in rates if rate]
    if not known or min(known) >= 0.9995:
        return max(known, default=None)
    return min(max(known), 0.5)


def in_words(found: Capacity | None, like: float | None = None) -> str:
    """The state and the limit, in one unit; None: not measured."""
    if found is None or found.state == "not_even_alone":
        return state_words(found)
    like = like or common_rate([found])
    about = "about " if found.method == "law" and found.limit else ""
    return f"{state_words(found, like)}, limit {about}{limit(found, like)}"


def state_words(found: Capacity | None, like: float | None = None) -> str:
    """`holds 2.1/s`, `no rate confirmed`, `not even alone`."""
    if found is None:
        return formatting.NOT_MEASURED
    if found.state == "holds":
        return f"holds {formatting.rate(found.held, rounded='down', like=like)}"
    is_once = found.state == "not_even_alone" and found.starts < 2
    return found.state.replace("_", " ") + (" (on one start)" if is_once else "")


def limit(found: Capacity | None, like: float | None = None) -> str:
    """`2.4/s (2.0–2.9)`; by levels alone `2.0–2.9/s`; `none` where not even requests one at a time
    are good by the law; `not known`; `–`: there is none to tell of."""
    if found is None or found.state == "not_even_alone":
        return "–"
    low, high, like = found.low, found.high, like or found.held
    if found.method == "law":
        known = found.limit is not None
        return formatting.rate_with_interval(found.limit, low, high, like) if known else "none"
    return (
        "not known" if low is None and high is None else formatting.rate_interval(low, high, like)
    )


def held_words(found: Capacity) -> str:
    """What the confirmed rate rests on: `90 s, 214 requests, 98 % good, 2 starts`."""
    if not found.holds:
        return found.reason
    asked, good = formatting.count(found.held_requests), formatting.share(found.held_share)
    starts = f", {found.starts} starts" if found.starts > 1 else ""
    return f"{formatting.seconds(found.held_seconds)}, {asked} requests, {good} good{starts}"


def speed_words(found: Capacity) -> str:
    """ "" for a machine whose speed was not seen to change."""
    moved = found.speed_moved
    return f"this machine's speed moved by {moved:.0%} while it was measured" if moved else ""
