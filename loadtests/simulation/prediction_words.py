"""A prediction in words, beside what was measured and never inside it."""

from __future__ import annotations

from loadtests.capacity.words import AT_NO_RATE
from loadtests.records.events import Capacity, PredictedRate
from loadtests.simulation.calibration import prediction_ratio
from models import formatting


def predicted_words(predicted: PredictedRate) -> str:
    """`0.64 requests/s (0.46–0.86)`, with p10 and p90 where they are known, or `at no rate`."""
    if not predicted.rate:
        return AT_NO_RATE
    return formatting.rate_with_interval(predicted.rate, predicted.low, predicted.high)


def ratio_words(predicted: PredictedRate, found: Capacity | None) -> str:
    """`1.6 x what was measured (1.2–2.0)`; "" where no level bounds the capacity."""
    ratio = prediction_ratio(predicted.rate, found) if found is not None else None
    if ratio is None:
        return ""
    low, middle, high = ratio
    return (
        f"{formatting.significant(middle)} x what was measured ({formatting.interval(low, high)})"
    )


def predicted_beside(predicted: PredictedRate, found: Capacity | None) -> str:
    """`predicted 0.64 requests/s (0.46–0.86), 1.6 x what was measured (1.2–2.0)`."""
    ratio = ratio_words(predicted, found)
    words = f"predicted {predicted_words(predicted)}"
    return f"{words}, {ratio}" if ratio else words
