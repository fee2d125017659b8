"""How much CPU time was taken from the engine during a level, and by whom.

    disturbance = disturbance_of(samples)     # CoresSample, as crossover.loadtests.host reads them
    disturbance.share, disturbance.is_disturbed, disturbance_in_words(disturbance)

The kernel tells how long a thread was ready and had no core, but not who ran meanwhile. So the
delay is divided in proportion to the CPU time that other processes (S) and Crossover's own
processes (O) had on these cores:

    by_others    = min(stalled x S / (S + O), S)
    steal        = the core's steal x E / (E + S + O)     E: the engine; only running threads lose
    share        = taken / (work + taken)                 taken = by_others + steal + throttled

`stalled` is the delay of the thread that waited longest in each sample, and `work` the CPU time of
the busiest thread: the threads of an engine compute in lockstep, so one late thread delays all. S
is the busy time of the cores less that of all our processes, so it includes processes that lived
too briefly to be seen and those that a container hides. The rest of the delay is caused by the
engine itself, or by our API and load generator if they share its cores. That is due to the layout
of the cores, not to the machine, and does not count.

CPU contention can only make answers later. So a disturbed level that meets the SLO counts: on a
quiet machine it would meet it too. Its steps took 1 / (1 - share) times as long as they would have
there, and their times are shortened by that.
"""

from __future__ import annotations

from collections.abc import Sequence

from crossover.loadtests.records.journal_events import Disturbance
from crossover.loadtests.records.resource_sample import CoresSample, busiest

HYPERVISOR, CPU_QUOTA = "the hypervisor", "the CPU quota"  # who took CPU time, beside processes
MAX_TAKEN_SHARE = 0.03  # if more is taken, the level is disturbed
MAX_SLIGHT_SHARE = 0.1  # of a burst: if more is taken, it is sent again once
MIN_TAKEN_SHARE = 0.002  # of the level's time: less delays no request noticeably
# Per time slice: waking a thread on an idle virtual core takes 20 to 100 us.
MIN_TAKEN_SECONDS = 0.0002


def disturbance_of(samples: Sequence[CoresSample], *, counts: bool = False) -> Disturbance | None:
    """Return the CPU contention on an engine's cores during one level; None without samples.

    `counts`: the campaign accepts disturbed levels as they are.
    """
    if not samples:
        return None

    def total(name: str) -> float | None:
        known = [value for sample in samples if (value := getattr(sample, name)) is not None]
        return sum(known) if known else None

    level_seconds = total("seconds") or 0.0
    engine_seconds = total("busy_seconds")
    work_seconds = total("work_seconds")
    foreign_seconds = total("other_processes_seconds")
    stalled_seconds = total("stalled_seconds")
    steal_seconds = total("steal_seconds")
    quota_seconds = total("throttled_seconds")
    # Tick counters may take the CPU time of other processes a little below zero.
    foreign_or_zero = max(0.0, foreign_seconds or 0.0)
    competing_seconds = foreign_or_zero + (total("ours_seconds") or 0.0)
    taken_seconds: dict[str, float] = {}  # who -> how much
    if stalled_seconds is not None and foreign_seconds is not None:
        processes = busiest(process for sample in samples for process in sample.other_processes)
        name = "unidentified processes"
        if processes:
            name = f"`{processes[0].name}` (pid {processes[0].pid})"
        taken_seconds[name] = 0.0
        if competing_seconds:
            by_others = stalled_seconds * foreign_or_zero / competing_seconds
            taken_seconds[name] = min(by_others, foreign_or_zero)
    if steal_seconds is not None and engine_seconds is not None:
        running_seconds = engine_seconds + competing_seconds
        taken_seconds[HYPERVISOR] = (
            steal_seconds * engine_seconds / running_seconds if running_seconds else 0.0
        )
    if quota_seconds is not None:
        taken_seconds[CPU_QUOTA] = quota_seconds
    if not taken_seconds or work_seconds is None:
        return Disturbance(counts=counts)
    total_taken = sum(taken_seconds.values())
    share = total_taken / (work_seconds + total_taken) if total_taken else 0.0
    lost_share = round(total_taken / level_seconds, 4) if level_seconds else None
    min_taken = max(MIN_TAKEN_SECONDS * (total("turns") or 0), MIN_TAKEN_SHARE * level_seconds)
    if share <= MAX_TAKEN_SHARE or total_taken <= min_taken:
        return Disturbance(share=round(share, 4), lost_share=lost_share, counts=counts)
    return Disturbance(
        share=round(share, 4),
        lost_share=lost_share,
        who=max(taken_seconds, key=lambda name: taken_seconds[name]),
        is_disturbed=True,
        counts=counts,
        is_corrected=not counts,
    )


def disturbance_in_words(disturbance: Disturbance) -> str:
    """Return what disturbed a level: "`make` (pid 123) took 34 % of ..."."""
    share = disturbance.share or 0.0
    return f"{disturbance.who} took {share:.0%} of the CPU time that the engine needed"
