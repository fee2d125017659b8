"""How the scheduler fills a step: prompts in pieces, whole blocks, the time that it takes."""

import pytest

from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.engine.scheduler import Scheduler
from crossover.serving.sampling.step_inputs import Row, Sampled
from tests.serving.engine.schedules import TABLE, VOCABULARY, Recorder, make, request, run


def test_decoders_run_in_every_step_while_a_long_prompt_is_filled_in_pieces() -> None:
    scheduler, backend = make(prefill_tokens=32)
    scheduler.add(request(1, [5] * 10, 40))
    scheduler.step()
    scheduler.add(request(2, [7] * 193, 4))  # six times 32 would leave a piece of one token
    backend.steps.clear()
    for _ in range(7):
        scheduler.step()
    assert all(any(slot == 0 and count == 1 for slot, _, count in step) for step in backend.steps)
    pieces = [count for step in backend.steps for slot, _, count in step if slot == 1 and count > 1]
    assert sum(pieces) == 193
    assert max(pieces) <= 32


def test_prefill_tokens_is_the_bound_however_little_it_is() -> None:
    scheduler, backend = make(prefill_tokens=5)
    scheduler.add(request(1, [5] * 40, 60))
    scheduler.step()
    scheduler.add(request(2, [7] * 100, 4))
    run(scheduler)
    pieces = [count for step in backend.steps for slot, _, count in step if slot == 1 and count > 1]
    assert set(pieces) == {5}, pieces


class Timed(Recorder):
    """A backend whose rows get cheaper in company, by a clock of its own; `says`: whether it tells
    what the decoding rows took.
    """

    PROMPT_TOKEN = 0.003

    def __init__(self, config: EngineConfig, reports_seconds: bool) -> None:
        super().__init__(config)
        self.now, self.reports_seconds = 0.0, reports_seconds
        self.last_decode_seconds: float | None = None

    @staticmethod
    def decode_seconds(rows: int) -> float:
        blocks, ones = divmod(rows, 4)
        return 0.026 * blocks + 0.011 * ones

    def step(self, rows: list[Row]) -> list[Sampled]:
        decode = self.decode_seconds(sum(len(row.tokens) == 1 for row in rows))
        self.now += decode + self.PROMPT_TOKEN * sum(
            len(row.tokens) for row in rows if len(row.tokens) > 1
        )
        self.last_decode_seconds = decode if self.reports_seconds else None
        return super().step(rows)


@pytest.mark.parametrize(("reports_seconds", "over"), [(True, 1.1), (False, 1.6)])
def test_while_prompts_keep_coming_a_step_takes_what_the_rule_gives_it(
    reports_seconds: bool, over: float
) -> None:
    """From the first sequence to the sixteenth, with no step of decoding alone in between to learn
    from.
    """
    config = EngineConfig(
        backend="fake",
        model_path="",
        model_name="fake",
        options={"vocabulary": VOCABULARY},
        settings=SchedulerSettings(slots=16, context_tokens=512),
    )
    backend = Timed(config, reports_seconds)
    scheduler = Scheduler(backend, TABLE, frozenset({0}), config, clock=lambda: backend.now)
    for number in range(16):
        scheduler.add(request(number, list(range(number, number + 260)), 200, ignore_eos=True))
    mixed = 0
    while scheduler.busy and len(scheduler.running) + len(scheduler.waiting) == 16:
        before = backend.now
        scheduler.step()
        decoding = sum(count == 1 for _, _, count in backend.steps[-1])
        filled = sum(count for _, _, count in backend.steps[-1] if count > 1)
        if not decoding or not filled:
            continue
        mixed += 1
        decode = backend.decode_seconds(decoding)
        cheapest = backend.decode_seconds(4) / 4
        allowed = max(0.3, decode * 4.75, decode + 120 * (decode / decoding - cheapest))
        assert backend.now - before <= allowed * over + 0.03, (decoding, filled)
    assert mixed > 30
