"""The queue's bounds, and whether predicted waits and Retry-After come true."""

import random
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import pytest

from crossover.serving.errors import Overloaded
from crossover.serving.supervisor.admission import AdmissionController, QueueBounds

OPEN = QueueBounds(waiting_requests=1 << 20, wait_seconds=1e9)


@dataclass
class Work:
    prompt_tokens: int
    max_tokens: int
    produced: int = 0


class Queue(AdmissionController):
    """With the sequences in flight beside it, as crossover.serving.supervisor.inflight_requests has
    them."""

    def __init__(self, bounds: QueueBounds, slots: int) -> None:
        self.inside: dict[int, Work] = {}
        super().__init__(bounds, slots, self.inside)

    def admit(self, number: int, prompt: int, limit: int) -> None:
        self.inside[number] = Work(prompt, limit)
        self.cached_load = None

    def progressed(self, number: int, tokens: int) -> None:
        self.inside[number].produced += tokens
        self.cached_load = None

    def finished(self, number: int) -> None:
        self.ended(self.inside.pop(number), naturally=True)


def paced(bounds: QueueBounds, slots: int, tokens_per_second: float = 100.0) -> Queue:
    ledger = Queue(bounds, slots)
    for _ in range(100):
        ledger.pace.learn(int(tokens_per_second / 10), 0, 0.1, is_full=True)
    return ledger


def refused(ledger: Queue, prompt: int = 10) -> Overloaded | None:
    """None: it may join."""
    try:
        ledger.check_room(prompt)
    except Overloaded as refusal:
        return refusal
    return None


def kind_of(refusal: Overloaded | None) -> tuple[str, str]:
    assert refusal is not None
    return refusal.kind, refusal.reason


def test_no_refusal_while_a_slot_is_free_whatever_the_bounds() -> None:
    ledger = paced(QueueBounds(waiting_requests=0, wait_seconds=0.0), slots=2)
    for number in range(2):
        assert refused(ledger, 500) is None
        ledger.admit(number, 500, 500)
    assert refused(ledger, 500) is not None


def test_the_bound_by_requests_counts_those_beyond_the_slots() -> None:
    ledger = Queue(msgspec.structs.replace(OPEN, waiting_requests=2), slots=1)
    for number in range(3):
        assert refused(ledger) is None
        ledger.admit(number, 10, 10)
    kind, text = kind_of(refused(ledger))
    assert kind == "queue_requests" and "2 requests are waiting" in text
    ledger.finished(0)
    assert refused(ledger) is None


def test_the_bound_by_wait_needs_evidence() -> None:
    ledger = Queue(msgspec.structs.replace(OPEN, wait_seconds=1.0), slots=1)
    ledger.admit(0, 1000, 1000)
    assert ledger.predicted_wait_seconds() is None and refused(ledger) is None
    ledger.pace.learn(100, 0, 1.0, is_full=True)
    kind, text = kind_of(refused(ledger))
    assert kind == "queue_wait" and "20.0 s exceeds" in text


def test_requests_one_at_a_time_say_nothing_of_the_wait_behind_a_full_engine() -> None:
    """Steps of 50 ms, with one row as with 16: a batch of 16 processes 320 tokens/s, not 20."""
    ledger = Queue(msgspec.structs.replace(OPEN, wait_seconds=30.0), slots=16)
    for _ in range(60):
        ledger.pace.learn(1, 0, 0.05, is_full=False)
    for number in range(20):
        assert refused(ledger) is None
        ledger.admit(number, 10, 256)
    for _ in range(20):
        ledger.pace.learn(16, 0, 0.05, is_full=True)
    assert ledger.predicted_wait_seconds() == pytest.approx(256 * 0.05, rel=0.06)


class Simulated(NamedTuple):
    """What became of the requests of one simulation; forecasts are of the time to first token."""

    forecast: list[float]
    ttft: list[float]
    refused: int
    busy_seconds: float


