"""What to do when an engine has died, when to go back to the preferred one, and when one is hung.

Pure decisions on times that are given. An engine list is in order of preference (GPU first).

| the engine ended with                         | there is a next engine    | there is none    |
|-----------------------------------------------|---------------------------|------------------|
| a permanent cause (no driver, unsupported...) | fall back at once         | fail             |
| load_oom, load_failed, death before ready     | fall back at once         | once more, fail  |
| runtime_oom, health_timeout                   | fall back at once         | restart, backoff |
| engine_died                                   | once more, then fall back | restart, backoff |
| too many deaths in the window (breaker opens) | fall back                 | fail             |

With the next engine on standby, loaded, every cause falls back at once: quicker than any restart.

Failback is tried after `return_first_seconds`, then after twice as long for each attempt that did
not last, up to `return_longest_seconds`, at most `flips_per_hour` times an hour, never after a
permanent cause.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from serving.errors import Cause

PERMANENT = frozenset(
    {
        *(Cause.no_driver, Cause.driver_mismatch, Cause.no_device, Cause.arch_unsupported),
        *(Cause.backend_missing, Cause.forced, Cause.unsupported),
    }
)
_FALL_BACK_AT_ONCE = PERMANENT | {
    *(Cause.insufficient_vram, Cause.load_oom, Cause.load_failed),
    *(Cause.runtime_oom, Cause.health_timeout),
}
_KEPT_ATTEMPTS = 100


class RecoveryLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How patient the supervisor is. All times in seconds."""

    backoff_first_seconds: float = 0.5
    backoff_longest_seconds: float = 30.0
    deaths: int = 5  # within `window_seconds`: the circuit breaker opens
    window_seconds: float = 300.0
    load_attempts: int = 2  # deaths in a row before ready: then it is not chance
    return_first_seconds: float = 30.0
    return_longest_seconds: float = 600.0
    steady_seconds: float = 30.0  # the preferred device must look usable for so long before
    lasted_seconds: float = 600.0  # uptime after which the backoff resets
    flips_per_hour: int = 4
    health_timeout_seconds: float = 30.0  # no step for so long with work, and no CPU used
    # No step for so long with work, CPU used or not: a process that waits for a GPU spins. On a CPU
    # 512 prompt tokens of 32B take 400 s; an engine may leave layers of a GPU's model to it. Once
    # its pace is known, both are held to `slow_step` times their largest step at that pace.
    gpu_step_timeout_seconds: float = 30.0
    step_timeout_seconds: float = 300.0
    cpu_step_timeout_seconds: float = 1800.0
    slow_step: float = 10.0
    slow_step_least_seconds: float = 60.0
    # No word for so long from an engine that loads; one on a GPU alone tells of every layer.
    gpu_load_timeout_seconds: float = 120.0
    load_timeout_seconds: float = 1800.0
    kill_after_seconds: float = 5.0  # from asking an engine to stop at once to SIGKILL


class Ending(msgspec.Struct, frozen=True):
    """How one engine process ended. `engine`: its place in the list; times of a monotonic clock."""

    engine: int
    cause: Cause
    message: str
    at_seconds: float
    ready_seconds: float | None  # how long it had been ready; None: it never was


class Verdict(msgspec.Struct, frozen=True):
    """Start engine `engine` after `delay_seconds`; nothing any more where `engine` is None."""

    engine: int | None
    delay_seconds: float
    text: str


def after_death(
    endings: Sequence[Ending], engines: int, limits: RecoveryLimits, standby: bool = False
) -> Verdict:
    """The next move, from all unasked-for endings, oldest first (at least one).

    `standby`: the next engine is loaded already.
    """
    last = endings[-1]
    why = f"{last.cause.value}: {last.message}"
    same = [one for one in endings if one.engine == last.engine]
    recent = [one for one in same if last.at_seconds - one.at_seconds <= limits.window_seconds]
    if last.engine + 1 < engines:
        at_once = standby or last.cause in _FALL_BACK_AT_ONCE or last.ready_seconds is None
        if at_once or len(recent) >= 2:
            return Verdict(last.engine + 1, 0.0, f"falling back after {why}")
        return Verdict(last.engine, limits.backoff_first_seconds, f"restarting once after {why}")
    if last.cause in PERMANENT:
        return Verdict(None, 0.0, why)
    unready = _trailing_unready(same)
    if unready >= limits.load_attempts:
        text = f"the engine did not load in {unready} attempts; the last ended with {why}"
        return Verdict(None, 0.0, text)
    if len(recent) >= limits.deaths:
        span = last.at_seconds - recent[0].at_seconds
        text = (
            f"the engine died {len(recent)} times in {span:.0f} s and is not started again; "
            f"last {why}"
        )
        return Verdict(None, 0.0, text)
    return Verdict(last.engine, backoff_seconds(len(recent) - 1, limits), f"restarting after {why}")


