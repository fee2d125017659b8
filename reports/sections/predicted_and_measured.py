"""Prediction beside measurement: what the catalogue would have said of this machine's GPU."""

from __future__ import annotations

from collections.abc import Sequence

from crossover.models import formatting
from crossover.reports.headline import Answer
from crossover.reports.own_gpu import predicted_here
from crossover.reports.report_data import ReportData
from crossover.reports.sections.section import Section, table


def predicted_and_measured(data: ReportData, answers: Sequence[Answer]) -> Section | None:
    """None where no GPU of the catalogue was measured."""
    rows, sentence = [], ""
    for one in answers:
        predicted, cell = predicted_here(one.gpu, data), one.gpu
        if predicted is None or cell is None or cell.capacity is None:
            continue
        found, like = cell.capacity, cell.like
        said = formatting.rate_with_interval(predicted.rate, predicted.low, predicted.high, like)
        estimated = formatting.rate_with_interval(found.estimated_rate, found.low, found.high, like)
        held = (
            formatting.rate(cell.confirmed_rate, rounded="down", like=like)
            if cell.confirmed_rate
            else "none"
        )
        rows.append(
            (cell.model, cell.device_words, str(cell.slots), said, estimated, held, _off(one, data))
        )
        sentence = (
            f"Without this run the catalogue predicts {said} of {cell.model} for {predicted.name}; "
            f"the capacity from measured step times is {estimated}."
        )
    if not rows:
        return None
    return Section(
        slug="prediction",
        title="Prediction beside measurement",
        sentence=sentence,
        grades=("predicted", "estimated"),
        table=table(
            (
                *("model", "device", "slots", "predicted from published measurements"),
                *("estimated from this run", "confirmed", "predicted over estimated"),
            ),
            rows,
            words=("device",),
        ),
        note="The same simulation with the same slots and requests: once with step times from the "
        "datasheet and published measurements, once with those of this run. It shows how far to "
        "trust the predictions for other GPUs. The low end of the predicted interval is one-sided, "
        "at 90 % confidence.",
    )


def _off(one: Answer, data: ReportData) -> str:
    """`+6 %`."""
    predicted = predicted_here(one.gpu, data)
    limit = None if one.gpu is None else one.gpu.estimated_rate
    if predicted is None or not predicted.rate or not limit:
        return "–"
    return f"{predicted.rate / limit - 1:+.0%}".replace("%", " %").replace("-", "\N{MINUS SIGN}")
