"""Structs that hold scheduler settings, from flat keywords: tests vary one key at a time."""

from __future__ import annotations

from typing import Any

from crossover.models.identity.identify_model import ModelIdentity
from crossover.models.shape.model_spec import ModelSpec
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.capacity.scheduler_settings import RequestedSettings, SchedulerSettings
from crossover.serving.placement.engines import Wanted
from crossover.serving.placement.placement_policy import PlacementRequest


def engine_config(*values: Any, **given: Any) -> EngineConfig:
    """An engine's configuration; the keys of SchedulerSettings may be among the others."""
    given["settings"] = SchedulerSettings(**_settings_in(given))
    return EngineConfig(*values, **given)


def ladder_identity(spec: ModelSpec) -> ModelIdentity:
    """A model of the ladder with this shape."""
    return ModelIdentity(name=spec.name, kind="ladder", source=spec.name, spec=spec, is_random=True)


def placement_request(model: ModelSpec, **given: Any) -> PlacementRequest:
    """The request to place a ladder model of this shape. The keys of RequestedSettings and Wanted
    may be among the others, and `backend` and `weight_format` name one."""
    settings = RequestedSettings(**_settings_in(given))
    for name, names in (("backend", "backends"), ("weight_format", "formats")):
        value = given.pop(name, None)
        given[names] = (value,) if value else ()
    wanted = Wanted(**{name: given.pop(name) for name in Wanted.__struct_fields__ if name in given})
    return PlacementRequest(model=ladder_identity(model), settings=settings, wanted=wanted, **given)


def _settings_in(given: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in SchedulerSettings.__struct_fields__ if name in given]
    return {name: given.pop(name) for name in names}
