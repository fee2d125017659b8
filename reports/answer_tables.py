"""The first table, a row a model, and the table of levels. A cell has at most six words.

columns = columns_of(data)         # CPU and GPU beside each other where both were measured
answer_row(answer, columns)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import msgspec
import numpy as np

from crossover.loadtests.capacity import capacity_text
from crossover.models import formatting
from crossover.reports.binding_limits import binding_of
from crossover.reports.headline import Answer, machine_words
from crossover.reports.report_data import CPU, GPU, SIDE_NAMES, CellData, ReportData
from crossover.reports.sections.section import Grade, Table, table
from crossover.serving.capacity.batching_simulator import Simulated
from crossover.serving.capacity.binding_limit import sentence_of
from crossover.serving.capacity.simulated_capacity import Server
from crossover.serving.capacity.slo import Slo

STATES = {"skipped": "skipped", "unfinished": "not finished", "not_started": "not started"}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of the first table: text, its grade, and what a click tells."""

    text: str
    grade: Grade | None = None
    detail: str = ""


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """A column of the first table. `side`: the device that it is of; "": of the model."""

    name: str  # "model", "alone", "held", "limit", "engine", "over" or "price"
    head: str
    side: str = ""

    @property
    def key(self) -> str:
        """`cpu-held`: by which the page's script finds its cells."""
        return f"{self.side}-{self.name}" if self.side else self.name

    @property
    def full_head(self) -> str:
        """Its head where no head of its device stands above it."""
        return f"{SIDE_NAMES[self.side]}: {self.head}" if self.side else self.head


HEADS = {
    "alone": "Single request (TTFT, TPOT)",
    "held": "Confirmed rate",
    "limit": "Estimated capacity (90 % CI)",
    "engine": "Engine",
}
MODEL = Column(name="model", head="Model")
TAKEOVER = Column(name="over", head="Takeover GPU (capacity, price)")
PRICE = Column(name="price", head="GPU (list price)")


def columns_of(data: ReportData) -> tuple[Column, ...]:
    """Those of the devices that were measured; where that is the CPU alone, and the GPU that takes
    over."""
    columns = [MODEL]
    for side in data.sides:
        columns += [Column(name=name, head=head, side=side) for name, head in HEADS.items()]
    if data.sides == (GPU,):
        columns.append(PRICE)
    elif GPU not in data.sides:
        columns.append(TAKEOVER)
    return tuple(columns)


def side_heads(data: ReportData) -> tuple[tuple[str, str], ...]:
    """(side, what it is and costs) of each device, to stand above its columns; () where there is
    one device alone."""
    if len(data.sides) < 2:
        return ()
    price = None if data.gpu is None else data.gpu.dollars_per_hour
    priced = formatting.dollars_per_hour(price)
    own = "price not known" if price is None else f"list price {priced}"
    words = {CPU: "price not known", GPU: own}
    return tuple(
        (side, f"{SIDE_NAMES[side]}: {machine_words(data, side)}, {words[side]}")
        for side in data.sides
    )


def answer_row(answer: Answer, data: ReportData) -> tuple[Cell, ...]:
    """The cells of one model, in the order of `columns_of`."""
    return tuple(_cell(answer, column, data) for column in columns_of(data))


def _cell(answer: Answer, column: Column, data: ReportData) -> Cell:
    if column.name == "model":
        return Cell(text=answer.title, detail=_model_detail(answer))
    if column.name == "over":
        return _takes_over(answer)
    if column.name == "price":
        return _price(data)
    cell = answer.side(column.side)
    if cell is None:
        # a GPU of the catalogue stands where none was measured
        if column.side == GPU and column.name == "limit" and answer.over is not None:
            return _takes_over(answer)
        return Cell(text=formatting.NOT_MEASURED if column.name == "held" else "–")
    makers: dict[str, Callable[[CellData, Slo], Cell]] = {
        "alone": _alone,
        "held": _held,
        "limit": _limit,
        "engine": _engine,
    }
    return makers[column.name](cell, answer.slo)


def _model_detail(answer: Answer) -> str:
    parts = [f"{answer.cell.size_words} parameters"]
    if any(cell.ready is not None and cell.ready.synthetic for cell in answer.cells):
        parts.append("random weights: speed and memory are real, the text is noise")
    for cell in answer.cells:
        where = f" on the {cell.device_words}" if len(answer.cells) > 1 else ""
        if cell.slots:
            parts.append(f"{cell.slots} requests at a time{where}")
        if cell.choice is not None:
            parts.append(cell.choice.reason)
    return "; ".join(parts)


def _engine(cell: CellData, slo: Slo) -> Cell:
    return Cell(text="–" if cell.state in ("not_started", "skipped") else cell.engine_words)


def alone_words(cell: CellData) -> str:
    """Of a single request, medians: TTFT and TPOT, `83 ms, 12 ms`.

    As measured. Where no request was measured, or none had a second token, as simulated.
    """
    return _alone_times(cell)[0]


def _alone_times(cell: CellData) -> tuple[str, str]:
    """The times in words, and how they are known."""
    measured = cell.alone
    if measured is not None and measured.ttft_seconds is not None:
        many = "1 request" if measured.requests == 1 else f"{measured.requests} requests"
        times = _times_in_words(measured.ttft_seconds, measured.tpot_seconds)
        return times, f"measured: medians of {many} sent one at a time"
    if measured is None or (simulated := _simulated_alone(cell)) is None:
        return formatting.NOT_MEASURED, ""
    ttft, tpot = (float(np.nanmedian(one)) for one in (simulated.ttft, simulated.tpot))
    return _times_in_words(ttft, tpot), "simulated from step times, medians"


