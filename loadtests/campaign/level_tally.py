"""Whether a running level is decided already: pure counts over its records.

tally = LevelTally.of(plan, slos)
tally.add(record)
tally.verdict()      # why no more requests are needed; None while they are
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loadtests.generator.load_plan import LoadPlan
from loadtests.metrics.request_metrics import is_good
from loadtests.metrics.slo import Slo, is_hopeless
from loadtests.records.schema import RequestRecord
from loadtests.workload.arrivals import due_times

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
        self._window = window
        self._least_bad = least_bad
        self._bad: list[set[int]] = [set() for _ in slos]
        self._late: set[int] = set()

    @classmethod
    def of(cls, plan: LoadPlan, slos: Sequence[Slo]) -> LevelTally:
        """For a level that runs by `plan`."""
        start, end = plan.warmup_seconds, plan.duration_seconds
        planned: list[int] | None = None
        if plan.rate_per_second is not None:
            due = due_times(plan.arrivals, plan.rate_per_second, end, plan.seed)
            planned = [index for index, at in enumerate(due.tolist()) if start <= at < end]
        return cls(slos, planned, (start, end))

    @property
    def good(self) -> int:
        return self.counted - len(self._bad[0])

    def add(self, record: RequestRecord) -> None:
        """A request has ended."""
        self.ended += 1
        if not self._window[0] <= record.due_seconds < self._window[1]:
            return
        self.counted += 1
        for slo, bad in zip(self._slos, self._bad, strict=True):
            if not is_good(record, slo):
                bad.add(record.index)

    def late(self, indices: Iterable[int]) -> None:
        """These requests have broken the TTFT limit of every SLO and still wait."""
        self._late.update(indices)

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
