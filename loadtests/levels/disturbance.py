"""What was taken from the engine during a level, and by whom. Pure: readings in, Disturbance out.

    found = disturbance_of(parts)             # CoresSample, as crossover.loadtests.host reads them
    found.share, found.is_disturbed, in_words(found)

The kernel says how long a thread was ready and had no core, not who ran meanwhile. So the delay is
shared out by the CPU time that other processes (S) and our own processes (O) had on these cores:

    by_others    = min(stalled x S / (S + O), S)
    steal        = the core's steal x E / (E + S + O)     E the engine: only who runs is stolen from
    share        = taken / (work + taken)                 taken = by_others + steal + throttled

The rest of the delay is the engine behind itself or behind our API and load generator, which go
before it where they share its cores: a matter of the layout, not of the machine. `stalled` is the
delay of one thread in each reading, the one that waited longest, and `work` the CPU time of the
busiest: engines compute in step, so one late thread delays all. S is the cores' busy time less that
of all our processes, so it includes processes that lived too briefly to be seen or that a container
hides.

What is taken only ever makes answers later. So a level of which little was taken (is_slight), and
that meets the SLO all the same, counts: on a quiet machine it is no worse.
"""

from __future__ import annotations

from collections.abc import Sequence

from crossover.loadtests.records.journal_events import Disturbance
from crossover.loadtests.records.resource_sample import CoresSample, busiest

MAX_TAKEN_SHARE = 0.03  # more, and a level is disturbed
# More, and it counts for nothing: its rate may be so far below the capacity that the upper end of
# an interval is too low.
MAX_SLIGHT_SHARE = 0.1
MIN_TAKEN_SHARE = 0.002  # of the level's time: less delays no request by what anyone can see
MIN_TAKEN_SECONDS = 0.0002  # a turn: waking a thread on an idle virtual core costs 20 to 100 us


def disturbance_of(parts: Sequence[CoresSample], *, counts: bool = False) -> Disturbance | None:
    """The readings of an engine's cores during one level in one; None without any.

    `counts`: the campaign takes the machine as it is.
    """
    if not parts:
        return None

    def total(name: str) -> float | None:
        known = [value for part in parts if (value := getattr(part, name)) is not None]
        return sum(known) if known else None

    seconds, busy, work = total("seconds") or 0.0, total("busy_seconds"), total("work_seconds")
    seen, stalled, stolen = map(
        total, ("other_processes_seconds", "stalled_seconds", "steal_seconds")
    )
    other_processes = max(0.0, seen or 0.0)
    others = other_processes + (total("ours_seconds") or 0.0)
    taken: dict[str, float] = {}
    if stalled is not None and seen is not None:
        named = busiest(stranger for part in parts for stranger in part.other_processes)
        who = f"`{named[0].name}` (pid {named[0].pid})" if named else "unidentified processes"
        taken[who] = min(stalled * other_processes / others, other_processes) if others else 0.0
    if stolen is not None and busy is not None:
        taken["the hypervisor"] = stolen * busy / (busy + others) if busy + others else 0.0
    if (quota := total("throttled_seconds")) is not None:
        taken["the CPU quota"] = quota
    if not taken or work is None:
        return Disturbance(counts=counts)
    lost = sum(taken.values())
    share = lost / (work + lost) if lost else 0.0
    lost_share = round(lost / seconds, 4) if seconds else None
    least = max(MIN_TAKEN_SECONDS * (total("turns") or 0), MIN_TAKEN_SHARE * seconds)
    if share <= MAX_TAKEN_SHARE or lost <= least:
        return Disturbance(share=round(share, 4), lost_share=lost_share, counts=counts)
    most = max(taken, key=lambda name: taken[name])
    return Disturbance(
        share=round(share, 4), lost_share=lost_share, who=most, is_disturbed=True, counts=counts
    )


def is_slight(found: Disturbance) -> bool:
    """Whether a disturbed level counts where it meets the SLO all the same."""
    return (found.share or 0.0) <= MAX_SLIGHT_SHARE


def in_words(found: Disturbance) -> str:
    """Return what disturbed a level: "`make` (pid 123) took 34 % of ..."."""
    return f"{found.who} took {found.share or 0.0:.0%} of the CPU time that the engine needed"
