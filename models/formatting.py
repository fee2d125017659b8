"""The one formatter: numbers in base units in, text for people out.

    >>> seconds(0.0834), seconds(2.0), seconds(None)
    ('83 ms', '2.0 s', 'not measured')
    >>> rate_with_interval(1.824, 1.61, 1.943)
    '1.8 requests/s (1.6–2.0)'
    >>> rate(0.57), rate_with_interval(0.0441, 0.029, 0.0702)
    ('34 a minute', '160 requests an hour (100–260)')
    >>> rate(5.65, rounded="down")
    '5.6/s'
    >>> size(1288490189)
    '1.2 GiB'

Two significant digits by default, three where a figure is read against a limit. An estimate is
rounded to the nearest; a bound stays one: what is held and the low end of an interval are rounded
down, the high end up. Missing is NOT_MEASURED, never 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Literal

NOT_MEASURED = "not measured"
GIB = 1 << 30

Rounding = Literal["nearest", "down", "up"]


def significant(value: float, digits: int = 2, rounded: Rounding = "nearest") -> str:
    """Decimal notation with that many significant digits, or the integer part: 1,234, 12, 0.12."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        raise ValueError(f"{value} is no measured number")
    shown = _round(value, _places(value, digits), rounded)
    return f"{shown:,.{_places(shown, digits)}f}"  # 0.0999 becomes 0.10, not 0.100


