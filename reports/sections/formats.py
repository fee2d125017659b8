"""Formats and engines of one model side by side: speed, memory, quality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from loadtests.analysis.capacity_text import in_words
from models import formatting
from models.formatting import model_title
from reports.headline import Answer
from reports.report_data import CellData, ReportData
from reports.sections.prefill_decode import speeds
from reports.sections.section import Section, Table


def formats(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where each model was measured in one way."""
    counts = Counter(cell.model for cell in data.cells)
    several = [cell for cell in data.cells if counts[cell.model] > 1]
    if not several:
        return _chosen(data)
    table = Table(
        ("model", "engine", "capacity", "reads", "writes", "memory", "quality"),
        tuple(_row(cell) for cell in several),
        numeric=(3, 4, 5),
    )
    best = max(several, key=lambda cell: cell.limit or 0.0)
    return Section(
        slug="formats",
        title="Formats and engines",
        sentence=f"{_name(best)} serves most of {model_title(best.model)}.",
        grades=("measured",),
        table=table,
        note="Quality: KL divergence to the float model on text, in nats; of random weights none "
        "is told.",
    )


def _name(cell: CellData) -> str:
    parts = (cell.engine or cell.backend, cell.weight_format, cell.hardware, cell.workload)
    return " ".join(filter(None, parts))


def _row(cell: CellData) -> tuple[str, ...]:
    speed = speeds(cell)
    reads, writes = ("", "") if speed is None else map(formatting.significant, speed[:2])
    ready = cell.ready
    quality = None if ready is None or ready.synthetic else ready.info.quality_kl_nats
    return (
        model_title(cell.model),
        _name(cell),
        in_words(cell.capacity) if cell.capacity is not None else cell.reason,
        f"{reads} tokens/s" if reads else formatting.NOT_MEASURED,
        f"{writes} tokens/s" if writes else formatting.NOT_MEASURED,
        formatting.size(cell.memory.peak_bytes or cell.memory.predicted_bytes),
        "–" if quality is None else f"{formatting.significant(quality)} nats",
    )


def _chosen(data: ReportData) -> Section | None:
    """What the engine of each cell was chosen from."""
    rows = [
        (
            model_title(cell.model),
            f"{one.backend} {one.weight_format}",
            formatting.rate(one.requests_per_second),
            "chosen" if one.is_chosen else one.why_not,
        )
        for cell in data.cells
        if cell.choice is not None
        for one in cell.choice.engines
    ]
    if not rows:
        return None
    chosen = [row for row in rows if row[3] == "chosen"]
    return Section(
        slug="formats",
        title="Engines that were chosen from",
        sentence=", ".join(f"{model}: {engine}" for model, engine, _, _ in chosen) + ".",
        grades=("estimated",),
        table=Table(("model", "engine", "would hold", ""), tuple(rows), numeric=(2,)),
        note="From step times that seconds of calibration gave of each candidate.",
    )
