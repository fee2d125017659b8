"""What a soak has shown, as a table, and whether it held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy import stats

from tests.bench.pressure.trend import Trend, trend
from tests.bench.pressure.wire import mib
from tests.bench.soak.traffic import Phase, Sample, Soak, Tree

MOST_RATIO = 2.0
MOST_GROWTH_BYTES = 16 << 20
SETTLING = 1 / 6  # of the attacked time, before the slope of memory is looked at
PROCESSES = ("api", "engine")
PHASES: tuple[Phase, ...] = ("alone", "polite", "attacked")


def ttfts(soak: Soak, phase: Phase) -> list[float]:
    return sorted(one.ttft for one in soak.requests if one.phase == phase and one.ttft is not None)


def percentile(values: Sequence[float], share: float) -> tuple[float, float, float] | None:
    """The percentile of sorted values and its 95 % interval by order statistics; None of none."""
    if not values:
        return None
    low, high = stats.binom.ppf([0.025, 0.975], len(values), share)
    at = [min(len(values) - 1, max(0, int(place))) for place in (low, high)]
    return float(np.quantile(values, share)), values[at[0]], values[at[1]]


def ratio(soak: Soak, without: Phase = "alone") -> float | None:
    """TTFT p99 beside attackers over alone, or over beside polite clients."""
    alone = percentile(ttfts(soak, without), 0.99)
    attacked = percentile(ttfts(soak, "attacked"), 0.99)
    return attacked[0] / alone[0] if alone and attacked else None


def slopes(soak: Soak) -> dict[str, tuple[Trend, float]]:
    """RSS while attacked, the least of each minute, with the hours that it was watched; empty where
    that is too short.
    """
    attacked = [one for one in soak.samples if one.phase == "attacked"]
    later = attacked[int(len(attacked) * SETTLING) :]
    minutes = sorted({int(one.seconds // 60) for one in later})
    if len(minutes) < 5:
        return {}
    hours = (later[-1].seconds - later[0].seconds) / 3600
    found = {}
    for name in PROCESSES:
        least = [
            min(float(getattr(one, name).rss_bytes) for one in later if one.seconds // 60 == minute)
            for minute in minutes
        ]
        found[name] = trend([60.0 * minute for minute in minutes], least), hours
    return found


def at_rest(soak: Soak) -> dict[str, tuple[float | None, float | None]]:
    """What must not be more afterwards than before; empty where the soak was cut short."""
    if soak.before is None or soak.after is None:
        return {}
    found: dict[str, tuple[float | None, float | None]] = {}
    for place, name in enumerate(PROCESSES):
        first, last = soak.before[place], soak.after[place]
        assert not isinstance(first, float | None) and not isinstance(last, float | None)
        found[f"{name} descriptors"] = first.descriptors, last.descriptors
        found[f"{name} threads"] = first.threads, last.threads
    found["api tasks"] = soak.before[2], soak.after[2]
    return found


def verdicts(soak: Soak) -> dict[str, bool]:
    """What was asked -> whether it was so; what could not be measured is not kept."""
    found = ratio(soak)
    grown = slopes(soak)
    rest = at_rest(soak)
    normal = [one for one in soak.requests if one.phase != "warm-up"]
    flat = [slope.high * hours <= MOST_GROWTH_BYTES for slope, hours in grown.values()]
    no_more = [a is None or b is None or b <= a for a, b in rest.values()]
    told = "not measured" if found is None else f"{found:.2f}"
    return {
        f"TTFT p99 attacked / alone: {told}, at most {MOST_RATIO:g}": found is not None
        and found <= MOST_RATIO,
        "no normal request is lost": bool(normal) and not any(one.lost for one in normal),
        f"RSS grows by less than {mib(MOST_GROWTH_BYTES)}": bool(flat) and all(flat),
        "no more held at rest than before": bool(no_more) and all(no_more),
        "the engine lived": not soak.is_engine_gone,
    }


def printed(soak: Soak) -> str:
    lines = [_HEAD, *_minutes(soak)]
    for phase in PHASES:
        times = ttfts(soak, phase)
        if phase == "polite" and not times:
            continue
        mine = [one for one in soak.requests if one.phase == phase]
        lags = [one.send_lag for one in mine if one.send_lag is not None]
        lines.append(
            f"{phase}: {len(mine)} requests, {sum(bool(one.lost) for one in mine)} lost; TTFT p50 "
            f"{_told(times, 0.5)}, p99 {_told(times, 0.99)}; send lag p99 "
            + (f"{1000 * float(np.quantile(lags, 0.99)):.1f} ms" if lags else "-")
        )
        lines.append(f"  CPU, of one core: {_cpu_line(soak, phase)}")
    lines += [
        f"  {count} x {why}"
        for why, count in Counter(one.lost for one in soak.requests if one.lost).items()
    ]
    for name, (slope, hours) in slopes(soak).items():
        lines.append(
            f"RSS of {name}: {mib(slope.mean)}; {slope.samples} minutes within {60 * hours:.0f}; "
            f"{mib(slope.slope)}/h ({mib(slope.low)} to {mib(slope.high)}), Theil-Sen "
            f"{mib(slope.theil_sen)}/h: {slope.verdict}, at most {mib(slope.high * hours)} in all"
        )
    lines += [f"{name} at rest: {a} -> {b}" for name, (a, b) in at_rest(soak).items()]
    if (fair := ratio(soak, "polite")) is not None:
        lines.append(f"TTFT p99 beside attackers / beside polite clients: {fair:.2f}")
    for name, seen in soak.attacks.items():
        told = ", ".join(f"{count} x {what}" for what, count in sorted(seen.items()))
        lines.append(f"attack: {name}: {told or 'none'}")
    return "\n".join(lines)


def _told(values: Sequence[float], share: float) -> str:
    found = percentile(values, share)
    if found is None:
        return "-"
    return "{:.0f} ms ({:.0f}-{:.0f})".format(*(1000 * one for one in found))


_HEAD = (
    "| minute | phase | requests | lost | TTFT p50, p99 ms | RSS MiB: api, engine | descriptors "
    "| threads | CPU % of a core: api, engine, attackers |\n|---|---|---|---|---|---|---|---|---|"
)


def _minutes(soak: Soak) -> list[str]:
    lines = []
    for minute in range(int(soak.samples[-1].seconds // 60) + 1 if soak.samples else 0):
        inside = [one for one in soak.samples if minute * 60 <= one.seconds < minute * 60 + 60]
        asked = [one for one in soak.requests if minute * 60 <= one.due < minute * 60 + 60]
        if not inside:
            continue
        last = inside[-1]
        times = sorted(one.ttft for one in asked if one.ttft is not None)
        quantiles = [f"{1000 * float(np.quantile(times, q)):.0f}" if times else "-" for q in _BOTH]
        trees: list[Tree] = [last.api, last.engine]
        sizes = ", ".join(f"{one.rss_bytes / 2**20:.1f}" for one in trees)
        lost = sum(bool(one.lost) for one in asked)
        lines.append(
            f"| {minute} | {last.phase} | {len(asked)} | {lost} | {', '.join(quantiles)} | {sizes} "
            f"| {', '.join(str(one.descriptors) for one in trees)} "
            f"| {', '.join(str(one.threads) for one in trees)} | {_cpu(inside)} |"
        )
    return lines


_BOTH = (0.5, 0.99)


def _cpu_line(soak: Soak, phase: Phase) -> str:
    inside = [one for one in soak.samples if one.phase == phase]
    return f"api, engine, attackers {_cpu(inside)} %" if len(inside) > 1 else "-"


def _cpu(inside: list[Sample]) -> str:
    """Shares of one core in percent, of the HTTP side, the engine and the attackers."""
    first, last = inside[0], inside[-1]
    seconds = last.seconds - first.seconds
    if not seconds:
        return "-"
    used = (
        last.api.cpu_seconds - first.api.cpu_seconds,
        last.engine.cpu_seconds - first.engine.cpu_seconds,
        last.attackers_cpu_seconds - first.attackers_cpu_seconds,
    )
    return ", ".join(f"{100 * one / seconds:.1f}" for one in used)
