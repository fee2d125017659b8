"""The first table: a row for each model. The text of a cell has at most six words.

columns = columns_of(data)         # CPU and GPU beside each other where both were measured
answer_row(answer, data)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from crossover.loadtests.capacity import capacity_text
from crossover.models import formatting
from crossover.reports.answers.binding_limits import binding_of
from crossover.reports.answers.headline import machine_words
from crossover.reports.answers.model_answers import Grade, ModelAnswer
from crossover.reports.answers.single_request import single_request_of
from crossover.reports.report_data import CPU, GPU, SIDE_NAMES, CellData, ReportData
from crossover.serving.capacity.batching_simulator import Simulated
from crossover.serving.capacity.binding_limit import sentence_of
from crossover.serving.capacity.slo import Slo

STATE_WORDS = {"skipped": "skipped", "unfinished": "not finished", "not_started": "not started"}
NO_CAPACITY_NOTE = (
    f'Estimated capacity "{capacity_text.NO_CAPACITY}": in the simulation even requests sent one '
    "at a time miss the SLO."
)


ColumnName = Literal[
    "model", "single_stream", "confirmed", "estimated", "engine", "takeover", "price"
]


class TableCell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of the first table: its text, its grade, and the details that a click opens."""

    text: str
    grade: Grade | None = None
    detail: str = ""


class AnswerColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column of the first table. `side` is its device; "": the column is about the model."""

    name: ColumnName
    head: str
    side: str = ""

    @property
    def key(self) -> str:
        """`cpu-confirmed`: the page's script finds the cells of a column by it."""
        return f"{self.side}-{self.name}" if self.side else self.name

    @property
    def full_head(self) -> str:
        """The heading with its device, for a table without a heading of the device above it."""
        return f"{SIDE_NAMES[self.side]}: {self.head}" if self.side else self.head


DEVICE_HEADS: dict[ColumnName, str] = {
    "single_stream": "Single request (TTFT, TPOT)",
    "confirmed": "Confirmed rate",
    "estimated": "Estimated capacity (90 % CI)",
    "engine": "Engine",
}
MODEL = AnswerColumn(name="model", head="Model")
TAKEOVER = AnswerColumn(name="takeover", head="Takeover GPU (capacity, price)")
PRICE = AnswerColumn(name="price", head="GPU (list price)")


def columns_of(data: ReportData) -> tuple[AnswerColumn, ...]:
    """Return the columns of each device that was measured, then the takeover GPU if no GPU was
    measured, or the GPU's price if only the GPU was."""
    columns = [MODEL]
    for side in data.sides:
        columns += [
            AnswerColumn(name=name, head=head, side=side) for name, head in DEVICE_HEADS.items()
        ]
    if data.sides == (GPU,):
        columns.append(PRICE)
    elif GPU not in data.sides:
        columns.append(TAKEOVER)
    return tuple(columns)


def side_heads(data: ReportData) -> tuple[tuple[str, str], ...]:
    """Return (side, name and price of its device) for the heading above the columns of each device;
    () where only one device was measured."""
    if len(data.sides) < 2:
        return ()
    price = None if data.gpu is None else data.gpu.dollars_per_hour
    prices = {CPU: "price not known", GPU: "price not known"}
    if price is not None:
        prices[GPU] = f"list price {formatting.dollars_per_hour(price)}"
    return tuple(
        (side, f"{SIDE_NAMES[side]}: {machine_words(data, side)}, {prices[side]}")
        for side in data.sides
    )


def answer_row(answer: ModelAnswer, data: ReportData) -> tuple[TableCell, ...]:
    """Return the cells of one model, in the order of `columns_of`."""
    return tuple(_table_cell(answer, column, data) for column in columns_of(data))


def _table_cell(answer: ModelAnswer, column: AnswerColumn, data: ReportData) -> TableCell:
    if column.name == "model":
        return TableCell(text=answer.model, detail=_model_detail(answer))
    if column.name == "takeover":
        return _takeover_cell(answer)
    if column.name == "price":
        return _price_cell(data)
    cell = answer.cell_on(column.side)
    if cell is None:
        # The GPU was not measured with this model: show the takeover GPU in its place.
        if column.side == GPU and column.name == "estimated" and answer.takeover is not None:
            return _takeover_cell(answer)
        return TableCell(text=formatting.NOT_MEASURED if column.name == "confirmed" else "–")
    if column.name == "single_stream":
        return _single_stream_cell(cell, answer.slo)
    if column.name == "confirmed":
        return _confirmed_cell(cell)
    if column.name == "estimated":
        return _estimated_cell(cell, answer.slo)
    return _engine_cell(cell)


