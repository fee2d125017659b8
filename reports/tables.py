"""The first table, a row a model, and the table of levels. A cell has at most six words."""

from __future__ import annotations

import msgspec

from loadtests.analysis.capacity_text import held_words
from loadtests.analysis.slo import Slo
from loadtests.records.run_journal import Capacity
from models import formatting
from models.formatting import model_title
from reports.crossover_point import TakeOver
from reports.headline import Answer
from reports.report_data import CellData, ReportData
from reports.sections.section import Grade, Table

HEADS = ("model", "one user alone", "holds", "limit", "engine", "what takes over")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of the first table: text, its grade, and what a click tells."""

    text: str
    grade: Grade | None = None
    detail: str = ""


def answer_row(answer: Answer, slo: Slo) -> tuple[Cell, ...]:
    """The cells of one model, in the order of HEADS."""
    cell = answer.cell
    return (
        Cell(text=answer.title, detail=_model_detail(cell)),
        _alone(cell, slo),
        held_cell(cell.capacity, cell),
        limit_cell(cell.capacity),
        Cell(text=" ".join(filter(None, (cell.engine or cell.backend, cell.weight_format)))),
        takeover_cell(answer.over, cell),
    )


def _model_detail(cell: CellData) -> str:
    parts = [f"{formatting.parameters(cell.parameters)} parameters"]
    if cell.ready is not None and cell.ready.synthetic:
        parts.append("random weights of its shape: speed and memory are real, the text is noise")
    if cell.slots:
        parts.append(f"{cell.slots} requests at a time")
    if cell.choice is not None:
        parts.append(cell.choice.reason)
    return "; ".join(parts)


def _alone(cell: CellData, slo: Slo) -> Cell:
    """`83 ms, 12 ms a token, met`."""
    alone = cell.alone
    if alone is None:
        return Cell(text=cell.reason or formatting.NOT_MEASURED)
    each = "" if alone.tpot_seconds is None else f", {formatting.seconds(alone.tpot_seconds)}/token"
    met = {True: ": met", False: ": missed", None: ""}[alone.is_good]
    return Cell(
        text=f"{formatting.seconds(alone.ttft_seconds)}{each}{met}",
        detail=f"measured: medians of {alone.requests} requests one at a time",
    )


def held_cell(found: Capacity | None, cell: CellData) -> Cell:
    """What is confirmed."""
    if found is None:
        return Cell(text=cell.reason if cell.state != "measured" else formatting.NOT_MEASURED)
    if found.holds:
        text = formatting.rate(found.held, rounded="down")
        return Cell(text=text, grade="confirmed", detail=held_words(found))
    if found.state == "not_even_alone":
        return Cell(text="not even alone", detail=found.reason)
    detail = found.reason
    if found.confirm_seconds is not None:
        detail = (
            f"{detail}; crossover campaign resume {cell.run_id} --confirm takes "
            f"{formatting.duration(found.confirm_seconds)}"
        )
    return Cell(text="no rate confirmed", detail=detail.lstrip("; "))


def limit_cell(found: Capacity | None) -> Cell:
    """The estimate with its interval."""
    if found is None or found.state == "not_even_alone":
        return Cell(text="–")
    if found.method == "law" and found.limit is not None:
        said = formatting.rate_with_interval(found.limit, found.low, found.high, found.held)
        text = said.replace(" requests", "")
        detail = "simulated from step times that this run measured; 90 % interval"
        if found.speed_moved:
            detail += f"; the machine's speed moved by {found.speed_moved:.0%} meanwhile"
        return Cell(text=text, grade="estimated", detail=detail)
    if found.low is None and found.high is None:
        if found.method == "law" and not found.holds:  # its step times are too long for one
            return Cell(text="none", grade="estimated", detail=found.reason)
        return Cell(text="not known")
    text = formatting.rate_interval(found.low, found.high)
    return Cell(text=text, grade="estimated", detail="between levels that held and failed")


def takeover_cell(over: TakeOver | None, cell: CellData) -> Cell:
    """`NVIDIA T4, 12/s, $0.53/h`."""
    if over is None:
        served = "runs on a GPU" if cell.device == "gpu" else "not known"
        return Cell(text=served)
    if over.gpu is None:
        return Cell(text="no GPU in the list", grade="predicted", detail=over.reason)
    gpu = over.gpu
    rate = formatting.rate(gpu.rate)
    ends = formatting.rate_interval(gpu.low, gpu.high)
    detail = (
        f"the cheapest whose low end (90 %) holds {formatting.rate(over.rate)}; predicted "
        f"{rate} ({ends}) from its datasheet, in 16 bits"
    )
    price = formatting.dollars_per_hour(gpu.dollars_per_hour)
    return Cell(text=f"{gpu.name}: {rate}, {price}", grade="predicted", detail=detail)


def levels_table(data: ReportData) -> Table:
    """Every finished level."""
    columns = (
        *("model", "load", "good", "verdict", "TTFT p50", "p90", "TPOT p50", "p90"),
        *("tokens/s", "send lag p99", "seconds", "notes"),
    )
    rows = []
    for cell in data.cells:
        for one in cell.levels:
            level, judged = one.level, one.judged
            said = level.finished
            notes = [] if said is None else [*said.warnings]
            if said is not None and said.cut_short:
                notes.append(f"cut short: {said.cut_short}")
            if not one.counts:
                notes.append("does not count")
            rows.append(
                (
                    f"{model_title(cell.model)} {cell.weight_format} {cell.workload}".strip(),
                    formatting.load(level.rate, level.started.concurrency),
                    f"{judged.good} of {judged.due}",
                    judged.verdict,
                    formatting.seconds(one.quantile("ttft", 0.5)),
                    formatting.seconds(one.quantile("ttft", 0.9)),
                    formatting.seconds(one.quantile("tpot", 0.5)),
                    formatting.seconds(one.quantile("tpot", 0.9)),
                    _tokens(level.output_tokens_per_second),
                    formatting.seconds(one.quantile("send_lag", 0.99)),
                    f"{level.window_seconds:.0f}",
                    ", ".join(notes),
                )
            )
    return Table(columns, tuple(rows), numeric=tuple(range(4, 11)))


def _tokens(value: float | None) -> str:
    return formatting.NOT_MEASURED if value is None else formatting.significant(value)
