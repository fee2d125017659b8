"""Prefill against decode: how fast each is, and which of the machine's peaks it uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from loadtests.simulation.step_time import StepObservation
from reports.accelerator.peaks import Peaks, Work, peaks_of, work_of
from reports.numbers import CellNumbers, RunNumbers

PhaseName = Literal["prefill", "decode, one stream", "decode, all slots"]


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one cell: medians over the steps seen, `low` and `high` their p10 and p90."""

    cell: CellNumbers
    name: PhaseName
    tokens: float  # of a step
    count: int  # observations
    tokens_per_second: float
    low: float
    high: float
    work: Work | None  # of a step
    peaks: Peaks

    @property
    def flops_per_second(self) -> float | None:
        if self.work is None:
            return None
        return self.work.flops * self.tokens_per_second / self.tokens

    @property
    def bytes_per_second(self) -> float | None:
        if self.work is None:
            return None
        return self.work.bytes * self.tokens_per_second / self.tokens

    @property
    def compute_share(self) -> float | None:
        """Of the arithmetic peak; above 1 where kernels beat float32 products."""
        return _over(self.flops_per_second, self.peaks.flops_per_second)

    @property
    def bandwidth_share(self) -> float | None:
        return _over(self.bytes_per_second, self.peaks.bytes_per_second)


def _over(value: float | None, peak: float | None) -> float | None:
    return value / peak if value is not None and peak else None


def phases_of(run: RunNumbers) -> list[Phase]:
    """Of all cells, prefill first."""
    return [phase for cell in run.cells for phase in _phases(run, cell)]


def _phases(run: RunNumbers, cell: CellNumbers) -> Iterator[Phase]:
    peaks = peaks_of(run, cell)
    prompts = [
        one
        for one in cell.observations
        if not one.decode_rows and one.prefill_tokens and one.passes == 1
    ]
    longest = max((one.prefill_tokens for one in prompts), default=0.0)
    # The longest prompts: of short ones most time is not arithmetic.
    yield from _phase(
        cell, "prefill", [one for one in prompts if one.prefill_tokens >= longest / 2], peaks
    )
    decode = [one for one in cell.observations if one.decode_rows and not one.prefill_tokens]
    yield from _phase(
        cell, "decode, one stream", [one for one in decode if one.decode_rows == 1], peaks
    )
    most = max((one.decode_rows for one in decode), default=1)
    if most > 1:
        full = [one for one in decode if one.decode_rows == most]
        yield from _phase(cell, "decode, all slots", full, peaks)


def _phase(
    cell: CellNumbers, name: PhaseName, seen: Sequence[StepObservation], peaks: Peaks
) -> Iterator[Phase]:
    if not seen:
        return
    tokens = np.array([one.decode_rows or one.prefill_tokens for one in seen])
    rates = tokens / np.array([one.seconds for one in seen])
    low, middle, high = np.quantile(rates, (0.1, 0.5, 0.9)).tolist()
    rows = round(seen[0].decode_rows)
    typical = float(np.median(tokens))
    context = float(np.median([one.kv_tokens for one in seen]))
    yield Phase(
        cell=cell,
        name=name,
        tokens=typical,
        count=len(seen),
        tokens_per_second=middle,
        low=low,
        high=high,
        work=work_of(cell, rows, 0 if rows else typical, context),
        peaks=peaks,
    )
