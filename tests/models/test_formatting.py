from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import formatting
from models.formatting import GIB, NOT_MEASURED


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0834, "83 ms"),
        (2.0, "2.0 s"),
        (0.9999, "1.0 s"),
        (0.99, "990 ms"),
        (0.00099, "990 µs"),
        (59.6, "60 s"),
        (180, "3.0 min"),
        (7300, "2.0 h"),
        (math.inf, "never"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert formatting.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0999, 2, "0.10"),
        (0.824, 2, "0.82"),
        (9.96, 2, "10"),
        (1234.5, 2, "1,234"),
        (12.34, 3, "12.3"),
        (0.000123, 2, "0.00012"),
        (0.0, 2, "0"),
    ],
)
def test_significant(value: float, digits: int, text: str) -> None:
    assert formatting.significant(value, digits) == text


@given(st.floats(min_value=1e-6, max_value=1e6), st.integers(2, 4))
def test_significant_is_within_half_a_digit(value: float, digits: int) -> None:
    shown = float(formatting.significant(value, digits).replace(",", ""))
    assert abs(shown - value) <= 0.5000001 * max(
        10.0 ** (math.floor(math.log10(value)) + 1 - digits), 0.0 if value < 10**digits else 1.0
    )


@pytest.mark.parametrize(
    ("value", "digits", "down", "up"),
    [
        (5.65, 2, "5.6", "5.7"),
        (637 / 60, 2, "10", "11"),
        (9.96, 2, "9.9", "10"),
        (0.0999, 2, "0.099", "0.10"),
        (123.7, 2, "123", "124"),
        (0.07 * 60, 2, "4.2", "4.2"),  # 4.200000000000001
        (0.29 * 100, 2, "29", "29"),  # 28.999999999999996
        (5.6, 3, "5.60", "5.60"),
        (0.0, 2, "0", "0"),
    ],
)
def test_a_bound_is_rounded_to_its_own_side(value: float, digits: int, down: str, up: str) -> None:
    assert formatting.significant(value, digits, "down") == down
    assert formatting.significant(value, digits, "up") == up


@given(st.floats(min_value=1e-6, max_value=1e6), st.integers(2, 4))
def test_a_bound_stays_one_and_is_within_a_digit(value: float, digits: int) -> None:
    down, up = (
        float(formatting.significant(value, digits, rounded).replace(",", ""))
        for rounded in ("down", "up")
    )
    digit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits) if value < 10**digits else 1.0
    assert down <= value * (1 + 2e-9) and up >= value * (1 - 2e-9)
    assert up - down <= 1.0000001 * digit


def test_missing_is_said_and_never_a_number() -> None:
    for function in (
        formatting.seconds,
        formatting.rate,
        formatting.size,
        formatting.share,
        formatting.count,
        formatting.bandwidth,
    ):
        assert function(None) == NOT_MEASURED  # type: ignore[operator]
    assert formatting.rate_with_interval(None, None, None) == NOT_MEASURED


def test_intervals() -> None:
    assert formatting.rate_with_interval(1.824, 1.71, 1.943) == "1.8 requests/s (1.7–2.0)"
    assert (
        formatting.rate_with_interval(1.824, 1.815, 1.833) == "1.82 requests/s (1.81–1.84)"
    )  # two digits would not tell its ends apart
    assert formatting.interval(0.5, None) == "above 0.50"
    assert formatting.interval(0.559, None) == "above 0.55"
    assert formatting.interval(None, 0.551) == "below 0.56"
    assert formatting.rate_interval(1.71, 1.943) == "1.7–2.0/s"
    assert formatting.rate_interval(None, 0.05) == "below 180 an hour"
    assert formatting.rate_interval(None, None) == NOT_MEASURED
    assert formatting.interval(None, 0.5) == "below 0.50"


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (0.0, "0 requests/s"),
        (2.4, "2.4 requests/s"),
        (0.57, "34 requests a minute"),
        (0.0999, "360 requests an hour"),
        (0.044, "160 requests an hour"),
        (1 / 60, "60 requests an hour"),
        (0.0125, "45 requests an hour"),
        (0.0002, "0.72 requests an hour"),
    ],
)
def test_slow_rates_are_said_per_minute_or_per_hour(per_second: float, text: str) -> None:
    assert formatting.requests(per_second) == text
    assert formatting.rate(per_second) == text.replace(" requests", "")


def test_the_load_of_a_level_is_a_rate_or_users() -> None:
    assert formatting.load(2.4, 7) == "2.4/s"
    assert formatting.load(0.0999, digits=3, said=formatting.requests) == "360 requests an hour"
    assert formatting.load(None, 8) == "8 users"
    assert formatting.load(None, 1) == formatting.load(None) == "alone"


def test_an_interval_is_in_the_unit_of_its_rate() -> None:
    assert formatting.rate_with_interval(0.044, 0.029, 0.13) == "160 requests an hour (100–470)"
    assert formatting.rate_with_interval(0.5, 0.4, 2.0) == "30 requests a minute (24–120)"


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1536, "1.5 KiB"),
        (400 << 20, "400 MiB"),
        (1023 << 20, "1023 MiB"),
        (999.9 * (1 << 20), "1000 MiB"),
        (1.2 * GIB, "1.2 GiB"),
        (21.44 * GIB, "21.4 GiB"),
        (3 << 39, "1.5 TiB"),
    ],
)
def test_sizes(size_bytes: float, text: str) -> None:
    assert formatting.size(size_bytes) == text


def test_limits_are_shown_as_they_were_set() -> None:
    shown = [formatting.limit(seconds) for seconds in (0.025, 0.1, 0.45, 2.0, 4.5, 30.0)]
    assert shown == ["25 ms", "100 ms", "450 ms", "2 s", "4.5 s", "30 s"]


def test_durations() -> None:
    shown = [formatting.duration(seconds) for seconds in (0, 0.4, 59, 60, 95, 660, 7300)]
    assert shown == ["0 s", "1 s", "59 s", "1 min", "1 min 35 s", "11 min", "2 h 1 min"]


def test_share_never_rounds_to_all_or_none() -> None:
    assert formatting.share(1.0) == "100 %"
    assert formatting.share(0.9999) == ">99.9 %"
    assert formatting.share(0.99) == "99 %"
    assert formatting.share(0.0) == "0 %"
    assert formatting.share(0.00872) == "0.87 %"


def test_parameters_and_names() -> None:
    assert formatting.parameters(134_515_008) == "135M"
    assert formatting.parameters(1_235_814_400) == "1.2B"
    assert formatting.parameters(70_553_706_496) == "71B"
    assert formatting.model_title("llama-3.2-1b") == "Llama-3.2-1B"
    assert formatting.model_title("smollm2-135m") == "SmolLM2-135M"
    assert formatting.model_title("my/model.gguf") == "my/model.gguf"
    assert formatting.listing(["a", "b", "c"]) == "a, b and c"


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="no measured number"):
        formatting.significant(math.inf)
