"""The capacity of a machine that serves several models at the same time, one engine for each.

    parts = [MixPart(service, slo, share=0.7), MixPart(other, slo, share=0.3)]
    capacity = mix_capacity_of(parts, [capacity_of(part.service, part.slo) for part in parts])
    capacity.low, capacity.rate       # of all requests together
    capacity.models[0].kept_share     # of what it would serve with the machine to itself

The memory of all models adds up. What is left of it is divided among their KV caches in proportion
to the requests of each and to the bytes of its longest request. Processor and GPU are shared as in
serving/capacity/shared_processor.py, and each model must meet its own SLO.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from crossover.models.formatting import GIB
from crossover.reports.devices.device_capacity import (
    EXPECTED_STEPS,
    FAST_STEPS,
    SLOW_STEPS,
    CapacityGrade,
    DeviceCapacity,
    MixedModel,
    Service,
    simulation_of,
)
from crossover.reports.errors import ReportError
from crossover.serving.capacity.shared_processor import SharedProcessor, SharingEngine
from crossover.serving.capacity.slo import Slo


class MixPart(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A model on the machine, with its share of all requests."""

    service: Service
    slo: Slo
    share: float


def mix_capacity_of(parts: Sequence[MixPart], unshared: Sequence[DeviceCapacity]) -> DeviceCapacity:
    """Return the capacity of the machine that all parts name, in requests/s of all models. Where it
    cannot serve them together, its `reason` says why; nothing is raised.

    `unshared`: the capacity of the machine with each part by itself (`capacity_of`).
    """
    grades: set[CapacityGrade] = {capacity.grade for capacity in unshared}
    models = [
        MixedModel(
            model=part.service.spec.name,
            weight_format=part.service.weight_format,
            share=part.share,
            unshared_rate=capacity.rate,
        )
        for part, capacity in zip(parts, unshared, strict=True)
    ]
    mix = msgspec.structs.replace(
        unshared[0],
        grade="predicted" if "predicted" in grades else "estimated",
        low=None,
        rate=None,
        high=None,
        reason="",
        notes=tuple(dict.fromkeys(note for capacity in unshared for note in capacity.notes)),
        ttft_seconds=None,
        tpot_seconds=None,
        answer_seconds=None,
        memory_bytes=sum(map(_needed_bytes, parts)),
        models=tuple(models),
    )
    for part, capacity in zip(parts, unshared, strict=True):
        if not capacity.rate:
            reason = f"{part.service.spec.name}: {capacity.reason}"
            return msgspec.structs.replace(mix, reason=reason)
    try:
        fitting = _divided(parts)
        processors = {
            speed: SharedProcessor(
                [
                    SharingEngine(
                        server=simulation_of(part.service, speed),
                        slo=part.slo,
                        share=part.share,
                        unshared_rate=rate or 0.0,
                        use=part.service.machine.use,
                    )
                    for part, rate in zip(fitting, rates, strict=True)
                ]
            )
            for speed, rates in (
                (SLOW_STEPS, [capacity.low for capacity in unshared]),
                (EXPECTED_STEPS, [capacity.rate for capacity in unshared]),
                (FAST_STEPS, [capacity.high for capacity in unshared]),
            )
        }
    except ReportError as problem:
        return msgspec.structs.replace(mix, reason=str(problem))
    low, rate, high = (processor.capacity() for processor in processors.values())
    mix = msgspec.structs.replace(mix, low=low, rate=rate, high=high)
    if not rate:
        return msgspec.structs.replace(mix, reason="misses the SLO of a model beside the others")
    slowdowns = processors[EXPECTED_STEPS].slowdowns(rate)
    models = [
        msgspec.structs.replace(
            model,
            rate=rate * model.share,
            kept_share=rate * model.share / model.unshared_rate if model.unshared_rate else None,
            slowdown=slowdown,
        )
        for model, slowdown in zip(models, slowdowns, strict=True)
    ]
    return msgspec.structs.replace(mix, models=tuple(models))


def _needed_bytes(part: MixPart) -> float:
    """Return the memory that a model needs for its longest request."""
    return part.service.needed_bytes(part.service.traffic.longest)


def _divided(parts: Sequence[MixPart]) -> list[MixPart]:
    """Return the parts with the memory of each. Raises ReportError if the memory is too small."""
    first = parts[0].service
    if first.machine.memory_bytes is None or len(parts) == 1:
        return list(parts)
    memory_bytes = first.machine.memory_bytes * first.devices
    needed_bytes = [_needed_bytes(part) for part in parts]
    if sum(needed_bytes) > memory_bytes:
        raise ReportError(
            f"the models need {sum(needed_bytes) / GIB:.1f} GiB together, {first.machine.name} has "
            f"{memory_bytes / GIB:.1f} GiB"
        )
    free_bytes = memory_bytes - sum(needed_bytes)
    weights = [
        part.share * (needed - part.service.needed_bytes(0, states=0))
        for part, needed in zip(parts, needed_bytes, strict=True)
    ]
    divided = []
    for part, needed, weight in zip(parts, needed_bytes, weights, strict=True):
        own_bytes = (needed + free_bytes * weight / sum(weights)) / first.devices
        machine = msgspec.structs.replace(part.service.machine, memory_bytes=own_bytes)
        service = msgspec.structs.replace(part.service, machine=machine)
        divided.append(msgspec.structs.replace(part, service=service))
    return divided
