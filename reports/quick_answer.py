"""What `crossover quick` says of a server: computed from the run, worded here.

    answer = quick_answer(read_report(folder), software="llama-server", think_seconds=45.0)
    lines_of(answer)        # for a terminal
    markdown_of(answer)     # a block to paste

Its rates are estimated, never more: no level ran. Times are seconds, rates requests/s. Missing is
None, which people read as "not measured" or "not known".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from crossover.loadtests.capacity import capacity_text
from crossover.loadtests.levels.level_columns import levels_of
from crossover.loadtests.records.journal_events import Calibrated, Capacity, of_kind
from crossover.loadtests.records.run_folder import read_records
from crossover.models import formatting
from crossover.reports.binding_limits import binding_of
from crossover.reports.cheapest_gpu import takes_over
from crossover.reports.headline import slo_words
from crossover.reports.report_data import GPU, CellData, ReportData
from crossover.serving.capacity.binding_limit import BindingLimit, sentence_of
from crossover.serving.capacity.simulated_capacity import QUICK_REQUESTS, Server
from crossover.serving.capacity.slo import Slo
from crossover.serving.workload.request_lengths import in_words

SHAPE_ADVICE = "the model's shape is not known (name one of `crossover models list` with --shape)"


class Users(msgspec.Struct, frozen=True, kw_only=True):
    """People who each wait for an answer, then read and think, then ask again."""

    estimate: float
    low: float | None  # with the 90 % confidence interval of the capacity
    high: float | None
    think_seconds: float
    answer_seconds: float  # mean time of a whole answer at the estimated capacity


class Takeover(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU that would take over: predicted. `name` None: `reason` says why there is none."""

    name: str | None = None
    rate: float | None = None
    dollars_per_hour: float | None = None
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
    requests: int = 0  # one at a time, that the times below are medians of
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    grade: Literal["estimated", "not measured"] = "not measured"  # of the capacity
    capacity: Capacity | None = None
    reason: str = ""  # why there is no capacity
    users: Users | None = None
    slots: int | None = None  # as the server says, or as bursts found
    binding: BindingLimit | None = None  # which limit binds; None: it is not known
    takeover: Takeover = Takeover(reason="not known")
    notes: tuple[str, ...] = ()
    run: str = ""  # the run's folder

    @property
    def like(self) -> float | None:
        """The rate in whose unit all rates are read."""
        return None if self.capacity is None else self.capacity.estimated_rate


def quick_answer(
    data: ReportData, *, software: str, think_seconds: float, notes: tuple[str, ...] = ()
) -> QuickAnswer:
    """Return the answer that a run of one endpoint gives."""
    (cell,) = data.cells
    single, found, traffic = cell.alone, cell.capacity, cell.traffic
    is_estimated = bool(found is not None and found.estimated_rate)
    return QuickAnswer(
        url=str(data.facts.get("url") or ""),
        software=software,
        model=cell.model,
        created=data.manifest.created,
        workload=in_words(data.workload),
        mean_prompt_tokens=None if traffic is None else round(traffic.mean_prompt, 1),
        mean_output_tokens=None if traffic is None else round(traffic.mean_output, 1),
        slo=data.slo,
        requests=0 if single is None else single.requests,
        ttft_seconds=None if single is None else single.ttft_seconds,
        tpot_seconds=None if single is None else single.tpot_seconds,
        grade="estimated" if is_estimated else "not measured",
        capacity=found,
        reason="" if is_estimated else _why_no_capacity(cell, data),
        users=_users_of(cell, think_seconds) if is_estimated else None,
        slots=None if cell.policy is None else cell.policy.slots,
        binding=binding_of(cell, data.slo),
        takeover=_takeover_of(cell, data.slo),
        notes=(*_notes_of(cell), *notes),
        run=cell.folder,
    )


class FailedRequests(NamedTuple):
    """Single requests that got no whole answer: refused, cut off, timed out."""

    failed: int
    requests: int  # all of them
    kinds: Mapping[str, int]  # how many failed in which way, as records name it

    @property
    def share(self) -> float:
        return self.failed / self.requests if self.requests else 0.0

    @property
    def words(self) -> str:
        """`18 of 20 single requests failed (17 connection, 1 cut_off)`."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        return f"{self.failed} of {self.requests} single requests failed ({kinds})"


def failed_requests(data: ReportData) -> FailedRequests:
    """Return the single requests of a run that failed, of all its levels together."""
    (cell,) = data.cells
    kinds: Counter[str] = Counter()
    requests = 0
    for level in (one.level for one in cell.levels if one.level.is_single_stream):
        kinds.update(level.failures)
        requests += int(level.counted.sum())
    return FailedRequests(kinds.total(), requests, kinds)


def _notes_of(cell: CellData) -> list[str]:
    ready = cell.ready
    notes = [] if ready is None else list(ready.endpoint_notes)
    if failed := _failed_in_bursts(cell):
        notes.append(
            f"{failed}: the server refused or dropped requests that came together, and the "
            "estimate is from those that it answered"
        )
    if cell.policy is not None and (ready is None or not ready.info.slots):
        notes.append(
            f"the server does not say its slots: bursts saw it serve {cell.policy.slots} requests "
            "at once; if it has more, the estimate is not right"
        )
    return notes


def _failed_in_bursts(cell: CellData) -> str:
    """Return `18 of 32 requests of the bursts failed (18 http_429)`; "": none did."""
    kinds: Counter[str] = Counter()
    requests = 0
    for level in levels_of(read_records(Path(cell.folder))):
        if level.started.is_burst:
            kinds.update(level.failures)
            requests += int(level.counted.sum())
    if not kinds:
        return ""
    words = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{kinds.total()} of {requests} requests of the bursts failed ({words})"


def _why_no_capacity(cell: CellData, data: ReportData) -> str:
    found = cell.capacity
    if found is None:
        return cell.reason or "nothing was measured"
    if found.state == "misses_slo_unloaded":
        return found.reason
    if found.method == "step_times":
        return found.reason
    if calibrations := of_kind(data.events, Calibrated):
        return calibrations[-1].reason
    return "the single requests took all of the time; --seconds gives more"


def _users_of(cell: CellData, think_seconds: float) -> Users | None:
    """By Little's law: users = rate x (time of an answer + time to think)."""
    found, answer_seconds = cell.capacity, _answer_seconds(cell)
    if found is None or found.estimated_rate is None or answer_seconds is None:
        return None
    turn = answer_seconds + think_seconds
    return Users(
        estimate=found.estimated_rate * turn,
        low=None if found.low is None else found.low * turn,
        high=None if found.high is None else found.high * turn,
        think_seconds=think_seconds,
        answer_seconds=answer_seconds,
    )


