"""How much of the shared prefixes a server found in its cache is read off its records."""

import msgspec
import numpy as np
import pytest

from crossover.loadtests.capacity.prefix_reuse import (
    measured_history_reuse,
    measured_reasoning_share,
    measured_reuse,
    measured_template_tokens,
)
from crossover.loadtests.cli.one_level import show_level
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records.journal_events import LevelStarted
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.capacity.slo import Slo
from crossover.serving.workload.request_lengths import Workload
from tests.loadtests.capacity.known_server import STEP_TIMES, KnownServer

CHAT = Workload(preset="sharegpt", max_prompt_tokens=512, max_output_tokens=128)


def test_how_much_a_server_found_in_its_cache_is_measured():
    shared = Workload(prompt_tokens=200, output_tokens=8, shared_prefix_tokens=150)
    server = KnownServer(STEP_TIMES.seconds)
    levels = [
        server.level([0.0, 5.0, 10.0], [200] * 3, [8] * 3, [0, 150, 150]),
        server.level([0.0], [200], [8], [150]),
    ]
    assert measured_reuse(shared, levels) == pytest.approx(0.75)
    assert measured_reuse(CHAT, levels) == 0.0
    untold = msgspec.structs.replace(levels[1], cached_tokens=np.array([np.nan]))
    assert measured_reuse(shared, [untold]) == 0.0


def test_load_prints_how_much_of_the_prompts_of_conversations_was_found_in_the_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = KnownServer(STEP_TIMES.seconds)
    level = server.level([0.0, 5.0, 10.0], [200] * 3, [8] * 3, [0, 150, 150])
    line = "50.0% of the prompt tokens found in the server's cache"
    show_level(level, Slo("any", target=0.9), Workload(preset="conversation"))
    assert line in capsys.readouterr().out
    unknown = msgspec.structs.replace(level, cached_tokens=np.full(3, np.nan))
    show_level(unknown, Slo("any", target=0.9), Workload(preset="conversation"))
    show_level(level, Slo("any", target=0.9), CHAT)
    assert "server's cache" not in capsys.readouterr().out


def test_the_tokens_of_a_template_that_every_prompt_begins_with_are_measured():
    server = KnownServer(STEP_TIMES.seconds)
    prompts, cached = [40, 41, 40, 300, 512, 31], [0, 25, 39, 25, 25, 29]
    level = server.level([5.0 * number for number in range(6)], prompts, [8] * 6, cached)
    assert measured_template_tokens(CHAT, [level]) == 25
    assert measured_template_tokens(Workload(preset="conversation"), [level]) == 0
    shared = Workload(prompt_tokens=200, output_tokens=8, shared_prefix_tokens=20)
    assert measured_template_tokens(shared, [level]) == 5, "the rest is the workload's own prefix"
    untold = msgspec.structs.replace(level, cached_tokens=np.full(6, np.nan))
    assert measured_template_tokens(CHAT, [untold]) == 0


def conversing(growth: float, answer_share: float, **more: object) -> Level:
    """Two conversations of three turns, on a server that finds so much of each history, and whose
    answers become so many times their tokens."""
    records = []
    for session in range(2):
        prompt, cached = 100, 40 if session else 0
        for turn in range(3):
            begin = 60.0 * session + 10.0 * turn
            records.append(
                RequestRecord(
                    cell="c",
                    level="l",
                    index=3 * session + turn,
                    session=session,
                    turn=turn,
                    scheduled_seconds=begin,
                    first_content_seconds=begin + 1.0,
                    first_answer_seconds=begin + 1.5,
                    last_content_seconds=begin + 2.0,
                    ended_seconds=begin + 2.0,
                    content_seconds=[begin + 1.0, begin + 1.5, begin + 2.0],
                    added_tokens=20,
                    prompt_tokens=prompt,
                    cached_tokens=cached,
                    output_tokens=51,
                    status=200,
                )
            )
            cached = round(prompt + answer_share * 50)
            prompt = round(prompt + growth * 51 + 20)
    if more:
        records = [msgspec.structs.replace(one, **more) for one in records]
    return Level.of(
        records, LevelStarted(cell="c", level="l", plan=LevelPlan(window_seconds=200.0))
    )


@pytest.mark.parametrize(("growth", "share"), [(1.0, 1.0), (4.0, 0.0), (1.5, 0.5)])
def test_what_a_server_saves_of_histories_is_measured(growth: float, share: float) -> None:
    found = measured_history_reuse([conversing(growth, share)])
    assert found.kind == "any prefix" and found.shared_tokens == 40
    assert found.answer_share == pytest.approx(share, abs=0.01)
    assert found.answer_growth == pytest.approx(growth, abs=0.02)
    by_checkpoints = measured_history_reuse([conversing(growth, share)], "checkpoints")
    assert by_checkpoints.kind == "checkpoints"


@pytest.mark.parametrize("cached", [None, 0, 9])
def test_a_server_that_computes_histories_again_saves_nothing(cached: int | None) -> None:
    found = measured_history_reuse([conversing(1.0, 1.0, cached_tokens=cached)])
    assert found.kind == "none" and found.answer_growth == pytest.approx(1.0)


def test_how_long_a_model_reasons_is_measured() -> None:
    assert measured_reasoning_share([conversing(1.0, 1.0)]) == 0.5
    plain = conversing(1.0, 1.0, first_answer_seconds=None)
    assert measured_reasoning_share([plain]) == 0.0
    assert measured_reasoning_share([]) == 0.0
