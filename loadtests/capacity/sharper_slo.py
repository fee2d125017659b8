"""Why an interval is wide although the step times are well known, and which SLO would be sharper.

    advice(found, step_times, settings, workload, slo)
    # "The interval is wide because ... It would span less than a factor of 2 with slo.target = 0.9"

Near the edge of what a configuration can do, the capacity falls several times faster than step
times rise (`Capacity.steepness`), so that a small error of the step-time model is a large one of
the capacity. More minutes of measuring hardly help; another target or limit does. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import msgspec

from crossover.loadtests.records.journal_events import Capacity
from crossover.models import formatting
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    QUICK_REQUESTS,
    Z_90,
    PrefixReuse,
    capacity,
)
from crossover.serving.capacity.slo import LIMITS, Slo
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.arrivals import Arrivals
from crossover.serving.workload.request_lengths import Workload

SHARP = 2.0  # an interval whose ends are further apart than this factor is wide
MIN_SINGLE_SHARE = 0.99  # of single requests that meet the SLO: else the SLO is plainly missed
TARGETS = (0.95, 0.9, 0.8)
LOOSER = (1.25, 1.5, 2.0, 3.0, 4.0)  # factors of a latency limit
MAX_ALTERNATIVES = 2


def advice(
    found: Capacity,
    step_times: StepTimeModel,
    settings: SchedulerSettings,
    workload: Workload,
    slo: Slo,
    *,
    arrivals: Arrivals | None = None,
    reused_share: float = 0.0,
    reuse: PrefixReuse | None = None,
    reasoning_share: float = 0.0,
) -> str:
    """Return a sentence that names the target and the limit at which the interval becomes sharp.

    "" where the interval is sharp, where another reason made it wide, or where no alternative in
    reach is sharp. Simulates up to a dozen capacities, which takes seconds.
    """
    low, high, limit, steepness = found.low, found.high, found.estimated_rate, found.steepness
    if (
        found.method != "step_times"
        or not (low and high and limit and steepness)
        or high <= SHARP * low
    ):
        return ""
    if found.speed_moved is not None:  # the machine, not the SLO, made it wide
        return ""
    step_error = math.log(high / low) / (2 * Z_90 * steepness)
    seen = step_times.slower(found.factor or 1.0)
    single_share: float | None = None

    def sharp_ones() -> Iterator[str]:
        nonlocal single_share
        for name, others in _looser(slo):
            for value, other in others:
                told = capacity(
                    seen,
                    settings,
                    workload,
                    other,
                    arrivals=arrivals,
                    reused_share=reused_share,
                    reuse=reuse,
                    reasoning_share=reasoning_share,
                    requests=QUICK_REQUESTS,
                )
                if name == "target":
                    single_share = told.alone_share
                width = math.exp(2 * Z_90 * step_error * told.steepness)
                if told.rate > 0 and width <= SHARP:
                    yield f"slo.{name} = {value} (about {formatting.rate(told.rate)})"
                    break

    named = list(islice(sharp_ones(), MAX_ALTERNATIVES))
    if not named or (single_share is not None and single_share < MIN_SINGLE_SHARE):
        return ""
    return (
        "The interval is wide because the SLO is near the edge of what this configuration can do: "
        f"single requests meet it, but steps that take 1 % longer lower the capacity by "
        f"{steepness:.1f} %. It would span less than a factor of {SHARP:g} with "
        f"{' or '.join(named)}."
    )


def _looser(slo: Slo) -> Iterator[tuple[str, list[tuple[str, Slo]]]]:
    """Yield each key of the SLO with looser values of it, the nearest first."""
    lower = [target for target in TARGETS if target < slo.target]
    yield "target", [(f"{one:g}", msgspec.structs.replace(slo, target=one)) for one in lower]
    for name in LIMITS.values():
        limit = getattr(slo, name)
        if limit is not None:
            values = [limit * factor for factor in LOOSER]
            yield (
                name,
                [(f"{one:.3g}", msgspec.structs.replace(slo, **{name: one})) for one in values],
            )