def _model_detail(answer: ModelAnswer) -> str:
    details = [f"{answer.cell.size_words} parameters"]
    if any(cell.ready is not None and cell.ready.synthetic for cell in answer.cells):
        details.append("random weights: speed and memory are real, the text is noise")
    details += [cell.engine_choice.reason for cell in answer.cells if cell.engine_choice]
    return "; ".join(details)


def _origin_of_slots(cell: CellData) -> str:
    """Return who set the slots; "": it is not known, or they are as many as memory has room for."""
    if cell.are_slots_set:
        return ", as the campaign sets"
    choice = cell.slots_choice
    if choice is None:
        return ""
    if not choice.is_change:
        return ", chosen by the step times"
    rate = formatting.rate(choice.rate, like=cell.unit_rate)
    previous_rate = formatting.rate(choice.previous_rate, like=cell.unit_rate)
    return (
        f", chosen by the step times: they carry {rate}, and the {choice.previous_slots} that it "
        f"started with {previous_rate}"
    )


def _engine_cell(cell: CellData) -> TableCell:
    """Return `onnx int8, 16 slots`, or `onnx int8, 2 x 16 slots` of two engines."""
    if cell.state in ("not_started", "skipped"):
        return TableCell(text="–")
    if not cell.slots:
        return TableCell(text=cell.engine_words)
    details = [f"{cell.engines} engines with one queue"] if cell.engines > 1 else []
    if origin := _origin_of_slots(cell):
        details.append(f"{cell.slots} slots{origin}")
    of_each = f"{cell.engines} x " if cell.engines > 1 else ""
    return TableCell(
        text=f"{cell.engine_words}, {of_each}{cell.slots} slots", detail="; ".join(details)
    )


class SingleStreamTimes(NamedTuple):
    """The times of single requests in words, and how they are known: TTFT at the mean prompt by the
    step times, or else the measured medians."""

    words: str  # `83 ms, 12 ms`: TTFT, TPOT
    origin: str  # "": they are not known


def single_stream_times(cell: CellData) -> SingleStreamTimes:
    """Return TTFT at the mean prompt from the step times, or the measured median if there are none,
    and the measured median of TPOT. Where single requests were sent and none was answered, return
    the simulated medians."""
    measured = cell.single_stream
    if measured is not None and measured.ttft_seconds is not None:
        requests = "1 request" if measured.requests == 1 else f"{measured.requests} requests"
        medians = f"medians of {requests} sent one at a time"
        single = single_request_of(cell)
        if single is None:
            times = _times_in_words(measured.ttft_seconds, measured.tpot_seconds)
            return SingleStreamTimes(times, f"measured: {medians}")
        measured_times = _times_in_words(measured.ttft_seconds, measured.tpot_seconds)
        return SingleStreamTimes(
            _times_in_words(single.mean_ttft_seconds, measured.tpot_seconds),
            f"{single.words}, from the step times{single.check_words} "
            f"({medians}: {measured_times})",
        )
    simulated = _simulated_single_stream(cell)
    if measured is None or simulated is None:
        return SingleStreamTimes(formatting.NOT_MEASURED, "")
    ttft_seconds = float(np.nanmedian(simulated.ttft))
    tpot_seconds = float(np.nanmedian(simulated.tpot))
    return SingleStreamTimes(
        _times_in_words(ttft_seconds, tpot_seconds), "simulated from step times, medians"
    )


def _times_in_words(ttft_seconds: float | None, tpot_seconds: float | None) -> str:
    ttft = formatting.seconds(ttft_seconds)
    return ttft if tpot_seconds is None else f"{ttft}, {formatting.seconds(tpot_seconds)}"


def _single_stream_cell(cell: CellData, slo: Slo) -> TableCell:
    """Return `83 ms, 12 ms: met`; where too few requests were measured to decide, the simulated
    SLO attainment: `83 ms, 12 ms: 84 % attainment`."""
    times = single_stream_times(cell)
    measured = cell.single_stream
    if measured is None or not times.origin:
        return TableCell(text=times.words)
    if measured.meets_slo is not None:
        verdict = "met" if measured.meets_slo else "missed"
        return TableCell(text=f"{times.words}: {verdict}", detail=times.origin)
    verdict = "unclear"
    detail = f"{times.origin}; too few to tell whether they meet the SLO"
    simulated = _simulated_single_stream(cell)
    if simulated is not None:
        attainment = float(slo.met_by(simulated).mean())
        attainment_words = formatting.share(attainment, 2)
        verdict = "met" if attainment >= slo.target else f"{attainment_words} attainment"
        detail += f"; simulated SLO attainment {attainment_words}"
    return TableCell(text=f"{times.words}: {verdict}", detail=detail)


