"""The step-time model: its numbers found again, and what a fit may not do."""

import msgspec
import numpy as np
import pytest

from crossover.serving.capacity.step_time_model import (
    COEFFICIENTS,
    StepObservation,
    fit_step_times,
    without_interruptions,
)
from crossover.serving.errors import WorkloadError
from tests.loadtests.capacity.known_server import EXPERTS_STEP_TIMES, SERVER_STEPS, STEP_TIMES


def seen(step_times, count=60, noise=0.0, seed=1):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        steps = int(rng.integers(1, 4))
        rows, passes = int(rng.integers(0, 9)) * steps, steps + int(rng.integers(0, 3))
        counts = (rows, int(rng.integers(0, 300)), rows * int(rng.integers(50, 600)), passes, steps)
        experts = step_times.expert_passes(rows, counts[1], passes, steps)
        seconds = step_times.seconds(*counts) * float(np.exp(noise * rng.normal()))
        names = ("rows", "prompt_tokens", "context_tokens", "passes", "steps")
        counted = dict(zip(names, counts, strict=True))
        found.append(StepObservation(seconds=seconds, expert_passes=experts, **counted))
    return found


@pytest.mark.parametrize("step_times", [STEP_TIMES, EXPERTS_STEP_TIMES], ids=["dense", "experts"])
def test_the_numbers_are_found_again(step_times):
    found = fit_step_times(seen(step_times), experts=step_times.experts)
    for name in COEFFICIENTS:
        assert getattr(found, name) == pytest.approx(getattr(step_times, name), rel=1e-6), name
    assert found.experts == step_times.experts
    assert found.error < 1e-6 and found.observations == 60 and found.fits


def test_experts_that_explain_nothing_cost_nothing():
    """As of 4-bit weights on a small CPU, whose kernels take each row of a mixture by itself."""
    by_rows = msgspec.structs.replace(EXPERTS_STEP_TIMES, expert_seconds=0.0)
    found = fit_step_times(seen(by_rows), experts=by_rows.experts)
    assert found.expert_seconds == pytest.approx(0.0, abs=1e-9)
    assert found.row_seconds == pytest.approx(by_rows.row_seconds, rel=1e-6)


def test_a_step_reads_the_experts_that_its_tokens_are_routed_to():
    """Each pass of 8 of 128 experts: 1 row reads 6.25 % of them, 16 rows 64.4 %, and a long prompt
    all of them."""
    step_times = EXPERTS_STEP_TIMES
    assert step_times.expert_passes(1, 0) == pytest.approx(0.0625)
    assert step_times.expert_passes(16, 0) == pytest.approx(0.644, abs=0.001)
    assert step_times.expert_passes(0, 500) == pytest.approx(1.0)
    assert step_times.expert_passes(16, 500, passes=2) == pytest.approx(1.644, abs=0.001)
    on_gpu = msgspec.structs.replace(step_times, shares_pass=True)
    assert on_gpu.expert_passes(16, 500, passes=2) == pytest.approx(1.0), "one pass for both"
    assert step_times.expert_passes(32, 0, passes=2, steps=2) == pytest.approx(2 * 0.644, abs=0.002)
    assert STEP_TIMES.expert_passes(16, 500, passes=2) == 0.0, "a dense model has none"


def test_the_error_is_that_of_what_was_left_out():
    found = fit_step_times(seen(STEP_TIMES, 400, noise=0.1))
    assert found.error == pytest.approx(0.1, rel=0.15)
    assert not fit_step_times(seen(STEP_TIMES, 400, noise=0.4)).fits


