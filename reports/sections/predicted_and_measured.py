"""Prediction beside measurement: what the catalog would have predicted of this machine's GPU."""

from __future__ import annotations

from collections.abc import Sequence

from crossover.models import formatting
from crossover.models.tables import Column, table_of
from crossover.reports.answers.cheapest_gpu import predicted_here
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.report_data import CellData, ReportData
from crossover.reports.sections.section import DEVICE, MODEL, Section


def predicted_and_measured(data: ReportData, answers: Sequence[ModelAnswer]) -> Section | None:
    """Return prediction and measurement of each model; None where no GPU of the catalog was
    measured."""
    predictions = {
        answer.gpu: prediction
        for answer in answers
        if answer.gpu is not None and (prediction := predicted_here(answer.gpu, data)) is not None
    }
    if not predictions:
        return None

    def predicted_words(cell: CellData) -> str:
        rate, low, high = predictions[cell].rate, predictions[cell].low, predictions[cell].high
        return formatting.rate_with_interval(rate, low, high, cell.unit_rate)

    largest = list(predictions)[-1]
    return Section(
        slug="prediction",
        title="Prediction beside measurement",
        sentence=f"Without this run the catalog predicts {predicted_words(largest)} of "
        f"{largest.model} for {predictions[largest].name}; the capacity from measured step times "
        f"is {largest.estimated_words}.",
        grades=("predicted", "estimated"),
        table=table_of(
            predictions,
            MODEL,
            DEVICE,
            Column("slots", "count", lambda cell: cell.slots),
            Column("predicted from published measurements", "number", predicted_words),
            Column("estimated from this run", "number", lambda cell: cell.estimated_words),
            Column(
                "confirmed",
                "number",
                lambda cell: cell.confirmed_words if cell.confirmed_rate else "none",
            ),
            Column(
                "predicted over estimated",
                "number",
                lambda cell: formatting.difference(predictions[cell].rate, cell.estimated_rate),
                missing="–",
            ),
        ),
        note="The same simulation with the same slots and requests: once with step times from the "
        "datasheet and published measurements, once with those of this run. It shows how far to "
        "trust the predictions for other GPUs. The low end of the predicted interval is one-sided, "
        "at 90 % confidence.",
    )