@lru_cache(maxsize=32)
def _simulated_single_stream(cell: CellData) -> Simulated | None:
    """Return simulated requests, one at a time; None: the configuration has no step-time model."""
    server = cell.simulated()
    return None if server is None else server.unloaded()


def _confirmed_cell(cell: CellData) -> TableCell:
    """Return the confirmed rate, or in words why there is none."""
    capacity = cell.capacity
    if capacity is None:
        text = formatting.NOT_MEASURED if cell.state == "measured" else STATE_WORDS[cell.state]
        return TableCell(text=text, detail=cell.reason)
    if capacity.is_confirmed:
        evidence = capacity_text.evidence_words(capacity)
        if capacity.taken_share:
            evidence += ", while other processes ran too"
        return TableCell(text=cell.confirmed_words, grade="confirmed", detail=evidence)
    if capacity.state == "misses_slo_unloaded":
        return TableCell(text="misses the SLO unloaded", detail=capacity.reason)
    details = [capacity.reason] if capacity.reason else []
    if capacity.confirm_seconds is not None:
        minutes = formatting.duration(capacity.confirm_seconds)
        details.append(f"crossover campaign resume {cell.folder} --confirm takes {minutes}")
    return TableCell(text="none confirmed", detail="; ".join(details))


def _estimated_cell(cell: CellData, slo: Slo) -> TableCell:
    """Return the estimated capacity with its interval."""
    capacity, text = cell.capacity, cell.estimated_words
    if capacity is None or text in ("–", "not known"):
        return TableCell(text=text)
    if capacity.method != "step_times":
        detail = "between the levels that met and missed the SLO"
        return TableCell(text=text, grade="estimated", detail=detail)
    origin = "simulated from step times that this run measured; 90 % confidence interval"
    if capacity.estimated_rate is None:
        origin = capacity.reason
    facts = (origin, capacity_text.speed_words(capacity), capacity_text.users_words(capacity))
    binding = binding_of(cell, slo)
    known_facts = "; ".join(filter(None, facts))
    sentences = (
        f"{known_facts}." if known_facts else "",
        capacity_text.disturbance_words(capacity, cell.unit_rate),
        capacity_text.reuse_words(capacity, cell.unit_rate),
        "" if binding is None else sentence_of(binding, cell.unit_rate),
    )
    return TableCell(text=text, grade="estimated", detail=" ".join(filter(None, sentences)))


def no_capacity_note(rows: Sequence[Sequence[TableCell]]) -> str:
    """Return what an estimated capacity of "none" means; "": no row has one."""
    has_none = any(
        cell.grade == "estimated" and cell.text == capacity_text.NO_CAPACITY
        for cells in rows
        for cell in cells
    )
    return NO_CAPACITY_NOTE if has_none else ""


def _takeover_cell(answer: ModelAnswer) -> TableCell:
    """Return `NVIDIA L40S: 12/s, $1.86/h in bf16`; the GPU in a narrower format is the detail."""
    takeover, gpu = answer.takeover, answer.takeover_gpu
    if takeover is None:
        return TableCell(text="not known")
    if gpu is None:
        return TableCell(text="no GPU in the list", grade="predicted", detail=takeover.reason)
    unit_rate = answer.cell.unit_rate
    rate = formatting.rate(gpu.rate, like=unit_rate)
    required = "meets the SLO"
    if answer.cell.estimated_rate:
        required = f"serves {formatting.rate(takeover.rate, like=unit_rate)}"
    interval = formatting.rate_interval(gpu.low, gpu.high, unit_rate)
    detail = (
        f"the cheapest GPU that {required} with 90 % confidence; predicted capacity "
        f"{rate} ({interval}) from its datasheet"
    )
    price = formatting.dollars_per_hour(gpu.dollars_per_hour)
    if narrow := takeover.narrow_gpu:
        narrow_price = formatting.dollars_per_hour(narrow.dollars_per_hour)
        detail += f"; in {takeover.narrow_format}: {narrow.name}, {narrow_price}"
    text = f"{gpu.name}: {rate}, {price} in {takeover.weight_format}"
    return TableCell(text=text, grade="predicted", detail=detail)


def _price_cell(data: ReportData) -> TableCell:
    """Return `NVIDIA H200, $7.91/h`."""
    price = None if data.gpu is None else data.gpu.dollars_per_hour
    return TableCell(text=f"{machine_words(data, GPU)}, {formatting.dollars_per_hour(price)}")