def simulate(
    seed: int,
    arrivals_per_second: float,
    bounds: QueueBounds,
    outputs: tuple[int, int] = (20, 80),
    noise: float = 0.0,
    slots: int = 8,
    warm_seconds: float = 20.0,
    seconds: float = 140.0,
) -> Simulated:
    """An engine that gives each running sequence one token a step and fills prompts in order, 32
    tokens a step while anyone decodes.

    For `warm_seconds` there is hardly any load, and nothing is counted.
    """
    rng = random.Random(seed)
    ledger = Queue(bounds, slots)
    now, due, number, prompt = 0.0, 0.0, 0, 30
    queue: list[tuple[int, int]] = []
    running: dict[int, list[int]] = {}  # prompt tokens and output tokens still to be worked
    arrived: dict[int, tuple[float, float | None]] = {}
    forecast: list[float] = []
    ttft: list[float] = []
    busy, away = 0.0, 0
    while now < seconds:
        while due <= now:
            output = rng.randint(*outputs)
            if refused(ledger, prompt) is None:
                queue.append((number, output))
                arrived[number] = due, ledger.predicted_ttft_seconds(prompt)
                ledger.admit(number, prompt, outputs[1])
                number += 1
            elif due > warm_seconds:
                away += 1
            due += rng.expovariate(arrivals_per_second if due > warm_seconds else 1.0)
        while queue and len(running) < slots:
            sequence, output = queue.pop(0)
            running[sequence] = [prompt, output]
        if not running:
            now = due
            continue
        decoding = [sequence for sequence, (left, _) in running.items() if not left]
        budget = 32 if decoding else 512
        begun: list[int] = []
        filled = 0
        for sequence, left in running.items():
            if left[0] and filled < budget:
                count = min(left[0], budget - filled)
                left[0] -= count
                filled += count
                begun += [] if left[0] else [sequence]
        cost = (0.02 + 0.001 * filled) * (1 + noise * abs(rng.gauss(0, 1)))
        now += cost
        busy += cost if now > warm_seconds else 0.0
        ledger.pace.learn(len(decoding), filled, cost, is_full=len(running) >= slots)
        for sequence in decoding + begun:
            running[sequence][1] -= 1
            ledger.progressed(sequence, 1)
            since, predicted = arrived[sequence]
            if sequence in begun and since > warm_seconds:
                ttft.append(now - since)
                forecast += [] if predicted is None else [predicted]
            if not running[sequence][1]:
                del running[sequence]
                ledger.finished(sequence)
    return Simulated(forecast, sorted(ttft), away, busy)


def test_forecasts_are_right_on_average_under_overload() -> None:
    found = simulate(1, 30.0, QueueBounds(wait_seconds=8.0), warm_seconds=80.0, seconds=240.0)
    assert len(found.ttft) > 500
    forecast, ttft = sum(found.forecast) / len(found.forecast), sum(found.ttft) / len(found.ttft)
    assert ttft > 4.0
    assert abs(forecast - ttft) < 0.15 * ttft


@pytest.mark.parametrize("factor", [1.0, 2.0, 10.0])
@pytest.mark.parametrize(("outputs", "noise"), [((40, 40), 0.0), ((20, 80), 0.3)])
def test_an_slo_is_kept_for_those_let_in_and_the_engine_is_never_idle_for_it(
    factor: float, outputs: tuple[int, int], noise: float
) -> None:
    """An engine that could do some 7 requests a second is asked for 1, 2 and 10 times that, after a
    quiet time.
    """
    bounds = msgspec.structs.replace(OPEN, ttft_seconds=3.0)
    found = simulate(2, 7.0 * factor, bounds, outputs, noise)
    assert found.ttft[int(0.99 * len(found.ttft))] <= 3.0
    if factor > 1:
        assert found.refused > 100 and found.busy_seconds > 0.99 * 120


def test_while_no_pace_is_known_nobody_waits_for_an_slo() -> None:
    ledger = Queue(msgspec.structs.replace(OPEN, ttft_seconds=1.0), slots=2)
    for number in range(2):
        assert refused(ledger) is None
        ledger.admit(number, 10, 10)
    assert kind_of(refused(ledger))[0] == "queue_ttft"


def test_a_prompt_that_always_comes_late_is_admitted_to_an_unloaded_server() -> None:
    ledger = paced(QueueBounds(ttft_seconds=1.0), slots=2)  # 100 tokens/s
    assert refused(ledger, 500) is None
    ledger.admit(1, 10, 50)
    assert "5.1 s exceeds the limit of 1 s" in kind_of(refused(ledger, 500))[1]
    ledger.progressed(1, 1)
    assert refused(ledger, 500) is None  # nobody else waits: no better time will come


def test_the_slot_that_a_new_sequence_finds_is_the_one_that_is_free_first() -> None:
    """Slots: 10 and 40 tokens left; one waits for 30. It takes the first; the new one the second,
    at 40, where the first has 0 left."""
    ledger = paced(OPEN, slots=2)
    for number, limit in ((1, 11), (2, 41), (3, 30)):
        ledger.admit(number, 0, limit)
    ledger.progressed(1, 1)
    ledger.progressed(2, 1)
    assert ledger.predicted_wait_seconds() == pytest.approx((10 + 40 + 30) / 100)
    ledger.admit(4, 0, 100)  # slots end at 40 and 140: the next one begins at 40
    assert ledger.predicted_wait_seconds() == pytest.approx((10 + 40 + 30) / 100)
    ledger.progressed(1, 10)  # the fourth does 10 before the second ends
    assert ledger.predicted_wait_seconds() == pytest.approx((40 + 30 + 10) / 100)
