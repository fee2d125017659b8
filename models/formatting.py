"""Formats numbers for people. All functions take base units, such as seconds and bytes.

    >>> seconds(0.0834), seconds(2.0), seconds(None)
    ('83 ms', '2.0 s', 'not measured')
    >>> rate_with_interval(1.824, 1.61, 1.943)
    '1.8/s (1.6–2.0)'
    >>> rate(0.57), rate(5.65, rounded="down"), size(1288490189)
    ('34 a minute', '5.6/s', '1.2 GiB')

Numbers have two significant digits by default, and three where they are compared with a limit.
Estimates are rounded to the nearest number. Bounds stay bounds: a confirmed rate and the low end of
an interval are rounded down, the high end up. A missing value is NOT_MEASURED, never 0.

`like`, in functions for rates, is another rate: the unit in which people read that one is used, so
that numbers beside each other have the same unit. None: the unit that suits the value itself. What
the unit is, is decided here alone: by `rate_unit` for one rate, by `common_unit_rate` for rates
that are compared, and by `RateUnits` for a log, whose later rates are not known yet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_UP, Context, Decimal
from typing import Literal

NOT_MEASURED = "not measured"
SINGLE_STREAM = "single stream"  # the load of one request at a time
GIB = 1 << 30

# Requests/s: the lowest rates that are shown per second and per minute, as 1.00.
PER_SECOND_FROM, PER_MINUTE_FROM = 0.9995, 0.9995 / 60
PER_MINUTE_RATE = 0.5  # a rate that is shown per minute
# Where a larger model may follow, a rate is shown per minute up to this many requests/s.
MAX_FOLLOWED_RATE = 10.0

Rounding = Literal["nearest", "down", "up"]
_ROUNDING = {"nearest": ROUND_HALF_UP, "down": ROUND_FLOOR, "up": ROUND_CEILING}


def significant(
    value: float, digits: int = 2, rounded: Rounding = "nearest", whole: bool = True
) -> str:
    """Return a number in decimal notation with so many significant digits: 12, 0.12. With `whole`
    it has all digits of its integer part: 1,234."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        raise ValueError(f"{value} is no measured number")
    exact = Decimal(f"{value:.10g}")  # without the error of floats: 0.07 x 60 is 4.2
    digits_kept = max(digits, exact.adjusted() + 1) if whole else digits
    rounded_value = Context(digits_kept, _ROUNDING[rounded]).plus(exact)
    decimals = max(0, digits - 1 - rounded_value.adjusted())  # 0.0999 becomes 0.10, not 0.100
    return f"{rounded_value:,.{decimals}f}"


def seconds(value: float | None, digits: int = 2, missing: str = NOT_MEASURED) -> str:
    """Return a time in µs, ms, s (up to two minutes), min or h; "never" if it is infinite."""
    if value is None:
        return missing
    if math.isinf(value):
        return "never"
    if value == 0:
        return "0 ms"
    for upper_bound, factor, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (120, 1, "s")):
        if abs(value) < upper_bound:
            return f"{significant(value * factor, digits)} {unit}"
    unit_seconds, unit = (60, "min") if abs(value) < 7200 else (3600, "h")
    return f"{significant(value / unit_seconds, digits)} {unit}"


def limit(value: float) -> str:
    """Return a limit in seconds as it was set: 2 s, 100 ms."""
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.4g} s"


def duration(value: float) -> str:
    """Return a waiting time in whole seconds: 90 -> "1 min 30 s"; 0.5 -> "1 s"."""
    whole = max(1, round(value)) if value > 0 else 0
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 and whole < 600 else "")
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def rate_unit(value: float | None) -> tuple[float, str]:
    """Return the unit in which people read a rate, as seconds and as a name: the first of second,
    minute and hour in which it is 1 or more."""
    if not value or value >= PER_SECOND_FROM:
        return 1.0, "/s"
    return (60.0, " a minute") if value >= PER_MINUTE_FROM else (3600.0, " an hour")


def common_unit_rate(rates: Iterable[float | None]) -> float | None:
    """Return the rate whose unit suits all of these, so that they can be compared: per second if
    none is below 1/s, otherwise per minute, or per hour if none reaches one a minute. None: all are
    0 or missing."""
    positive = [rate for rate in rates if rate]
    if not positive or min(positive) >= PER_SECOND_FROM:
        return max(positive, default=None)
    return min(max(positive), PER_MINUTE_RATE)


class RateUnits:
    """The units of a log: all rates of one device are written in one unit, chosen with the first.
    The texts that belong to a log, as a later table of its run, have that unit too if the run
    recorded it.

    `devices_with_several`: those on which several configurations are measured. After the first,
    larger models may come, so its rates are written per minute unless they are high.
    """

    def __init__(self) -> None:
        self.devices_with_several: set[str | None] = set()
        self._unit_rates: dict[str | None, float] = {}

    def keep(
        self,
        device: str | None,
        rates: Iterable[float | None] = (),
        recorded: Iterable[float | None] = (),
    ) -> float | None:
        """Return a rate in whose unit all rates of a device are written.

        If none was written yet, it is the first of `recorded`, which earlier calls returned. If
        that has none, the unit suits `rates`, the first ones. None: these are 0 or missing too.
        """
        if device not in self._unit_rates:
            unit_rate = next(filter(None, recorded), None)
            if unit_rate is None and (unit_rate := common_unit_rate(rates)) is not None:
                if device in self.devices_with_several and unit_rate < MAX_FOLLOWED_RATE:
                    unit_rate = min(unit_rate, PER_MINUTE_RATE)
            if unit_rate is not None:
                self._unit_rates[device] = unit_rate
        return self._unit_rates.get(device)


