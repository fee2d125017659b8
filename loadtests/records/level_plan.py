"""What a level of load sends when: as it is decided, as it is sent, and as the journal records it.

LevelPlan(rate=2.0, warmup_seconds=5.0, window_seconds=60.0)             # open loop
LevelPlan(concurrency=1, requests=20, window_seconds=60.0)               # single stream
LevelPlan(burst=Burst((16, 16), (8, 8)), window_seconds=30.0)
LevelPlan(concurrency=1, burst=Burst((512, 512), (8, 8)), window_seconds=30.0)  # one at a time
"""

from __future__ import annotations

import msgspec


class Burst(msgspec.Struct, frozen=True):
    """Requests (streams) that are sent at one moment, in this order."""

    prompt_tokens: tuple[int, ...]  # of each stream
    output_tokens: tuple[int, ...]

    @property
    def streams(self) -> int:
        return len(self.output_tokens)


class LevelPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The load of one level: exactly one of `rate` (open loop), `concurrency` (closed loop) and
    `burst` is set, or `burst` with a concurrency of 1: its requests are sent one at a time."""

    rate: float | None = None  # nominal rate, requests/s; of conversations: of all their turns
    concurrency: int | None = None  # users that each send one request after the other
    requests: int | None = None  # a closed loop ends after this many; None: it ends by time alone
    burst: Burst | None = None  # None also for a burst that an earlier version recorded
    warmup_seconds: float = 0.0  # requests due before this do not count
    window_seconds: float  # requests due in [warmup_seconds, warmup_seconds + window_seconds) count
    seed: int = 1  # of arrivals, lengths and texts

    @property
    def duration_seconds(self) -> float:
        """Seconds from the start of the level to the end of its window."""
        return self.warmup_seconds + self.window_seconds

    @property
    def is_single_stream(self) -> bool:
        """Whether the workload's requests are sent one at a time."""
        return self.concurrency == 1 and self.burst is None

    @property
    def is_unloaded_check(self) -> bool:
        """Whether chosen requests are sent one at a time, to check what the step-time model says of
        them (crossover.loadtests.capacity.unloaded_check)."""
        return self.concurrency == 1 and self.burst is not None

    @property
    def is_burst(self) -> bool:
        """Whether this is a burst of the calibration, to whose steps the step-time model is
        fitted."""
        return self.rate is None and self.concurrency is None
