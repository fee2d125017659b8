"""One life of an engine: its process, what it said, what it is busy with, and why it ended."""

from __future__ import annotations

import msgspec

from serving.backends.base import EngineConfig
from serving.child import Child, cause_of_exit
from serving.messages import Died, Ready, ToEngine
from serving.placement import Cause
from serving.recovery import RecoveryLimits, is_hung

_BUSY_CPU_SHARE = 0.05  # of one core; below it a child counts as asleep


class Event(msgspec.Struct, frozen=True):
    """Something that happened to the engines.

    `kind`: started, ready, standby, died, restarting, fell_back, returning, returned, failed, draining, stopped, unloaded.
    """

    unix_seconds: float
    kind: str
    engine: str  # "llama_cpp/cpu"
    message: str
    cause: str | None = None  # a value of serving.placement.Cause
    model: str = ""


class Life:
    """One child from its start to its end. `place` is that of its configuration in the supervisor's list."""

    def __init__(self, place: int, config: EngineConfig, now: float) -> None:
        self.place = place
        self.config = config
        self.child: Child | None = None
        self.ready: Ready | None = None
        self.ready_at: float | None = None
        self.died: Died | None = None
        self.killed_for: tuple[Cause, str] | None = None
        self.asked_to_end = False
        self.sequences: set[int] = set()
        self.started_at = now
        self.heard_at = now  # any message
        self.step_at = now  # a finished step, or work for an idle engine
        self.busy_at = now  # the child used CPU
        self._cpu: tuple[float, float] | None = None

    @property
    def label(self) -> str:
        return label(self.config)

    def send(self, message: ToEngine) -> None:
        if self.child is not None:
            self.child.send(message)

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()

    def took(self, sequence: int, now: float) -> None:
        """A sequence was given to it: from now on it has to step."""
        if not self.sequences:
            self.step_at = self.busy_at = now
        self.sequences.add(sequence)

    def look_at_cpu(self, now: float) -> None:
        used = self.child.cpu_seconds() if self.child is not None else None
        if used is None:
            return
        if self._cpu is None or used - self._cpu[0] > _BUSY_CPU_SHARE * (now - self._cpu[1]):
            self.busy_at = now
        self._cpu = (used, now)

    def trouble(self, now: float, limits: RecoveryLimits) -> str | None:
        """What is wrong with a process that still runs: it is silent while it loads, or it hangs; None: nothing."""
        if self.killed_for is not None or self.child is None:
            return None
        self.look_at_cpu(now)
        if self.ready is None:
            silent = now - self.heard_at
            return f"no word from the loading engine for {silent:.0f} s" if silent > limits.load_timeout_seconds else None
        if self.sequences and is_hung(now - self.step_at, now - self.busy_at, limits):
            return f"no step finished for {now - self.step_at:.1f} s with {len(self.sequences)} sequences in flight"
        return None

    def give_up(self, trouble: str) -> None:
        self.killed_for = (Cause.health_timeout, trouble)
        self.kill()

    def why(self) -> tuple[Cause, str]:
        """The cause of an unasked-for end: what we killed it for, its last word, or its exit status."""
        if self.killed_for is not None:
            return self.killed_for
        child = self.child
        if self.died is not None:
            try:
                return Cause(self.died.cause), self.died.message
            except ValueError:
                return Cause.engine_died, f"{self.died.cause}: {self.died.message}"
        if child is None:
            return Cause.load_failed, "it never ran"
        if child.broken is not None:
            return Cause.engine_died, child.broken
        return cause_of_exit(child.returncode, self.ready is not None, child.killed_for_memory), child.exit_text()


def label(config: EngineConfig) -> str:
    """How an engine is called in headers, logs and metrics: "llama_cpp/cpu"."""
    return f"{config.backend}/{config.device}"