def rate(
    value: float | None,
    digits: int = 2,
    rounded: Rounding = "nearest",
    like: float | None = None,
) -> str:
    """Return a rate in requests per second, minute or hour: `1.8/s`, `34 a minute`, `160 an
    hour`."""
    if value is None:
        return NOT_MEASURED
    unit_seconds, unit = rate_unit(like or value)
    # Only rates per second keep all digits of their integer part: 160 an hour, not 159.
    return f"{significant(value * unit_seconds, digits, rounded, unit == '/s')}{unit}"


def of_requests(rate_text: str, what: str = "requests") -> str:
    """Insert the word: `1.8/s` -> `1.8 requests/s`, `34 a minute` -> `34 requests a minute`."""
    return re.sub("(/s| a minute| an hour)", rf" {what}\1", rate_text, count=1)


def requests(
    value: float | None,
    digits: int = 2,
    rounded: Rounding = "nearest",
    like: float | None = None,
) -> str:
    """Return a rate with its word: `1.8 requests/s`, `34 requests a minute`."""
    return of_requests(rate(value, digits, rounded, like))


def load(
    per_second: float | None, users: int | None = None, digits: int = 2, like: float | None = None
) -> str:
    """Return the load of a level: `1.8/s`, `8 users` or `single stream` (one after another)."""
    if per_second is not None:
        return rate(per_second, digits, like=like)
    return SINGLE_STREAM if users in (None, 1) else f"{users} users"


def rate_interval(low: float | None, high: float | None, like: float | None = None) -> str:
    """Return `1.7–2.4/s`, or `above 43 a minute` if one end is open. Without `like`, the unit suits
    the higher end."""
    if low is None and high is None:
        return NOT_MEASURED
    unit_rate = like or high or low
    low_text, high_text = rate(low, 2, "down", unit_rate), rate(high, 2, "up", unit_rate)
    if low is None:
        return f"below {high_text}"
    if high is None:
        return f"above {low_text}"
    _, unit = rate_unit(unit_rate)
    return f"{low_text.removesuffix(unit)}–{high_text}"


def rate_with_interval(
    value: float | None, low: float | None, high: float | None, like: float | None = None
) -> str:
    """Return `1.8/s (1.7–1.9)`, or `above 1.7/s` if one end is open."""
    if low is None and high is None:
        return rate(value, like=like)
    if value is None or low is None or high is None:
        return rate_interval(low, high, like)
    unit_rate = like or value
    _, unit = rate_unit(unit_rate)
    ends = rate_interval(low, high, unit_rate).removesuffix(unit)
    return f"{rate(value, like=like)} ({ends})"


def with_interval(value: float, low: float | None, high: float | None) -> str:
    """Return a number with its interval: `110 (92–130)`; without one if an end is open."""
    if low is None or high is None:
        return significant(value)
    ends = f"{significant(low, rounded='down')}–{significant(high, rounded='up')}"
    return f"{significant(value)} ({ends})"


def size(size_bytes: float | None, digits: int = 3) -> str:
    """Return a number of bytes with three digits: 73.4 MiB, 1.21 GiB, 24 GiB."""
    if size_bytes is None:
        return NOT_MEASURED
    value = float(size_bytes)
    unit = "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.{digits}g} {unit}" if abs(value) < 999.5 else f"{value:.0f} {unit}"


def share(value: float | None, digits: int = 3) -> str:
    """Return a share in percent. Only a share of exactly 1 is shown as 100 %, and only 0 as 0 %."""
    if value is None:
        return NOT_MEASURED
    percent = value * 100
    if abs(percent - round(percent)) < 1e-9:
        return f"{round(percent)} %"
    text = significant(percent, digits if percent >= 10 else digits - 1)
    return ">99.9 %" if text == "100" else f"{text} %"


def difference(value: float | None, reference: float | None, decimals: int = 0) -> str | None:
    """Return how far a value is above another: `+6 %`; None: one of them is not known or 0."""
    if not value or not reference:
        return None
    percent = f"{value / reference - 1:+.{decimals}%}"
    return percent.replace("%", " %").replace("-", "\N{MINUS SIGN}")


def count(value: int | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,}"


def tokens_per_second(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{significant(value)} tokens/s"


def parameters(value: int | None) -> str:
    """Return the number of a model's parameters: 135M, 1.2B, 70B."""
    if value is None:
        return NOT_MEASURED
    is_small = value < 999_500_000
    return f"{significant(value / 1e6, 3)}M" if is_small else f"{significant(value / 1e9, 2)}B"


def dollars(value: float) -> str:
    """Return whole dollars: $588. A cost below half a dollar is not free: <$1."""
    return "<$1" if 0 < value < 0.5 else f"${value:,.0f}"


def dollars_per_hour(value: float | None) -> str:
    return "no list price" if value is None else f"${value:.2f}/h"
