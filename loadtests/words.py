"""Capacities and levels in a line each, for whoever watches a run."""

from __future__ import annotations

from loadtests.levels import Measured
from loadtests.search import Capacity


def in_words(capacity: Capacity) -> str:
    """A capacity for people."""
    match capacity.status:
        case "none":
            return f"keeps the promise at no rate ({capacity.reason})"
        case "at_least":
            return f"keeps the promise up to at least {capacity.low:.3g} requests/s ({capacity.reason})"
        case "resolved" if capacity.estimate is not None and capacity.high is not None:
            return f"keeps the promise up to {capacity.estimate:.3g} requests/s ({capacity.low:.3g}-{capacity.high:.3g})"
    high = f"{capacity.high:.3g}" if capacity.high is not None else "?"
    return f"unresolved, between {capacity.low:.3g} and {high} requests/s ({capacity.reason})"


def level_in_words(measured: Measured) -> str:
    """A level for people."""
    summary, level = measured.summary, measured.level
    load = f"{level.rate:.3g} requests/s" if level.rate is not None else "lone requests"
    typical = summary.ttft.p50 if summary.ttft.p50 is not None else summary.ttft.mean
    ttft = f", TTFT {typical * 1000:.0f} ms" if typical is not None else ""
    each = summary.tpot.p50 if summary.tpot.p50 is not None else summary.tpot.mean
    tpot = f", TPOT {each * 1000:.1f} ms" if each is not None else ""
    doubts = ", ".join(doubt.code for doubt in summary.doubts if doubt.invalidates)
    word = f"not valid: {doubts}" if doubts else summary.verdict
    short = ", cut short" if measured.cut_short else ""
    return f"{load}: {summary.good} of {summary.due} good{ttft}{tpot} -> {word}{short}"