def _places(value: float, digits: int) -> int:
    """After the point."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0


def _round(value: float, places: int, rounded: Rounding) -> float:
    nearest = round(value, places)
    if rounded == "nearest" or math.isclose(nearest, value, rel_tol=1e-9):  # 0.07 x 60 is 4.2
        return nearest
    away = (nearest > value) if rounded == "down" else (nearest < value)
    step = 10.0**-places if rounded == "up" else -(10.0**-places)
    return round(nearest + step, places) if away else nearest


def seconds(value: float | None, digits: int = 2, missing: str = NOT_MEASURED) -> str:
    """A time in µs, ms, s (up to two minutes), min or h; infinite: never."""
    if value is None:
        return missing
    if math.isinf(value):
        return "never"
    if value == 0:
        return "0 ms"
    for most, times, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (120, 1, "s")):
        if abs(value) < most:
            return f"{significant(value * times, digits)} {unit}"
    each, unit = (60, "min") if abs(value) < 7200 else (3600, "h")
    return f"{significant(value / each, digits)} {unit}"


def limit(value: float) -> str:
    """A limit in seconds as it was set: 2 s, 100 ms."""
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.4g} s"


def duration(value: float) -> str:
    """Seconds a person waits, in whole seconds: 90 -> "1 min 30 s"; 0.5 -> "1 s"."""
    whole = max(1, round(value)) if value > 0 else 0
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 and whole < 600 else "")
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def rate_unit(value: float | None) -> tuple[float, str]:
    """Seconds of the unit in which people read a rate, and its name: below 1/s a whole number."""
    if not value or value >= 0.9995:
        return 1.0, "/s"
    return (60.0, " a minute") if value * 60 >= 9.995 else (3600.0, " an hour")


def rate(
    value: float | None,
    digits: int = 2,
    rounded: Rounding = "nearest",
    like: float | None = None,
) -> str:
    """Requests per second, minute or hour: `1.8/s`, `34 a minute`, `160 an hour`.

    `like`: in the unit of this rate, so that two can be compared.
    """
    if value is None:
        return NOT_MEASURED
    times, unit = rate_unit(like or value)
    return f"{significant(_coarse(value * times, unit, digits, rounded), digits, rounded)}{unit}"


def _coarse(value: float, unit: str, digits: int, rounded: Rounding) -> float:
    """160 an hour, not 159: a slow rate has as many digits as any other."""
    if unit == "/s" or value < 100:
        return value
    return _round(value, digits - 1 - math.floor(math.log10(value)), rounded)


def requests(value: float | None, digits: int = 2, rounded: Rounding = "nearest") -> str:
    """`1.8 requests/s`, `34 requests a minute`."""
    return _of_requests(rate(value, digits, rounded))


def _of_requests(said: str) -> str:
    return re.sub("(/s| a minute| an hour)$", r" requests\1", said)


def load(
    rate_per_second: float | None,
    users: int | None = None,
    digits: int = 2,
    said: Callable[[float | None, int], str] = rate,
) -> str:
    """What a level is loaded with: `1.8/s`, `8 users`, `alone` (one request at a time)."""
    if rate_per_second is not None:
        return said(rate_per_second, digits)
    return "alone" if users in (None, 1) else f"{users} users"


def _interval_digits(low: float | None, high: float | None) -> int:
    """Digits that tell the ends of the interval apart: two or three."""
    if low is None or high is None or low <= 0 or high <= low:
        return 2
    return 2 if (high - low) / high > 0.05 else 3


def interval(low: float | None, high: float | None) -> str:
    """`0.71–0.94`, `above 0.71`, `below 0.94`: never narrower than it is."""
    digits = _interval_digits(low, high)
    least = "" if low is None else significant(low, digits, "down")
    most = "" if high is None else significant(high, digits, "up")
    if least and most:
        return f"{least}–{most}"
    if least:
        return f"above {least}"
    return f"below {most}" if most else NOT_MEASURED


def rate_interval(low: float | None, high: float | None, like: float | None = None) -> str:
    """`1.7–2.4/s`, `above 43 a minute`: in the unit of `like`, else of the higher end."""
    if low is None and high is None:
        return NOT_MEASURED
    times, unit = rate_unit(like or high or low)
    digits = _interval_digits(low, high)
    least = None if low is None else _coarse(low * times, unit, digits, "down")
    most = None if high is None else _coarse(high * times, unit, digits, "up")
    return f"{interval(least, most)}{unit}"


def rate_with_interval(
    value: float | None, low: float | None, high: float | None, like: float | None = None
) -> str:
    """`1.8 requests/s (1.7–1.9)`; with one end open `above 1.7 requests/s`. `like`: see `rate`."""
    if low is None and high is None:
        return requests(value)
    if value is None or low is None or high is None:
        return _of_requests(rate_interval(low, high, like))
    _, unit = rate_unit(like or value)
    ends = rate_interval(low, high, like or value).removesuffix(unit)
    return f"{_of_requests(rate(value, _interval_digits(low, high), like=like))} ({ends})"


def size(size_bytes: float | None) -> str:
    """Bytes with three digits: 73.4 MiB, 1.21 GiB, 24 GiB."""
    if size_bytes is None:
        return NOT_MEASURED
    value = float(size_bytes)
    unit = "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value:.0f} {unit}"


def share(value: float | None, digits: int = 3) -> str:
    """A proportion in per cent; 100 % only of all, 0 % only of none."""
    if value is None:
        return NOT_MEASURED
    percent = value * 100
    if abs(percent - round(percent)) < 1e-9:
        return f"{round(percent)} %"
    text = significant(percent, digits if percent >= 10 else digits - 1)
    return ">99.9 %" if text == "100" else f"{text} %"


def count(value: int | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,}"


def parameters(value: int | None) -> str:
    """Parameters of a model: 135M, 1.2B, 70B."""
    if value is None:
        return NOT_MEASURED
    is_small = value < 999_500_000
    return f"{significant(value / 1e6, 3)}M" if is_small else f"{significant(value / 1e9, 2)}B"


def dollars_per_hour(value: float | None) -> str:
    return "no list price" if value is None else f"${value:.2f}/h"


def listing(parts: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


_SPELLING = {name.lower(): name for name in ("SmolLM2", "Llama", "Mistral", "TinyLlama")}
_SPELLING |= {name.lower(): name for name in ("Qwen2.5", "Qwen2", "Qwen3")}


def model_title(name: str) -> str:
    """A model's name as its makers write it: llama-3.2-1b -> Llama-3.2-1B; others unchanged."""
    family, dash, rest = name.partition("-")
    if family not in _SPELLING:
        return name
    sizes = re.sub(r"\b[\d.]+[bm]\b", lambda size: size[0].upper(), rest)
    return _SPELLING[family] + dash + sizes
