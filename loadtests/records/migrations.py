"""Older formats of a run folder, brought to the present one line by line while they are read.

Format 1 -> 2: an event's fields lay in `detail`; promise, doubt and lone became SLO, warning and
single-stream; a skipped cell got a cause.
Format 2 -> 3: a predicted rate, a number before, is a struct with low and high; a capacity has the
rate that a level confirmed, and no prediction in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Json = dict[str, Any]
# Format 1's words for a cell that does not fit.
NEEDS_MEMORY = re.compile(r"needs [\d.]+ ?[KMGT]iB")
RENAMED = {
    "promise": "slo",
    "promises": "slos",
    "doubts": "warnings",
    "lone_requests": "single_stream_requests",
    "lone_seconds": "single_stream_seconds",
}


def _renamed(old: Mapping[str, Any]) -> Json:
    return {RENAMED.get(key, key): value for key, value in old.items()}


def _manifest_1(old: Json) -> Json:
    campaign = _renamed(old["campaign"])
    if isinstance(campaign.get("search"), dict):
        campaign["search"] = _renamed(campaign["search"])
    levels = campaign.get("cell_levels") or {}
    campaign["cell_levels"] = {
        cell: [[None, 0.0, None], *([rate, seconds, None] for rate, seconds in own)]
        for cell, own in levels.items()
    }
    return old | {"campaign": campaign}


def _event_1(old: Json, manifest: Json) -> Json:
    """`manifest` is the migrated one."""
    detail = _renamed(old.get("detail") or {})
    event = {key: value for key, value in old.items() if key != "detail"} | detail
    match event["kind"]:
        case "level_started" if event["purpose"] == "lone":
            event["purpose"] = "single_stream"
        case "cell_skipped":
            is_memory = NEEDS_MEMORY.search(event["reason"]) or "memory cap" in event["reason"]
            event["cause"] = "memory" if is_memory else "unknown"
        case "cell_finished" if "capacity" in event:
            first = {manifest["campaign"]["slo"]["name"]: event["capacity"]}
            event["capacities"] = event.get("capacities") or first
    return event


def _manifest_2(old: Json) -> Json:
    campaign = dict(old["campaign"])
    if isinstance(campaign.get("search"), dict):
        known = campaign["search"].items()
        campaign["search"] = {key: value for key, value in known if key != "predicted_rate"}
    return old | {"campaign": campaign}


def _capacity_2(old: Json) -> Json:
    """Before format 3 a capacity was fitted, with a prediction in it, and no level confirmed it."""
    if old["status"] == "none":
        return {"status": "none", "held": 0.0, "low": 0.0, "estimate": 0.0, "high": 0.0} | {
            "reason": old["reason"]
        }
    return {
        "status": "alone_only" if old.get("holds_at_any_rate") else "unresolved",
        "low": old.get("low") or None,
        "high": old.get("high"),
        "estimate": old.get("estimate"),
        "reason": f"an older version fitted it, no level confirmed it; {old['reason']}",
    }


def _event_2(old: Json, manifest: Json) -> Json:
    if old["kind"] == "cell_finished":
        found = {name: _capacity_2(one) for name, one in old.get("capacities", {}).items()}
        return {key: value for key, value in old.items() if key != "measured_only"} | {
            "capacities": found
        }
    if old["kind"] != "calibrated":
        return old
    rates = {name: {"rate": rate} for name, rate in old.get("rates", {}).items()}
    return old | {"rates": rates}


# Format -> what makes the next one of it.
MANIFESTS: dict[int, Callable[[Json], Json]] = {1: _manifest_1, 2: _manifest_2}
EVENTS: dict[int, Callable[[Json, Json], Json]] = {1: _event_1, 2: _event_2}


def manifest_from(version: int, raw: Json) -> Json:
    """A manifest of format `version` in the present one; `format_version` stays as it was."""
    for one in range(version, max(MANIFESTS) + 1):
        raw = MANIFESTS[one](raw)
    return raw


def event_from(version: int, raw: Json, manifest: Json) -> Json:
    """An event of format `version` in the present format."""
    for one in range(version, max(EVENTS) + 1):
        raw = EVENTS[one](raw, manifest)
    return raw
