"""What was taken from the engine during a level, and by whom. Pure: readings in, Disturbance out.

    found = disturbance_of(parts)             # CoresSample, as loadtests.host reads them
    found.share, found.is_disturbed, in_words(found)

The kernel says how long a thread was ready and had no core, not who ran meanwhile. So the delay is
shared out by the CPU time that strangers (S) and our other processes (O) had on these cores:

    by_strangers = min(stalled x S / (S + O), S)
    steal        = the core's steal x E / (E + S + O)     E the engine: only who runs is stolen from
    share        = taken / (work + taken)                 taken = by_strangers + steal + throttled

The rest of the delay is the engine behind itself or behind our API and load generator, which go
before it where they share its cores: a matter of the layout, not of the machine. `stalled` is the
delay of one thread in each reading, the one that waited longest, and `work` the CPU time of the
busiest: engines compute in step, so one late thread delays all. S is the cores' busy time less that
of all our processes, so it includes processes that lived too briefly to be seen or that a container
hides.

What is taken only ever makes answers later. So a level of which little was taken (is_slight), and
that meets an SLO all the same, counts for that SLO: on a quiet machine it is no worse.

Steal that is the same all the time is no disturbance: it is the machine that there is. It can only
be told under load, as nothing is stolen from an idle core.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from loadtests.records.resource_sample import CoresSample, Stranger
from loadtests.records.run_journal import Disturbance
from models import formatting

MOST_TAKEN_SHARE = 0.03  # more, and a level is disturbed
# More, and it counts for nothing: its rate may be so far below the capacity that the upper end of
# an interval is too low.
MOST_SLIGHT_SHARE = 0.1
LEAST_TAKEN_SHARE = 0.002  # of the level's time: less delays no request by what anyone can see
LEAST_TAKEN_SECONDS = 0.0002  # a turn: waking a thread on an idle virtual core costs 20 to 100 us
QUIET_CORES = 0.1  # CPU of strangers on the engine's cores, below which it is worth a try
MOST_STRANGERS = 3  # that are named
STEADY_PARTS = 6  # of equal CPU time, that a level is cut into
STEADY_SECONDS = 0.5  # of CPU time in each: the kernel counts by 0.01 s
STEADY_BAND = 0.02  # around the mean, that the share of each part is in ...
STEADY_WITHIN = 1 / 3  # ... or so much of the mean


def disturbance_of(parts: Sequence[CoresSample], *, counts: bool = False) -> Disturbance | None:
    """The readings of an engine's cores during one level in one; None without any.

    `counts`: the campaign takes the machine as it is.
    """
    if not parts:
        return None
    total = _total(parts)
    busy, strangers = total.busy_seconds, total.strangers_seconds
    others = (strangers or 0.0) + (total.ours_seconds or 0.0)
    by_strangers = steal = share = steady = None
    if total.stalled_seconds is not None and strangers is not None:
        by_strangers = min(total.stalled_seconds * strangers / others, strangers) if others else 0.0
    if total.steal_seconds is not None and busy is not None:
        steal = total.steal_seconds * busy / (busy + others) if busy + others else 0.0
    taken = _sum((by_strangers, steal, total.throttled_seconds))
    if taken is not None and total.work_seconds is not None:
        share = taken / (total.work_seconds + taken) if taken else 0.0
    if steal and is_steady_steal(parts):
        steady = steal / ((total.work_seconds or 0.0) + steal)
    found = Disturbance(
        total=total,
        by_strangers_seconds=_rounded(by_strangers),
        steal_seconds=_rounded(steal),
        taken_seconds=_rounded(taken),
        share=_rounded(share),
        steady_steal_share=_rounded(steady),
        counts=counts,
    )
    return msgspec.structs.replace(found, is_disturbed=_is_too_much(found, MOST_TAKEN_SHARE))


def is_slight(found: Disturbance) -> bool:
    """Whether a disturbed level counts where it meets the SLO all the same."""
    return not _is_too_much(found, MOST_SLIGHT_SHARE)


def is_lost(parts: Sequence[CoresSample], left_seconds: float, may_hold: bool) -> bool:
    """Whether a running level will count for nothing even if all that is left of it is quiet.

    `may_hold`: it meets an SLO so far. Steal that may turn out to be steady has no say before
    that can be told.
    """
    found = disturbance_of(parts)
    if found is not None and (found.total.work_seconds or 0.0) < STEADY_PARTS * STEADY_SECONDS:
        parts = [msgspec.structs.replace(part, steal_seconds=0.0) for part in parts]
        found = disturbance_of(parts)
    most = MOST_SLIGHT_SHARE if may_hold else MOST_TAKEN_SHARE
    return found is not None and _is_too_much(found, most, left_seconds)


def is_quiet(part: CoresSample) -> bool:
    """Whether others left the cores alone in a reading of about a second."""
    return (part.strangers_seconds or 0.0) <= QUIET_CORES * part.seconds


def is_steady_steal(parts: Sequence[CoresSample]) -> bool:
    """Whether the host takes the same share, steal / (work + steal), at all times.

    In STEADY_PARTS parts of equal CPU time; False also where it is no more than MOST_TAKEN_SHARE
    and where there is too little work to tell.
    """
    looks = [(part.steal_seconds or 0.0, part.work_seconds or 0.0) for part in parts]
    wanted = np.cumsum([0.0, *(steal + work for steal, work in looks)])
    stolen = np.cumsum([0.0, *(steal for steal, _ in looks)])
    if wanted[-1] < STEADY_PARTS * STEADY_SECONDS:
        return False
    edges = np.interp(np.linspace(0.0, wanted[-1], STEADY_PARTS + 1), wanted, stolen)
    shares = np.diff(edges) / (wanted[-1] / STEADY_PARTS)
    mean = float(shares.mean())
    band = max(STEADY_BAND, STEADY_WITHIN * mean)
    return bool(mean > MOST_TAKEN_SHARE and np.ptp(shares) <= 2 * band)


def in_words(found: Disturbance) -> str:
    """What makes a level disturbed: "`name` (pid 123, 0.9 cores) took 34 % of ..."."""
    share = (found.share or 0.0) - (found.steady_steal_share or 0.0)
    return f"{_who(found)} took {share:.0%} of the CPU time that the engine wanted"


def _who(found: Disturbance) -> str:
    """Who took most of it."""
    strangers, quota = found.by_strangers_seconds or 0.0, found.total.throttled_seconds or 0.0
    steal = found.steal_seconds or 0.0
    if found.steady_steal_share is not None:  # of the machine, not a disturbance
        steal = 0.0
    seconds = max(found.total.seconds, 1e-9)
    if steal > max(quota, strangers):
        return f"the hypervisor ({steal / seconds:.2f} cores)"
    if quota > strangers:
        return f"the CPU quota ({quota / seconds:.0%} of the time)"
    return who_of(found.total)


def who_of(part: CoresSample) -> str:
    """The busiest stranger, if it had most of what all strangers had, else all of them."""
    seconds = max(part.seconds, 1e-9)
    cores = (part.strangers_seconds or 0.0) / seconds
    if not part.strangers:
        return f"processes that cannot be seen ({_cores(cores)})"
    first = part.strangers[0]
    own = first.cpu_seconds / seconds
    words = f"`{first.name}` (pid {first.pid}, {_cores(own)})"
    return words if own > 0.7 * cores else f"{words} and others ({_cores(cores)} in all)"


def busiest(strangers: Iterable[Stranger]) -> list[Stranger]:
    """One entry for each process, the busiest first, no more than MOST_STRANGERS."""
    found: dict[int, Stranger] = {}
    for one in strangers:
        before = found[one.pid].cpu_seconds if one.pid in found else 0.0
        found[one.pid] = Stranger(one.name, one.pid, round(before + one.cpu_seconds, 4))
    return sorted(found.values(), key=lambda one: -one.cpu_seconds)[:MOST_STRANGERS]


def _is_too_much(found: Disturbance, most_share: float, quiet_seconds: float = 0.0) -> bool:
    """Also if the engine computes undisturbed for `quiet_seconds`."""
    work, taken = found.total.work_seconds, found.taken_seconds
    if taken is None or work is None:
        return False
    if found.steady_steal_share is not None:
        taken -= found.steal_seconds or 0.0
    return taken > max(
        most_share * (work + taken + quiet_seconds),
        LEAST_TAKEN_SHARE * (found.total.seconds + quiet_seconds),
        LEAST_TAKEN_SECONDS * (found.total.turns or 0),
    )


SUMS = (
    *("busy_seconds", "work_seconds", "stalled_seconds", "turns", "ours_seconds"),
    *("strangers_seconds", "steal_seconds", "throttled_seconds"),
)


def _total(parts: Sequence[CoresSample]) -> CoresSample:
    """The sums of what was read."""
    sums: dict[str, Any] = {name: _sum(getattr(part, name) for part in parts) for name in SUMS}
    if sums["turns"] is not None:
        sums["turns"] = round(sums["turns"])
    if sums["strangers_seconds"] is not None:
        sums["strangers_seconds"] = max(0.0, sums["strangers_seconds"])
    return CoresSample(
        seconds=round(sum(part.seconds for part in parts), 3),
        strangers=busiest(stranger for part in parts for stranger in part.strangers),
        **sums,
    )


def _cores(cores: float) -> str:
    """ "1.4 cores"; "0.02 cores"."""
    return f"{formatting.significant(cores, 1) if 0 < cores < 0.1 else f'{cores:.1f}'} cores"


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), 6) if known else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
