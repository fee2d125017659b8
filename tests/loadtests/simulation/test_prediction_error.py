"""Pairs of predicted and measured capacities, and the scale of the prediction's error."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtests.records.old_run_folder import read_events
from loadtests.simulation.prediction_error import (
    FLOOR,
    Pair,
    error_scale,
    packaged_pairs,
    pairs_in,
)
from tests.loadtests.campaign.campaigns import calibrated
from tests.loadtests.campaign.simulated import Simulated


def pair(ratio: float, wide: float = 1.0, law: str = "rows") -> Pair:
    ends = {"low": ratio / wide, "high": ratio * wide} if wide > 1 else {}
    return msgspec.convert({"what": "x", "ratio": ratio, "law": law, **ends}, Pair)


def test_a_run_yields_its_pairs(tmp_path: Path) -> None:
    folder = calibrated(tmp_path, Simulated(slots=4))
    events = read_events(folder).records
    (one,) = pairs_in(events)
    assert one.law == "rows"
    assert 0.3 < one.ratio < 3 and one.low is not None and one.high is not None
    assert one.low <= one.ratio <= one.high
    assert pairs_in(events[: len(events) // 2]) == [], "the cell is not finished"


def test_a_prediction_without_an_interval_makes_no_pair() -> None:
    folder = Path(__file__).parents[1] / "records" / "fixtures" / "two_cells"
    assert pairs_in(read_events(folder).records) == []


def test_every_packaged_pair_has_a_source_and_its_interval() -> None:
    for one in packaged_pairs():
        assert one.source and one.ratio > 0, one.what
        if one.low is not None and one.high is not None:
            assert one.low < one.ratio < one.high, one.what
    assert FLOOR <= error_scale(packaged_pairs()) < 0.5


def test_the_scale_is_the_spread_of_the_predictions() -> None:
    rng = np.random.default_rng(1)
    exact = [pair(float(np.exp(0.3 * rng.normal()))) for _ in range(400)]
    assert error_scale(exact) == pytest.approx(0.3, rel=0.15)
    measured = [pair(float(np.exp(math.hypot(0.3, 0.2) * rng.normal())), 1.39) for _ in range(400)]
    assert error_scale(measured) == pytest.approx(0.3, rel=0.2), "without the measurement's error"
    assert error_scale([*exact, *[pair(50.0)] * 20]) == pytest.approx(0.3, rel=0.25)


def test_what_the_scale_is_told_from() -> None:
    assert error_scale([pair(1.0), pair(1.01)]) == FLOOR
    vague = pair(4.0, wide=2.0)
    assert error_scale([pair(1.3), vague]) == error_scale([pair(1.3)])
    older = [pair(2.0, law="line")] * 5
    assert error_scale([*older, pair(1.2), pair(1.2)]) == error_scale(older)
    assert error_scale([*older, *[pair(1.2)] * 3]) == error_scale([pair(1.2)])
    with pytest.raises(ValueError, match="no pair"):
        error_scale([vague])
