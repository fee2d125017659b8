"""What the next step holds: the rule that scheduler and simulation share."""

from __future__ import annotations

import dataclasses

import pytest

from crossover.serving.capacity.plan_step import plan_step
from crossover.serving.capacity.scheduler_settings import (
    DEFAULT_SETTINGS,
    RequestedSettings,
    SchedulerSettings,
)

SETTINGS = SchedulerSettings(prefill_tokens=256, step_tokens=512, step_seconds_target=0.3)


@dataclasses.dataclass
class Costs:
    """A prompt token takes 1 ms; a row of any number 10 ms, so that none is cheaper."""

    row_seconds: float = 0.01
    cheapest_row_seconds: float = 0.01
    prompt_seconds: float | None = 0.001

    def row_costs(self, rows: int) -> tuple[float, float]:
        return self.row_seconds * rows, self.cheapest_row_seconds

    def prompt_tokens_in(self, seconds: float) -> int | None:
        return None if self.prompt_seconds is None else int(seconds / self.prompt_seconds)


@pytest.mark.parametrize(
    ("pending", "rows", "costs", "pieces"),
    [
        ([100, 200], 0, Costs(), [100, 200]),  # whole prompts while nobody decodes
        ([400, 200], 0, Costs(), [400, 112]),  # cut at a multiple of 16 where the step is full
        ([505, 30], 0, Costs(), [505]),  # 7 tokens are too few for a piece of another prompt
        ([505, 7], 0, Costs(), [505, 7]),  # a whole prompt needs no more
        ([513], 0, Costs(), [496]),  # never 512: the last piece would be one token
        ([400], 1, Costs(), [256]),  # prefill_tokens while somebody decodes
        ([400], 10, Costs(), [256]),  # 0.375 s: 3.75 x the 0.1 s that decoding takes
        ([400], 4, Costs(prompt_seconds=0.002), [128]),  # 0.26 s of a target of 0.3 s
        ([400], 1, Costs(prompt_seconds=0.5), [16]),  # at least 17 tokens, cut at 16
        ([400], 1, Costs(prompt_seconds=None), [256]),  # nothing has been learnt yet
        ([400], 1, Costs(0.02, 0.01, prompt_seconds=0.01), [112]),  # 1.2 s: rows cost double
        ([], 3, Costs(), []),
    ],
)
def test_the_prompt_tokens_of_a_step(
    pending: list[int], rows: int, costs: Costs, pieces: list[int]
) -> None:
    assert plan_step(pending, rows, SETTINGS, costs) == pieces


def test_without_a_target_a_step_takes_its_prompt_tokens() -> None:
    settings = SchedulerSettings(prefill_tokens=2048, step_tokens=64, step_seconds_target=None)
    assert plan_step([400], 8, settings, Costs(prompt_seconds=9.0)) == [48]
    assert plan_step([400], 64, settings, Costs()) == [], "the step is full of decoding rows"


def test_settings_left_open_are_the_devices_defaults() -> None:
    requested = RequestedSettings(context_tokens=4096, prefill_tokens=100)
    on_cpu, on_gpu = (requested.filled(DEFAULT_SETTINGS[device]) for device in ("cpu", "gpu"))
    assert (on_cpu.slots, on_cpu.prefill_tokens, on_cpu.step_tokens) == (16, 100, 512)
    assert (on_gpu.slots, on_gpu.prefill_tokens, on_gpu.step_tokens) == (256, 100, 2048)
    assert on_cpu.context_tokens == on_gpu.context_tokens == 4096
    assert on_cpu.pool_tokens == 16 * 4096 and on_cpu.longest_tokens == 4096
    assert RequestedSettings(slots=400).filled(DEFAULT_SETTINGS["cpu"]).step_tokens == 800
