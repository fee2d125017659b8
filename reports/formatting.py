"""The one place that knows milliseconds, GiB and requests/s: numbers in base units in, text for people out.

    >>> seconds(0.0834), seconds(2.0), seconds(None)
    ('83 ms', '2.0 s', 'not measured')
    >>> rate_with_interval(0.824, 0.71, 0.943)
    '0.82 requests/s (0.71–0.94)'
    >>> size(1288490189)
    '1.2 GiB'

Digits are those that mean something: two for most things, three where a figure is read against a limit. Missing is NOT_MEASURED, never 0.
"""

from __future__ import annotations

import math

NOT_MEASURED = "not measured"
MIB = 1 << 20
GIB = 1 << 30


def significant(value: float, digits: int = 2) -> str:
    """Plain decimal notation with that many significant digits, and never fewer than the integer part: 1234, 12, 1.2, 0.12."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        raise ValueError(f"{value} is no measured number")
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    if rounded != 0:  # 0.0999 becomes 0.10, not 0.100
        places = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(0, places)}f}" if places > 0 else f"{value:,.0f}"


def seconds(value: float | None, digits: int = 2) -> str:
    """A duration: microseconds below 1 ms, milliseconds below 1 s, seconds up to two minutes, else minutes."""
    if value is None:
        return NOT_MEASURED
    if value == 0:
        return "0 ms"
    size_of = abs(value)
    if size_of < 0.9995e-3:
        return f"{significant(value * 1e6, digits)} µs"
    if size_of < 0.9995:
        return f"{significant(value * 1e3, digits)} ms"
    if size_of < 120:
        return f"{significant(value, digits)} s"
    if size_of < 7200:
        return f"{significant(value / 60, digits)} min"
    return f"{significant(value / 3600, digits)} h"


def rate(value: float | None) -> str:
    """Requests per second, two digits: `0.82/s`."""
    return NOT_MEASURED if value is None else f"{significant(value)}/s"


def interval_digits(low: float | None, high: float | None) -> int:
    """How many digits of a value with this interval mean something: enough to tell its ends apart, two or three."""
    if low is None or high is None or low <= 0 or high <= low:
        return 2
    return 2 if (high - low) / high > 0.05 else 3


def interval(low: float | None, high: float | None) -> str:
    """`0.71–0.94`, `above 0.71`, `below 0.94`."""
    digits = interval_digits(low, high)
    if low is not None and high is not None:
        return f"{significant(low, digits)}–{significant(high, digits)}"
    if low is not None:
        return f"above {significant(low, digits)}"
    if high is not None:
        return f"below {significant(high, digits)}"
    return NOT_MEASURED


def rate_with_interval(value: float | None, low: float | None, high: float | None) -> str:
    """`0.82 requests/s (0.71–0.94)`; with one end open `above 0.71 requests/s`."""
    if value is None and low is None and high is None:
        return NOT_MEASURED
    if value is None or low is None or high is None:
        return f"{interval(low, high)} requests/s" if (low, high) != (None, None) else f"{significant(value or 0.0)} requests/s"
    return f"{significant(value, interval_digits(low, high))} requests/s ({interval(low, high)})"


def size(value_bytes: float | None) -> str:
    """Bytes as MiB below one GiB, else GiB."""
    if value_bytes is None:
        return NOT_MEASURED
    if abs(value_bytes) < GIB:
        return f"{value_bytes / MIB:,.0f} MiB"
    return f"{significant(value_bytes / GIB)} GiB"


def gib(value_bytes: float | None) -> float | None:
    """Bytes as a number of GiB, for axes and tables."""
    return None if value_bytes is None else value_bytes / GIB


def tokens_per_second(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{significant(value)} tokens/s"


def share(value: float | None, digits: int = 3) -> str:
    """A proportion in per cent. Rounding never makes 100 % of less than all, nor 0 % of more than none."""
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
    """Model size as people say it: 135M, 1.2B, 70B."""
    if value is None:
        return NOT_MEASURED
    if value < 999_500_000:
        return f"{significant(value / 1e6, 3)}M"
    return f"{significant(value / 1e9, 2)}B"


def dollars_per_hour(value: float | None) -> str:
    return "no list price" if value is None else f"${value:.2f}/h"


def bandwidth(bytes_per_second: float | None) -> str:
    """Decimal gigabytes per second, as memory vendors count."""
    return NOT_MEASURED if bytes_per_second is None else f"{significant(bytes_per_second / 1e9)} GB/s"


def listing(parts: list[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} {last} {parts[-1]}"


_SPELLING = {
    "smollm2": "SmolLM2",
    "llama": "Llama",
    "qwen2.5": "Qwen2.5",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "tinyllama": "TinyLlama",
}


def model_title(name: str) -> str:
    """A model's name as its makers write it: llama-3.2-1b -> Llama-3.2-1B. Names of nobody we know stay as they are."""
    family, dash, rest = name.partition("-")
    if family not in _SPELLING:
        return name
    sizes = [part.upper() if part[:1].isdigit() and part[-1:] in ("b", "m") else part for part in rest.split("-")]
    return _SPELLING[family] + dash + "-".join(sizes)
