"""Decides what to do after an engine died, and when to return to the preferred engine.

Pure decisions on times that are given. An engine list is in order of preference (GPU first).

| the engine ended with                            | there is a next engine    | there is none    |
|--------------------------------------------------|---------------------------|------------------|
| a permanent cause (backend_missing, unsupported) | fall back at once         | fail             |
| load_oom, load_failed, death before ready        | fall back at once         | once more, fail  |
| runtime_oom, health_timeout                      | fall back at once         | restart, backoff |
| engine_died                                      | once more, then fall back | restart, backoff |
| too many deaths in the window (breaker opens)    | fall back                 | fail             |

If the next engine is loaded (standby), every cause falls back at once, since that is faster than
any restart.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from crossover.serving.errors import Cause

PERMANENT = frozenset({Cause.backend_missing, Cause.unsupported})
# Maximum silence of a loading engine; on a GPU an engine reports every layer.
LOAD_SILENCE_SECONDS = {"gpu": 120.0, "cpu": 1800.0}
# A step may take this many health_timeout_seconds. On a CPU, a large model's prompt takes minutes.
MAX_STEP_TIMEOUTS = {"gpu": 1.0, "cpu": 20.0}
# If the engine's pace is known, a step may take no more than this many times what the largest step
# takes at that pace.
MAX_STEP_SLOWDOWN = 10.0


class RecoveryLimits(msgspec.Struct, frozen=True):
    """The limits and delays of the supervisor. All times in seconds."""

    backoff_first_seconds: float = 0.5
    backoff_longest_seconds: float = 30.0
    deaths: int = 5  # deaths within `window_seconds` that open the circuit breaker
    window_seconds: float = 300.0
    load_attempts: int = 2  # failed loads in a row before the engine is given up
    return_first_seconds: float = 30.0  # from a fallback to the first attempt to return
    return_longest_seconds: float = 900.0
    health_timeout_seconds: float = 30.0  # a GPU engine with work but no step for this long hangs
    kill_after_seconds: float = 5.0  # from the request to stop to SIGKILL


class EngineExit(msgspec.Struct, frozen=True):
    """How one engine process ended unexpectedly."""

    engine: int  # index in the engine list
    cause: Cause
    message: str
    at_seconds: float  # by a monotonic clock
    ready_seconds: float | None  # how long it was ready; None: it never was


class RestartDecision(msgspec.Struct, frozen=True):
    """Which engine is started after one has died."""

    engine: int | None  # index in the engine list; None: no engine is started again
    delay_seconds: float
    text: str  # what is done, and why


def after_death(
    endings: Sequence[EngineExit], engines: int, limits: RecoveryLimits, standby: bool = False
) -> RestartDecision:
    """Return which engine to start, by the table above, after the last of `endings`.

    `endings`: all unexpected ends, oldest first, at least one. `engines`: the length of the engine
    list. `standby`: the next engine of the list is already loaded.
    """
    last = endings[-1]
    why = f"{last.cause.value}: {last.message}"
    own_endings = [ending for ending in endings if ending.engine == last.engine]
    recent = [
        ending
        for ending in own_endings
        if last.at_seconds - ending.at_seconds <= limits.window_seconds
    ]
    if last.engine + 1 < engines:
        may_be_chance = last.cause is Cause.engine_died and last.ready_seconds is not None
        if standby or not may_be_chance or len(recent) >= 2:
            return RestartDecision(last.engine + 1, 0.0, f"falling back after {why}")
        return RestartDecision(
            last.engine, limits.backoff_first_seconds, f"restarting once after {why}"
        )
    if last.cause in PERMANENT:
        return RestartDecision(None, 0.0, why)
    failed_loads = 0  # in a row
    for ending in reversed(own_endings):
        if ending.ready_seconds is not None:
            break
        failed_loads += 1
    if failed_loads >= limits.load_attempts:
        text = f"the engine did not load in {failed_loads} attempts; the last ended with {why}"
        return RestartDecision(None, 0.0, text)
    if len(recent) >= limits.deaths:
        died = f"died {len(recent)} times in {last.at_seconds - recent[0].at_seconds:.0f} s"
        return RestartDecision(
            None, 0.0, f"the engine {died} and is not restarted; the last time: {why}"
        )
    doubled = limits.backoff_first_seconds * 2.0 ** (len(recent) - 1)
    pause = min(limits.backoff_longest_seconds, doubled)
    return RestartDecision(last.engine, pause, f"restarting after {why}")


def return_at(
    endings: Sequence[EngineExit],
    fell_back_at: float,
    returns: Sequence[float],
    limits: RecoveryLimits,
) -> float | None:
    """Return the earliest time to try the preferred (first) engine again; None: never, because it
    ended with a permanent cause or has not ended.

    `returns`: when earlier attempts started. The pause doubles with each. All times are by the
    clock of `endings`.
    """
    preferred_endings = [ending for ending in endings if ending.engine == 0]
    if not preferred_endings or preferred_endings[-1].cause in PERMANENT:
        return None
    doubled = limits.return_first_seconds * 2.0 ** len(returns)
    pause = min(limits.return_longest_seconds, doubled)
    return max(fell_back_at, *returns, 0.0) + pause
