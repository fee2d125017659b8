"""What was taken from the engine during a level, and by whom. Pure: readings in, Disturbance out.

    found = disturbance_of(parts, "engine")   # CoresSample of loadtests.host.core_watch
    found.share, found.is_disturbed, in_words(found)

The kernel says how long a thread was ready and had no core, not who ran meanwhile. So the delay is
shared out by the CPU time that strangers (S) and our other processes (O) had on these cores:

    by_strangers = min(stalled x S / (S + O), S)
    steal        = the core's steal x E / (E + S + O)     E the engine: only who runs is stolen from
    share        = taken / (work + taken)                 taken = by_strangers + steal + throttled

The rest of the delay (`queued_seconds`) is the engine behind itself or behind our API and load
generator, which go before it where they share its cores: a matter of the layout, not of the
machine. `stalled` is the delay of one thread in each
reading, the one that waited longest, and `work` the CPU time of the busiest: engines compute in
step, so one late thread delays all. S is the cores' busy time less that of all our processes, so
it includes processes that lived too briefly to be seen or that a container hides.

What is taken only ever makes answers later. So a level of which little was taken (is_slight), and
that meets an SLO all the same, counts for that SLO: on a quiet machine it is no worse. Where the
machine is not quiet for as long as a campaign waits, all levels of which little was taken count.

Steal that is the same all the time is no disturbance: it is the machine that there is. It can only
be told under load, as nothing is stolen from an idle core.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from loadtests.records.schema import CoresSample, Disturbance, Probe, Stranger
from models import formatting

MOST_TAKEN_SHARE = 0.03  # more, and a level is disturbed
# More, and it counts for nothing: its rate may be so far below the capacity that the upper end of
# an interval is too low.
MOST_SLIGHT_SHARE = 0.1
LEAST_TAKEN_SHARE = 0.002  # of the level's time: less delays no request by what anyone can see
LEAST_TAKEN_SECONDS = (
    0.0002  # a turn: waking a thread, and an idle virtual core, costs 20 to 100 us
)
MOST_PROBE_RATIO = 1.15  # of a probe over its median: what is slower is slowed by something
QUIET_CORES = 0.1  # CPU of strangers on the engine's cores, below which it is worth a try
PROBE_SHARE = 0.03  # of the shortest level, that a probe may take
PROBE_REQUESTS = 3
LEAST_PROBES = 3  # before a median is one
MOST_STRANGERS = 3  # that are named
STEADY_PARTS = 6  # of equal CPU time, that a level is cut into
STEADY_SECONDS = 0.5  # of CPU time in each: the kernel counts by 0.01 s
STEADY_BAND = 0.02  # around the mean, that the share of each part is in
STEADY_WITHIN = 1 / 3  # or so much of the mean

Subject = Literal["engine", "load generator"]


def disturbance_of(
    parts: Sequence[CoresSample],
    subject: Subject,
    *,
    probe: Probe | None = None,
    counts: bool = False,
    counts_slight: bool = False,
) -> Disturbance | None:
    """The readings of one level in one; None without any. Only an engine's level is disturbed.

    `counts`: as in Disturbance. `counts_slight`: that, for a level of which little was taken.
    """
    if not parts and probe is None:
        return None
    found = _totals(parts, subject)
    others = (found.strangers_seconds or 0.0) + (found.ours_seconds or 0.0)
    by_strangers = queued = steal = None
    if found.stalled_seconds is not None and found.strangers_seconds is not None:
        theirs = found.strangers_seconds
        stalled = found.stalled_seconds
        by_strangers = min(stalled * theirs / others, theirs) if others else 0.0
        queued = stalled - by_strangers
    if found.steal_seconds is not None and found.busy_seconds is not None:
        every = found.busy_seconds + others
        steal = found.steal_seconds * found.busy_seconds / every if every else 0.0
    taken = _sum((by_strangers, steal, found.throttled_seconds))
    share = None
    if taken is not None and found.work_seconds is not None:
        share = taken / (found.work_seconds + taken) if taken else 0.0
    steady = None
    if steal and is_steady_steal(parts):
        steady = steal / ((found.work_seconds or 0.0) + steal)
    found = msgspec.structs.replace(
        found,
        by_strangers_seconds=_rounded(by_strangers),
        queued_seconds=_rounded(queued),
        steal_seconds=_rounded(steal),
        taken_seconds=_rounded(taken),
        share=_rounded(share),
        steady_steal_share=_rounded(steady),
        probe=probe,
    )
    is_disturbed = subject == "engine" and (is_too_much(found) or is_slow(probe))
    counts = counts or (counts_slight and is_disturbed and is_slight(found))
    return msgspec.structs.replace(found, is_disturbed=is_disturbed, counts=counts)


def _totals(parts: Sequence[CoresSample], subject: Subject) -> Disturbance:
    """The sums of what was read, and the mean clock."""
    strangers = _sum(part.strangers_seconds for part in parts)
    turns = _sum(part.turns for part in parts)
    clocks = [part.clock_hertz for part in parts if part.clock_hertz is not None]
    return Disturbance(
        subject=subject,
        seconds=round(sum(part.seconds for part in parts), 3),
        busy_seconds=_sum(part.busy_seconds for part in parts),
        work_seconds=_sum(part.work_seconds for part in parts),
        waited_seconds=_sum(part.waited_seconds for part in parts),
        stalled_seconds=_sum(part.stalled_seconds for part in parts),
        turns=None if turns is None else round(turns),
        ours_seconds=_sum(part.ours_seconds for part in parts),
        strangers_seconds=None if strangers is None else max(0.0, strangers),
        steal_seconds=_sum(part.steal_seconds for part in parts),
        throttled_seconds=_sum(part.throttled_seconds for part in parts),
        clock_hertz=round(sum(clocks) / len(clocks)) if clocks else None,
        strangers=busiest(stranger for part in parts for stranger in part.strangers),
    )


def is_too_much(
    found: Disturbance, quiet_seconds: float = 0.0, most_share: float | None = None
) -> bool:
    """Whether more than `most_share` was taken (default: MOST_TAKEN_SHARE), also if the engine
    computes undisturbed for `quiet_seconds`."""
    most_share = MOST_TAKEN_SHARE if most_share is None else most_share
    if found.taken_seconds is None or found.work_seconds is None:
        return False
    taken = found.taken_seconds
    if found.steady_steal_share is not None:
        taken -= found.steal_seconds or 0.0
    return taken > max(
        most_share * (found.work_seconds + taken + quiet_seconds),
        LEAST_TAKEN_SHARE * (found.seconds + quiet_seconds),
        LEAST_TAKEN_SECONDS * (found.turns or 0),
    )


def is_slight(found: Disturbance) -> bool:
    """Whether a disturbed level counts where it meets the SLO all the same."""
    return not is_too_much(found, most_share=MOST_SLIGHT_SHARE) and not is_slow(found.probe)


def is_lost(parts: Sequence[CoresSample], left_seconds: float, may_hold: bool) -> bool:
    """Whether a running level will count for nothing even if all that is left of it is quiet.

    `may_hold`: it meets an SLO so far. Steal that may turn out to be steady has no say before
    that can be told.
    """
    found = disturbance_of(parts, "engine")
    if found is not None and (found.work_seconds or 0.0) < STEADY_PARTS * STEADY_SECONDS:
        parts = [msgspec.structs.replace(part, steal_seconds=0.0) for part in parts]
        found = disturbance_of(parts, "engine")
    most = MOST_SLIGHT_SHARE if may_hold else MOST_TAKEN_SHARE
    return found is not None and is_too_much(found, left_seconds, most)


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


def steadily_in_words(share: float) -> str:
    """What a steady steal means for the capacity."""
    return (
        f"the host takes {share:.0%} of this machine's time steadily; "
        "the capacity is of this machine with that"
    )


class Probes:
    """The probes of one cell. `ask` sends a short request and says how long it took; None: failed.

    A probe is the fastest of up to PROBE_REQUESTS, and they take at most PROBE_SHARE of a level:
    what slows all of them lasts. On two busy virtual cores a quiet engine's fastest of three was
    within 5 % of its median nine times in ten and never above 1.153 (37 probes of 8 tokens, 135M).
    """

    def __init__(self, ask: Callable[[], float | None]) -> None:
        self._ask = ask
        self._seconds: list[float] = []
        self._too_slow = 0  # how often one request took longer than a probe may, in a row

    def take(self, level_seconds: float) -> Probe | None:
        """One before a level that is no shorter than this; None where requests take too long."""
        if self._too_slow >= LEAST_PROBES:
            return None
        while True:
            usual = statistics.median(self._seconds) if self._seconds else None
            is_known = len(self._seconds) >= LEAST_PROBES
            seconds = self._fastest(PROBE_SHARE * level_seconds)
            if seconds is None:
                return None
            self._seconds.append(seconds)
            if is_known:
                return Probe(round(seconds, 6), usual)

    def _fastest(self, limit_seconds: float) -> float | None:
        best = math.inf
        spent = 0.0
        for _ in range(PROBE_REQUESTS):
            seconds = self._ask()
            if seconds is None:
                return None
            best = min(best, seconds)
            spent += seconds
            if spent + seconds > limit_seconds:
                break
        is_too_slow = best > limit_seconds and len(self._seconds) < LEAST_PROBES
        self._too_slow = self._too_slow + 1 if is_too_slow else 0
        return None if is_too_slow else best


def is_slow(probe: Probe | None) -> bool:
    """Slower than usual by more than chance."""
    if probe is None or probe.usual_seconds is None:
        return False
    return probe.seconds > MOST_PROBE_RATIO * probe.usual_seconds


def is_quiet(part: CoresSample) -> bool:
    """Whether others left the cores alone in a reading of about a second."""
    return (part.strangers_seconds or 0.0) <= QUIET_CORES * part.seconds


def in_words(found: Disturbance) -> str:
    """What makes a level disturbed: "`name` (pid 123, 0.9 cores) took 34 % of ..."."""
    if not is_too_much(found) and found.probe is not None and is_slow(found.probe):
        return slow_in_words(found.probe)
    share = (found.share or 0.0) - (found.steady_steal_share or 0.0)
    return f"{who(found)} took {share:.0%} of the CPU time that the engine wanted"


def slow_in_words(probe: Probe) -> str:
    usual = probe.usual_seconds or probe.seconds
    return (
        f"a short request took {probe.seconds / usual:.2f} times its median "
        f"({formatting.seconds(usual, 3)})"
    )


def who(found: Disturbance) -> str:
    """Who took most of the CPU time, for people: "`name` (pid 123, 0.9 cores)"."""
    steal, quota = found.steal_seconds or 0.0, found.throttled_seconds or 0.0
    if found.steady_steal_share is not None:  # of the machine, not a disturbance
        steal = 0.0
    seconds = max(found.seconds, 1e-9)
    if steal > max(quota, found.by_strangers_seconds or 0.0):
        return f"the hypervisor ({steal / seconds:.2f} cores)"
    if quota > (found.by_strangers_seconds or 0.0):
        return f"the CPU quota ({quota / seconds:.0%} of the time)"
    return who_of(found.strangers, found.strangers_seconds or 0.0, seconds)


def busiest(strangers: Iterable[Stranger]) -> list[Stranger]:
    """One entry for each process, the busiest first, no more than MOST_STRANGERS."""
    found: dict[int, Stranger] = {}
    for one in strangers:
        before = found[one.pid].cpu_seconds if one.pid in found else 0.0
        found[one.pid] = Stranger(one.name, one.pid, round(before + one.cpu_seconds, 4))
    return sorted(found.values(), key=lambda one: -one.cpu_seconds)[:MOST_STRANGERS]


def who_of(strangers: Sequence[Stranger], all_seconds: float, seconds: float) -> str:
    """The busiest stranger, if it had most of what all strangers had in `seconds`, else all."""
    cores = all_seconds / seconds
    if not strangers:
        return f"processes that cannot be seen ({_cores(cores)})"
    first = strangers[0]
    own = first.cpu_seconds / seconds
    words = f"`{first.name}` (pid {first.pid}, {_cores(own)})"
    return words if own > 0.7 * cores else f"{words} and others ({_cores(cores)} in all)"


def _cores(cores: float) -> str:
    """ "1.4 cores"; "0.02 cores"."""
    return f"{formatting.significant(cores, 1) if 0 < cores < 0.1 else f'{cores:.1f}'} cores"


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), 6) if known else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
