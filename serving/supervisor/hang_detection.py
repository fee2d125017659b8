"""Tells an engine that hangs from one that is slow: by its messages, its steps and its CPU time."""

from __future__ import annotations

import time

import psutil

from serving.engine.ipc_messages import Ready, StepStats
from serving.engine.prefill_budget import StepClock
from serving.supervisor.restart_policy import RecoveryLimits

LOOK_AFTER_SECONDS = 0.5  # without a step: only then is the process's CPU time read
_BUSY_CPU_SHARE = 0.05  # of one core; below it the process counts as asleep


class HangWatch:
    """Of one engine process. Times are time.monotonic(); `clock` learns what its steps cost."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self._heard_at = self._step_at = self._busy_at = time.monotonic()
        self._cpu: tuple[float, float] | None = None  # CPU seconds used, and when that was read

    def heard(self, stats: StepStats | None) -> None:
        """A message came; `stats`: of the step that it tells of."""
        self._heard_at = time.monotonic()
        if stats is not None:
            self._step_at = self._heard_at
            self.clock.learn(stats.decode_rows, stats.prefill_tokens, stats.step_seconds)

    def took_work(self) -> None:
        """An idle engine was given something: from now on it has to step."""
        self._step_at = self._busy_at = time.monotonic()

    def trouble(
        self, pid: int, ready: Ready | None, sequences: int, limits: RecoveryLimits, device: str
    ) -> str | None:
        """Why to give the process up: silent while loading, or hung. None: it is well."""
        now = time.monotonic()
        if ready is None:
            silent = now - self._heard_at
            is_gpu = device == "gpu"
            most = limits.gpu_load_timeout_seconds if is_gpu else limits.load_timeout_seconds
            return f"no word from the loading engine for {silent:.0f} s" if silent > most else None
        age = now - self._step_at
        if not sequences or age < LOOK_AFTER_SECONDS:
            return None
        pace = self.clock.prompt_tokens_per_second or self.clock.tokens_per_second
        longest = None if pace is None else ready.info.step_tokens / pace
        if is_hung(age, self._idle_seconds(pid, now), limits, longest):
            return f"no step finished for {age:.1f} s with {sequences} sequences in flight"
        return None

    def _idle_seconds(self, pid: int, now: float) -> float:
        """For how long the process has used no CPU, as far as was looked."""
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:  # it is gone
            return 0.0
        used = float(times.user + times.system)
        if self._cpu is None or used - self._cpu[0] > _BUSY_CPU_SHARE * (now - self._cpu[1]):
            self._busy_at = now
        self._cpu = (used, now)
        return now - self._busy_at


def is_hung(
    step_age_seconds: float,
    idle_seconds: float,
    limits: RecoveryLimits,
    longest_seconds: float | None,
) -> bool:
    """No step for long while it sleeps (`idle_seconds` without CPU use), or none for very long.

    `longest_seconds`: what its largest step takes at its pace so far; None: not known.
    """
    most = limits.step_timeout_seconds
    if longest_seconds is not None:
        most = max(limits.slow_step * longest_seconds, limits.slow_step_least_seconds)
    if step_age_seconds > most:
        return True
    return min(step_age_seconds, idle_seconds) > limits.health_timeout_seconds
