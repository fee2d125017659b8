"""What a cell's records say of its engine's steps, its loads, and changes of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from loadtests.errors import LoadError
from loadtests.metrics.fallback import fallback_of
from loadtests.records.events import Calibrated, CellReady, Event, of_kind
from loadtests.records.schema import RequestRecord
from loadtests.simulation.speed_under_load import usual_speed
from loadtests.simulation.step_observations import observations_of
from loadtests.simulation.step_replay import residuals_of
from loadtests.simulation.step_time import StepLaw, StepObservation, fit
from reports.numbers import CellNumbers


def with_steps(
    cell: CellNumbers, events: Sequence[Event], requests: Mapping[str, Sequence[RequestRecord]]
) -> CellNumbers:
    """The cell with its observed steps and the law fitted on them. `requests` are by level.

    A cell without calibration has the steps of its single-stream requests.
    """
    made = of_kind(events, Calibrated)
    seen = msgspec.convert(made[0].observations if made else [], list[StepObservation])
    if not seen:
        alone = [one.level for one in cell.levels if one.is_single_stream]
        seen = [one for level in alone for one in observations_of(requests[level])]
    timed = tuple(one for one in seen if one.seconds > 0)
    law = _law(timed)
    loaded = [requests[one.level] for one in cell.levels if one.counts and one.rate_per_second]
    speed = None if law is None else usual_speed(law, residuals_of(timed, law), loaded)
    changed = (fallback_of(level) for level in requests.values())
    ready = of_kind(events, CellReady)
    sampling = ready[-1].sampling if ready else None
    return msgspec.structs.replace(
        cell,
        observations=timed,
        law=law,
        speed=speed,
        loads=tuple(one.load_seconds for one in ready if one.load_seconds is not None),
        fallbacks=tuple(one for one in changed if one is not None),
        not_sampled=sampling if isinstance(sampling, dict) else {},
    )


def _law(observations: Sequence[StepObservation]) -> StepLaw | None:
    """None where no step of several rows was seen: what rows cost is then not known."""
    if max((one.decode_rows for one in observations), default=0) <= 1:
        return None
    try:
        return fit(observations)
    except LoadError:
        return None
