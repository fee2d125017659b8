"""The first table, a row a model, and the table of levels. A cell has at most six words."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from loadtests.analysis import capacity_text
from loadtests.simulation.batching_simulator import Simulated
from loadtests.simulation.simulated_capacity import Server
from models import formatting
from reports.headline import Answer
from reports.report_data import CellData, ReportData
from reports.sections.section import Grade, Table, table

HEADS = (
    *("model", "one user: first token, then each", "holds (confirmed)"),
    *("limit (estimated, 90 % interval)", "engine", "above that: GPU, its rate, price"),
)
STATES = {"skipped": "skipped", "unfinished": "not finished", "not_started": "not begun"}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of the first table: text, its grade, and what a click tells."""

    text: str
    grade: Grade | None = None
    detail: str = ""


def answer_row(answer: Answer) -> tuple[Cell, ...]:
    """The cells of one model, in the order of HEADS."""
    cell = answer.cell
    return (
        Cell(text=answer.title, detail=_model_detail(cell)),
        _alone(answer),
        _held(cell),
        _limit(cell),
        Cell(text="–" if cell.state in ("not_started", "skipped") else cell.engine_words),
        _takes_over(answer),
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


def alone_words(cell: CellData) -> str:
    """Of one user, medians: first token and each after it, `83 ms, then 12 ms`.

    By the step law where there is one: in the time that one user is given, a slow model answers few
    requests, and not those that a quick one does.
    """
    if cell.alone is None:
        return formatting.NOT_MEASURED
    if (simulated := _simulated_alone(cell)) is None:
        return _times_in_words(cell.alone.ttft_seconds, cell.alone.tpot_seconds)
    ttft, tpot = (float(np.nanmedian(one)) for one in (simulated.ttft, simulated.tpot))
    return _times_in_words(ttft, tpot)


def _times_in_words(ttft: float | None, tpot: float | None) -> str:
    each = "" if tpot is None else f", then {formatting.seconds(tpot)}"
    return f"{formatting.seconds(ttft)}{each}"


def _alone(answer: Answer) -> Cell:
    """`83 ms, then 12 ms: met`; by the law where it is not sure, `83 ms, then 12 ms: 84 % good`."""
    cell, slo = answer.cell, answer.slo
    if cell.alone is None:
        return Cell(text=alone_words(cell))
    told = {True: "met", False: "missed", None: "unclear"}[cell.alone.is_good]
    measured = _times_in_words(cell.alone.ttft_seconds, cell.alone.tpot_seconds)
    detail = f"measured, medians of {cell.alone.requests} requests: {measured}"
    if (simulated := _simulated_alone(cell)) is not None:
        detail = f"simulated from step times, medians; {detail}"
        if cell.alone.is_good is None:
            good = simulated.good(slo.ttft_seconds, slo.tpot_seconds).mean()
            told = f"{formatting.share(float(good), 2)} good"
    elif cell.alone.is_good is None:
        detail += ", too few to tell whether the share is met"
    return Cell(text=f"{alone_words(cell)}: {told}", detail=detail)


@lru_cache(maxsize=32)
def _simulated_alone(cell: CellData) -> Simulated | None:
    """Requests one at a time by the cell's step law; None: it has none."""
    if cell.law is None or cell.policy is None or cell.traffic is None:
        return None
    return Server(cell.law, cell.policy, cell.traffic.lengths, cell.traffic.arrivals).alone()


def _held(cell: CellData) -> Cell:
    """What is confirmed."""
    found = cell.capacity
    if found is None:
        text = formatting.NOT_MEASURED if cell.state == "measured" else STATES[cell.state]
        return Cell(text=text, detail=cell.reason)
    if found.holds:
        text = formatting.rate(found.held, rounded="down", like=cell.like)
        return Cell(text=text, grade="confirmed", detail=capacity_text.held_words(found))
    if found.state == "not_even_alone":
        return Cell(text="not even alone", detail=found.reason)
    parts = [found.reason] if found.reason else []
    if found.confirm_seconds is not None:
        minutes = formatting.duration(found.confirm_seconds)
        parts.append(f"crossover campaign resume {cell.folder} --confirm takes {minutes}")
    return Cell(text="no rate confirmed", detail="; ".join(parts))


def _limit(cell: CellData) -> Cell:
    """The estimate with its interval."""
    found = cell.capacity
    text = capacity_text.limit(found, cell.like)
    if found is None or text in ("–", "not known"):
        return Cell(text=text)
    detail = "between levels that held and failed"
    if found.method == "law":
        how = "simulated from step times that this run measured; 90 % interval"
        parts = (found.reason if found.limit is None else how, capacity_text.speed_words(found))
        detail = "; ".join(filter(None, parts))
    return Cell(text=text, grade="estimated", detail=detail)


def _takes_over(answer: Answer) -> Cell:
    """`NVIDIA T4: 12/s, $0.53/h`."""
    over, gpu = answer.over, answer.gpu
    if over is None:
        return Cell(text="runs on a GPU" if answer.cell.device == "gpu" else "not known")
    if gpu is None:
        return Cell(text="no GPU in the list", grade="predicted", detail=over.reason)
    like = answer.cell.like
    rate = formatting.rate(gpu.rate, like=like)
    asked = formatting.rate(over.rate, like=like)
    detail = (
        f"the cheapest of the list that holds {asked} in nine cases of ten; predicted {rate} "
        f"({formatting.rate_interval(gpu.low, gpu.high, like)}) from its datasheet, weights in "
        "16 bits"
    )
    price = formatting.dollars_per_hour(gpu.dollars_per_hour)
    return Cell(text=f"{gpu.name}: {rate}, {price}", grade="predicted", detail=detail)


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
            times = [("ttft", 0.5), ("ttft", 0.9), ("tpot", 0.5), ("tpot", 0.9), ("send_lag", 0.99)]
            *latencies, lag = (formatting.seconds(one.quantile(*which)) for which in times)
            rows.append(
                (
                    f"{cell.model} {cell.weight_format}".strip(),
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
    words = ("load", "good", "verdict", "notes")
    columns = (
        *("model", *words[:3], "TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90"),
        *("tokens/s", "sent late p99", "seconds", "notes"),
    )
    return table(columns, rows, words)
