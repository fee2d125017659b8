"""Another process's clock against ours: an offset by round trips, within bounds that hold.

    other = OtherClock()
    other.exchange(sent, there, received)    # our clock, theirs, ours; seconds
    other.at(received)                       # Offset: theirs - ours, and how wrong that may be

No message arrives before it was sent, so each round trip bounds the offset by there - received and
there - sent, however unlike its two ways were (Marzullo and Owicki 1983). Bounds that have aged are
widened by the most that two clocks run apart.
"""

from __future__ import annotations

from collections import deque

import msgspec

# Seconds per second: NTP slews a clock by at most 500 ppm (adjtimex), and there are two.
MOST_DRIFT = 1e-3
KEPT = 64  # round trips


class Offset(msgspec.Struct, frozen=True):
    """Their clock minus ours lies in `seconds` +- `uncertainty_seconds`."""

    seconds: float
    uncertainty_seconds: float

    def nearest(self, seconds: float) -> float:
        """The offset nearest to `seconds` that may be true: a clock is moved only if it must be."""
        low, high = self.seconds - self.uncertainty_seconds, self.seconds + self.uncertainty_seconds
        return min(max(seconds, low), high)


class OtherClock:
    """What round trips say of another process's clock. Both run forward without steps."""

    def __init__(self) -> None:
        self._trips: deque[tuple[float, float, float]] = deque(maxlen=KEPT)

    @property
    def is_known(self) -> bool:
        return bool(self._trips)

    def exchange(self, sent: float, there: float, received: float) -> bool:
        """One round trip. False where it contradicts those before: a clock jumped, or stood."""
        self._trips.append((sent, there, received))
        low, high = self._bounds(received)
        return low <= high

    def at(self, now: float) -> Offset:
        """The offset at `now`, on our clock, which is not before the last round trip."""
        low, high = self._bounds(now)
        return Offset((low + high) / 2, (high - low) / 2)

    def _bounds(self, now: float) -> tuple[float, float]:
        lows, highs = [], []
        for sent, there, received in self._trips:
            lows.append(there - received - MOST_DRIFT * (now - received))
            highs.append(there - sent + MOST_DRIFT * (now - sent))
        return max(lows), min(highs)
