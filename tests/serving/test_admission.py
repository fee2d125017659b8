"""The queue's bounds, and whether predicted waits and Retry-After come true in a simulated engine."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.admission import Ledger, QueueBounds

OPEN = QueueBounds(waiting_requests=None, waiting_tokens=None, wait_seconds=None)


def paced(bounds: QueueBounds, slots: int, tokens_per_second: float = 100.0) -> Ledger:
    ledger = Ledger(bounds, slots)
    for _ in range(100):
        ledger.worked(0, int(tokens_per_second / 10), 0.1)
    return ledger


def test_no_refusal_while_a_slot_is_free_whatever_the_bounds() -> None:
    ledger = paced(QueueBounds(waiting_requests=0, waiting_tokens=1, wait_seconds=0.0), slots=2)
    assert ledger.refusal(500, 500, 0.0) is None
    ledger.admit(1, 500, 500, 0.0)
    assert ledger.refusal(500, 500, 0.0) is None
    ledger.admit(2, 500, 500, 0.0)
    assert ledger.refusal(500, 500, 0.0) is not None


def test_the_bound_by_requests_counts_those_beyond_the_slots() -> None:
    ledger = Ledger(QueueBounds(waiting_requests=2, waiting_tokens=None, wait_seconds=None), slots=1)
    for number in range(3):
        assert ledger.refusal(10, 10, 0.0) is None
        ledger.admit(number, 10, 10, 0.0)
    refusal = ledger.refusal(10, 10, 0.0)
    assert refusal is not None and refusal.kind == "queue_requests" and "2 requests are waiting" in refusal.text
    ledger.finished(0)
    assert ledger.refusal(10, 10, 0.0) is None


def test_the_bound_by_tokens_lets_one_big_request_wait() -> None:
    ledger = Ledger(QueueBounds(waiting_requests=None, waiting_tokens=100, wait_seconds=None), slots=1)
    ledger.admit(0, 10, 10, 0.0)
    ledger.progressed(0, 1, 0.0)
    assert ledger.refusal(5000, 100, 0.0) is None  # alone it can never fit; refusing it would be for ever
    ledger.admit(1, 60, 30, 0.0)
    refusal = ledger.refusal(5, 10, 0.0)
    assert refusal is not None and refusal.kind == "queue_tokens"
    assert ledger.refusal(5, 5, 0.0) is None


def test_the_bound_by_wait_needs_evidence() -> None:
    ledger = Ledger(QueueBounds(waiting_requests=None, waiting_tokens=None, wait_seconds=1.0), slots=1)
    ledger.admit(0, 1000, 1000, 0.0)
    assert ledger.predicted_wait_seconds() is None and ledger.refusal(10, 10, 0.0) is None
    ledger.worked(0, 100, 1.0)
    refusal = ledger.refusal(10, 10, 0.0)
    assert refusal is not None and refusal.kind == "queue_wait" and "20.0 s is predicted" in refusal.text


def test_another_engine_starts_without_a_pace() -> None:
    ledger = paced(OPEN, slots=1)
    assert ledger.pace is not None
    ledger.forget_pace()
    assert ledger.pace is None


def test_those_told_to_come_back_are_not_told_the_same_moment() -> None:
    ledger = paced(QueueBounds(waiting_requests=1, waiting_tokens=None, wait_seconds=None), slots=1)
    ledger.admit(0, 50, 50, 0.0)
    ledger.admit(1, 50, 50, 0.0)
    times = [refusal.retry_after_seconds for _ in range(5) if (refusal := ledger.refusal(50, 50, 0.0))]
    gaps = [round(b - a, 3) for a, b in zip(times, times[1:], strict=False)]
    assert gaps == [1.1, 1.1, 1.1, 1.1]  # 100 tokens each at 100 tokens/s, and a little slack
    many = [refusal.retry_after_seconds for _ in range(200) if (refusal := ledger.refusal(50, 50, 0.0))]
    assert max(many) == QueueBounds().retry_longest_seconds


def simulate(seed: int, slots: int, arrivals_per_second: float, seconds: float, bounds: QueueBounds) -> tuple[list[float], list[float]]:
    """An engine that gives each running sequence one token a step of 20 ms and prefills at once; (predicted, real) waits."""
    rng = random.Random(seed)
    ledger = Ledger(bounds, slots)
    now, number = 0.0, 0
    queue: list[tuple[int, float, float | None, int]] = []
    running: dict[int, int] = {}
    predicted: list[float] = []
    real: list[float] = []
    due = 0.0
    while now < seconds:
        while due <= now:
            due += rng.expovariate(arrivals_per_second)
            output, limit = rng.randint(20, 80), 100
            if ledger.refusal(30, limit, now) is None:
                queue.append((number, now, ledger.predicted_wait_seconds(), output))
                ledger.admit(number, 30, limit, now)
                number += 1
        prefilled = 0
        while queue and len(running) < slots:
            sequence, arrived, forecast, output = queue.pop(0)
            running[sequence] = output
            prefilled += 30
            if forecast is not None and now > seconds / 3:
                predicted.append(forecast)
                real.append(now - arrived)
        cost = 0.02 + prefilled * 0.001
        now += cost
        rows = len(running)
        for sequence in list(running):
            running[sequence] -= 1
            ledger.progressed(sequence, 1, now)
            if running[sequence] == 0:
                del running[sequence]
                ledger.finished(sequence)
        if rows:
            ledger.worked(prefilled, rows, cost)
    return predicted, real


def test_predicted_waits_are_right_on_average_under_overload() -> None:
    predicted, real = simulate(1, slots=8, arrivals_per_second=30.0, seconds=240.0, bounds=QueueBounds(wait_seconds=8.0))
    assert len(real) > 500
    mean_predicted, mean_real = sum(predicted) / len(predicted), sum(real) / len(real)
    assert mean_real > 4.0
    assert abs(mean_predicted - mean_real) < 0.15 * mean_real


def test_the_wait_stays_under_its_bound_at_ten_times_the_capacity() -> None:
    _, real = simulate(2, slots=8, arrivals_per_second=60.0, seconds=120.0, bounds=QueueBounds(wait_seconds=2.0))
    real.sort()
    assert real[int(0.99 * len(real))] < 2.0 * 1.35


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["admit", "progress", "finish", "restart"]), st.integers(0, 5), st.integers(0, 40)), max_size=60))
def test_the_books_balance_after_any_history(history: list[tuple[str, int, int]]) -> None:
    ledger = Ledger(OPEN, slots=2)
    known: set[int] = set()
    for action, sequence, amount in history:
        if action == "admit" and sequence not in known:
            ledger.admit(sequence, amount, amount + 1, 0.0)
            known.add(sequence)
        elif action == "progress":
            ledger.progressed(sequence, amount, 0.0)
        elif action == "restart":
            ledger.restarted(sequence)
        elif action == "finish":
            ledger.finished(sequence)
            known.discard(sequence)
        assert len(ledger) == len(known) and 0 <= ledger.waiting <= len(known)
        assert ledger.outstanding_work >= 0 and ledger.waiting_tokens >= 0
    for sequence in known:
        ledger.finished(sequence)
    assert (len(ledger), ledger.waiting, ledger.waiting_tokens, ledger.outstanding_work) == (0, 0, 0, 0.0)
