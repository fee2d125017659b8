"""The SLO: verdicts at their stated confidence, and SLOs that cannot be."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.metrics.slo import SLO_PRESETS, Slo, is_hopeless, requests_to_hold, verdict
from loadtests.metrics.wilson import wilson

CHAT = SLO_PRESETS["chat"]


def test_wilson_equals_the_published_interval():
    # Newcombe (1998), table I, 81 of 263: 0.2553 to 0.3662 at 95 % two-sided, which is 97.5 % on
    # each side.
    assert wilson(81, 263, 0.975) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20, 0.975) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_nothing_measured_is_nothing_known():
    assert wilson(0, 0) == (0.0, 1.0)
    assert verdict(0, 0, CHAT) == "unresolved"


@pytest.mark.parametrize(("good", "due"), [(-1, 5), (6, 5), (0, -1)])
def test_counts_that_cannot_be(good, due):
    with pytest.raises(ValueError, match="cannot be"):
        wilson(good, due)


def test_fewest_requests_that_can_hold():
    for slo in (
        CHAT,
        Slo("p90", 1.0, None, target=0.9),
        Slo("p50", 1.0, None, target=0.5, confidence=0.99),
    ):
        n = requests_to_hold(slo)
        assert verdict(n, n, slo) == "holds"
        assert verdict(n - 1, n - 1, slo) == "unresolved"


def test_verdicts_are_wrong_no_more_often_than_stated():
    # At a true share of exactly the target, "holds" and "fails" are both wrong: each at most 5 % of
    # the time (Wilson is about that).
    rng = np.random.default_rng(0)
    slo = Slo("x", 1.0, None, target=0.9, confidence=0.95)
    verdicts = [verdict(int(good), 400, slo) for good in rng.binomial(400, 0.9, 4000)]
    assert 0.02 < verdicts.count("holds") / 4000 < 0.065
    assert 0.02 < verdicts.count("fails") / 4000 < 0.065


def test_hopeless_means_that_the_rest_cannot_save_it():
    assert not is_hopeless(0, 100, CHAT)
    first = next(bad for bad in range(1, 101) if is_hopeless(bad, 100, CHAT))
    assert verdict(100 - first, 100, CHAT) == "fails"
    assert verdict(100 - first + 1, 100, CHAT) == "unresolved"
    assert is_hopeless(5, 3, CHAT)  # more bad ones than were planned


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttft_seconds", 0.0),
        ("tpot_seconds", -1.0),
        ("target", 1.0),
        ("target", 0.0),
        ("confidence", 0.5),
    ],
)
def test_an_slo_that_cannot_be_is_refused_with_its_key(field, value):
    with pytest.raises(msgspec.ValidationError, match=f"{field} must be"):
        msgspec.convert({"name": "x", "ttft_seconds": 1.0, "tpot_seconds": None, field: value}, Slo)


ORDER = ["fails", "unresolved", "holds"]


@given(st.integers(0, 400), st.integers(1, 400), st.sampled_from([0.5, 0.9, 0.99]))
@settings(max_examples=150, deadline=None)
def test_a_verdict_never_gets_worse_by_a_good_request(good, due, target):
    slo = Slo("x", 1.0, None, target=target)
    good = min(good, due)
    now = ORDER.index(verdict(good, due, slo))
    assert ORDER.index(verdict(good + 1, due + 1, slo)) >= now
    assert ORDER.index(verdict(good, due + 1, slo)) <= now
    if good < due:
        assert ORDER.index(verdict(good + 1, due, slo)) >= now


@given(st.integers(0, 300), st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_a_hopeless_level_fails_however_the_rest_ends(bad, planned):
    if not is_hopeless(bad, planned, CHAT):
        return
    assert bad > 0
    for later_good in {0, max(planned - bad, 0)}:
        assert verdict(later_good, max(planned, bad), CHAT) == "fails"


def test_an_slo_has_no_other_keys_and_does_not_change():
    with pytest.raises(msgspec.ValidationError, match="unknown field `ttft`"):
        msgspec.convert({"name": "x", "ttft_seconds": 1, "tpot_seconds": None, "ttft": 1}, Slo)
    with pytest.raises(AttributeError, match="immutable"):
        CHAT.target = 0.5


def test_one_bad_request_of_one_is_hopeless_and_confidence_is_a_share():
    assert is_hopeless(1, 1, CHAT) and not is_hopeless(0, 0, CHAT)
    for confidence in (0.0, 1.0, 2.0):
        with pytest.raises(ValueError, match="confidence must be between 0 and 1"):
            wilson(1, 2, confidence)


def test_presets_are_the_published_limits():
    limits = {name: (slo.ttft_seconds, slo.tpot_seconds) for name, slo in SLO_PRESETS.items()}
    assert limits == {
        "chat": (2.0, 0.1),
        "interactive": (0.5, 0.03),
        "70b-server": (2.0, 0.2),
        "70b-interactive": (0.45, 0.04),
        "405b-server": (6.0, 0.175),
        "405b-interactive": (4.5, 0.08),
        "reading": (5.0, 0.2),
        "batch": (None, None),
    }
    assert {(slo.target, slo.confidence) for slo in SLO_PRESETS.values()} == {(0.99, 0.95)}


def test_bounds_of_a_level_of_one_and_of_the_usual_confidence():
    # By hand, one of one: z^2 = 2.7055, bounds 1 / (1 + z^2) and 1.
    low, high = wilson(1, 1)
    assert low == pytest.approx(1 / 3.7055, rel=1e-4) and high == 1.0
    low, high = wilson(0, 1)
    assert low == 0.0 and high == pytest.approx(2.7055 / 3.7055, rel=1e-4)


def test_the_fewest_requests_are_those_of_the_formula():
    assert requests_to_hold(CHAT) == 268
    assert requests_to_hold(Slo("half", 1.0, None, target=0.5)) == 3


def test_an_slo_at_the_edges_is_allowed():
    for changes in ({"target": 0.001}, {"target": 0.999}, {"confidence": 0.501}):
        Slo("x", 0.001, 0.001, **changes)
    for confidence in (0.3, 1.0):
        with pytest.raises(ValueError, match="confidence must be between 0.5 and 1"):
            Slo("x", 1.0, None, confidence=confidence)
    for seconds in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="ttft_seconds must be above 0"):
            Slo("x", seconds, None)
