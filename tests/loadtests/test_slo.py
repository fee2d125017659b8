"""The promise: verdicts at their stated confidence, and promises that cannot be."""

import msgspec
import numpy as np
import pytest

from loadtests.slo import PROMISES, Promise, is_hopeless, requests_to_hold, verdict, wilson

CHAT = PROMISES["chat"]


def test_wilson_equals_the_published_interval():
    # Newcombe (1998), table I, 81 of 263: 0.2553 to 0.3662 at 95 % two-sided, which is 97.5 % on each side.
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
    for promise in (CHAT, Promise("p90", 1.0, None, target=0.9), Promise("p50", 1.0, None, target=0.5, confidence=0.99)):
        n = requests_to_hold(promise)
        assert verdict(n, n, promise) == "holds"
        assert verdict(n - 1, n - 1, promise) == "unresolved"


def test_verdicts_are_wrong_no_more_often_than_stated():
    # At a true share of exactly the target, "holds" and "fails" are both wrong: each at most 5 % of the time (Wilson is about that).
    rng = np.random.default_rng(0)
    promise = Promise("x", 1.0, None, target=0.9, confidence=0.95)
    verdicts = [verdict(int(good), 400, promise) for good in rng.binomial(400, 0.9, 4000)]
    assert 0.02 < verdicts.count("holds") / 4000 < 0.065
    assert 0.02 < verdicts.count("fails") / 4000 < 0.065


def test_hopeless_means_that_the_rest_cannot_save_it():
    assert not is_hopeless(0, 100, CHAT)
    first = next(bad for bad in range(1, 101) if is_hopeless(bad, 100, CHAT))
    assert verdict(100 - first, 100, CHAT) == "fails"
    assert verdict(100 - first + 1, 100, CHAT) == "unresolved"
    assert is_hopeless(5, 3, CHAT)  # more bad ones than were planned


@pytest.mark.parametrize(
    ("field", "value"), [("ttft_seconds", 0.0), ("tpot_seconds", -1.0), ("target", 1.0), ("target", 0.0), ("confidence", 0.5)]
)
def test_a_promise_that_cannot_be_is_refused_with_its_key(field, value):
    with pytest.raises(msgspec.ValidationError, match=f"{field} must be"):
        msgspec.convert({"name": "x", "ttft_seconds": 1.0, "tpot_seconds": None, field: value}, Promise)
