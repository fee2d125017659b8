"""What a report is made of: one LevelNumbers per measured level, one CellNumbers per (model, format, backend), one RunNumbers per run.

Plain values, computed by reports.capacity from records; charts, page, markdown and tables show them. Times are seconds, sizes bytes, rates
per second. Missing is None and is shown as "not measured".
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loadtests.calibrate import error_of
from loadtests.records import RunManifest
from loadtests.slo import Promise, Verdict
from loadtests.summary import Distribution, Summary
from models.spec import ModelSpec

CapacityState = Literal["interval", "at_least", "none", "unresolved", "not_measured"]


class LevelNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """One level of load: what was asked, and the Summary of what came back."""

    cell: str
    level: str
    purpose: str  # "lone": one request at a time; "search" and "load": a rate
    rate_per_second: float | None  # asked; None: closed loop
    concurrency: int | None
    attempt: int
    seed: int
    started_unix_seconds: float
    cut_short: str | None  # why the level ended before its time: its verdict was sure
    summary: Summary
    # (TTFT, TPOT) of each request due in the window, in the order due; TTFT None: no good answer came; TPOT None: an answer of one chunk.
    answers: tuple[tuple[float | None, float | None], ...]

    @property
    def is_lone(self) -> bool:
        return self.rate_per_second is None and self.concurrency == 1

    @property
    def verdict(self) -> Verdict:
        return self.summary.verdict


def middle(times: Distribution) -> float | None:
    """The typical value of a distribution: its median, the mean of the few where a median is not given, None where nothing came.

    None too where the median is a request that never came: see `Distribution.never`.
    """
    if times.p50 is not None or "p50" in times.never or times.late:
        return times.p50
    return times.mean


class CapacityNumbers(msgspec.Struct, frozen=True):
    """The highest rate that keeps the promise, in requests per second, as loadtests.search estimates it from the levels.

    interval: between `low` and `high`, best guess `estimate`; at_least: more than `low`, and nothing was seen to be too much;
    none: a lone request breaks the promise, so no rate keeps it; unresolved: measured, and not known, though below `high` where given.
    """

    state: CapacityState
    low: float | None = None
    estimate: float | None = None
    high: float | None = None
    is_narrow: bool = True  # False: an interval, and wider than the campaign asked for
    reason: str = ""


class MemoryNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory of one model goes, in bytes."""

    weight_bytes: int | None = None  # predicted
    kv_bytes: int | None = None  # predicted
    overhead_bytes: int | None = None  # predicted
    measured_peak_bytes: int | None = None  # the engine's peak RSS, from samples and from its own word when it was ready
    measured_weight_bytes: int | None = None  # as the engine accounts for it
    measured_kv_bytes: int | None = None

    @property
    def predicted_bytes(self) -> int | None:
        if self.weight_bytes is None or self.kv_bytes is None or self.overhead_bytes is None:
            return None
        return self.weight_bytes + self.kv_bytes + self.overhead_bytes


class CellNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """One (model, format, backend) on one machine."""

    key: str
    run_id: str
    model: str
    spec: ModelSpec | None  # None: a model that the ladder does not know
    weight_format: str
    backend: str
    device: str  # "cpu" or "gpu"; what in fact served
    url: str | None  # an endpoint that the campaign did not start; None: it ran on the machine of the manifest
    hardware: str  # the name of its hardware budget; "" where the campaign has one
    slots: int | None
    context_tokens: int | None
    kv_tokens: int | None
    kv_dtype: str
    state: Literal["measured", "skipped", "unfinished", "not_started"]
    reason: str  # why it was skipped or not finished; "" where it was measured
    levels: tuple[LevelNumbers, ...]  # finished ones, in the order measured
    capacity: CapacityNumbers
    memory: MemoryNumbers
    random_weights: bool | None
    quality_kl_nats: float | None = None  # KL divergence of the weights' format to the float model, measured when they were converted
    load_seconds: float | None
    predicted_rate: float | None = None  # capacity by calibration and simulation, requests/s; None: no calibration, or another promise
    measured_only: CapacityNumbers | None = None  # what the levels say without it; None where there is no prediction

    @property
    def prediction_error(self) -> float | None:
        """(predicted - measured) / measured by the levels alone: above 0 where the prediction was too hopeful."""
        return error_of(self.predicted_rate, self.measured_only.estimate if self.measured_only is not None else None)

    @property
    def parameters(self) -> int | None:
        return None if self.spec is None else self.spec.parameters

    @property
    def lone(self) -> LevelNumbers | None:
        """The level with one request at a time; the last one where it was repeated."""
        found = [level for level in self.levels if level.is_lone and level.summary.due]
        return found[-1] if found else None

    @property
    def loaded(self) -> tuple[LevelNumbers, ...]:
        """The levels at a rate, lowest first."""
        return tuple(sorted((level for level in self.levels if level.rate_per_second), key=lambda level: level.rate_per_second or 0.0))


class Doubt(msgspec.Struct, frozen=True):
    """A named reason to read a number with care, and what to do about it."""

    name: str
    what: str  # one sentence with the values
    advice: str
    severity: Literal["note", "warning", "serious"] = "warning"
    where: tuple[str, ...] = ()  # cells


class RunNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a report says of one run."""

    manifest: RunManifest
    folder: str
    promise: Promise
    cells: tuple[CellNumbers, ...]  # smallest model first
    doubts: tuple[Doubt, ...] = ()
    requests: int = 0  # on record
    requests_counted: int = 0  # due in the window of a finished level
    measured_seconds: float | None = None

    also: tuple[str, ...] = ()  # other runs of the same machine whose cells are among these

    @property
    def name(self) -> str:
        return ", ".join([self.manifest.run_id, *self.also])

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest.server_facts