def _times_in_words(ttft: float | None, tpot: float | None) -> str:
    each = "" if tpot is None else f", {formatting.seconds(tpot)}"
    return f"{formatting.seconds(ttft)}{each}"


def _alone(cell: CellData, slo: Slo) -> Cell:
    """`83 ms, 12 ms: met`; where the measured requests are too few to tell, the simulated SLO
    attainment: `83 ms, 12 ms: 84 % attainment`."""
    text, detail = _alone_times(cell)
    if cell.alone is None or not detail:
        return Cell(text=text)
    verdict = {True: "met", False: "missed", None: "unclear"}[cell.alone.is_good]
    if cell.alone.is_good is None:
        detail += "; too few to tell whether they meet the SLO"
        if (simulated := _simulated_alone(cell)) is not None:
            good = float(simulated.meets(slo).mean())
            verdict = "met" if good >= slo.target else f"{formatting.share(good, 2)} attainment"
            detail += f"; simulated SLO attainment {formatting.share(good, 2)}"
    return Cell(text=f"{text}: {verdict}", detail=detail)


@lru_cache(maxsize=32)
def _simulated_alone(cell: CellData) -> Simulated | None:
    """Requests one at a time by the cell's step-time model; None: it has none."""
    if cell.step_times is None or cell.policy is None or cell.traffic is None:
        return None
    return Server(cell.step_times, cell.policy, cell.traffic.lengths, cell.traffic.arrivals).alone()


def _held(cell: CellData, slo: Slo) -> Cell:
    """What is confirmed."""
    found = cell.capacity
    if found is None:
        text = formatting.NOT_MEASURED if cell.state == "measured" else STATES[cell.state]
        return Cell(text=text, detail=cell.reason)
    if found.is_confirmed:
        text = formatting.rate(found.confirmed_rate, rounded="down", like=cell.like)
        return Cell(text=text, grade="confirmed", detail=capacity_text.held_words(found))
    if found.state == "misses_slo_unloaded":
        return Cell(text="misses the SLO unloaded", detail=found.reason)
    parts = [found.reason] if found.reason else []
    if found.confirm_seconds is not None:
        minutes = formatting.duration(found.confirm_seconds)
        parts.append(f"crossover campaign resume {cell.folder} --confirm takes {minutes}")
    return Cell(text="none confirmed", detail="; ".join(parts))


def _limit(cell: CellData, slo: Slo) -> Cell:
    """The estimate with its interval."""
    found = cell.capacity
    text = capacity_text.limit(found, cell.like)
    if found is None or text in ("–", "not known"):
        return Cell(text=text)
    detail = "between the levels that met and missed the SLO"
    if found.method == "step_times":
        how = "simulated from step times that this run measured; 90 % confidence interval"
        parts = (
            found.reason if found.estimated_rate is None else how,
            capacity_text.speed_words(found),
            capacity_text.users_words(found),
            capacity_text.reuse_words(found, cell.like),
        )
        detail = "; ".join(filter(None, parts))
        if (binding := binding_of(cell, slo)) is not None:
            detail += f". {sentence_of(binding)}"
    return Cell(text=text, grade="estimated", detail=detail)


def _takes_over(answer: Answer) -> Cell:
    """`NVIDIA T4: 12/s, $0.53/h`."""
    over, gpu = answer.over, answer.takeover_gpu
    if over is None:
        return Cell(text="not known")
    if gpu is None:
        return Cell(text="no GPU in the list", grade="predicted", detail=over.reason)
    like = answer.cell.like
    rate = formatting.rate(gpu.rate, like=like)
    asked = formatting.rate(over.rate, like=like)
    detail = (
        f"the cheapest GPU that serves {asked} with 90 % confidence; predicted capacity {rate} "
        f"({formatting.rate_interval(gpu.low, gpu.high, like)}) from its datasheet, weights in "
        "16 bits"
    )
    price = formatting.dollars_per_hour(gpu.dollars_per_hour)
    return Cell(text=f"{gpu.name}: {rate}, {price}", grade="predicted", detail=detail)


def _price(data: ReportData) -> Cell:
    """`NVIDIA H200, $7.91/h`."""
    price = None if data.gpu is None else data.gpu.dollars_per_hour
    return Cell(text=f"{machine_words(data, GPU)}, {formatting.dollars_per_hour(price)}")


def levels_table(data: ReportData) -> Table:
    """Every finished level."""
    rows = []
    for cell in data.cells:
        for one in cell.levels:
            said = one.level.finished
            notes = [] if said is None else [*said.warnings]
            if not one.level.counts:
                notes.append("does not count")
            tokens = one.level.output_tokens_per_second
            times = [
                ("ttft", 0.5),
                ("ttft", 0.9),
                ("tpot", 0.5),
                ("tpot", 0.9),
                ("send_delay", 0.99),
            ]
            *latencies, lag = (formatting.seconds(one.quantile(*which)) for which in times)
            rows.append(
                (
                    f"{cell.model} {cell.weight_format}".strip(),
                    cell.device_words,
                    one.load(cell.like),
                    f"{one.judged.good} of {one.judged.due}",
                    one.judged.verdict,
                    *latencies,
                    formatting.NOT_MEASURED if tokens is None else formatting.significant(tokens),
                    lag,
                    f"{one.level.window_seconds:.0f}",
                    ", ".join(notes),
                )
            )
    words = ("device", "load", "met the SLO", "verdict", "notes")
    columns = (
        *("model", *words[:4], "TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90"),
        *("tokens/s", "send delay p99", "seconds", "notes"),
    )
    return table(columns, rows, words)
