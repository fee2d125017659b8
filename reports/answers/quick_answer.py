"""The answer of `crossover quick`, computed from its run; reports/render/quick_text.py words it.

    answer = quick_answer(read_report(folder), software="llama-server", think_seconds=45.0)

Its rates are estimated, never confirmed, because no load level ran. Times are in seconds, rates in
requests/s. A missing value is None, which people read as "not measured" or "not known".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from crossover.loadtests.capacity.calibration_bursts import max_concurrent_streams
from crossover.loadtests.capacity.capacity_text import check_words, common_rate, disturbance_words
from crossover.loadtests.levels.level_columns import Level, levels_of
from crossover.loadtests.records.journal_events import Calibrated, Capacity, of_kind
from crossover.loadtests.records.run_folder import read_records
from crossover.reports.answers.binding_limits import binding_of
from crossover.reports.answers.cheapest_gpu import choose_takeover
from crossover.reports.answers.single_request import SingleRequest, single_request_of
from crossover.reports.report_data import GPU, CellData, ReportData
from crossover.serving.capacity.binding_limit import BindingLimit
from crossover.serving.capacity.slo import Slo
from crossover.serving.workload.request_lengths import lengths_in_words

REFUSALS = {"refused", "http_503"}  # failures of requests for which a server has no room: 429, 503
SHAPE_ADVICE = "the model's shape is not known (name one of `crossover models list` with --shape)"


class Users(msgspec.Struct, frozen=True, kw_only=True):
    """Concurrent users: each waits for an answer, reads and thinks, then asks again."""

    estimate: float
    low: float | None  # with the 90 % confidence interval of the capacity
    high: float | None
    think_seconds: float
    answer_seconds: float  # mean time of a whole answer at the estimated capacity


class QuickTakeover(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU that would take over: predicted. Where `name` is None, `reason` says why."""

    name: str | None = None
    rate: float | None = None
    dollars_per_hour: float | None = None
    weight_format: str | None = None  # in which it serves that rate
    narrow_format: str | None = None  # the format beside it, and the GPU that serves in it
    narrow_name: str | None = None
    reason: str = ""


class QuickAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, as --json prints it."""

    kind: Literal["crossover-quick"] = "crossover-quick"
    version: int = 1
    url: str
    software: str
    model: str
    created: str
    workload: str
    mean_prompt_tokens: float | None = None
    mean_output_tokens: float | None = None
    slo: Slo
    requests: int = 0  # sent one at a time; the two times below are their medians
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    single_request: SingleRequest | None = None  # TTFT at stated lengths; None: not known
    grade: Literal["estimated", "not measured"] = "not measured"  # of the capacity
    capacity: Capacity | None = None
    reason: str = ""  # why there is no capacity
    users: Users | None = None
    slots: int | None = None  # as the server reports, or as the bursts showed
    binding: BindingLimit | None = None  # which limit binds; None: it is not known
    takeover: QuickTakeover = QuickTakeover(reason="not known")
    notes: tuple[str, ...] = ()
    run: str = ""  # the run's folder

    @property
    def unit_rate(self) -> float | None:
        """The rate in whose unit all rates are written, as while it was measured."""
        return common_rate([self.capacity])


def quick_answer(
    data: ReportData, *, software: str, think_seconds: float, notes: tuple[str, ...] = ()
) -> QuickAnswer:
    """Return the answer that a run of one endpoint gives."""
    (cell,) = data.cells
    single, traffic = cell.single_stream, cell.traffic
    is_estimated = bool(cell.capacity is not None and cell.capacity.estimated_rate)
    return QuickAnswer(
        url=str(data.facts.get("url") or ""),
        software=software,
        model=cell.model,
        created=data.manifest.created,
        workload=lengths_in_words(data.workload),
        mean_prompt_tokens=None if traffic is None else round(traffic.mean_prompt, 1),
        mean_output_tokens=None if traffic is None else round(traffic.mean_output, 1),
        slo=data.slo,
        requests=0 if single is None else single.requests,
        ttft_seconds=None if single is None else single.ttft_seconds,
        tpot_seconds=None if single is None else single.tpot_seconds,
        single_request=single_request_of(cell),
        grade="estimated" if is_estimated else "not measured",
        capacity=cell.capacity,
        reason="" if is_estimated else _why_no_capacity(cell, data),
        users=_users_of(cell, think_seconds) if is_estimated else None,
        slots=None if cell.server is None else cell.server.settings.slots,
        binding=binding_of(cell, data.slo),
        takeover=_takeover_of(cell, data.slo),
        notes=(*_notes_of(cell), *notes),
        run=cell.folder,
    )


class FailedRequests(NamedTuple):
    """The requests of some levels that got no whole answer: refused, cut off or timed out."""

    failed: int
    requests: int  # all requests of these levels, failed or not
    kinds: Mapping[str, int]  # kind of failure, as records name it -> how many

    @property
    def share(self) -> float:
        return self.failed / self.requests if self.requests else 0.0

    def in_words(self, requests: str) -> str:
        """Return `18 of 20 single requests failed (17 connection, 1 cut_off)`, where `requests` is
        "single requests"."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        return f"{self.failed} of {self.requests} {requests} failed ({kinds})"