def test_what_was_taken_is_counted_for_the_steps_that_were_interrupted():
    """Every third step takes twice as long. Of its time as much is taken as of the others', since
    only what was taken from all of them is known."""
    own = seen(STEP_TIMES, noise=0.02)
    whole = [one.seconds * (2 if i % 3 == 0 else 1) for i, one in enumerate(own)]
    kept = sum(one.seconds for one in own) / sum(whole)
    shortened = [
        msgspec.structs.replace(one, seconds=kept * seconds, taken_seconds=(1 - kept) * seconds)
        for one, seconds in zip(own, whole, strict=True)
    ]
    model = fit_step_times(shortened)
    assert model.row_seconds < 0.9 * STEP_TIMES.row_seconds
    found = without_interruptions(model, shortened)
    assert sum(one.seconds for one in found) == pytest.approx(sum(one.seconds for one in own))
    fitted = fit_step_times(found)
    for name in ("row_seconds", "prompt_token_seconds"):
        assert getattr(fitted, name) == pytest.approx(getattr(STEP_TIMES, name), rel=0.1), name
    assert fitted.error is not None and fitted.error < 0.05, "by the steps that were left alone"
    assert without_interruptions(model, own) == own, "nothing was taken"


def test_a_coefficient_seen_in_one_step_is_not_tested_on_that_step():
    """As in calibrations: decode steps and single prompts, a step of eight prompts, and one in
    which a second pass came with a stall. Without the eight the stall alone would tell what a pass
    costs."""
    rng = np.random.default_rng(1)
    one_pass = []
    for rows in np.tile(np.arange(1, 9), 12):
        counts = (float(rows), 0.0, float(rows * 100))
        noise = np.exp(0.05 * rng.normal())
        names = ("rows", "prompt_tokens", "context_tokens")
        one_pass.append(
            StepObservation(
                seconds=STEP_TIMES.seconds(*counts) * noise, **dict(zip(names, counts, strict=True))
            )
        )
    for tokens in (20.0, 60.0, 150.0, 250.0):
        seconds = STEP_TIMES.seconds(0, tokens, 0)
        one_pass.append(
            StepObservation(seconds=seconds, rows=0, prompt_tokens=tokens, context_tokens=0)
        )
    eight = StepObservation(
        seconds=STEP_TIMES.seconds(0, 128, 0, passes=8),
        rows=0,
        prompt_tokens=128,
        context_tokens=0,
        passes=8,
    )
    stalled = StepObservation(
        seconds=STEP_TIMES.seconds(4, 20, 400, passes=2) + 0.3,
        rows=4,
        prompt_tokens=20,
        context_tokens=400,
        passes=2,
    )
    for place in range(8):  # whichever eighth of the observations it falls into
        found = fit_step_times([*one_pass[:place], eight, *one_pass[place:], stalled])
        assert found.fits, f"{found.error:.2f} with the step of eight prompts at {place}"
        assert found.pass_seconds == pytest.approx(STEP_TIMES.pass_seconds, rel=0.3)


def test_a_slower_machine_takes_longer_for_every_step():
    one = seen(STEP_TIMES, 5)[3]
    assert STEP_TIMES.slower(1.3).of(one) == pytest.approx(1.3 * STEP_TIMES.of(one))
    assert STEP_TIMES.slower(1.3).error == STEP_TIMES.error


def test_too_few_observations_are_an_error():
    with pytest.raises(WorkloadError, match="4 observations are too few"):
        fit_step_times(seen(STEP_TIMES, 4))


def test_weights_and_multiplications_overlap_and_attention_is_added():
    seconds = SERVER_STEPS.seconds(rows=10, prompt_tokens=450, context_tokens=1e4)
    products = (0.010**2 + (0.00004 * 460) ** 2) ** 0.5
    assert seconds == pytest.approx(0.002 + products + 1e4 * 1e-7 + 2e-9 * 450**2 / 2)
    assert SERVER_STEPS.seconds(20, 900, 2e4, passes=2, steps=2) == pytest.approx(2 * seconds)


def test_a_step_is_not_shorter_than_the_host_needs():
    assert SERVER_STEPS.seconds(100, 0, 0) == pytest.approx(0.004 + 0.0005 * 100)
    assert SERVER_STEPS.seconds(1, 0, 0) > 0.0045