def _answer_seconds(cell: CellData) -> float | None:
    """Return the mean time of an answer at the estimated capacity; None: it is not simulated."""
    traffic = cell.traffic
    if cell.step_times is None or cell.policy is None or traffic is None:
        return None
    if not cell.estimated_rate:
        return None
    server = Server(
        cell.step_times, cell.policy, traffic.lengths, traffic.arrivals, count=QUICK_REQUESTS
    )
    played = server.play(cell.estimated_rate)
    each = float(np.nanmean(played.tpot)) if np.isfinite(played.tpot).any() else 0.0
    return float(played.ttft.mean()) + each * (traffic.mean_output - 1)


def _takeover_of(cell: CellData, slo: Slo) -> Takeover:
    if cell.side == GPU:
        return Takeover(reason="it runs on a GPU already")
    if cell.spec is None:
        return Takeover(reason=SHAPE_ADVICE)
    over = takes_over(cell, slo)
    if over is None:
        return Takeover(reason="the capacity is not known")
    if over.gpu is None:
        return Takeover(reason=over.reason)
    gpu = over.gpu
    return Takeover(name=gpu.name, rate=gpu.rate, dollars_per_hour=gpu.dollars_per_hour)


# In words.


def rows_of(answer: QuickAnswer) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the answer: what, its value, and its grade or basis."""
    many = "1 request" if answer.requests == 1 else f"{answer.requests} requests"
    times = (
        f"TTFT {formatting.seconds(answer.ttft_seconds)}, "
        f"TPOT {formatting.seconds(answer.tpot_seconds)}"
    )
    yield "Single request", times, f"measured, medians of {many} one at a time"
    found, like = answer.capacity, answer.like
    if answer.grade != "estimated" or found is None:
        yield "Estimated capacity", f"none: {answer.reason}", ""
    else:
        rate = formatting.of_requests(capacity_text.limit(found, like))
        yield "Estimated capacity", rate, "estimated, 90 % confidence interval"
    if answer.users is not None:
        think = formatting.seconds(answer.users.think_seconds)
        yield (
            "Concurrent users",
            _users_in_words(answer.users),
            f"estimated; each waits for the answer, then reads and thinks for {think}",
        )
    if answer.binding is not None:
        is_unloaded = found is not None and found.state == "misses_slo_unloaded"
        is_measured = is_unloaded or answer.binding.kind == "other_processes"
        how = "measured" if is_measured else "simulated"
        yield "Binding limit", sentence_of(answer.binding), how
    over = answer.takeover
    if over.name is None:
        yield "Takeover GPU", over.reason, ""
    else:
        price = formatting.dollars_per_hour(over.dollars_per_hour)
        yield (
            "Takeover GPU",
            f"{over.name}: {formatting.of_requests(formatting.rate(over.rate))}, {price}",
            "predicted",
        )


def _users_in_words(users: Users) -> str:
    """`about 110 (92–130)`."""
    estimate = f"about {formatting.significant(users.estimate)}"
    if users.low is None or users.high is None:
        return estimate
    low = formatting.significant(users.low, rounded="down")
    return f"{estimate} ({low}–{formatting.significant(users.high, rounded='up')})"


def basis_of(answer: QuickAnswer) -> str:
    """Return what the answer rests on, in a line."""
    lengths = answer.workload
    if answer.mean_prompt_tokens is not None and answer.mean_output_tokens is not None:
        lengths = (
            f"requests of {answer.mean_prompt_tokens:.0f} + {answer.mean_output_tokens:.0f} tokens "
            "(prompt + answer, means)"
        )
    return f"SLO {answer.slo.name}: {slo_words(answer.slo)}; {lengths}"


def lines_of(answer: QuickAnswer) -> list[str]:
    """Return the answer for a terminal."""
    rows = list(rows_of(answer))
    width = max(len(what) for what, _, _ in rows)
    lines = [f"{answer.model} on {answer.software} at {answer.url}", basis_of(answer), ""]
    for what, value, grade in rows:
        lines.append(f"{what:<{width}}  {value}{f'  [{grade}]' if grade else ''}")
    lines += [f"note: {note}" for note in answer.notes]
    return lines


def markdown_of(answer: QuickAnswer) -> str:
    """Return the answer as a block of Markdown to paste."""
    lines = [
        f"**{_plain(answer.model)}** on {answer.software}, `crossover quick`, "
        f"{answer.created[:10]}. {basis_of(answer)}.",
        "",
        "| | | |",
        "|---|---|---|",
    ]
    lines += [f"| {' | '.join(map(_plain, row))} |" for row in rows_of(answer)]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Return a name or sentence without what would end a cell or a line of Markdown."""
    return " ".join(text.split()).replace("|", "/").replace("<", "&lt;")
