"""Prediction beside measurement: what the catalog would have predicted of this machine's GPU."""

from __future__ import annotations

from collections.abc import Sequence

from crossover.models import formatting
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.answers.own_gpu import predicted_here
from crossover.reports.report_data import ReportData
from crossover.reports.sections.section import Section, table


def predicted_and_measured(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return prediction and measurement of each model; None where no GPU of the catalog was
    measured."""
    rows, sentence = [], ""
    for answer in answers:
        cell, prediction = answer.gpu, predicted_here(answer.gpu, data)
        if prediction is None or cell is None or cell.capacity is None:
            continue
        capacity, unit_rate = cell.capacity, cell.unit_rate
        predicted = formatting.rate_with_interval(
            prediction.rate, prediction.low, prediction.high, unit_rate
        )
        estimated = formatting.rate_with_interval(
            capacity.estimated_rate, capacity.low, capacity.high, unit_rate
        )
        confirmed = "none"
        if cell.confirmed_rate:
            confirmed = formatting.rate(cell.confirmed_rate, rounded="down", like=unit_rate)
        difference = _difference(prediction.rate, cell.estimated_rate)
        rows.append(
            (
                cell.model,
                cell.device_words,
                str(cell.slots),
                predicted,
                estimated,
                confirmed,
                difference,
            )
        )
        sentence = (
            f"Without this run the catalog predicts {predicted} of {cell.model} for "
            f"{prediction.name}; the capacity from measured step times is {estimated}."
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
                "model",
                "device",
                "slots",
                "predicted from published measurements",
                "estimated from this run",
                "confirmed",
                "predicted over estimated",
            ),
            rows,
            words=("device",),
        ),
        note="The same simulation with the same slots and requests: once with step times from the "
        "datasheet and published measurements, once with those of this run. It shows how far to "
        "trust the predictions for other GPUs. The low end of the predicted interval is one-sided, "
        "at 90 % confidence.",
    )


def _difference(predicted_rate: float | None, estimated_rate: float | None) -> str:
    """Return how far the prediction is above the estimate, `+6 %`; `–`: one of them is not
    known."""
    if not predicted_rate or not estimated_rate:
        return "–"
    difference = f"{predicted_rate / estimated_rate - 1:+.0%}"
    return difference.replace("%", " %").replace("-", "\N{MINUS SIGN}")
