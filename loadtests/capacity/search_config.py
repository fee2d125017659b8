"""Settings of the search for the capacity: [search] of a campaign."""

from __future__ import annotations

import math

import msgspec

LEVEL_SHARE = 0.1  # of the budget, that a level may take for its requests
_ABOVE_ZERO = (
    *("min_rate", "max_rate", "precision", "level_seconds_min", "level_seconds_max"),
    *("budget_seconds", "single_stream_seconds", "start_rate"),
)


class SearchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to search. Rates in requests per second."""

    min_rate: float = 0.0001  # lowest rate tried, requests per second
    max_rate: float = 1000.0  # highest rate tried, requests per second
    precision: float = 0.10  # the search ends when the interval is this narrow: 0.10 is +- 10 %
    level_seconds_min: float = 20.0  # shortest level
    level_seconds_max: float = 120.0  # longest level; one that confirms, or is slow, may be longer
    level_requests_min: int = 30  # a level is made longer until it expects this many requests
    budget_seconds: float = 600.0  # measuring time a cell, unless the campaign has the key
    start_rate: float | None = (
        None  # where to look first; none: predicted by calibration and simulation
    )
    calibration_seconds: float = 60.0  # most, and at most an eighth of the budget; 0: none
    rates: tuple[float, ...] = ()  # rates to measure in this order, without a search
    rate_seconds: tuple[float, ...] = ()  # duration of each of `rates`; empty: as in a search
    single_stream_requests: int = 20  # requests sent one at a time to the idle server
    single_stream_seconds: float = 120.0  # after this no further single-stream request is begun
    batching_gain: float = 2.0  # without a prediction the first rate is this times one stream's
    confidence: float = 0.95  # confidence of each side of the interval
    starts: int = 3  # server starts that a search is spread over; 1 with given rates or a target
    confirming_share: float = 0.35  # share of the budget kept for the level that confirms
    overhead: float = 0.25  # warm-up and draining of a level, as a share of its duration

    def __post_init__(self) -> None:
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0, got {value}")
        if self.max_rate <= self.min_rate:
            raise ValueError(
                f"max_rate must be above min_rate = {self.min_rate}, got {self.max_rate}"
            )
        if self.level_seconds_max < self.level_seconds_min:
            raise ValueError(
                f"level_seconds_max must be at least {self.level_seconds_min}, the minimum, "
                f"got {self.level_seconds_max}"
            )
        if self.level_requests_min < 1 or self.single_stream_requests < 1:
            raise ValueError("level_requests_min and single_stream_requests must be at least 1")
        if self.starts < 1:
            raise ValueError(f"starts must be at least 1, got {self.starts}")
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence must be between 0.5 and 1, got {self.confidence}")
        if not self.batching_gain >= 1:
            raise ValueError(f"batching_gain must be at least 1, got {self.batching_gain}")
        if not (math.isfinite(self.calibration_seconds) and self.calibration_seconds >= 0):
            raise ValueError(
                f"calibration_seconds must be 0 or more, got {self.calibration_seconds}"
            )
        for name in ("rates", "rate_seconds"):
            for value in getattr(self, name):
                if not (math.isfinite(value) and value > 0):
                    raise ValueError(f"{name} must all be above 0, got {value}")
        if self.rate_seconds and len(self.rate_seconds) != len(self.rates):
            raise ValueError(
                f"rate_seconds has {len(self.rate_seconds)} entries for {len(self.rates)} rates: "
                "give one for each, or none"
            )
        if not 0 <= self.confirming_share < 1:
            raise ValueError(
                f"confirming_share must be 0 or more and below 1, got {self.confirming_share}"
            )
        if not self.overhead >= 0:
            raise ValueError(f"overhead must be 0 or more, got {self.overhead}")

    def level_seconds(self, rate: float) -> float:
        """Seconds that expect `level_requests_min` requests; a slow model's level may take longer
        than `level_seconds_max`, up to a tenth of the budget.
        """
        wanted = max(self.level_seconds_min, self.level_requests_min / rate)
        return min(wanted, max(self.level_seconds_max, LEVEL_SHARE * self.budget_seconds))
