"""Steps out of stamps: of a server whose steps are known, their sums are right."""

import msgspec
import numpy as np
import pytest

from crossover.loadtests.capacity.step_observation import level_factor, merged_steps, observed_steps
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records.journal_events import LevelStarted
from crossover.loadtests.records.level_plan import LevelPlan
from tests.loadtests.capacity.known_server import (
    EXPERTS_STEP_TIMES,
    SETTINGS,
    STEP_TIMES,
    KnownServer,
    Skewed,
)


def loaded(server, rate=1.2, count=150, seed=1, **more):
    """An open-loop level near the server's limit."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    prompts = rng.integers(10, 400, count).tolist()
    return server.level(due, prompts, rng.integers(5, 90, count).tolist(), **more), prompts


@pytest.mark.parametrize("rate", [0.3, 1.2, 3.0], ids=["mostly alone", "loaded", "overloaded"])
def test_the_observed_steps_of_a_level_are_those_of_the_model(rate):
    level, _ = loaded(KnownServer(STEP_TIMES.seconds), rate)
    seen, covered = observed_steps(level, 8)
    assert covered > 0.9
    exact = [one for one in seen if one.steps == 1]
    assert len(exact) > 500
    right = [abs(STEP_TIMES.of(one) / one.seconds - 1) < 0.02 for one in exact]
    assert np.mean(right) > 0.95
    assert sum(map(STEP_TIMES.of, seen)) == pytest.approx(
        sum(one.seconds for one in seen), rel=0.01
    )


def test_cached_prompt_tokens_were_not_computed():
    rng = np.random.default_rng(3)
    due = np.cumsum(rng.exponential(1.0, 80)).tolist()
    prompts = rng.integers(200, 400, 80)
    cached = (prompts * 0.8).astype(int).tolist()
    level = KnownServer(STEP_TIMES.seconds).level(due, prompts.tolist(), [40] * 80, cached)
    seen, covered = observed_steps(level, 8)
    assert covered > 0.9
    assert sum(map(STEP_TIMES.of, seen)) == pytest.approx(
        sum(one.seconds for one in seen), rel=0.01
    )


def test_chunks_of_several_tokens_show_no_steps():
    level, _ = loaded(KnownServer(STEP_TIMES.seconds, chunk=4))
    assert observed_steps(level, 8) == ([], 0.0)


def test_stamps_that_come_in_late_together_keep_their_sum():
    """A client that was held up for three steps sees their chunks at one moment."""
    level, _ = loaded(KnownServer(STEP_TIMES.seconds))
    end = float(np.median(level.chunks))
    delayed = (level.chunks > end - 0.15) & (level.chunks < end)
    assert 3 <= delayed.sum()
    late = msgspec.structs.replace(level, chunks=np.where(delayed, end, level.chunks))
    seen, covered = observed_steps(late, 8)
    assert covered > 0.9
    assert sum(map(STEP_TIMES.of, seen)) == pytest.approx(
        sum(one.seconds for one in seen), rel=0.01
    )


@pytest.mark.parametrize("step_times", [STEP_TIMES, EXPERTS_STEP_TIMES], ids=["dense", "experts"])
@pytest.mark.parametrize("slower", [0.8, 1.0, 1.3])
def test_the_factor_of_a_level_is_how_much_longer_its_steps_took(slower, step_times):
    skewed = Skewed(5, stalls=0.0)
    server = KnownServer(lambda *counts: slower * skewed() * step_times.seconds(*counts))
    level, _ = loaded(server, rate=1.0)
    found = level_factor(step_times, level, SETTINGS)
    assert found == pytest.approx(slower, rel=0.03)


def test_steps_are_observed_of_a_server_that_computes_whole_prompts_first():
    server = KnownServer(lambda *counts: 1.2 * STEP_TIMES.seconds(*counts), whole_prompts=True)
    level, _ = loaded(server, rate=1.0, count=300)
    jitter = np.random.default_rng(1).uniform(0, 0.002, len(level.chunks))
    level = msgspec.structs.replace(level, chunks=level.chunks + jitter)
    found = level_factor(STEP_TIMES, level, SETTINGS)
    assert found == pytest.approx(1.2, rel=0.03)


def test_the_steps_of_two_engines_are_observed_engine_by_engine():
    rng = np.random.default_rng(4)
    due = np.cumsum(rng.exponential(0.5, 300))
    prompts, outputs = rng.integers(10, 400, 300), rng.integers(5, 90, 300)
    records = []
    for engine in (1, 2):
        server = KnownServer(lambda *counts: 1.2 * STEP_TIMES.seconds(*counts))
        own = slice(engine - 1, None, 2)
        records += [
            msgspec.structs.replace(record, engine=engine, index=2 * record.index + engine - 1)
            for record in server.records(due[own], prompts[own], outputs[own])
        ]
    plan = LevelPlan(rate=2.0, window_seconds=float(due[-1]) + 1)
    started = LevelStarted(cell="c", level="l", plan=plan)
    level = Level.of(records, started)
    two_engines = msgspec.structs.replace(SETTINGS, engines=2)
    seen, covered = observed_steps(level, 8)
    assert covered > 0.9
    assert 1.2 * sum(map(STEP_TIMES.of, seen)) == pytest.approx(
        sum(one.seconds for one in seen), rel=0.01
    )
    assert level_factor(STEP_TIMES, level, two_engines) == pytest.approx(1.2, rel=0.03)
    # As if one engine had taken them all: the steps overlap, and so seem to be shorter.
    unnumbered = msgspec.structs.replace(level, engine=np.full(300, np.nan))
    assert level_factor(STEP_TIMES, unnumbered, SETTINGS) < 1.1


def test_without_observed_steps_the_speed_factor_comes_from_tpot():
    server = KnownServer(lambda *counts: 1.2 * STEP_TIMES.seconds(*counts), chunk=3)
    level, _ = loaded(server, rate=1.0, count=300)
    found = level_factor(STEP_TIMES, level, SETTINGS)
    assert found == pytest.approx(1.2, rel=0.08)


def test_a_level_without_answers_gives_no_factor():
    level, _ = loaded(KnownServer(STEP_TIMES.seconds), count=3)
    empty = msgspec.structs.replace(
        level,
        chunks=np.empty(0),
        chunk_offsets=np.zeros(4, dtype=np.int64),
        failure=("refused",) * 3,
    )
    assert level_factor(STEP_TIMES, empty, SETTINGS) is None


def test_like_steps_in_a_row_are_merged():
    level, _ = loaded(KnownServer(STEP_TIMES.seconds))
    seen, _ = observed_steps(level, 8)
    merged = merged_steps(seen)
    assert len(merged) < len(seen) / 2
    assert sum(one.seconds for one in merged) == pytest.approx(sum(one.seconds for one in seen))
    assert max(one.steps for one in merged if not one.prompt_tokens) <= 12
    assert STEP_TIMES.of(merged[5]) == pytest.approx(merged[5].seconds, rel=0.03)
