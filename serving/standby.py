"""The engine that stands by: loaded beside the one that serves, to take over at once when that one dies.

Whether one is wanted, which one it is, and how long to wait before the next is loaded when one has died itself: it costs memory and never
serves anybody while it waits, so one that keeps dying is given up, and the engine that serves does not notice.
"""

from __future__ import annotations

from serving.life import Life
from serving.recovery import RecoveryLimits


class Standby:
    """`engine` is the one that stands by, or is being loaded for it. `wanted`: False for a server that is to have none."""

    def __init__(self, wanted: bool, limits: RecoveryLimits) -> None:
        self.wanted = wanted
        self.engine: Life | None = None
        self._limits = limits
        self._deaths = 0

    def forget(self) -> None:
        """Begin anew, as if none had ever died."""
        self.engine, self._deaths = None, 0

    @property
    def loaded(self) -> Life | None:
        """The one that could take over now."""
        return self.engine if self.engine is not None and self.engine.ready is not None else None

    def died(self) -> bool:
        """The one that stood by is gone. True while another is worth a try."""
        self.engine = None
        self._deaths += 1
        return self._deaths < self._limits.deaths

    def pause_seconds(self) -> float:
        """How long to wait before the next is loaded."""
        if not self._deaths:
            return 0.0
        return min(self._limits.backoff_longest_seconds, self._limits.backoff_first_seconds * 2.0**self._deaths)
