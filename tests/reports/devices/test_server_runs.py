"""Predicted GPU servers beside measured ones (tests/bench/device_fit/data/SERVER_RUNS.md)."""

import pytest

from tests.bench.device_fit.server_runs import ClassScore, Score, by_class, scores

# Mean absolute errors of ln(time): those of the fit, and 0.03.
MAX_ERRORS = {
    "current engine, BF16": 0.11,
    "all at once, BF16, GDDR": 0.16,
    "all at once, BF16, HBM": 0.07,
    "all at once, FP8": 0.21,
    "all at once, W8A8": 0.15,
    "all at once, W8A16": 0.20,
    "all at once, 2 to 8 GPUs, HBM": 0.08,
    "all at once, 2 to 8 GPUs, GDDR": 0.11,
    "prompts of 28,600 tokens: ttft": 0.18,
    "prompts of 28,600 tokens: throughput": 0.13,
    "0.5B, current engine": 0.06,
}
MAX_BIAS = 0.12
UNBIASED = ("current engine, BF16", "all at once, BF16, GDDR", "all at once, BF16, HBM")


@pytest.fixture(scope="module")
def measured() -> list[Score]:
    return list(scores())


@pytest.fixture(scope="module")
def classes(measured: list[Score]) -> dict[str, ClassScore]:
    return by_class(measured)


@pytest.mark.parametrize("name", MAX_ERRORS)
def test_errors_of_a_class_have_not_grown(name: str, classes: dict[str, ClassScore]) -> None:
    assert classes[name].mean_absolute <= MAX_ERRORS[name]


@pytest.mark.parametrize("name", UNBIASED)
def test_hbm_and_gddr_cards_are_predicted_without_bias(
    name: str, classes: dict[str, ClassScore]
) -> None:
    assert abs(classes[name].median) <= MAX_BIAS


def test_intervals_contain_what_was_measured(
    measured: list[Score], classes: dict[str, ClassScore]
) -> None:
    assert len(measured) > 150 and classes["all"].inside >= 0.85
