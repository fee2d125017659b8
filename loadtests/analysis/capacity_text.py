"""A capacity in words: the only place that words one, for terminal, report and plan alike.

    >>> from loadtests.records.run_journal import Capacity
    >>> found = Capacity(state="holds", held=2.1, limit=2.42, low=2.04, high=2.87, method="law")
    >>> in_words(found)
    'holds 2.1/s, limit about 2.4/s (2.0–2.9)'

"Holds" is said of `held` alone: a rate that ran, long enough, and met the SLO.
"""

from __future__ import annotations

from loadtests.records.run_journal import Capacity
from models import formatting


def in_words(found: Capacity | None) -> str:
    """The state and the limit; None: not measured."""
    if found is None or found.state == "not_even_alone":
        return state_words(found)
    return f"{state_words(found)}, {limit_words(found)}"


def state_words(found: Capacity | None) -> str:
    """`holds 2.1/s`, `no rate confirmed`, `not even alone`."""
    if found is None:
        return formatting.NOT_MEASURED
    if found.state == "holds":
        return f"holds {formatting.rate(found.held, rounded='down')}"
    is_once = found.state == "not_even_alone" and found.starts < 2
    return found.state.replace("_", " ") + (" (on one start)" if is_once else "")


def limit_words(found: Capacity) -> str:
    """`limit about 2.4/s (2.0–2.9)`; by levels alone `limit between 2.0 and 2.9/s`."""
    low, high = found.low, found.high
    if found.state == "not_even_alone":
        return "no limit"
    if found.method == "law" and found.limit is not None:
        said = formatting.rate_with_interval(found.limit, low, high, found.held)
        return f"limit about {said}"
    if low is None and high is None:
        return "limit not known"
    ends = formatting.rate_interval(low, high)
    return "limit " + (f"between {ends.replace('–', ' and ')}" if low and high else ends)


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