def backoff_seconds(earlier_deaths: int, limits: RecoveryLimits) -> float:
    """The pause before an engine is started again."""
    pause = limits.backoff_first_seconds * 2.0**earlier_deaths
    return min(limits.backoff_longest_seconds, pause)


def return_at(
    endings: Sequence[Ending],
    fell_back_at: float,
    returns: Sequence[float],
    limits: RecoveryLimits,
) -> float | None:
    """The earliest time to try the preferred engine, the first, again. None: never.

    `returns`: when earlier attempts began. Never, where its last cause is permanent.
    """
    of_preferred = [one for one in endings if one.engine == 0]
    if not of_preferred or of_preferred[-1].cause in PERMANENT or limits.flips_per_hour <= 0:
        return None
    lasted = [
        one.at_seconds
        for one in of_preferred
        if one.ready_seconds is not None and one.ready_seconds >= limits.lasted_seconds
    ]
    unlucky = [at for at in returns if not lasted or at >= lasted[-1]]
    pause = min(limits.return_longest_seconds, limits.return_first_seconds * 2.0 ** len(unlucky))
    earliest = max(fell_back_at, returns[-1] if returns else fell_back_at) + pause
    if len(returns) >= limits.flips_per_hour:
        earliest = max(earliest, returns[-limits.flips_per_hour] + 3600.0)
    return earliest


class Failback:
    """Whether to try the preferred engine again: it is due, and has looked usable for a while.

    `usable`: could it load now (its GPU has room)? None: nobody can tell, so it is tried.
    """

    def __init__(
        self,
        limits: RecoveryLimits,
        usable: Callable[[], Awaitable[bool]] | None,
        clock: Callable[[], float],
    ) -> None:
        self.fell_back_at: float | None = None  # None: there is nothing to go back to
        self.pause_seconds = min(
            5.0, max(0.05, limits.return_first_seconds / 6, limits.steady_seconds / 6)
        )
        self._limits = limits
        self._usable = usable
        self._clock = clock
        self._attempts: list[float] = []
        self._usable_since: float | None = None

    def forget(self) -> None:
        """Begin again, as if nothing had ever failed."""
        self.fell_back_at = None
        self._usable_since = None
        self._attempts = []

    def is_due(self, endings: Sequence[Ending]) -> bool:
        """True when enough time has passed since the fall, and since earlier attempts."""
        if self.fell_back_at is None:
            return False
        at = return_at(endings, self.fell_back_at, self._attempts, self._limits)
        return at is not None and self._clock() >= at

    async def is_open(self, may: Callable[[], bool]) -> bool:
        """Ask every `pause_seconds`: True once `may` held and the engine looked usable for
        `steady_seconds` without a break."""
        if not may() or (self._usable is not None and not await self._usable()):
            self._usable_since = None
            return False
        now = self._clock()
        if self._usable_since is None:
            self._usable_since = now
        return now - self._usable_since >= self._limits.steady_seconds and may()

    def begin(self) -> None:
        """An attempt begins now."""
        self._usable_since = None
        self._attempts = [*self._attempts[-_KEPT_ATTEMPTS + 1 :], self._clock()]


def is_hung(
    step_age_seconds: float,
    idle_seconds: float,
    limits: RecoveryLimits,
    device: str,
    longest_seconds: float | None = None,
) -> bool:
    """True when an engine with work is to be given up: no step for long while it sleeps, or no step
    for very long.

    `step_age_seconds`: since the last step, or since work came. `idle_seconds`: without CPU use.
    `device`: "cpu", "gpu", or "both" where layers may be left to the CPU. `longest_seconds`: what
    its largest step takes at its pace so far; None: not known.
    """
    most = {
        "cpu": limits.cpu_step_timeout_seconds,
        "gpu": limits.gpu_step_timeout_seconds,
        "both": limits.step_timeout_seconds,
    }[device]
    if longest_seconds is not None and device != "gpu":
        slow = max(limits.slow_step * longest_seconds, limits.slow_step_least_seconds)
        most = min(slow, limits.cpu_step_timeout_seconds)
    if step_age_seconds > most:
        return True
    return min(step_age_seconds, idle_seconds) > limits.health_timeout_seconds


def _trailing_unready(endings: Sequence[Ending]) -> int:
    count = 0
    for ending in reversed(endings):
        if ending.ready_seconds is not None:
            break
        count += 1
    return count
