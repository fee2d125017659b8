"""The speed of steps under load, told from chunks alone."""

import msgspec
import pytest

from loadtests.records.schema import RequestRecord
from loadtests.simulation.speed_under_load import LEAST_STEPS, speed_under_load, steps_under_load
from loadtests.simulation.step_replay import Residuals
from loadtests.simulation.step_time import StepLaw
from tests.tools.records import request

LAW = StepLaw(base_seconds=0.01, row_seconds=0.002, prompt_token_seconds=0.001, pass_seconds=0.005)
PROMPT, TOKENS = 30, 12


def played(steps: int, slower: float = 1.0, pause_seconds: float = 0.0) -> list[RequestRecord]:
    """A request every third step, from an engine that pauses whenever it has served ten."""
    now, stamps, running = 0.0, [], []
    for step in range(steps):
        begun = step % 3 == 0
        rows = len(running)
        context = sum(PROMPT + len(one) for one in running)
        now += slower * LAW.seconds(rows, PROMPT * begun, context, begun + (rows > 0))
        if begun:
            stamps.append([])
            running.append(stamps[-1])
        for place, one in enumerate(running):
            one.append(now + 1e-4 * place)  # not all at the same moment
        running = [one for one in running if len(one) < TOKENS]
        if not running:
            now += pause_seconds
    made = [request(i, 0.0, tokens=len(one), prompt_tokens=PROMPT) for i, one in enumerate(stamps)]
    return [
        msgspec.structs.replace(r, content_seconds=one) for r, one in zip(made, stamps, strict=True)
    ]


@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_steps_that_take_longer_than_the_law_says(slower: float) -> None:
    found = speed_under_load(LAW, Residuals(), played(300, slower))
    assert found == pytest.approx(1 / slower, rel=0.01)


def test_the_law_is_asked_for_its_usual_step_with_stalls() -> None:
    stalling = Residuals(alone=(1.0, 1.4), together=(1.0, 1.4), prompts=(1.2,))
    assert speed_under_load(LAW, stalling, played(300, 1.2)) == pytest.approx(1.0, rel=0.01)


def test_chunks_of_several_tokens_are_not_steps() -> None:
    """Three tokens a chunk looked like an engine at 0.59 of its speed."""
    whole = played(300)
    threes = [
        msgspec.structs.replace(r, content_seconds=r.content_seconds[2::3], first_chunk_tokens=3)
        for r in whole
    ]
    assert speed_under_load(LAW, Residuals(), threes) is None
    few = [*threes[:2], *whole[2:]]  # a character of three tokens now and then
    assert speed_under_load(LAW, Residuals(), few) == pytest.approx(1.0, rel=0.05)


def test_an_engine_that_rests_is_not_slow() -> None:
    one, other = (request(i, 0.0, tokens=2, prompt_tokens=5) for i in range(2))
    one = msgspec.structs.replace(one, content_seconds=[1.0, 1.02])
    other = msgspec.structs.replace(other, content_seconds=[5.0, 5.02])
    seen = list(steps_under_load([one, other], 0.005))
    assert [(step.decode_rows, round(step.seconds, 6)) for step in seen] == [(1, 0.02), (1, 0.02)]


def test_few_steps_tell_nothing() -> None:
    assert speed_under_load(LAW, Residuals(), played(LEAST_STEPS // 2)) is None
