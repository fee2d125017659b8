"""Whether a running level is decided already: pure counts over its records.

    tally = LevelTally.of(plan, slos)
    tally.add(record)
    tally.verdict()      # why no more requests are needed; None while they are
    Cut(tally, patience_seconds).may_stop(now_seconds)

A decided level is not stopped at once: requests on their way would count as bad, and they are not
(0.923 good as served, 0.799 as recorded). Load goes on until every request that was due until then
is known to be good or bad; the window ends before the oldest request that is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from loadtests.generator.load_plan import LoadPlan
from loadtests.metrics.request_metrics import is_good
from loadtests.metrics.slo import Slo, is_hopeless
from loadtests.records.schema import RequestRecord
from loadtests.workload.arrivals import due_times

A_MOMENT_SECONDS = 1e-4  # more than times are rounded by
LEAST_BAD = 5  # fewer may be a single unlucky meeting of requests


class LevelTally:
    """Bad requests of a level by SLO; `good` is by the first SLO.

    `planned` are the indices of the requests that count. A closed loop has none: nobody knows how
    many requests will come, so it is never decided early.
    """

    def __init__(
        self,
        slos: Sequence[Slo],
        planned: Iterable[int] | None,
        window: tuple[float, float] = (0.0, float("inf")),
        least_bad: int = LEAST_BAD,
    ) -> None:
        self.ended = 0
        self.counted = 0  # ended, and due within the window
        self._slos = slos
        self._planned = None if planned is None else frozenset(planned)
        self._due: dict[int, float] = {}  # seconds, of those in `planned`
        self._ended: set[int] = set()
        self._window = window
        self._least_bad = least_bad
        self._bad: list[set[int]] = [set() for _ in slos]
        self._late: set[int] = set()

    @classmethod
    def of(cls, plan: LoadPlan, slos: Sequence[Slo]) -> LevelTally:
        """For a level that runs by `plan`."""
        start, end = plan.warmup_seconds, plan.duration_seconds
        if plan.rate_per_second is None:
            return cls(slos, None, (start, end))
        times = due_times(plan.arrivals, plan.rate_per_second, end, plan.seed).tolist()
        due = {index: at for index, at in enumerate(times) if start <= at < end}
        tally = cls(slos, due, (start, end))
        tally._due = due
        return tally

    @property
    def good(self) -> int:
        return self.counted - len(self._bad[0])

    @property
    def may_hold(self) -> bool:
        """Of what has ended, as many are good as an SLO asks for."""
        return any(
            self.counted - len(bad) >= slo.target * self.counted
            for slo, bad in zip(self._slos, self._bad, strict=True)
        )

    def add(self, record: RequestRecord) -> None:
        """A request has ended."""
        self.ended += 1
        if not self._window[0] <= record.due_seconds < self._window[1]:
            return
        self.counted += 1
        self._ended.add(record.index)
        for slo, bad in zip(self._slos, self._bad, strict=True):
            if not is_good(record, slo):
                bad.add(record.index)

    def late(self, indices: Iterable[int]) -> None:
        """These requests have broken the TTFT limit of every SLO and still wait."""
        self._late.update(indices)

    def settled_until(self, now_seconds: float) -> float:
        """A moment before the oldest request that may still be good or bad; without one, now."""
        waiting = (
            at
            for index, at in self._due.items()
            if index not in self._ended and index not in self._late
        )
        return min(now_seconds, min(waiting, default=math.inf) - A_MOMENT_SECONDS)

    def verdict(self) -> str | None:
        """Why the level fails by every SLO whatever is still to come; None while it may hold."""
        if self._planned is None:
            return None
        late = self._late & self._planned
        bad = [len(its | late) for its in self._bad]
        planned = len(self._planned)
        if min(bad) < self._least_bad:
            return None
        if not all(
            is_hopeless(count, planned, slo) for count, slo in zip(bad, self._slos, strict=True)
        ):
            return None
        return f"{min(bad)} of {planned} requests are bad: the level cannot meet the SLO any more"


class Cut:
    """When a level that is decided may be stopped. Times count from the level's start."""

    def __init__(self, tally: LevelTally, patience_seconds: float) -> None:
        """`patience_seconds`: who takes longer is not good by any SLO."""
        self.reason: str | None = None  # why it is decided
        self.end_seconds: float | None = None  # of its window, once it may be stopped
        self._decided_seconds = 0.0
        self._tally = tally
        self._patience_seconds = patience_seconds

    def may_stop(self, now_seconds: float) -> bool:
        """True once: the level is decided, and so is every request that was due until then."""
        if self.end_seconds is not None:
            return False
        if self.reason is None:
            self.reason = self._tally.verdict()
            self._decided_seconds = now_seconds
        if self.reason is None:
            return False
        settled = self._tally.settled_until(now_seconds)
        is_patient = now_seconds - self._decided_seconds < self._patience_seconds
        if settled < self._decided_seconds and is_patient:
            return False
        self.end_seconds = max(settled, self._decided_seconds)
        return True

    def stop(self, reason: str | None, now_seconds: float) -> bool:
        """True once where there is a reason to stop at once: the level counts for nothing."""
        if reason is None or self.end_seconds is not None:
            return False
        self.reason = reason
        self.end_seconds = now_seconds
        return True
