"""The atlas: what each of many measured machines serves of each of its models.

    atlas = atlas_of(read_machines([Path("docs/atlas")]), Demand(workload), slo)
    for entry in atlas.entries:       # the cheapest output tokens first
        entry.measured.name, entry.steps.model.name, entry.capacity.rate, entry.token_price

Machines are compared under the same requests and the same SLO, which the machine files do not fix:
the capacity of each model is simulated from the step times that the machine's own run measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from crossover.loadtests.capacity.machine_file import ModelSteps
from crossover.models import formatting
from crossover.reports.answers.energy_and_cost import dollars_in_words, token_price
from crossover.reports.answers.headline import slo_words
from crossover.reports.devices.calibrated_machines import MeasuredMachine
from crossover.reports.devices.device_capacity import (
    DeviceCapacity,
    Service,
    Traffic,
    capacity_of,
)
from crossover.serving.capacity.simulated_capacity import Demand
from crossover.serving.capacity.slo import Slo


class AtlasEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model in one weight format on one engine of one measured device."""

    measured: MeasuredMachine
    steps: ModelSteps
    capacity: DeviceCapacity
    token_price: float | None  # dollars for a million output tokens; None: not known, or no service

    @property
    def engine_words(self) -> str:
        """`onnx int8`."""
        return f"{self.steps.backend} {self.steps.weight_format}"


class Atlas(msgspec.Struct, frozen=True, kw_only=True):
    """Measured machines under one SLO and the same requests."""

    machines: tuple[MeasuredMachine, ...]
    entries: tuple[AtlasEntry, ...]  # cheapest first; without a price, by capacity, highest first
    slo: Slo
    mean_prompt: float  # tokens
    mean_output: float

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names of the measured models, the smallest first."""
        sizes = {
            entry.steps.model.name: entry.steps.model.active_parameters for entry in self.entries
        }
        return tuple(sorted(sizes, key=lambda name: (sizes[name], name)))

    def best(self, measured: MeasuredMachine, model: str) -> AtlasEntry | None:
        """Return the entry with the highest capacity for a model on a device; None: it was not
        measured there."""
        own = [
            entry
            for entry in self.entries
            if entry.measured is measured and entry.steps.model.name == model
        ]
        return max(own, key=lambda entry: entry.capacity.rate or 0.0, default=None)

    def capacity_words(self, entry: AtlasEntry) -> str:
        """Return `1.1/s (0.91–1.3)`, or why there is no capacity. All capacities of a model are
        written in one unit."""
        capacity = entry.capacity
        if not capacity.rate:
            return capacity.reason
        unit_rate = formatting.common_unit_rate(
            other.capacity.rate
            for other in self.entries
            if other.steps.model.name == entry.steps.model.name
        )
        low, high = capacity.low, capacity.high
        return formatting.rate_with_interval(capacity.rate, low, high, like=unit_rate)

    @property
    def headline(self) -> str:
        """Return the sentence on the cheapest output tokens."""
        names = dict.fromkeys(measured.path for measured in self.machines)
        counted = f"{len(names)} measured machine{'' if len(names) == 1 else 's'}"
        cheapest = self.entries[0]
        if cheapest.token_price is None:
            return f"{counted}, none of which serves a model at a known price."
        return (
            f"{counted}; where the price is known, the cheapest output tokens are those of "
            f"{cheapest.steps.model.name} on {cheapest.measured.name}: "
            f"{dollars_in_words(cheapest.token_price)} per million."
        )

    @property
    def basis(self) -> str:
        """Return what the capacities rest on, in a line."""
        return (
            f"Requests of {self.mean_prompt:,.0f} + {self.mean_output:,.0f} tokens (prompt + "
            f"answer, means); SLO: {slo_words(self.slo)}"
        )


def atlas_of(
    machines: Sequence[MeasuredMachine],
    demand: Demand,
    slo: Slo,
    report_progress: Callable[[str, float], None] = lambda name, done: None,
) -> Atlas:
    """Return the atlas of machines. `report_progress` is called with the name of each device before
    it is simulated, and with the share of the devices that are done, from 0 to 1."""
    traffic = Traffic(demand)
    entries = []
    for number, measured in enumerate(machines):
        report_progress(measured.name, number / len(machines))
        for steps in measured.models:
            service = Service(measured.serving(steps), steps.model, steps.weight_format, traffic)
            capacity = capacity_of(service, slo)
            price = token_price(capacity.dollars_per_hour, capacity.low, traffic.mean_output)
            entries.append(
                AtlasEntry(measured=measured, steps=steps, capacity=capacity, token_price=price)
            )
    return Atlas(
        machines=tuple(machines),
        entries=tuple(sorted(entries, key=_rank)),
        slo=slo,
        mean_prompt=traffic.mean_prompt,
        mean_output=traffic.mean_output,
    )


def _rank(entry: AtlasEntry) -> tuple[float, float]:
    price = math.inf if entry.token_price is None else entry.token_price
    return price, -(entry.capacity.rate or 0.0)
