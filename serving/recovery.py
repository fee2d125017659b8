"""What to do when an engine has died: again, somewhere else, or not at all; and when to come back. Pure decisions on a given clock.

An engine list is in order of preference (GPU first). The table, in words:

| the engine ended with                                              | and there is a next engine | and there is none                  |
|--------------------------------------------------------------------|----------------------------|------------------------------------|
| a cause that a restart cannot change (no driver, does not fit, ...) | fall back at once          | fail                               |
| load_oom, load_failed, or death before it was ready                | fall back at once          | again once, then fail              |
| runtime_oom, health_timeout                                        | fall back at once          | again, with growing pauses         |
| engine_died                                                        | again once, then fall back | again, with growing pauses         |
| too many deaths within the window                                  | fall back                  | fail: the circuit breaker is open  |

Where the next engine stands by, loaded, every cause falls back at once: that is quicker than any restart.

Going back to the preferred engine is tried after `return_first_seconds`, then twice as long after each attempt that did not last, up to
`return_longest_seconds`, never more than `flips_per_hour` times an hour, and never after a permanent cause.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from serving.placement import Cause

PERMANENT: frozenset[Cause] = frozenset(
    {
        Cause.no_driver,
        Cause.driver_mismatch,
        Cause.no_device,
        Cause.arch_unsupported,
        Cause.backend_missing,
        Cause.forced,
    }
)
_FALL_BACK_AT_ONCE = frozenset({Cause.insufficient_vram, Cause.load_oom, Cause.load_failed, Cause.runtime_oom, Cause.health_timeout})


class RecoveryLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How patient the supervisor is. All times in seconds."""

    backoff_first_seconds: float = 0.5
    backoff_longest_seconds: float = 30.0
    deaths: int = 5  # within `window_seconds`: the circuit breaker opens
    window_seconds: float = 300.0
    load_attempts: int = 2  # deaths in a row before ready: then it is not chance
    return_first_seconds: float = 30.0
    return_longest_seconds: float = 600.0
    steady_seconds: float = 30.0  # the preferred device must look usable for so long before the attempt
    lasted_seconds: float = 600.0  # an engine that lived this long counts as well again: the pauses start anew
    flips_per_hour: int = 4
    health_timeout_seconds: float = 30.0  # no step finished for so long while work runs, and the child burns no CPU
    step_timeout_seconds: float = 300.0  # no step finished for so long, CPU or not
    load_timeout_seconds: float = 1800.0  # no word from a loading child for so long
    kill_after_seconds: float = 5.0  # from asking a child to stop at once to SIGKILL


class Ending(msgspec.Struct, frozen=True):
    """How one engine process ended. `engine` is its place in the list; times are of one monotonic clock."""

    engine: int
    cause: Cause
    message: str
    at_seconds: float
    ready_seconds: float | None  # how long it had been ready; None: it never was


class Verdict(msgspec.Struct, frozen=True):
    """What happens next: start engine `engine` after `delay_seconds`, or nothing any more (`engine` is None)."""

    engine: int | None
    delay_seconds: float
    text: str

    @property
    def fails(self) -> bool:
        return self.engine is None


def after_death(endings: Sequence[Ending], engines: int, limits: RecoveryLimits, standby: bool = False) -> Verdict:
    """The next move, given every unasked-for ending so far, oldest first (at least one). `standby`: the next engine is loaded already."""
    last = endings[-1]
    following = last.engine + 1 if last.engine + 1 < engines else None
    same = [e for e in endings if e.engine == last.engine]
    recent = [e for e in same if last.at_seconds - e.at_seconds <= limits.window_seconds]
    unready = _trailing_unready(same)
    if following is not None:
        if standby or last.cause in PERMANENT or last.cause in _FALL_BACK_AT_ONCE or last.ready_seconds is None or len(recent) >= 2:
            return Verdict(following, 0.0, f"falling back after {last.cause.value}: {last.message}")
        return Verdict(last.engine, limits.backoff_first_seconds, f"restarting once after {last.cause.value}: {last.message}")
    if last.cause in PERMANENT:
        return Verdict(None, 0.0, f"{last.cause.value}: {last.message}")
    if unready >= limits.load_attempts:
        return Verdict(None, 0.0, f"the engine did not load in {unready} attempts; the last ended with {last.cause.value}: {last.message}")
    if len(recent) >= limits.deaths:
        span = last.at_seconds - recent[0].at_seconds
        return Verdict(
            None,
            0.0,
            f"the engine died {len(recent)} times in {span:.0f} s and is not started again; last {last.cause.value}: {last.message}",
        )
    pause = min(limits.backoff_longest_seconds, limits.backoff_first_seconds * 2.0 ** (len(recent) - 1))
    return Verdict(last.engine, pause, f"restarting after {last.cause.value}: {last.message}")


def return_at(
    endings: Sequence[Ending], fell_back_at: float, returns: Sequence[float], limits: RecoveryLimits, preferred: int = 0
) -> float | None:
    """The earliest time to try the preferred engine again; None: never (its last cause is permanent, or it never died).

    `returns` are the times at which earlier attempts to go back began. The pause doubles for each of them, until the preferred
    engine has once lasted `lasted_seconds`. At most `flips_per_hour` attempts within any hour.
    """
    of_preferred = [e for e in endings if e.engine == preferred]
    if not of_preferred or of_preferred[-1].cause in PERMANENT:
        return None
    lasted = [e.at_seconds for e in of_preferred if e.ready_seconds is not None and e.ready_seconds >= limits.lasted_seconds]
    unlucky = [t for t in returns if not lasted or t >= lasted[-1]]
    pause = min(limits.return_longest_seconds, limits.return_first_seconds * 2.0 ** len(unlucky))
    earliest = max(fell_back_at, returns[-1] if returns else fell_back_at) + pause
    if limits.flips_per_hour <= 0:
        return None
    if len(returns) >= limits.flips_per_hour:
        earliest = max(earliest, returns[-limits.flips_per_hour] + 3600.0)
    return earliest


def is_hung(step_age_seconds: float, idle_seconds: float, limits: RecoveryLimits) -> bool:
    """True when a child with work to do is to be given up: no step for long, and it sleeps; or no step for very long.

    `step_age_seconds`: since the last finished step (or since work came to an idle engine).
    `idle_seconds`: for how long the child has used next to no CPU.
    """
    if step_age_seconds > limits.step_timeout_seconds:
        return True
    return step_age_seconds > limits.health_timeout_seconds and idle_seconds > limits.health_timeout_seconds


def _trailing_unready(endings: Sequence[Ending]) -> int:
    count = 0
    for ending in reversed(endings):
        if ending.ready_seconds is not None:
            break
        count += 1
    return count