def failed_requests(data: ReportData) -> FailedRequests:
    """Return the single requests of a run that failed, of all its levels together."""
    (cell,) = data.cells
    levels = [measured.level for measured in cell.levels]
    return _failed_in(level for level in levels if level.is_single_stream)


def _failed_in(levels: Iterable[Level]) -> FailedRequests:
    kinds: Counter[str] = Counter()
    requests = 0
    for level in levels:
        kinds.update(level.failures)
        requests += int(level.counted.sum())
    return FailedRequests(kinds.total(), requests, kinds)


def _notes_of(cell: CellData) -> list[str]:
    ready = cell.ready
    notes = [] if ready is None else list(ready.endpoint_notes)
    bursts = [level for level in levels_of(read_records(Path(cell.folder))) if level.is_burst]
    if note := _note_of_failures(bursts):
        notes.append(note)
    if cell.capacity is not None:
        taken_words = disturbance_words(cell.capacity, cell.unit_rate)
        if taken_words and (who := _who_took_most(measured.level for measured in cell.levels)):
            taken_words += f" The largest share in the most disturbed measurement went to {who}."
        notes += filter(None, (taken_words, check_words(cell.capacity)))
    if cell.server is not None and (ready is None or not ready.info.slots):
        slots = cell.server.settings.slots
        notes.append(
            f"the server does not say its slots: bursts saw it serve {slots} requests at once; "
            "if it has more, the estimate is not right"
        )
    return notes


def _who_took_most(levels: Iterable[Level]) -> str | None:
    """Return which process took most of the engine's CPU time in the level that lost the largest
    share; None: no level was disturbed."""
    found = [level.finished.disturbance for level in levels if level.finished is not None]
    disturbed = [one for one in found if one is not None and one.is_disturbed]
    worst = max(disturbed, key=lambda one: one.share or 0.0, default=None)
    return None if worst is None else worst.who


def _note_of_failures(bursts: Sequence[Level]) -> str:
    """Return how many requests of the bursts failed, how, and what that means for the estimate; "":
    none failed."""
    failed = _failed_in(bursts)
    if not failed.failed:
        return ""
    words = failed.in_words("requests of the bursts")
    refusing = [level for level in bursts if REFUSALS & level.failures.keys()]
    if not refusing:
        return (
            f"{words}: the server dropped requests that came together, and the estimate is from "
            "those that it answered"
        )
    together = max(map(max_concurrent_streams, refusing))
    return (
        f"{words}: of requests that came together, the server answered at most {together} and "
        "refused others. The estimate is from those that it answered, and assumes that the others "
        "would wait. Refused requests miss the SLO, so this server may serve less; how much less "
        "only load levels show"
    )


def _why_no_capacity(cell: CellData, data: ReportData) -> str:
    """Return the reason for which nothing is estimated."""
    capacity = cell.capacity
    if capacity is None:
        return cell.reason or "nothing was measured"
    if capacity.state == "misses_slo_unloaded" or capacity.method == "step_times":
        return capacity.reason
    if calibrations := of_kind(data.events, Calibrated):
        return calibrations[-1].reason
    return "the single requests took all of the time; --seconds gives more"


def _users_of(cell: CellData, think_seconds: float) -> Users | None:
    """Return the users at the estimated capacity, by Little's law: users = rate * (seconds of an
    answer + seconds to think); None: the capacity or the time of an answer is not known."""
    capacity, answer_seconds = cell.capacity, cell.answer_seconds
    if capacity is None or capacity.estimated_rate is None or answer_seconds is None:
        return None
    turn_seconds = answer_seconds + think_seconds
    return Users(
        estimate=capacity.estimated_rate * turn_seconds,
        low=None if capacity.low is None else capacity.low * turn_seconds,
        high=None if capacity.high is None else capacity.high * turn_seconds,
        think_seconds=think_seconds,
        answer_seconds=answer_seconds,
    )


def _takeover_of(cell: CellData, slo: Slo) -> QuickTakeover:
    """Return the GPU that would take over, or why none is named."""
    if cell.side == GPU:
        return QuickTakeover(reason="it runs on a GPU already")
    if cell.spec is None:
        return QuickTakeover(reason=SHAPE_ADVICE)
    takeover = choose_takeover(cell, slo)
    if takeover is None:
        return QuickTakeover(reason="the capacity is not known")
    if takeover.gpu is None:
        return QuickTakeover(reason=takeover.reason)
    gpu = takeover.gpu
    narrow = takeover.narrow_gpu
    return QuickTakeover(
        name=gpu.name,
        rate=gpu.rate,
        dollars_per_hour=gpu.dollars_per_hour,
        weight_format=takeover.weight_format,
        narrow_format=None if narrow is None else takeover.narrow_format,
        narrow_name=None if narrow is None else narrow.name,
    )
