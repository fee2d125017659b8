"""Structs that hold scheduler settings, from flat keywords: tests vary one key at a time."""

from __future__ import annotations

from typing import Any

from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.capacity.scheduler_settings import RequestedSettings, SchedulerSettings
from crossover.serving.placement.placement_policy import PlacementRequest


def engine_config(*values: Any, **given: Any) -> EngineConfig:
    """An engine's configuration; the keys of SchedulerSettings may be among the others."""
    settings = SchedulerSettings(**_settings_in(given))
    return EngineConfig(*values, settings=settings, **given)


def placement_request(**given: Any) -> PlacementRequest:
    """What is to be placed; the keys of RequestedSettings may be among the others."""
    settings = RequestedSettings(**_settings_in(given))
    return PlacementRequest(settings=settings, **given)


def _settings_in(given: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in SchedulerSettings.__struct_fields__ if name in given]
    return {name: given.pop(name) for name in names}
