"""Decode speed against the number of streams: measured, by the step law, and by the roofline."""

from __future__ import annotations

import msgspec
import numpy as np

from reports.accelerator.peaks import Peaks, peaks_of, work_of
from reports.numbers import CellNumbers, RunNumbers


class BatchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One number of decoding rows as the calibration saw it; seconds of a step."""

    rows: int
    context_tokens: float  # of each row
    count: int  # steps
    seconds: float  # the median of its observations
    low: float  # p10 and p90 of the steps
    high: float

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """The number of rows with most tokens/s among those whose step keeps to a limit."""

    rows: int
    seconds: float
    tokens_per_second: float
    gain: float  # over one row


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """One cell's decode steps."""

    cell: CellNumbers
    points: tuple[BatchPoint, ...]  # fewest rows first
    peaks: Peaks

    @property
    def most(self) -> int:
        """The most rows that were seen to decode together."""
        return self.points[-1].rows

    @property
    def context_tokens(self) -> int:
        """Of a row, typically, as it was measured."""
        return round(float(np.median([one.context_tokens for one in self.points])))

    def law_seconds(self, rows: int, context_tokens: float) -> float | None:
        """Of a step, by the law; None where there is none."""
        law = self.cell.law
        return None if law is None else law.seconds(rows, 0, rows * context_tokens)

    def roof_seconds(self, rows: int, context_tokens: float) -> float | None:
        """The least time of a step, at both peaks; None where they or the shape are not known."""
        work = work_of(self.cell, rows, 0, rows * context_tokens)
        return None if work is None else work.least_seconds(self.peaks)

    def best(self, limit_seconds: float | None, context_tokens: float) -> Best | None:
        """By the law, up to the most rows seen; None: even one row takes longer, or no law."""
        steps = {n: self.law_seconds(n, context_tokens) for n in range(1, self.most + 1)}
        known = {n: seconds for n, seconds in steps.items() if seconds}
        kept = {n: s for n, s in known.items() if limit_seconds is None or s <= limit_seconds}
        if not kept:
            return None
        rows = max(kept, key=lambda n: n / kept[n])
        speed = rows / kept[rows]
        return Best(rows=rows, seconds=kept[rows], tokens_per_second=speed, gain=speed * known[1])


def batching_of(run: RunNumbers) -> list[Batching]:
    """Of the cells whose calibration saw several rows together."""
    found = []
    for cell in run.cells:
        points = _points(cell)
        if len(points) > 1:
            found.append(Batching(cell=cell, points=points, peaks=peaks_of(run, cell)))
    return found


def _points(cell: CellNumbers) -> tuple[BatchPoint, ...]:
    decode = [one for one in cell.observations if one.decode_rows and not one.prefill_tokens]
    points = []
    for rows in sorted({round(one.decode_rows) for one in decode}):
        seen = [one for one in decode if round(one.decode_rows) == rows]
        steps = [step for one in seen for step in (one.steps or (one.seconds,))]
        low, high = np.quantile(steps, (0.1, 0.9)).tolist()
        points.append(
            BatchPoint(
                rows=rows,
                context_tokens=float(np.median([one.kv_tokens for one in seen])) / rows,
                count=len(steps),
                seconds=float(np.median([one.seconds for one in seen])),
                low=low,
                high=high,
            )
        )
    return tuple(points)
