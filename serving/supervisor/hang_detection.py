"""Tells an engine that hangs from one that is slow: by its messages, its steps and its CPU time.

watch = HangWatch()
watch.heard(); watch.stepped(stats); watch.took_work()
watch.trouble(pid, ready, sequences=2, limits=limits, device="cpu")      # None: it is well
"""

from __future__ import annotations

import time

import psutil

from serving.engine.ipc_messages import Ready, StepStats
from serving.engine.prefill_budget import StepClock
from serving.supervisor.restart_policy import RecoveryLimits

_BUSY_CPU_SHARE = 0.05  # of one core; below it the process counts as asleep


class HangWatch:
    """Of one engine process. Times are time.monotonic()."""

    def __init__(self) -> None:
        self._heard_at = self._step_at = self._busy_at = time.monotonic()
        self._clock = StepClock()
        self._cpu: tuple[float, float] | None = None  # CPU seconds used, and when that was read

    def heard(self) -> None:
        """Any message came."""
        self._heard_at = time.monotonic()

    def stepped(self, stats: StepStats) -> None:
        """A step has finished."""
        self._step_at = time.monotonic()
        self._clock.learn(stats.decode_rows, stats.prefill_tokens, stats.step_seconds)

    def took_work(self) -> None:
        """An idle engine was given something: from now on it has to step."""
        self._step_at = self._busy_at = time.monotonic()

    def trouble(
        self, pid: int, ready: Ready | None, sequences: int, limits: RecoveryLimits, device: str
    ) -> str | None:
        """Why to give the process up: silent while loading, or hung. None: it is well."""
        now = time.monotonic()
        self._look_at_cpu(pid, now)
        if ready is None:
            silent = now - self._heard_at
            is_gpu = device == "gpu"
            most = limits.gpu_load_timeout_seconds if is_gpu else limits.load_timeout_seconds
            return f"no word from the loading engine for {silent:.0f} s" if silent > most else None
        pace = self._clock.prompt_tokens_per_second or self._clock.tokens_per_second
        longest = None if pace is None else ready.info.step_tokens / pace
        age, idle = now - self._step_at, now - self._busy_at
        if sequences and is_hung(age, idle, limits, longest):
            return f"no step finished for {age:.1f} s with {sequences} sequences in flight"
        return None

    def _look_at_cpu(self, pid: int, now: float) -> None:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:  # it is gone
            return
        used = float(times.user + times.system)
        if self._cpu is None or used - self._cpu[0] > _BUSY_CPU_SHARE * (now - self._cpu[1]):
            self._busy_at = now
        self._cpu = (used, now)


def is_hung(
    step_age_seconds: float,
    idle_seconds: float,
    limits: RecoveryLimits,
    longest_seconds: float | None = None,
) -> bool:
    """True when an engine with work is to be given up: no step for long while it sleeps, or no step
    for very long.

    `step_age_seconds`: since the last step, or since work came. `idle_seconds`: without CPU use.
    `longest_seconds`: what its largest step takes at its pace so far; None: not known.
    """
    most = limits.step_timeout_seconds
    if longest_seconds is not None:
        most = max(limits.slow_step * longest_seconds, limits.slow_step_least_seconds)
    if step_age_seconds > most:
        return True
    return min(step_age_seconds, idle_seconds) > limits.health_timeout_seconds
