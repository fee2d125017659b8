"""Arrival processes against their theory."""

import json

import msgspec
import numpy as np
import pytest

from crossover.serving.errors import WorkloadError
from crossover.serving.workload.arrivals import (
    Arrivals,
    Constant,
    Gamma,
    Poisson,
    Trace,
    due_times,
    recorded_arrivals,
)

RATE, LONG = 20.0, 6000.0  # requests/s, seconds
KINDS: list[Arrivals] = [Constant(), Poisson(), Gamma(cv=2.5)]


def kind(process):
    return type(process).__name__


def trace(path, stamps):
    rows = [{"seconds": float(s), "prompt_tokens": 5, "output_tokens": 5} for s in stamps]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("process", KINDS, ids=kind)
def test_every_arrival_process_has_the_requested_rate(process):
    rates = [len(due_times(process, RATE, LONG, seed)) / LONG for seed in range(3)]
    assert np.mean(rates) == pytest.approx(RATE, rel=0.02)


@pytest.mark.parametrize("process", KINDS, ids=kind)
def test_times_ascend_within_the_level_and_are_the_same_for_the_same_seed(process):
    times = due_times(process, RATE, 100.0, 7)
    assert np.all(np.diff(times) >= 0) and times[0] >= 0 and times[-1] < 100.0
    assert np.array_equal(times, due_times(process, RATE, 100.0, 7))
    if not isinstance(process, Constant):
        assert not np.array_equal(times[:50], due_times(process, RATE, 100.0, 8)[:50])


@pytest.mark.parametrize("process", KINDS, ids=kind)
def test_a_longer_level_starts_like_a_shorter_one(process):
    short, long = due_times(process, RATE, 60.0, 3), due_times(process, RATE, 240.0, 3)
    assert np.allclose(short, long[: len(short)]) and long[len(short)] >= 60.0


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gamma_has_its_variation_and_starts_in_equilibrium(cv):
    from scipy.stats import kstest  # a second to import, in every worker

    gaps = np.diff(due_times(Gamma(cv=cv), RATE, LONG, 2))
    shape = 1 / cv**2
    assert kstest(gaps, "gamma", args=(shape, 0, 1 / (shape * RATE))).statistic < 0.05
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.05)
    # In equilibrium a short level has the asked number of arrivals on average, however bursty; from
    # an arrival at 0 it would have more.
    short = [len(due_times(Gamma(cv=cv), 1.0, 4.0, seed)) for seed in range(1500)]
    assert np.mean(short) == pytest.approx(4.0, abs=4 * np.std(short) / np.sqrt(1500))


def test_a_trace_is_replayed_at_the_requested_rate_and_repeated(tmp_path):
    stamps = np.cumsum(np.random.default_rng(0).exponential(2.0, 400))
    times = due_times(Trace(trace(tmp_path / "own.jsonl", stamps)), 4.0, 250.0, 1)
    assert len(times) / 250.0 == pytest.approx(4.0, rel=0.03)
    gaps, found = np.diff(stamps), np.diff(times)
    assert found[:399] / gaps == pytest.approx(np.full(399, found[0] / gaps[0])), "only stretched"
    assert found[400:798] == pytest.approx(found[:398]), "the second lap is the first again"


def test_quantised_stamps_are_spread_within_their_step(tmp_path):
    true = np.cumsum(np.random.default_rng(1).exponential(0.3, 6000))
    coarse = np.floor(true / 3.0) * 3.0
    path = trace(tmp_path / "coarse.jsonl", coarse)
    coarse -= coarse[0]
    rate = len(coarse) / (coarse[-1] + 3.0)  # as recorded: not stretched
    spread = due_times(Trace(path), rate, 1500.0, 1)
    cv_raw, cv = (np.std(np.diff(t)) / np.mean(np.diff(t)) for t in (coarse, spread))
    assert cv_raw > 2.5, "the artefact"
    assert cv == pytest.approx(1.0, abs=0.06), "what it was"
    counts = [np.histogram(t, 450, (0, 1350))[0] for t in (spread, coarse + 1e-9)]
    assert np.all(counts[0] == counts[1]), "spread within the step, never out of it"


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "gamma", "cv": 0}',
        '{"kind": "ramp"}',
        '{"kind": "poison"}',
        '{"kind": "poisson", "cv": 1}',
    ],
)
def test_settings_that_cannot_be_are_refused(text):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Arrivals)


def test_rates_and_traces_that_cannot_be_are_errors(tmp_path):
    for rate, seconds in ((0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))):
        with pytest.raises(WorkloadError, match="must be above 0"):
            due_times(Poisson(), rate, seconds, 0)
    with pytest.raises(WorkloadError, match="too few timestamps to replay"):
        due_times(Trace(trace(tmp_path / "one.jsonl", [3.0])), 1.0, 10.0, 0)
    with pytest.raises(WorkloadError, match="no such file"):
        due_times(Trace("/nowhere.csv"), 1.0, 10.0, 0)


def test_a_process_on_record_is_read_again():
    for process in KINDS:
        assert recorded_arrivals(msgspec.to_builtins(process)) == process
    with pytest.raises(WorkloadError, match="recorded arrivals cannot be read"):
        recorded_arrivals({"kind": "tea"})
