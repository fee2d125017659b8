"""What a report is made of: LevelNumbers in CellNumbers (model, format, backend) in RunNumbers.

Plain values, computed by reports.run from records; charts, page, markdown and tables show them.
Times are seconds, sizes bytes, rates per second. Missing is None, shown as "not measured".
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loadtests.metrics.distribution import Distribution
from loadtests.metrics.energy import Energy
from loadtests.metrics.fallback import Fallback
from loadtests.metrics.level_summary import Summary
from loadtests.metrics.named_warning import NamedWarning
from loadtests.metrics.slo import Slo, Verdict
from loadtests.records.events import (
    Capacity,
    CapacityStatus,
    EngineChosen,
    PredictedRate,
    SkipCause,
)
from loadtests.records.schema import EngineTime, RunManifest
from loadtests.simulation.calibration import prediction_ratio
from loadtests.simulation.step_time import StepLaw, StepObservation
from models.spec import ModelSpec
from serving.backends.backend_interface import GpuLoad

CellState = Literal["measured", "skipped", "unfinished", "not_started"]


class Answer(msgspec.Struct, frozen=True):
    """One request, as far as an SLO judges it."""

    due_seconds: float
    ttft_seconds: float | None  # None: no good answer
    tpot_seconds: float | None  # None: one chunk, or no good answer
    # Of one that was ended by the client, the limits above which nobody knows whether it was good.
    known_ttft_seconds: float | None = None
    known_tpot_seconds: float | None = None


class LevelNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """One level of load: what was asked, and the Summary of what came back."""

    cell: str
    level: str
    purpose: str
    rate_per_second: float | None  # None: closed loop
    concurrency: int | None
    start: int | None = None  # which start of the server; None: not on record
    summary: Summary
    cut_short: str | None = None  # why the level ended before its time
    answers: tuple[Answer, ...]  # of each request due in the window, in order of due time
    send_lag_seconds: float | None = None  # p99
    confirms: bool = False  # it is one of the levels that confirm the cell's capacity
    queue_grows: bool = False  # more requests were in flight at its end than a queue's wandering
    engine_time: EngineTime | None = None  # device and host; None: not on record
    energy: Energy | None = None  # in the window; None: not measured
    is_slightly_disturbed: bool = False  # it counts under an SLO that it meets, and no other

    @property
    def is_single_stream(self) -> bool:
        return self.rate_per_second is None and self.concurrency == 1

    @property
    def verdict(self) -> Verdict:
        """By the level's own requests; those of other levels may have made them enough."""
        return "holds" if self.confirms else self.summary.verdict

    @property
    def counts(self) -> bool:
        """It has a part in the capacity."""
        return self.summary.is_valid


def middle(times: Distribution) -> float | None:
    """The median, or the mean of a few; None where the median request never came."""
    if times.p50 is not None or "p50" in times.never or times.late:
        return times.p50
    return times.mean


class MemoryNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory of one model goes, in bytes: predicted, and as measured."""

    weight_bytes: int | None = None
    kv_bytes: int | None = None
    overhead_bytes: int | None = None
    measured_peak_bytes: int | None = None  # the engine's peak RSS
    measured_weight_bytes: int | None = None  # as the engine accounts for it
    measured_kv_bytes: int | None = None
    measured_compute_bytes: int | None = None
    measured_gpu_bytes: int | None = None  # the most of the GPU in use, by whomever

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
    device: str | None  # "cpu" or "gpu", what served; None: not known
    url: str | None  # an endpoint that the campaign did not start
    hardware: str  # the name of its hardware budget; "" where there is none
    workload: str = ""  # its name, where the campaign has several
    command: str | None = None  # of an engine of others, as it was run; None: ours, or an endpoint
    engine_version: str | None = None  # of an engine of others, as it said; None: it did not
    slots: int | None
    context_tokens: int | None
    kv_tokens: int | None
    kv_dtype: str  # as asked, and as on a GPU
    kv_held: str | None  # as the engine held it; None: it did not say
    state: CellState
    reason: str  # why it was skipped or not finished; "" where it was measured
    skip_cause: SkipCause | None = None
    levels: tuple[LevelNumbers, ...]  # finished ones, in the order measured
    capacity: Capacity | None  # by measured levels; None: not measured
    predicted: PredictedRate | None = None  # by calibration and simulation; None: no such
    memory: MemoryNumbers = MemoryNumbers()
    gpu: GpuLoad | None = None  # its last load on a GPU, as the engine accounts for it
    random_weights: bool | None = None
    quality_kl_nats: float | None = None  # KL of the format to the float model
    load_seconds: float | None = None
    threads: int | None = None  # of the engine; None: not known
    choice: EngineChosen | None = None  # of its engine among several; None: it was named
    engine_cores: int | None = None  # that it may run on; None: not known
    shares_cores: bool = False  # with HTTP and the load generator
    nice: int = 0  # of the engine; above 0: these go before it
    busy: str = ""  # by whom the machine was disturbed until the search gave up; "": it did not
    busy_slos: tuple[str, ...] = ()  # ... and which SLOs were not searched to the end
    observations: tuple[StepObservation, ...] = ()  # of its calibration
    law: StepLaw | None = None  # fitted on these; None: too few
    speed: float | None = None  # of steps under load, over what that law says; None: not seen
    loads: tuple[float, ...] = ()  # seconds of each load of the model, in order
    fallbacks: tuple[Fallback, ...] = ()  # one of each level in which the engine changed
    not_sampled: dict[str, str] = {}  # what could not be read beside the load, and why

    @property
    def status(self) -> CapacityStatus | None:
        """What is known of the capacity; None: not measured."""
        return None if self.capacity is None else self.capacity.status

    @property
    def held(self) -> float | None:
        """The confirmed rate, requests/s; None where no rate is confirmed."""
        return self.capacity.held if self.capacity is not None and self.capacity.holds else None

    @property
    def prediction_ratio(self) -> tuple[float, float, float] | None:
        """Predicted / measured, low, middle, high; None where one of them is not known."""
        if self.predicted is None or self.capacity is None:
            return None
        return prediction_ratio(self.predicted.rate, self.capacity)

    @property
    def parameters(self) -> int | None:
        return None if self.spec is None else self.spec.parameters

    @property
    def single_stream(self) -> LevelNumbers | None:
        """The last level with one request at a time."""
        levels = (one for one in reversed(self.levels) if one.is_single_stream)
        return next((level for level in levels if level.summary.counts.due), None)

    @property
    def loaded(self) -> tuple[LevelNumbers, ...]:
        """The levels at a rate, lowest first."""
        at_rate = (level for level in self.levels if level.rate_per_second)
        return tuple(sorted(at_rate, key=lambda level: level.rate_per_second or 0.0))


class RunNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a report says of one run."""

    manifest: RunManifest
    folder: str
    slo: Slo
    cells: tuple[CellNumbers, ...]  # smallest model first
    warnings: tuple[NamedWarning, ...] = ()
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

    @property
    def levels(self) -> list[LevelNumbers]:
        return [level for cell in self.cells for level in cell.levels]
